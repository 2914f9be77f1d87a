"""The README.md of a tuned model: what it is made of and how, for whoever finds it later."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from pathlib import Path
from typing import TYPE_CHECKING

import llmtrain

if TYPE_CHECKING:
    from llmtrain.train.data import TrainingData
    from llmtrain.train.runjson import RankRun
    from llmtrain.train.templates import Template

PACKAGES = ("torch", "deepspeed", "transformers", "trl", "accelerate", "datasets", "tokenizers")


def render_card(
    run: RankRun,
    data: TrainingData,
    template: Template | None,
    *,
    steps: int,
    losses: dict[str, float | None],
    versions: dict[str, str],
) -> str:
    """Render the model card; it names files without their folders, which are nobody's business.

    Args:
        run: the run.
        data: what was trained on.
        template: the chat template, None for plain text.
        steps: optimizer steps done.
        losses: by name, e.g. first, last and held-out.
        versions: package -> version.
    """
    base = Path(run.model.path).name
    recipe = run.training
    rows = [
        ("examples", f"{data.train_rows} trained on, {data.eval_rows} held out, {data.facts.dropped} left out"),
        ("longest example", f"{run.data.max_length} tokens ({data.facts.truncated} cut)"),
        ("trained tokens", f"{data.facts.method}, {data.facts.trained_tokens} of {data.facts.tokens}"),
        ("chat template", template.name if template else "none, plain text"),
        ("steps", f"{steps}"),
        ("batch", f"{run.batch.global_size} = {run.batch.micro} x {run.batch.accumulation} x {run.world_size} ranks"),
        ("trained", "all weights" if run.lora is None else f"adapters, rank {run.lora.rank}, alpha {run.lora.alpha:g}"),
        ("learning rate", f"{recipe.learning_rate:g}, {recipe.schedule}"),
        ("weight decay", f"{recipe.weight_decay:g}"),
        ("gradient clipping", f"{recipe.max_grad_norm:g}"),
        ("precision", run.model.dtype),
        ("ZeRO stage", f"{run.deepspeed.get('zero_optimization', {}).get('stage', 0)}"),
        ("seed", f"{recipe.seed}"),
        *((f"{name} loss", f"{loss:.4f}") for name, loss in losses.items() if loss is not None),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    used = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- llmtrain
- sft
---

# {base}, fine-tuned

Base model: `{base}`. Data: `{Path(run.data.path).name}`, SHA-256 `{data.facts.digest_sha256}`.
Run: `{run.run_id}`.

| setting | value |
| --- | --- |
{table}

Made with {used}.

The DeepSpeed configuration:

```json
{json.dumps(run.deepspeed, indent=2)}
```
"""


def read_versions() -> dict[str, str]:
    """Versions of what a run depends on, as installed here."""
    found = {name: _find_version(name) for name in PACKAGES}
    return {
        "llmtrain": llmtrain.__version__,
        "Python": platform.python_version(),
        **{name: version for name, version in found.items() if version},
    }


def _find_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
