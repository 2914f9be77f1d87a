"""The agent as one text that a bare Python runs: its modules, in the order they need each other."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

PARTS = ("manifest", "wire", "hop", "sockets", "relay", "blocks", "build", "finish", "place", "agent")
"""Modules of the agent; each imports only earlier ones and the standard library of Python 3.6."""

_LOADER = """
import json, sys, types
for name in ("llmtrain", "llmtrain.sync"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = []
sys.modules["llmtrain"].sync = sys.modules["llmtrain.sync"]
for name, text in json.loads(%s):
    module = sys.modules["llmtrain.sync." + name] = types.ModuleType("llmtrain.sync." + name)
    setattr(sys.modules["llmtrain.sync"], name, module)
    exec(compile(text, name + ".py", "exec"), module.__dict__)
module.main()
"""

_BOOT = (
    "import sys,zlib;i=sys.stdin.buffer;n=int(i.readline());exec(compile(zlib.decompress(i.read(n)),'agent','exec'))"
)

# The first Python there is; $0 the boot line, $1 a Python the user named, $2 one inside the destination.
_FIND = (
    'for p in python3 /usr/bin/python3 /usr/libexec/platform-python /usr/local/bin/python3 "$1" "$2"; do '
    'p=$(command -v -- "$p" 2>/dev/null) && [ -x "$p" ] && exec "$p" -I -c "$0"; done; echo NOPYTHON; exit 127'
)


def agent_text() -> bytes:
    """What goes into the standard input of the started Python: a length line, then the compressed agent."""
    folder = Path(__file__).parent
    texts = [(name, (folder / f"{name}.py").read_text(encoding="utf-8")) for name in PARTS]
    text = zlib.compress((_LOADER % repr(json.dumps(texts))).encode())
    return b"%d\n%s" % (len(text), text)


def agent_argv(dest: str, python: str = "") -> tuple[str, ...]:
    """The command that starts an agent on a host."""
    return ("/bin/sh", "-c", _FIND, _BOOT, python or "python", f"{dest}/bin/python3")
