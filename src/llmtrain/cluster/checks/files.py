"""Folders, space and contents on the hosts. Pure."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from llmtrain.cluster.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmtrain.cluster.needs import Needs
    from llmtrain.cluster.probes import Facts

MIN_INODES = 1000
MISSING: dict[str, Any] = {"kind": "missing", "files": {}}
"""What stands at a path where nothing does."""


def judge_files(items: Sequence[Facts], needs: Needs) -> list[Finding]:
    """Working folders first, then what must be the same everywhere."""
    return [
        *(finding for item in items for finding in _folder(item, needs)),
        *(finding for item in items for finding in _contents(item, needs)),
    ]


def _folder(item: Facts, needs: Needs) -> list[Finding]:
    """The first obstacle only: the others follow from it."""
    options = item.details.node_mount[1].split(",")
    if not item.node_dir_writable or "ro" in options:
        why = "cannot be made or written" + (": mounted read-only" if "ro" in options else "")
        return [_node_dir(item, why, "a working folder the login may write to")]
    if "noexec" in options:
        return [_node_dir(item, "is mounted noexec", "a working folder that programs may be started from")]
    if item.node_dir_free_bytes < needs.free_bytes:
        saw = f"{item.node_dir_free_bytes / 2**30:.2f} GiB free at {item.node_dir}"
        return [_space(item, saw, f"{needs.free_bytes / 2**30:.2f} GiB for code, data, checkpoints and model")]
    if item.node_dir_free_inodes is not None and 0 < item.node_dir_free_inodes < MIN_INODES:
        saw = f"room for {item.node_dir_free_inodes} more files at {item.node_dir}"
        return [_space(item, saw, f"room for {MIN_INODES} files")]
    return []


def _node_dir(item: Facts, why: str, wanted: str) -> Finding:
    return Finding(
        host=item.host,
        check="node-dir",
        level="fail",
        saw=f"{item.node_dir} {why}",
        wanted=wanted,
        fix=f"set node_dir (or per_host.{item.host}.node_dir) in the run file to another folder",
    )


def _space(item: Facts, saw: str, wanted: str) -> Finding:
    return Finding(
        host=item.host,
        check="disk",
        level="fail",
        saw=saw,
        wanted=wanted,
        fix="free space there, or set node_dir: in the run file to another disk",
    )


def _contents(item: Facts, needs: Needs) -> list[Finding]:
    """What is missing or differs is no failure where it will be brought; nothing else is ever overwritten."""
    findings = []
    for path in _wrong_trees(item, needs):
        here, there = needs.trees[path], item.trees.get(path, MISSING)
        mode = needs.bring.get(path, "missing")
        lacks = there["kind"] == "missing"
        saw = f"{path} is missing" if lacks else f"{path} is there with other content{_difference(here, there)}"
        findings.append(
            Finding(
                host=item.host,
                check="content",
                level="fail",
                saw=saw,
                wanted="the same content as here" + ("" if mode == "never" else ", or nothing at that path"),
                fix=_content_fix(item.host, path, mode),
            )
        )
    return findings


def _wrong_trees(item: Facts, needs: Needs) -> list[str]:
    found = []
    for path, here in needs.trees.items():
        there = item.trees.get(path, MISSING)
        mode = needs.bring.get(path, "missing")
        brought = there["kind"] == "missing" and mode != "never"
        if not (there == here or brought or (mode == "same" and not _extra(here, there))):
            found.append(path)
    return found


def wrong_trees(items: Sequence[Facts], needs: Needs) -> dict[str, list[str]]:
    """Path -> hosts where it is not as here, and a launch would not mend that."""
    found: dict[str, list[str]] = {}
    for item in items:
        for path in _wrong_trees(item, needs):
            found.setdefault(path, []).append(item.host)
    return found


def _content_fix(host: str, path: str, mode: str) -> str:
    ours = shlex.join(("llmtrain", "sync", path))
    if mode == "never":
        return f"{ours}  # the run file says that launch brings it never"
    if mode == "same":
        return f"{ours} --delete --force  # after a look at what only {host} has; kept for --rollback"
    removal = shlex.join(("ssh", "--", host, shlex.join(("rm", "-r", path))))
    return f"{removal}  # after a look at it; the next launch copies ours. Or {ours}, which keeps theirs"


def _extra(here: Mapping[str, Any], there: Mapping[str, Any]) -> bool:
    """Whether the host has files that are not here; a copy lets them be."""
    return here["kind"] == there["kind"] == "dir" and not there["files"].keys() <= here["files"].keys()


def _difference(here: Mapping[str, Any], there: Mapping[str, Any]) -> str:
    mine, theirs = here["files"], there["files"]
    odd = [name for name in sorted({*mine, *theirs}) if mine.get(name) != theirs.get(name)]
    if not odd or not odd[0]:
        return ""
    name = odd[0]
    if name not in theirs:
        more = ", which is missing"
    elif name in mine and mine[name][0] != theirs[name][0]:
        more = f", {theirs[name][0]} bytes instead of {mine[name][0]}"
    else:
        more = ""
    return f" (first difference: {name}){more}"


def lacking_trees(
    facts: Mapping[str, Facts], bring: Mapping[str, str], here: Mapping[str, Mapping[str, Any]]
) -> list[tuple[str, str]]:
    """Pairs (host, path) of what has to be copied, those included that replace something.

    Args:
        facts: what the hosts said.
        bring: path -> ``missing``, ``same`` or ``never``.
        here: path -> digest of the tree here.
    """
    pairs = [(host, item, path, mode) for host, item in facts.items() for path, mode in bring.items()]
    return [
        (host, path)
        for host, item, path, mode in pairs
        if (mode != "never" and is_missing(item, path)) or (mode == "same" and item.trees.get(path) != here.get(path))
    ]


def is_missing(item: Facts, path: str) -> bool:
    """Whether there is nothing at a path of a host."""
    return bool(item.trees.get(path, MISSING)["kind"] == "missing")
