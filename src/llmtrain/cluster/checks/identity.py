"""Who answers: is every name another machine, and is the login alike on all of them. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmtrain.cluster.checks.majority import odd_ones
from llmtrain.cluster.findings import Finding
from llmtrain.cluster.probes import same_machine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmtrain.cluster.probes import Facts


def judge_identity(items: Sequence[Facts]) -> list[Finding]:
    """Two names of one machine, logins that differ, shells that talk."""
    return [*_machines(items), *_accounts(items), *_shells(items)]


def _machines(items: Sequence[Facts]) -> list[Finding]:
    return [
        Finding(
            host=second,
            check="identity",
            level="fail",
            saw=f"{second} and {first} are the same machine",
            wanted="every line of the hostfile names another machine",
            fix=f"take {second} out of the hostfile and add its slots to {first}",
        )
        for first, second in same_machine(items)
    ]


def _accounts(items: Sequence[Facts]) -> list[Finding]:
    values = {item.host: f"user {item.details.user}, home {item.home}" for item in items if item.details.user}
    return [
        Finding(
            host=host,
            check="account",
            level="warn",
            saw=saw,
            wanted=f"{wanted}, as on most hosts",
            fix=f"give {host} the same 'User' in ~/.ssh/config, or set per_host.{host}.node_dir in the run file",
        )
        for host, saw, wanted in odd_ones(values)
    ]


def _shells(items: Sequence[Facts]) -> list[Finding]:
    return [
        Finding(
            host=item.host,
            check="noisy-shell",
            level="warn",
            saw=f"the shell prints {item.noise.splitlines()[0][:60]!r} before any command",
            wanted="silence in shells that nobody sees; llmtrain reads past it, scp and rsync do not",
            fix="put '[ -t 1 ] || return' at the top of ~/.bashrc there, or move the output to ~/.bash_profile",
        )
        for item in items
        if item.noise
    ]
