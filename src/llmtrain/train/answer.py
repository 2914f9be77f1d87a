"""Ask a model directory one question: ``python -m llmtrain.train.answer DIR "question"``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from llmtrain.errors import InputFileError, LlmtrainError


def answer(directory: Path, question: str, *, max_tokens: int = 100) -> str:
    """The model's most likely answer, found greedily, so that it is the same each time.

    Raises:
        InputFileError: not a model directory, or a model without a chat template.
    """
    if not (directory / "config.json").is_file():
        raise InputFileError("not a model directory: it has no config.json", where=str(directory))
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    if not tokenizer.chat_template:
        raise InputFileError("the model has no chat template, so it cannot be asked", where=str(directory))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, dtype="auto").to(device)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    ).to(device)
    output = model.generate(**prompt, max_new_tokens=max_tokens, do_sample=False)
    words = output[0][prompt["input_ids"].shape[1] :]
    return str(tokenizer.decode(words, skip_special_tokens=True)).strip()


def main(argv: list[str] | None = None) -> int:
    """Ask and print; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m llmtrain.train.answer", description=__doc__)
    parser.add_argument("directory", type=Path, help="a Hugging Face model directory")
    parser.add_argument("question", help="what to ask")
    parser.add_argument("--max-tokens", type=int, default=100, help="longest answer in tokens (default 100)")
    options = parser.parse_args(argv)
    try:
        sys.stdout.write(answer(options.directory, options.question, max_tokens=options.max_tokens) + "\n")
    except LlmtrainError as problem:
        sys.stderr.write(f"{problem}\n")
        return int(problem.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
