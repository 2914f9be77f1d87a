from __future__ import annotations

import os

from hypothesis import settings

# DeepSpeed's launcher and config classes ask for an accelerator on import; the suite runs on the CPU.
os.environ.setdefault("DS_ACCELERATOR", "cpu")

# One slow import must not fail a property; in CI the same examples are drawn every time.
settings.register_profile("llmtrain", deadline=None, derandomize=os.environ.get("CI") == "true")
settings.load_profile("llmtrain")
