"""Turn a GGUF file into a normal Hugging Face directory: ``python -m llmtrain.train.ggufmodel FILE.gguf OUTDIR``.

transformers reads GGUF, but refuses to save such a model again ("quantized with gguf and is not serializable").
So the de-quantised weights move into a fresh model of the same configuration, which is saved in bf16.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from llmtrain.errors import InputFileError, LlmtrainError
from llmtrain.train.modeldir import new_directory


def write_model_from_gguf(gguf: Path, directory: Path) -> int:
    """Write the model in *gguf* to the new *directory* as bf16 safetensors with its tokenizer and chat template.

    Returns:
        The number of tensors written.

    Raises:
        InputFileError: no such file, or *directory* exists.
    """
    if not gguf.is_file():
        raise InputFileError("no such GGUF file", where=str(gguf))
    with new_directory(directory) as partial:
        return _convert(gguf, partial)


def _convert(gguf: Path, partial: Path) -> int:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, logging

    logging.disable_progress_bar()
    # The relative name matters: an absolute gguf_file would make transformers ask the hub for it.
    place, name = str(gguf.resolve().parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=name)
    source = AutoModelForCausalLM.from_pretrained(place, gguf_file=name, dtype="float32")
    config = AutoConfig.from_pretrained(place, gguf_file=name)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype="float32")
    # strict: a missing or unexpected name raises, so the copy is complete or does not happen.
    model.load_state_dict(source.state_dict(), strict=True)
    model.tie_weights()
    model.generation_config = source.generation_config
    model.bfloat16().save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    return len(source.state_dict())


def main(argv: list[str] | None = None) -> int:
    """Convert one file; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m llmtrain.train.ggufmodel", description=__doc__)
    parser.add_argument("gguf", type=Path, help="the GGUF file")
    parser.add_argument("directory", type=Path, help="the directory to create")
    options = parser.parse_args(argv)
    try:
        tensors = write_model_from_gguf(options.gguf, options.directory)
    except LlmtrainError as problem:
        sys.stderr.write(f"{problem}\n")
        return int(problem.exit_code)
    sys.stdout.write(f"{options.directory}: {tensors} tensors in bf16\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
