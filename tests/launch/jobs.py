"""Jobs and contacts without hosts, for what is pure."""

from __future__ import annotations

import json

import numpy as np
from safetensors.numpy import save_file
from tests.cluster.hosts import make_facts

from llmtrain.cluster.network import choose_network
from llmtrain.launch.choices import choose_hardware
from llmtrain.launch.contact import Contact
from llmtrain.launch.job import Selection, read_job
from llmtrain.spec.runfile import read_run

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 32,
    "max_position_embeddings": 64,
}


def write_job(folder, hosts="gpu004 slots=2\ngpu006 slots=1\n", sets=(), envs=(), selection=None, **facts):
    """A job whose files lie in ``folder``, and the contact with healthy hosts."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(CONFIG))
    (model / "tokenizer.json").write_text("{}")
    save_file({"model.embed_tokens.weight": np.zeros((32, 8), np.float32)}, model / "model.safetensors")
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    (folder / "data.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    (folder / "hostfile").write_text(hosts)
    files = {"model.path": str(model), "data.path": str(folder / "data.jsonl"), "hosts": str(folder / "hostfile")}
    options = {key: (f"--{key}", value) for key, value in files.items()}
    options["config"] = ("--config", "zero3-offload")
    spec = read_run(None, options=options, sets=sets, envs=envs, folder=folder)
    job = read_job(spec, selection or Selection())
    return job, make_contact(job, **facts)


def make_contact(job, **facts):
    """What healthy hosts answer, but for the changes by host name."""
    made = {
        name: make_facts(name, number, **facts.get(name, {})) for number, name in enumerate(job.cluster.names, start=1)
    }
    hardware, choices = choose_hardware(job.spec, list(made.values()), flash_imports=False)
    network = choose_network(list(made.values()), dict.fromkeys(made))
    return Contact(facts=made, network=network, hardware=hardware, choices=choices, warnings=(), trees={})
