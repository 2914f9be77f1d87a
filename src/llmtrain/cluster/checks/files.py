"""Folders, space and contents on the hosts. Pure."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from llmtrain.cluster.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from llmtrain.cluster.needs import Needs
    from llmtrain.cluster.probes import Facts

MIN_INODES = 1000


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
    """Missing is fine, it will be copied; something else at that path is never overwritten."""
    findings = []
    for path, here in needs.trees.items():
        there = item.trees.get(path, {"kind": "missing"})
        if there["kind"] == "missing" or there == here:
            continue
        removal = ("ssh", "--", item.host, shlex.join(("rm", "-r", path)))
        findings.append(
            Finding(
                host=item.host,
                check="content",
                level="fail",
                saw=f"{path} is there with other content{_difference(here, there)}",
                wanted="the same content as here, or nothing at that path",
                fix=f"{shlex.join(removal)}  # after a look at it; the next launch copies ours",
            )
        )
    return findings


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


def missing_trees(facts: Mapping[str, Facts], paths: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs (host, path) of what has to be copied."""
    return [
        (host, path)
        for host, item in facts.items()
        for path in paths
        if item.trees.get(path, {"kind": "missing"})["kind"] == "missing"
    ]
