"""Make a tiny chat model in a second, without any download: ``python -m llmtrain.train.tinymodel DIR [--seed N]``.

It has the Llama architecture, a byte-level tokenizer and the ChatML template, so that it goes through everything a
real model goes through. It knows nothing. ``llmtrain smoke`` and the tests train it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from llmtrain.errors import LlmtrainError
from llmtrain.train.modeldir import new_directory
from llmtrain.train.templates import render_chatml

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
HIDDEN = 128
LAYERS = 4


def write_tiny_model(directory: Path, *, seed: int = 42, tied: bool = True, template: bool = True) -> None:
    """Write the model to a new directory, in fp32 (about 0.8 million parameters, 3 MB).

    Args:
        directory: must not exist.
        seed: of the weights.
        tied: whether input and output embedding are one matrix, as in most small models.
        template: whether it has a chat template.

    Raises:
        InputFileError: the directory exists.
    """
    with new_directory(directory) as partial:
        _write(partial, seed=seed, tied=tied, template=template)


def _write(partial: Path, *, seed: int, tied: bool, template: bool) -> None:
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, logging

    logging.disable_progress_bar()

    tokenizer = make_tokenizer()
    if template:
        tokenizer.chat_template = render_chatml(tokenizer)
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    pad = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=HIDDEN,
            intermediate_size=3 * HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            tie_word_embeddings=tied,
            bos_token_id=None,
            eos_token_id=stop,
            pad_token_id=pad,
        )
    )
    model.generation_config = GenerationConfig(eos_token_id=stop, pad_token_id=pad)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)


def make_tokenizer() -> Any:
    """A tokenizer with one token per byte and three special tokens, without any chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",  # noqa: S106 - no secret
        pad_token="<|endoftext|>",  # noqa: S106
        additional_special_tokens=["<|im_start|>"],
        model_input_names=["input_ids", "attention_mask"],
    )


def main(argv: list[str] | None = None) -> int:
    """Make one model; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m llmtrain.train.tinymodel", description=__doc__)
    parser.add_argument("directory", type=Path, help="the directory to create")
    parser.add_argument("--seed", type=int, default=42, help="of the weights (default 42)")
    options = parser.parse_args(argv)
    try:
        write_tiny_model(options.directory, seed=options.seed)
    except LlmtrainError as problem:
        sys.stderr.write(f"{problem}\n")
        return int(problem.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
