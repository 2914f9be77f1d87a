from __future__ import annotations

import json
import random

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """The directory of a tiny model with a chat template."""
    from llmtrain.train.tinymodel import write_tiny_model

    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(directory)
    return directory


@pytest.fixture(scope="session")
def chat_file(tmp_path_factory):
    """64 sums as questions and answers, the same each time."""
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    with path.open("w") as file:
        for _ in range(64):
            left, right = draw.randint(1, 99), draw.randint(1, 99)
            turns = [("user", f"{left}+{right}?"), ("assistant", f"It is {left + right}.")]
            file.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n")
    return path
