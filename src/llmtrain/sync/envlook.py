"""What an environment is made of. Imported here, and run on a host that has the environment to be copied.

Standard library only, Python 3.6 and later.
"""

import configparser
import glob
import json
import os
from typing import Any, Dict, List, Optional

Json = Dict[str, Any]


def look(prefix: str) -> Optional[Json]:
    """Kind of an environment, the interpreter it was made from, packages installed in place; None if it is none."""
    if not os.path.exists(os.path.join(prefix, "bin", "python")):
        return None
    found = {"kind": "plain", "bases": [], "shared": False, "editable": editable(prefix)}  # type: Json
    settings = os.path.join(prefix, "pyvenv.cfg")
    if os.path.isdir(os.path.join(prefix, "conda-meta")):
        found["kind"] = "conda"
    elif os.path.isfile(settings):
        config = read_settings(settings)
        found["kind"] = "uv" if "uv" in config else "venv"
        found["shared"] = config.get("include-system-site-packages", "").lower() == "true"
        found["bases"] = bases(prefix, config.get("home", "/usr/bin"))
    return found


def bases(prefix: str, home: str) -> List[List[str]]:
    """Folders of the interpreter: where it really is, and by which name the environment calls it (uv has links)."""
    named = {os.path.dirname(os.path.normpath(home))}
    link = os.path.join(prefix, "bin", "python")
    while os.path.islink(link):
        link = os.path.normpath(os.path.join(os.path.dirname(link), os.readlink(link)))
        folder = os.path.dirname(os.path.dirname(link))
        if folder != os.path.normpath(prefix):
            named.add(folder)
            break
    python = os.path.join(home, "python3")
    real = os.path.dirname(os.path.dirname(os.path.realpath(python))) if os.path.exists(python) else ""
    return [[real or name, name] for name in sorted(named)]


def read_settings(path: str) -> Dict[str, str]:
    """Lines of a pyvenv.cfg."""
    parser = configparser.ConfigParser(interpolation=None)
    with open(path, encoding="utf-8", errors="replace") as stream:
        parser.read_string("[venv]\n" + stream.read())
    return dict(parser["venv"])


def editable(prefix: str) -> List[List[str]]:
    """Packages that live outside: name and folder. The rank code of llmtrain travels with every run, so it may."""
    found = {}
    pattern = os.path.join(glob.escape(prefix), "lib*/python3*/site-packages/*.dist-info/direct_url.json")
    for path in glob.glob(pattern):
        try:
            with open(path, encoding="utf-8") as stream:
                document = json.load(stream)
        except (OSError, ValueError):
            continue
        url = str(document.get("url", ""))
        folder = url[len("file://") :] if url.startswith("file://") else url
        name = os.path.basename(os.path.dirname(path)).split("-")[0]
        inside = folder.startswith(prefix + "/")
        if document.get("dir_info", {}).get("editable") and not inside and name != "llmtrain":
            found[name] = folder
    return sorted([name, folder] for name, folder in found.items())
