"""Whether plain ssh, which pdsh starts, gets in where our own client does."""

from __future__ import annotations

import shlex
import subprocess

from llmtrain.cluster.findings import Finding
from llmtrain.cluster.fleet import run_on_all
from llmtrain.cluster.sshconfig import SAFE_OPTIONS, option

SSH_S = 30.0


def check_agreement(names: list[str]) -> list[Finding]:
    """Log in by OpenSSH, under pdsh's options, to hosts our client has entered."""
    answers = run_on_all(names, try_ssh).good
    return [
        Finding(
            host=name,
            check="ssh-agree",
            level="fail",
            saw=f"llmtrain's own client gets in, OpenSSH does not: {why}",
            wanted="both get in: pdsh starts the ranks through OpenSSH",
            fix=f"ssh -v -o BatchMode=yes -- {name} true  # its configuration: ssh -G -- {name}",
        )
        for name, why in answers.items()
        if why is not None
    ]


def try_ssh(name: str) -> str | None:
    """None if ``ssh NAME true`` works, else what it says last; a dropped connection (MaxStartups) is tried again."""
    options = [part for key, value in SAFE_OPTIONS for part in option(key, value)]
    argv = ["ssh", "-T", *options, "--", name, "true"]
    why = ""
    for _ in range(4):
        try:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=SSH_S, check=False)
        except subprocess.TimeoutExpired:
            return f"no answer within {SSH_S:.0f} s: {shlex.join(argv[-3:])}"
        if done.returncode != 255:
            return None  # it got in; what the shell there makes of "true" is another matter
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        why = lines[-1].strip() if lines else "exit code 255"
        if not ("closed by" in why or "reset by" in why or "banner exchange" in why):
            return why
    return why
