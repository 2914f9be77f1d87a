from __future__ import annotations

import json
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.launch.launchlab import wait_for

LLMTRAIN = str(Path(sys.executable).with_name("llmtrain"))


@dataclass(frozen=True)
class Done:
    """One `llmtrain` that has ended."""

    code: int
    out: str
    err: str
    folder: Path
    """Its working folder, as this machine sees it."""

    @property
    def json(self):
        return json.loads(self.out)

    @property
    def run(self) -> Path:
        """The newest run folder."""
        return max(self.folder.glob("runs/*"), key=lambda path: path.stat().st_mtime)

    def log(self, host: str, rank: int) -> str:
        return (self.run / "logs" / f"{host}-{rank}.log").read_text(errors="surrogateescape")


class ScriptLab:
    """A head and two nodes, a tiny model at /root/model and a question file at /root/data.jsonl on the head."""

    def __init__(self, lab):
        self.lab = lab
        self.head = lab.state.disk("head")

    def folder(self, path: str, files: dict[str, str | Path]) -> str:
        """A working folder on the head with a hostfile of both nodes."""
        base = self.head / path.lstrip("/")
        base.mkdir(parents=True)
        (base / "hostfile").write_text("node1 slots=1\nnode2 slots=1\n")
        for name, text in files.items():
            (base / name).parent.mkdir(parents=True, exist_ok=True)
            if isinstance(text, Path):
                shutil.copy(text, base / name)
            else:
                (base / name).write_text(text)
        return path

    def llmtrain(
        self, folder: str, *argv: str, env: dict[str, str] | None = None, until: str = "", number: int = 0
    ) -> Done:
        """Run `llmtrain ARGV` in a folder of the head; with *until*, signal it once that stands on its stderr."""
        base = self.head / folder.lstrip("/")
        out, err = base.with_suffix(".out"), base.with_suffix(".err")
        begun = time.monotonic()
        with out.open("wb") as out_file, err.open("wb") as err_file:
            process = self.lab.popen("head", [LLMTRAIN, *argv], cwd=folder, env=env, stdout=out_file, stderr=err_file)
        try:
            if until:
                wait_for(lambda: until in err.read_text() or process.poll() is not None, 100, err.read_text)
                process.send_signal(number)
            code = process.wait(150)
        except BaseException:
            sys.stderr.write(err.read_text(errors="replace")[-6000:])
            process.kill_group()
            process.wait(20)
            raise
        done = Done(code, out.read_text(), err.read_text(errors="replace"), base)
        sys.stderr.write(f"llmtrain {argv[0]}: {time.monotonic() - begun:.1f} s\n{done.err[-6000:]}\n")
        return done


@pytest.fixture(scope="session")
def script_lab(launch_lab):
    """The lab of the launch tests; two of its nodes are used."""
    return ScriptLab(launch_lab.lab)
