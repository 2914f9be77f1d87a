"""Runs first on a host: builds the environment of the ranks from a private file and becomes the interpreter.

Started by the run folder's ``bin/python``, which stands in for the host's interpreter in DeepSpeed's command
line. Values reach the ranks byte for byte: they are read from JSON here and never pass through a shell.
Standard library only.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from pathlib import Path

BEFORE = "LLMTRAIN_BEFORE_SETUP"
"""Environment ahead of the run file's ``setup`` lines, so that what they export can be told from the login's."""


def build_env(current: dict[str, str], request: dict[str, object]) -> dict[str, str]:
    """The ranks' environment.

    Args:
        current: the environment we were started with.
        request: ``keep``: names taken over from it; ``set``: values; ``path``: folders put first in PATH.
    """
    keep, fixed, path = request["keep"], request["set"], request["path"]
    assert isinstance(keep, list)  # noqa: S101  our own file
    assert isinstance(fixed, dict)  # noqa: S101
    assert isinstance(path, list)  # noqa: S101
    env = {name: value for name, value in current.items() if name in keep}
    if BEFORE in current:
        lines = base64.b64decode(current[BEFORE]).decode("utf-8", "surrogateescape").split("\0")
        before = dict(line.partition("=")[::2] for line in lines if line)
        env.update({key: text for key, text in current.items() if before.get(key) != text and key != BEFORE})
    env["PATH"] = ":".join([*path, env.get("PATH", "/usr/local/bin:/usr/bin:/bin")])
    env.update(fixed)
    return env


def main(argv: list[str]) -> None:
    """``RUN_DIR PYTHON ARGS...``: read and remove ``env.json``, then run the interpreter with these arguments."""
    run_dir, python, *args = argv
    path = Path(run_dir, "env.json")
    request = json.loads(path.read_text(encoding="utf-8"))
    path.unlink()
    os.execve(python, [python, *args], build_env(dict(os.environ), request))  # noqa: S606


if __name__ == "__main__":
    main(sys.argv[1:])
