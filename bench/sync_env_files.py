"""A real environment to four hosts: first, after one small package, unchanged; against rsync, tar and a packed archive.

    python bench/sync_env_files.py ENVIRONMENT WHEEL [PACKER]

ENVIRONMENT is a folder with an interpreter and at least 20,000 files, WHEEL a small pure package not in it, PACKER the
command venv-pack (conda-pack's twin for a venv) in an environment of its own. Hosts are those of the lab (root needed),
cables unlimited. Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.lab.lab import Lab  # noqa: E402
from tests.lab.life import default_shares  # noqa: E402
from tests.lab.model import LabOptions  # noqa: E402

PLACE = "/root/env"
THEIRS = "/root/rsynced"
GCM = "ssh -c aes128-gcm@openssh.com"
HOSTS = 4


def everywhere(lab: Lab, line: str) -> float:
    """Seconds of a shell line that runs for all hosts side by side; $n is the host."""
    begun = time.monotonic()
    words = f"for n in {' '.join(lab.nodes)}; do ( {line} ) & done; wait"
    lab.run("head", ["bash", "-c", words], timeout=900)
    return round(time.monotonic() - begun, 2)


def sync(lab: Lab) -> dict:
    """One sync, the whole command, and what it says of itself."""
    command = [sys.executable, "-m", "llmtrain.cli", "sync", PLACE, "--hosts", "/root/hosts", "--json"]
    begun = time.monotonic()
    report = json.loads(lab.run("head", command, env={"PYTHONPATH": str(ROOT / "src")}, timeout=600).stdout)
    whole = round(time.monotonic() - begun, 2)
    return {"whole_s": whole, "transfer_s": round(report["transfer_seconds"], 2), "sent": report["head_bytes_sent"]}


def pack(lab: Lab, packer: Path) -> dict[str, float]:
    """Seconds to pack the environment, and to copy and unpack the archive on all hosts."""
    begun = time.monotonic()
    lab.run("head", [str(packer), "-q", "-p", PLACE, "-o", "/root/env.tar.gz"], timeout=900)
    packed = round(time.monotonic() - begun, 2)
    line = f"{GCM} $n 'mkdir packed && tar -xzf - -C packed' < /root/env.tar.gz"
    found = {"pack": packed, "copy and unpack": everywhere(lab, line)}
    everywhere(lab, f"{GCM} $n 'rm -rf packed'")
    return found


def stale(lab: Lab, host: str) -> str:
    """Compiled files whose source has another time or size, and all of them."""
    code = (
        "import pathlib,struct\nbad=all=0\n"
        f"for c in pathlib.Path('{PLACE}').rglob('__pycache__/*.cpython-3*.pyc'):\n"
        " s=c.parent.parent/(c.name.split('.')[0]+'.py')\n"
        " if not s.exists() or '.opt-' in c.name: continue\n"
        " f,m,n=struct.unpack('<III',c.read_bytes()[4:16]); t=s.stat(); all+=1\n"
        " bad+=not f&1 and (m!=int(t.st_mtime)&0xffffffff or n!=t.st_size&0xffffffff)\n"
        "print(bad,'of',all)"
    )
    return lab.run(host, [sys.executable, "-c", code], timeout=300).stdout.strip()


def main() -> None:
    """All of it."""
    environment, wheel = Path(sys.argv[1]), Path(sys.argv[2])
    packer = Path(sys.argv[3]) if len(sys.argv) > 3 else None
    more = [str(packer.parents[1])] if packer else []
    shares = (*default_shares(), str(environment), str(wheel.parent), *more)
    with Lab.create(HOSTS, LabOptions(shares=shares, shm_mb=1024)) as lab:
        lab.write("head", "/root/hosts", "".join(f"{name} slots=1\n" for name in lab.nodes))
        lab.run("head", ["cp", "-a", str(environment), PLACE], timeout=300)
        count = lab.run(
            "head", ["bash", "-c", f"find {PLACE} -type f | wc -l; du -sm {PLACE} | cut -f1"]
        ).stdout.split()
        found: dict = {"files": int(count[0]), "MiB": int(count[1])}
        rsync = f"rsync -a -e '{GCM}' {PLACE}/ $n:{THEIRS}/"
        found["first"] = {"rsync_s": everywhere(lab, rsync)}
        found["first"]["tar_s"] = everywhere(lab, f"tar -C /root -cf - env | {GCM} $n 'tar -C /root -xpf -'")
        everywhere(lab, f"{GCM} $n 'rm -rf {PLACE}'")
        if packer:
            found["first"]["pack_s"] = pack(lab, packer)
        found["first"]["sync"] = sync(lab)
        found["stale_pyc"] = stale(lab, lab.nodes[-1])
        site = f"{PLACE}/lib/python*/site-packages"
        unpack = (
            f"{sys.executable} -m zipfile -e {wheel} $(echo {site}) && {sys.executable} -m compileall -q {site}/*.py"
        )
        lab.run("head", ["bash", "-c", unpack], timeout=120)
        linked = f"rsync -a --link-dest={THEIRS} -e '{GCM}' {PLACE}/ $n:{THEIRS}2/"
        found["changed"] = {
            "link_dest_s": everywhere(lab, linked),
            "rsync_s": everywhere(lab, rsync),
            "sync": sync(lab),
        }
        found["unchanged"] = {"rsync_s": everywhere(lab, rsync), "sync": sync(lab)}
        newer = f"find {PLACE} -newer /root/hosts -type f -printf '%s\n' | awk '{{n+=$1}} END {{print n}}'"
        found["changed"]["bytes"] = int(lab.run("head", ["bash", "-c", newer]).stdout)
        print(json.dumps(found, indent=1), flush=True)


if __name__ == "__main__":
    main()
