"""LLaMA-Factory, in an environment of its own, over two hosts of the lab: it trains and its model comes home.

    python bench/llama_factory.py ENVIRONMENT MODEL_DIR [LAUNCHER...]

ENVIRONMENT holds `llamafactory` and `deepspeed` (8 GB, which is why this is no test): docs/own-scripts.md says how it
is made. Runs the example in examples/llama-factory with the command of its README on each launcher. Needs root.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.lab import Lab, LabOptions  # noqa: E402
from tests.lab.fixtures import default_shares  # noqa: E402

WORDS = "train sft.yaml model_name_or_path={model} deepspeed={ds_config} output_dir={output} use_cpu=true"


def main(environment: str, model: str) -> None:
    base = str(Path(environment, "bin/python").resolve().parents[1])
    options = LabOptions(shares=(*default_shares(), environment, base))
    with Lab.create(2, options) as lab:
        home = lab.state.disk("head") / "root"
        shutil.copytree(model, home / "model")
        shutil.copytree(ROOT / "examples/llama-factory", home / "work")
        (home / "work/hostfile").write_text("node1 slots=1\nnode2 slots=1\n")
        for launcher in sys.argv[3:] or ("pdsh", "ssh"):
            command = [str(Path(sys.executable).with_name("llmtrain")), "launch", "--hosts", "hostfile"]
            command += ["--config", "zero3-offload", "--launcher", launcher, "--set", f"environment={environment}"]
            command += ["--model", "/root/model", "--output", f"/root/tuned-{launcher}", "--code", ".", "--json"]
            begun = time.monotonic()
            done = lab.run(
                "head", [*command, "--", "llamafactory-cli", *WORDS.split()], cwd="/root/work", check=False, timeout=900
            )
            print(done.stderr[-3000:])
            outcome = json.loads(done.stdout)
            log = Path(str(home / "work/runs" / Path(outcome["run_dir"]).name / "logs/node1-0.log"))
            losses = [line for line in log.read_text().splitlines() if "'loss'" in line or '"loss"' in line]
            written = sorted(path.name for path in (home / f"tuned-{launcher}").glob("*.safetensors"))
            print(f"{launcher}: exit {outcome['exit_code']}, {time.monotonic() - begun:.0f} s, model {written}")
            print("\n".join(losses) or log.read_text()[-3000:])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
