from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_wheel_holds_everything_a_user_needs(tmp_path):
    """A wheel built from this tree finds its presets and starts, without the checkout."""
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("llmtrain-*.whl")
    target = tmp_path / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
        names = archive.namelist()
    assert "llmtrain/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    code = "import llmtrain.cli, llmtrain.spec.presets as p; print(llmtrain.__file__); print(*p.preset_names())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(target)},
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    where, presets = done.stdout.splitlines()
    assert where.startswith(str(target))
    assert presets.split() == sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
