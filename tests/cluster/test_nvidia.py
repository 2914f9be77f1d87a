from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from llmtrain.cluster.nvidia import (
    parse_nvcc,
    parse_smi,
    parse_topology,
    parse_transport,
    parse_xids,
    smi_error,
)

CASES = Path(__file__).parent / "cases"
PARSERS = {
    "topology": lambda text: {" ".join(pair): link for pair, link in parse_topology(text).items()},
    "nvcc": parse_nvcc,
    "transport": parse_transport,
    "xids": lambda text: [list(one) for one in parse_xids(tuple(text.splitlines()))],
    "error": lambda text: smi_error(json.loads(text)),
}


def load(folder):
    """Name -> case."""
    return {path.stem: json.loads(path.read_text()) for path in sorted((CASES / folder).glob("*.json"))}


@pytest.mark.parametrize("case", load("nvidia").values(), ids=load("nvidia"))
def test_outputs_of_many_cards_and_drivers(case):
    """Answers of nvidia-smi, shortened or constructed, are read as their case says, unknown fields included."""
    driver, gpus = parse_smi(case["output"])
    assert {"driver": driver, "gpus": json.loads(json.dumps([asdict(one) for one in gpus]))} == case["parsed"]


@pytest.mark.parametrize("case", load("texts").values(), ids=load("texts"))
def test_other_outputs(case):
    """Topologies, compilers, NCCL's log, the kernel's log and error messages are read as their cases say."""
    assert PARSERS[case["parser"]](case["output"]) == case["parsed"]


@pytest.mark.parametrize("text", ["", "no xml", "<a", '<!DOCTYPE a [<!ENTITY b "c">]><a/>'])
def test_what_is_no_answer_is_refused(text):
    """Anything but an answer of nvidia-smi is a ValueError, also one that could blow up in a parser."""
    with pytest.raises(ValueError, match="nvidia-smi"):
        parse_smi(text)
