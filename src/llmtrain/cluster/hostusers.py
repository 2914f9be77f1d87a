"""Runs on a host for ``llmtrain who``: who computes here, on which accelerator, for which run.

Standard library only, Python 3.6 and later, given to the interpreter as text.
"""

import json
import os
import pwd
import re
import subprocess
import sys
import time
from typing import Any, Dict, List, Optional  # noqa: F401  read by the type checker in comments


def text_of(path):
    # type: (str) -> str
    try:
        with open(path, errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""


def on_accelerators():
    # type: () -> Dict[str, List[int]]
    """Process id -> indices of the GPUs it computes on."""
    fields = [query("--query-gpu=uuid,index"), query("--query-compute-apps=pid,gpu_uuid")]
    index = {row[0]: int(row[1]) for row in fields[0] if len(row) == 2 and row[1].isdigit()}
    found = {}  # type: Dict[str, List[int]]
    for row in fields[1]:
        if len(row) == 2 and row[1] in index:
            found.setdefault(row[0], []).append(index[row[1]])
    return found


def query(what):
    # type: (str) -> List[List[str]]
    argv = ["nvidia-smi", what, "--format=csv,noheader"]
    try:
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=15, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = done.stdout.decode("utf-8", "replace").splitlines() if done.returncode == 0 else []
    return [[part.strip() for part in line.split(",")] for line in lines]


def run_of(pid):
    # type: (str) -> Optional[str]
    """The run a process belongs to: by its environment, or for other users by what its arguments name."""
    match = re.search("(?:^|\0)LLMTRAIN_RUN_ID=([^\0]+)", text_of("/proc/%s/environ" % pid))
    match = match or re.search(
        r"/runs/([A-Za-z0-9_.-]+)/(?:run\.json|code/llmtrain)", text_of("/proc/%s/cmdline" % pid)
    )
    return match.group(1) if match else None


def describe(pid, gpus, run):
    # type: (str, List[int], Optional[str]) -> Optional[Dict[str, Any]]
    """None if it has ended meanwhile."""
    try:
        uid = os.stat("/proc/" + pid).st_uid
        fields = text_of("/proc/%s/stat" % pid).rpartition(")")[2].split()
        begun = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError):
        return None
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    uptime = float(text_of("/proc/uptime").split()[0])
    argv = text_of("/proc/%s/cmdline" % pid).replace("\0", " ").strip()
    rank = re.search("(?:^|\0)RANK=([0-9]+)", text_of("/proc/%s/environ" % pid))
    return {
        "user": user,
        "pid": int(pid),
        "accelerators": sorted(gpus),
        "run": run,
        "rank": int(rank.group(1)) if rank else None,
        "seconds": max(0, int(uptime - begun)),
        "command": argv[:200],
    }


def who():
    # type: () -> None
    """Processes on accelerators, and the ranks of any run of llmtrain."""
    gpus = on_accelerators()
    found = []
    for pid in os.listdir("/proc"):
        if not pid.isdigit():
            continue
        run = run_of(pid)
        is_rank = run is not None and "llmtrain.train.rank" in text_of("/proc/%s/cmdline" % pid)
        if pid in gpus or is_rank:
            found.append(describe(pid, gpus.get(pid, []), run))
    known = [one for one in found if one]
    seen = {str(one["pid"]) for one in known}
    for pid in sorted(set(gpus) - seen):  # in another container
        known.append({"user": None, "pid": int(pid), "accelerators": gpus[pid], "run": None, "rank": None})
    sys.stdout.write("\n" + json.dumps({"time": time.time(), "processes": known}) + "\n")
