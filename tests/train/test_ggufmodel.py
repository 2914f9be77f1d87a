from __future__ import annotations

import numpy as np
import pytest
from gguf import GGUFWriter
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmtrain.errors import InputFileError
from llmtrain.train.ggufmodel import main, write_model_from_gguf
from llmtrain.train.tinymodel import make_tokenizer

WIDTH, HEADS, FEED = 32, 4, 64
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    """A one-layer Llama in fp32 as a GGUF file, with a byte-level tokenizer and a chat template."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    tokenizer = make_tokenizer()
    tokens = [*tokenizer.convert_ids_to_tokens(range(len(tokenizer))), "ab"]  # the format wants one merge at least
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3] * (len(tokens) - 257) + [1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_chat_template(TEMPLATE)
    draw = np.random.default_rng(0)
    shapes = {"token_embd": (len(tokens), WIDTH), "output": (len(tokens), WIDTH), "output_norm": (WIDTH,)}
    block = {"attn_norm": (WIDTH,), "ffn_norm": (WIDTH,), "ffn_down": (WIDTH, FEED)}
    block |= {f"attn_{part}": (WIDTH, WIDTH) for part in ("q", "k", "v", "output")}
    block |= {f"ffn_{part}": (FEED, WIDTH) for part in ("gate", "up")}
    for name, shape in {**shapes, **{f"blk.0.{part}": shape for part, shape in block.items()}}.items():
        writer.add_tensor(f"{name}.weight", draw.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_becomes_an_ordinary_directory(gguf_file, tmp_path):
    """The result loads without GGUF, in bf16, with the same numbers, tokenizer and chat template."""
    tensors = write_model_from_gguf(gguf_file, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert tensors == len(model.state_dict()) == 12
    assert str(model.dtype) == "torch.bfloat16"
    expected = np.random.default_rng(0).normal(size=(260, WIDTH)).astype(np.float32)
    found = model.get_input_embeddings().weight.float().detach().numpy()
    assert np.allclose(found, expected, rtol=2**-7)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.decode(tokenizer("naïve 🙂")["input_ids"]) == "naïve 🙂"


def test_never_overwrites(gguf_file, tmp_path, capsys):
    """An existing directory is refused with exit code 3."""
    assert main([str(gguf_file), str(tmp_path)]) == 3
    assert "exists already" in capsys.readouterr().err


def test_no_file(tmp_path):
    """A missing file is named."""
    with pytest.raises(InputFileError, match="no such GGUF file"):
        write_model_from_gguf(tmp_path / "none.gguf", tmp_path / "model")
