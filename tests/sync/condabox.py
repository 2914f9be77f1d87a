"""A conda channel of small packages on this disk, and an environment installed from it by rattler."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"
ROOM = "/placeholder_" + "x" * 241
LEFT_OUT = (
    "test",
    "idlelib",
    "tkinter",
    "lib2to3",
    "ensurepip",
    "turtledemo",
    "__pycache__",
    "site-packages",
    "config-*",
)


def copy_python(target: Path) -> None:
    """An interpreter with its own folder, made of the one these tests run under."""
    base = Path(sys.base_prefix)
    (target / "bin").mkdir(parents=True)
    shutil.copy2(Path(sys.executable).resolve(), target / f"bin/python{VERSION}")
    for name in ("python3", "python"):
        (target / "bin" / name).symlink_to(f"python{VERSION}")
    shutil.copytree(
        base / f"lib/python{VERSION}", target / f"lib/python{VERSION}", ignore=shutil.ignore_patterns(*LEFT_OUT)
    )
    (target / f"lib/python{VERSION}/site-packages").mkdir()


def write_package(channel: Path, subdir: str, index: dict, folder: Path, *, noarch: dict | None = None) -> None:
    """Pack a folder; text and binary files that hold the placeholder are recorded as conda-build does."""
    paths = []
    for path in sorted(folder.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            continue
        entry = {"_path": str(path.relative_to(folder)), "path_type": "softlink" if path.is_symlink() else "hardlink"}
        if not path.is_symlink():
            data = path.read_bytes()
            entry |= {"sha256": hashlib.sha256(data).hexdigest(), "size_in_bytes": len(data)}
            if ROOM.encode() in data:
                mode = "binary" if b"\0" in data else "text"
                entry |= {"prefix_placeholder": ROOM, "file_mode": mode}
        paths.append(entry)
    index = {**index, "version": index.get("version", "1.0"), "build": "0", "build_number": 0, "subdir": subdir}
    name = f"{index['name']}-{index['version']}-0.tar.bz2"
    (channel / subdir).mkdir(parents=True, exist_ok=True)
    with tarfile.open(channel / subdir / name, "w:bz2", compresslevel=1) as tar:
        documents = {"index.json": index, "paths.json": {"paths": paths, "paths_version": 1}}
        if noarch:
            documents["link.json"] = {"noarch": noarch, "package_metadata_version": 1}
        for key, document in documents.items():
            data = json.dumps(document).encode()
            info = tarfile.TarInfo(f"info/{key}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        for entry in paths:
            tar.add(folder / entry["_path"], entry["_path"], recursive=False)
    data = (channel / subdir / name).read_bytes()
    path = channel / subdir / "repodata.json"
    document = json.loads(path.read_text()) if path.exists() else {"info": {"subdir": subdir}, "packages": {}}
    document["packages"][name] = {
        **index,
        "md5": hashlib.md5(data).hexdigest(),
        "sha256": hashlib.sha256(data).hexdigest(),
        "size": len(data),
        "timestamp": 1700000000000,
    }
    path.write_text(json.dumps(document))


def make_channel(root: Path) -> Path:
    """Python, a library with text and binary placeholders, and a noarch package with an entry point."""
    channel = root / "channel"
    python = root / "python"
    copy_python(python)
    (python / "lib/python3.1").symlink_to(f"python{VERSION}")
    full = ".".join(map(str, sys.version_info[:3]))
    write_package(channel, "linux-64", {"name": "python", "version": full, "depends": []}, python)
    library = root / "library"
    (library / "lib").mkdir(parents=True)
    (library / "bin").mkdir()
    (library / "lib/libthing.so").write_bytes(b"\x7fELF\0" + ROOM.encode() + b"/share/thing\0" + b"\0" * 8 + b"tail\0")
    (library / "lib/thing.pc").write_text(f"prefix={ROOM}\nlibs=-L{ROOM}/lib\n")
    (library / "bin/thing").write_text(f"#!{ROOM}/bin/python\nimport sys\nprint('thing in', sys.prefix)\n")
    (library / "bin/thing").chmod(0o755)
    write_package(channel, "linux-64", {"name": "thing", "depends": []}, library)
    pure = root / "pure"
    (pure / "site-packages").mkdir(parents=True)
    (pure / "site-packages/hello.py").write_text("def main():\n    print('hello')\n")
    entry = {"type": "python", "entry_points": ["hello = hello:main"]}
    write_package(channel, "noarch", {"name": "hello", "depends": ["python"], "noarch": "python"}, pure, noarch=entry)
    return channel


def install(channel: Path, prefix: Path) -> None:
    """The environment, with one more package from pip."""
    import rattler

    async def go() -> None:
        found = await rattler.solve(
            [rattler.Channel(channel.as_uri())], ["python", "thing", "hello"], platforms=["linux-64", "noarch"]
        )
        await rattler.install(found, target_prefix=prefix, cache_dir=channel.parent / "pkgs", show_progress=False)

    asyncio.run(go())
    wheel = write_wheel(channel.parent)
    pip = [sys.executable, "-m", "pip", "--python", str(prefix / "bin/python"), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "-q", "--no-index", "--root-user-action=ignore", str(wheel)], check=True)


def write_wheel(folder: Path) -> Path:
    """A package with a console script."""
    wheel = folder / "frompip-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("frompip.py", "def main():\n    print('from pip')\n")
        archive.writestr("frompip-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: frompip\nVersion: 1.0\n")
        archive.writestr(
            "frompip-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("frompip-1.0.dist-info/entry_points.txt", "[console_scripts]\nfrompip = frompip:main\n")
        archive.writestr("frompip-1.0.dist-info/RECORD", "")
    return wheel
