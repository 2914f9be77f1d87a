"""What autograd keeps between forward and backward, counted tensor by tensor as transformers 5 computes.

Held within 5% of a FakeTensor trace of the real classes by ``tests/plan/test_activations.py``. Numbers of bytes are
per token and per unit of width: h (hidden), q (all query heads), kv (all key heads), f (feed-forward).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmtrain.plan.setup import Setup
    from llmtrain.plan.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class Style:
    """How a family's layer is computed; bytes per token and unit of width, at 16-bit precision."""

    norms: float = 16
    """Per h. RMSNorm in Python: fp32 copy 4, normalised 2, scaled 2; two of them."""
    qk_norm: float = 0
    """Per q and kv: norms of queries and keys."""
    qkv_kept: bool = False
    """One fused matrix: the values are a view that keeps its whole output alive."""
    rotary: bool = True
    """Queries and keys are rotated into new tensors."""
    inner: float = 8
    """Per f. Gate, its activation, up, their product."""
    quadratic: float = 6
    """Per head and key, eager attention: fp32 softmax 4, its 16-bit copy 2."""
    inner_backward: float = 4
    """Per f, on top of what is kept, at the peak of the feed-forward part's backward pass."""
    quadratic_backward: float = 6
    """The same for eager attention, per head and key."""
    grouped: bool = True
    """Keys and values are repeated to the query heads where the kernel is given a mask, or is eager."""


PLAIN_NORM = 8
"""Two nn.LayerNorm: each keeps its input 2 (the residual stream) and its output 2."""
LOGITS, LOGITS_OLD = 12, 17
TILE_TOKENS, TILE_WORDS = 4096, 32768
"""Of the output head of TRL 1.16 (trl/kernels/chunked_logprob.py, trl/trainer/utils.py)."""
"""Per token and word: log-softmax, its gradient, that of the 32-bit logits; up to transformers 4.44 a shifted copy."""
GELU_IN_PYTHON = 10
"""Input 2, tanh 2, two factors 4, product 2 (GPT-2's gelu_new)."""

STYLES: dict[str, Style] = {
    "qwen3": Style(qk_norm=6),
    "gemma": Style(norms=20),
    "gemma2": Style(norms=36, quadratic=8),
    "gemma3_text": Style(norms=36, qk_norm=8),
    "phi3": Style(qkv_kept=True),
    "glm": Style(),
    "olmo2": Style(norms=20, qk_norm=8),
    "olmo3": Style(norms=20, qk_norm=8),
    "gpt2": Style(
        norms=PLAIN_NORM,
        inner=GELU_IN_PYTHON,
        rotary=False,
        qkv_kept=True,
        quadratic=2,
        quadratic_backward=4,
        grouped=False,
    ),
    "gpt_neox": Style(norms=6, inner=4, qkv_kept=True, grouped=False, inner_backward=2),
    "opt": Style(norms=PLAIN_NORM, inner=2, rotary=False, grouped=False, inner_backward=4),
    "phi": Style(norms=4, inner=GELU_IN_PYTHON, inner_backward=4),
    "stablelm": Style(norms=PLAIN_NORM),
    "starcoder2": Style(norms=PLAIN_NORM, inner=4, inner_backward=2),
    "falcon": Style(norms=4, inner=4, qkv_kept=True, inner_backward=2, quadratic=2, quadratic_backward=4),
    "bloom": Style(norms=PLAIN_NORM, inner=6, rotary=False, qkv_kept=True, grouped=False),
    "mpt": Style(norms=PLAIN_NORM, inner=4, rotary=False, qkv_kept=True, grouped=False, inner_backward=2),
}
"""Families that differ from Llama's style."""


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Bytes of one micro batch on one rank."""

    kept_layers: int
    """Between forward and backward, all layers."""
    kept_ends: int
    """Between forward and backward, outside the layers: last norm, mask, positions."""
    logits_kept: int
    """Log-softmax kept for the loss."""
    logits_peak: int
    """Logits and their gradients at the start of the backward pass, what is kept included."""
    layer_peak: int
    """Working set of the one layer that is being differentiated, beyond ``kept_layers`` and ``kept_ends``."""

    @property
    def peak(self) -> int:
        """Most at any moment."""
        return self.kept_layers + self.kept_ends + max(self.logits_peak, self.layer_peak)


def estimate_activations(shape: ModelShape, setup: Setup) -> Activations:
    """Count one micro batch."""
    style = STYLES.get(shape.family, Style())
    tokens, scale = setup.tokens, setup.width / 2
    attention, quadratic = _attention(shape, setup, style)
    inner = style.inner * _inner(shape)
    layer = scale * (style.norms * shape.hidden + attention + inner) + quadratic
    logits_kept, logits_peak = _logits(shape, setup)
    stream = scale * 2 * shape.hidden
    if setup.checkpointing:
        kept = shape.layers * stream * tokens
        whole = layer * tokens
    else:
        kept, whole = shape.layers * layer * tokens, 0.0
    return Activations(
        kept_layers=int(kept),
        kept_ends=int(tokens * scale * min(8, style.norms / 2) * shape.hidden + _mask(setup)),
        logits_kept=int(logits_kept),
        logits_peak=int(logits_peak),
        layer_peak=int(whole + _backward(shape, setup, style, inner)),
    )


def _inner(shape: ModelShape) -> float:
    """Width of the feed-forward part that one token goes through."""
    config = shape.config
    if not shape.experts_total:
        return 4 * config.hidden if shape.family in ("bloom", "mpt") else config.inner
    used, _ = shape.experts_used
    width = config.get("moe_intermediate_size", config.inner)
    shared = config.get("shared_expert_intermediate_size", width * config.get("n_shared_experts", 0))
    return float(used * width + shared)


def _attention(shape: ModelShape, setup: Setup, style: Style) -> tuple[float, float]:
    """Linear part (at 16 bit) and quadratic part (whatever the precision), bytes per token."""
    query, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    eager = setup.attention == "eager"
    masked = eager or (setup.attention == "sdpa" and setup.padded)
    repeated = query if masked or not style.grouped else narrow
    kept: float = 2 * query + 2 * repeated * 2 + 2 * query
    if style.qkv_kept:
        kept += 2 * (query + 2 * narrow) - (2 * repeated if repeated == narrow or not style.grouped else 0)
        if not style.rotary:
            kept -= 4 * query
    kept += style.qk_norm * (query + narrow)
    if eager:
        # A 32-bit softmax needs no copy at 16 bit when the model is 32-bit itself.
        return kept, style.quadratic * setup.length * shape.heads * (setup.width / 2 if style.quadratic == 2 else 1)
    return kept, 4 * shape.heads


def _mask(setup: Setup) -> float:
    if setup.attention == "eager":
        return setup.width * setup.length**2
    return setup.length**2 if setup.attention == "sdpa" and setup.padded else 0


def _logits(shape: ModelShape, setup: Setup) -> tuple[float, float]:
    """Kept and peak: log-softmax, its gradient and that of the 32-bit logits, each 4 bytes."""
    if setup.fused_loss:
        # Chunks of 1024 rows at a time, and the gradient of the last hidden states.
        return 2 * setup.tokens * shape.hidden, 12 * min(setup.tokens, 1024) * shape.vocab
    if setup.tiled_loss:
        tile = setup.width * min(setup.tokens, TILE_TOKENS) * min(shape.vocab, TILE_WORDS)
        head = 0 if setup.lora else (4 + setup.width) * shape.vocab * shape.hidden
        stream = setup.tokens * shape.hidden
        return setup.width * stream, tile + head + (4 + 2 * setup.width) * stream
    numbers = setup.tokens * shape.vocab
    return 4 * numbers, (LOGITS_OLD if setup.old_loss else LOGITS) * numbers


def _backward(shape: ModelShape, setup: Setup, style: Style, inner: float) -> float:
    """Gradients in flight at the worst moment of one layer's backward pass, less what it has already let go."""
    scale, tokens = setup.width / 2, setup.tokens
    # Recomputation stops before the product of gate and up is made again.
    width = style.inner_backward - (2 if setup.checkpointing and style.inner == Style.inner else 0)
    feed_forward = scale * tokens * (width * _inner(shape) + 2 * shape.hidden)
    if setup.attention != "eager":
        return feed_forward
    scores = style.quadratic_backward * setup.length * shape.heads * tokens
    freed = scale * tokens * (inner + style.norms / 2 * shape.hidden)
    return max(feed_forward, scores - freed)
