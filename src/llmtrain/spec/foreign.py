"""Conversations in the shapes that other tools write: prompt and completion, Alpaca, ShareGPT.

All become the same messages, so that one content gives the same tokens and masks whatever shape it came in.
"""

from __future__ import annotations

from typing import Any

from llmtrain.spec.datafile import Record, RecordError, kind_of, show, show_keys
from llmtrain.spec.messages import Example, parse_messages, parse_text, refuse_unsupported

_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "system": "system",
}
"""ShareGPT's words for who speaks."""


def parse_prompt_completion(record: Record) -> tuple[Example, set[str]]:
    """``prompt`` and ``completion``: two texts, or two lists of messages."""
    if "completion" not in record:
        raise RecordError(
            f"no field 'completion' (keys found: {show_keys(record)})", "each prompt needs its completion"
        )
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, list) or isinstance(completion, list):
        if not (isinstance(prompt, list) and isinstance(completion, list)):
            raise RecordError("prompt and completion: one is a list of messages, the other a text", "write both alike")
        return parse_messages({"messages": [*prompt, *completion]})
    turns = [_turn("user", prompt, "prompt"), _turn("assistant", completion, "completion")]
    return parse_messages({"messages": _with_system(record, turns)})


def parse_alpaca(record: Record) -> tuple[Example, set[str]]:
    """``instruction``, ``input`` (may be empty) and ``output``, with ``system`` and ``history`` if there are any."""
    if "output" not in record:
        raise RecordError(f"no field 'output' (keys found: {show_keys(record)})", "each instruction needs its output")
    question = parse_text(record["instruction"], "instruction")
    if record.get("input") not in (None, ""):
        question += "\n" + parse_text(record["input"], "input")
    turns: list[dict[str, Any]] = []
    history = record.get("history") or []
    if not isinstance(history, list):
        raise RecordError(f"history: expected a list, found {kind_of(history)}", "write [[question, answer], ...]")
    for at, pair in enumerate(history):
        if not isinstance(pair, list) or len(pair) != 2:
            raise RecordError(f"history[{at}]: expected [question, answer]", "write [[question, answer], ...]")
        turns += [_turn("user", pair[0], f"history[{at}][0]"), _turn("assistant", pair[1], f"history[{at}][1]")]
    turns += [_turn("user", question, "instruction"), _turn("assistant", record["output"], "output")]
    return parse_messages({"messages": _with_system(record, turns)})


def parse_sharegpt(record: Record) -> tuple[Example, set[str]]:
    """``conversations``: a list of ``{"from": ..., "value": ...}``."""
    refuse_unsupported(record, "")
    turns = record["conversations"]
    if not isinstance(turns, list):
        raise RecordError(f"conversations: expected a list, found {kind_of(turns)}", _SHAREGPT)
    messages = [_spoken(turn, f"conversations[{at}]") for at, turn in enumerate(turns)]
    example, _ = parse_messages({"messages": _with_system(record, messages)})
    extras = {
        f"conversations[].{key}" for turn in turns for key in turn if key not in {"from", "value", "role", "content"}
    }
    return example, extras


_SHAREGPT = 'each turn is {"from": "human", "value": "..."}'


def _spoken(turn: Any, where: str) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise RecordError(f"{where}: expected an object, found {kind_of(turn)}", _SHAREGPT)
    refuse_unsupported(turn, f"{where}.")
    if "role" in turn and "from" not in turn:
        turn = {"from": turn["role"], "value": turn.get("content")}
    for key in ("from", "value"):
        if key not in turn:
            raise RecordError(f"{where}.{key}: missing (keys found: {show_keys(turn)})", _SHAREGPT)
    if turn["from"] not in _SPEAKERS:
        fix = f"speakers are {', '.join(_SPEAKERS)}"
        raise RecordError(f"{where}.from: {show(turn['from'])} is not a speaker", fix)
    return _turn(_SPEAKERS[turn["from"]], turn["value"], f"{where}.value")


def _turn(role: str, content: Any, where: str) -> dict[str, Any]:
    return {"role": role, "content": parse_text(content, where)}


def _with_system(record: Record, turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if record.get("system") in (None, ""):
        return turns
    return [_turn("system", record["system"], "system"), *turns]
