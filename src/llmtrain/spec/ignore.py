"""``.gitignore`` rules: which files of a folder belong to the work. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """One line of a ``.gitignore``."""

    pattern: re.Pattern[str]
    """Matches a path relative to the folder that holds the file."""
    negated: bool
    """The line brings back what an earlier one left out (``!``)."""
    folders_only: bool
    """The line ends in a slash."""


def parse_rules(text: str) -> tuple[Rule, ...]:
    """The rules of one file, as git reads them."""
    rules = []
    for raw in text.splitlines():
        line = re.sub(r"(?<!\\)[ \t]+$", "", raw.rstrip("\r"))
        if not line or line.startswith("#"):
            continue
        negated = line.startswith("!")
        line = line[1:] if negated else line.removeprefix("\\") if line[:2] in {"\\#", "\\!"} else line
        folders_only = line.endswith("/")
        line = line.rstrip("/")
        if line:
            rules.append(Rule(re.compile(_regex(line)), negated, folders_only))
    return tuple(rules)


def _regex(line: str) -> str:
    anchored = "/" in line
    line = line.removeprefix("/")
    out = "" if anchored or line.startswith("**/") else "(?:.*/)?"
    at = 0
    while at < len(line):
        rest = line[at:]
        if rest.startswith("**/"):
            out, at = out + "(?:.*/)?", at + 3
        elif rest == "**":
            out, at = out + ".+", at + 2
        elif rest[0] == "*":
            out, at = out + "[^/]*", at + 1
        elif rest[0] == "?":
            out, at = out + "[^/]", at + 1
        elif rest[0] == "[" and (match := re.match(r"\[([!^]?)(\]?[^\]]*)\]", rest)):
            members = re.sub(r"([\\\[&~|])", r"\\\1", match[2])
            out += f"(?!/)[{'^' if match[1] else ''}{members}]"
            at += match.end()
        elif rest[0] == "\\" and len(rest) > 1:
            out, at = out + re.escape(rest[1]), at + 2
        else:
            out, at = out + re.escape(rest[0]), at + 1
    return out + r"\Z"


def is_ignored(path: str, *, folder: bool, rules: tuple[tuple[str, tuple[Rule, ...]], ...]) -> bool:
    """Whether git would leave a path out.

    Args:
        path: relative to the top, with slashes.
        folder: whether it is a folder.
        rules: (folder that holds the ``.gitignore``, "" for the top; its rules), outer ones first.
    """
    ignored = False
    for base, own in rules:
        if base and not path.startswith(f"{base}/"):
            continue
        inner = path[len(base) + 1 :] if base else path
        for rule in own:
            if (folder or not rule.folders_only) and rule.pattern.match(inner):
                ignored = not rule.negated
    return ignored
