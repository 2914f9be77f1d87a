"""One real launch on three hosts with private disks, given hostile values; every test looks at another side of it."""

from __future__ import annotations

import json
import re
import secrets
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.documented import stale_lines

FOLDER = "/root/my $(touch canary-folder) %h 'runs'"
DATA = 'sums $(touch canary-data) `touch canary-tick` "q".jsonl'
SECRET = secrets.token_hex(16)
HOSTILE = {
    "COMMAND": "$(touch /tmp/canary-command)",
    "TICKS": "`touch /tmp/canary-ticks`; touch /tmp/canary-semicolon",
    "QUOTES": "a'b\"c\\d",
    "NEWLINES": "first\nsecond\n",
    "PDSH_MARKS": "%h %n %u %%",
    "AS_JSON": '{"a": [1, "b c"]}',
    "UNICODE": "grüße 漢字 🚂",
    "EMPTY": "",
    "BLANKS": "  before and after  ",
}
RUN_FILE = f"""
name: demo
model: {{path: /root/model}}
data: {{path: {json.dumps(DATA)}, max_length: 64}}
output: tuned
batch: {{micro: 1, accumulation: 1}}
training: {{max_steps: 3, loader_workers: 0}}
env: {json.dumps({"OMP_NUM_THREADS": "1", **HOSTILE})}
env_file: secrets.env
"""


@dataclass
class Argvs:
    """Looks at every command line of this machine, the hosts' included, twenty times a second."""

    seen: set[str] = field(default_factory=set)
    with_secret: set[str] = field(default_factory=set)
    stop: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        while not self.stop.is_set():
            begun = time.monotonic()
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    argv = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
                except OSError:
                    continue
                self.seen.add(argv)
                if SECRET in argv:
                    self.with_secret.add(argv)
            self.stop.wait(max(0.0, 0.05 - (time.monotonic() - begun)))


def temporary_files(lab):
    """Host -> listing of the folders where something could be left."""
    folders = ("/tmp", "/var/tmp", "/dev/shm", "/root/.llmtrain/runs")
    return {host: lab.run(host, ["ls", "-A", *folders], check=False).stdout for host in lab.names}


@pytest.fixture(scope="module")
def clean(launch_lab):
    """What lies in the folders for passing things on every host before anything is launched."""
    for host in launch_lab.lab.nodes:
        launch_lab.lab.run(host, ["mkdir", "-p", "/root/.llmtrain/runs"])
    return temporary_files(launch_lab.lab)


@pytest.fixture(scope="module")
def prepared(launch_lab, clean):
    """The working folder, traps in the places where DeepSpeed and shells look, and a host that greets."""
    lab = launch_lab.lab
    launch_lab.folder(FOLDER, hosts="node1 node2 node3", run=RUN_FILE)
    lab.write("head", f"{FOLDER}/secrets.env", f"API_TOKEN={SECRET}\n", mode=0o600)
    lab.write("head", f"{FOLDER}/{DATA}", lab.read("head", "/root/data.jsonl"))
    for trap in ("/root/.deepspeed_env", f"{FOLDER}/.deepspeed_env"):
        lab.write("head", trap, "EVIL=$(touch /tmp/canary-deepspeed-env)\n")
    for module in ("torch", "deepspeed", "llmtrain"):
        lab.write("head", f"{FOLDER}/{module}.py", "open('/tmp/canary-module', 'w')\n")
    bashrc = lab.read("node2", "/root/.bashrc")
    lab.write("node2", "/root/.bashrc", f"echo WELCOME to node2\n{bashrc}")
    yield FOLDER
    lab.write("node2", "/root/.bashrc", bashrc)
    lab.run("head", ["rm", "/root/.deepspeed_env"])


@pytest.fixture(scope="module")
def argvs():
    """All command lines seen while the launch ran."""
    return Argvs()


@pytest.fixture(scope="module")
def environs(argvs):
    """Host -> environment of its rank; filled while the launch runs."""
    return {}


@pytest.fixture(scope="module")
def finished(launch_lab, prepared, argvs, environs):
    """The launch, watched while it ran."""
    watcher = threading.Thread(target=argvs.watch)
    watcher.start()
    try:
        run = launch_lab.launch(prepared, "--json")
        run.wait_text("all 3 ranks have started")
        for rank in range(3):
            host, process = run.rank(rank)
            environs[host] = process.environ
        run.wait()
    finally:
        argvs.stop.set()
        watcher.join()
    return run


def test_literal_command_exits_0_with_one_json_document_on_stdout(finished):
    """The literal command succeeds, and standard output holds the JSON document and nothing else."""
    assert finished.process.returncode == 0, finished.err
    document = finished.json
    assert document["ok"] is True
    assert {"exit_code", "run_dir", "reason", "first_failure", "last_step", "final_loss", "output"} < set(document)
    assert document["output"] == f"{FOLDER}/tuned"
    assert (document["exit_code"], document["last_step"]) == (0, 3)


def test_console_without_a_terminal_shows_plain_step_lines(finished):
    """Without a terminal every line is plain text: steps, and no control character."""
    assert re.search(r"^step 1/3  loss \d", finished.err, re.MULTILINE)
    told = finished.err.replace(FOLDER, "/root/demo")
    # Where earlier tests have brought the model to the hosts, nothing is copied.
    stale = [one for one in stale_lines("launch", "llmtrain launch --hosts", told) if not one.startswith("copying")]
    assert stale == [], told
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", finished.err)


def test_run_folder_holds_every_record(finished):
    """run.json, ds_config.json, hostfile, versions, metrics and outcome are there, private, with a schema number."""
    assert finished.dir.stat().st_mode & 0o777 == 0o700
    for name in ("run.json", "versions.json", "outcome.json"):
        assert json.loads((finished.dir / name).read_text())["schema"] == 1
        assert (finished.dir / name).stat().st_mode & 0o777 == 0o600
    assert json.loads((finished.dir / "ds_config.json").read_text())["zero_optimization"]["stage"] == 3
    assert (finished.dir / "hostfile").read_text() == "node1 slots=1\nnode2 slots=1\nnode3 slots=1\n"
    assert set(json.loads((finished.dir / "versions.json").read_text())["hosts"]) == {"node1", "node2", "node3"}
    assert finished.outcome == {"schema": 1, **finished.json}


def test_metrics_have_one_object_a_step(finished):
    """metrics.jsonl has a line for each step with all its keys, and a last one about the whole run."""
    steps = [row for row in finished.metrics if "loss" in row]
    keys = {"step", "epoch", "loss", "learning_rate", "tokens_per_s", "grad_norm", "time", "max_steps", "schema"}
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert all(set(row) == keys for row in steps)
    assert finished.metrics[-1]["final_loss"] == finished.json["final_loss"]


def test_each_rank_has_a_log_on_the_head(finished):
    """Every rank's own log has come to the head beside the launcher's."""
    names = {path.name for path in (finished.dir / "logs").iterdir()}
    assert names == {"launcher.log", "node1-0.log", "node2-1.log", "node3-2.log"}


def test_tuned_model_loads_and_generates(finished):
    """What arrived at --output is a Hugging Face model in bf16 that transformers loads and that has changed."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    before = AutoModelForCausalLM.from_pretrained(finished.bench.here / "model", dtype="auto")
    after = AutoModelForCausalLM.from_pretrained(finished.disk / "tuned", dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(finished.disk / "tuned")
    answer = after.generate(**tokenizer("1+1?", return_tensors="pt"), max_new_tokens=2, do_sample=False)
    assert answer.shape[0] == 1
    assert {parameter.dtype for parameter in after.parameters()} == {torch.bfloat16}
    pairs = zip(before.parameters(), after.parameters(), strict=True)
    assert any(not torch.equal(one.bfloat16(), other) for one, other in pairs)


def test_model_and_data_are_on_every_host(finished):
    """Hosts that lacked model and data hold copies of them at the same paths, byte for byte."""
    lab = finished.bench.lab
    paths = ["root/model/model.safetensors", f"{FOLDER}/{DATA}".lstrip("/")]
    for host in lab.nodes:
        for path in paths:
            assert (lab.state.disk(host) / path).read_bytes() == (lab.state.disk("head") / path).read_bytes()


def test_values_arrive_byte_for_byte(environs):
    """Values with commands, quotes, newlines, pdsh's marks, JSON and other scripts reach every rank unchanged."""
    assert set(environs) == {"node1", "node2", "node3"}
    for environ in environs.values():
        assert {key: environ.get(key) for key in HOSTILE} == HOSTILE
        assert environ["API_TOKEN"] == SECRET
        assert "EVIL" not in environ


def test_no_planted_command_has_run(finished):
    """No file that any of the hostile names and values would make exists, on any host or on this machine."""
    disks = [str(finished.bench.lab.state.disk(host)) for host in finished.bench.lab.names]
    found = subprocess.run(["find", *disks, "-name", "canary-*"], capture_output=True, text=True, check=False)
    assert found.stdout == ""
    assert not [path for folder in ("/tmp", "/root", ".") for path in Path(folder).glob("canary-*")]


def test_built_operations_are_used_as_they_are(launch_lab, finished, environs, op_cache):
    """A host that has DeepSpeed's operations for this environment compiles none: the ranks load the very files."""
    for host, environ in environs.items():
        ops = launch_lab.lab.state.disk(host) / environ["TORCH_EXTENSIONS_DIR"].lstrip("/")
        for built in op_cache.glob("*/*.so"):
            there = ops / built.relative_to(op_cache)
            assert there.stat().st_mtime_ns == built.stat().st_mtime_ns


def test_secret_is_on_no_command_line(argvs, finished):
    """While it ran no process of any host, nor of this machine, had the secret in its arguments."""
    seen = "\n".join(argvs.seen)
    assert finished.id in seen
    assert "pdsh -S" in seen
    assert "llmtrain.train.rank" in seen
    assert argvs.with_secret == set()


def test_secret_is_in_no_file_and_no_output(finished):
    """Neither the outputs nor any file of any host holds the secret, but for the user's own file."""
    assert SECRET not in finished.out + finished.err
    disks = [str(finished.bench.lab.state.disk(host)) for host in finished.bench.lab.names]
    folders = [f"{disk}/{name}" for disk in disks for name in ("root", "tmp", "var", "home", "srv")]
    found = subprocess.run(["grep", "-rlF", SECRET, *folders], capture_output=True, text=True, check=False)
    assert found.stdout.splitlines() == [f"{finished.disk}/secrets.env"]


def test_nothing_of_the_run_is_left_on_any_host(finished, clean):
    """After success no process, no temporary file and no run folder is left on any host."""
    finished.bench.wait_quiet()
    assert temporary_files(finished.bench.lab) == clean


def test_run_is_registered_in_the_state_folder(finished):
    """Later commands find the run by its id in the user's state folder."""
    link = finished.bench.lab.state.disk("head") / "root/.local/state/llmtrain/runs" / finished.id
    assert str(link.readlink()) == finished.json["run_dir"]


def test_output_that_exists_is_refused(finished, prepared):
    """The same command again ends with code 2 before any host is contacted, because the output exists."""
    again = finished.bench.launch(prepared, "--json")
    assert again.wait() == 2
    assert again.json["error"] == "the output exists, and is never overwritten"
    assert "contacting" not in again.err


def test_second_launch_copies_nothing(finished, prepared):
    """A dry run over the same hosts shows that nothing is left to copy."""
    again = finished.bench.launch(prepared, "--json", "--dry-run", "--output", "elsewhere")
    assert again.wait() == 0, again.err
    assert again.json["copies"] == []
