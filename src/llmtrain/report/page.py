"""One self-contained page that shows where a run lives: no network, no other file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def render_page(placement: dict[str, Any], estimate: dict[str, Any]) -> str:
    """The page's text.

    Args:
        placement: what ``map --json`` prints.
        estimate: what ``plan --json`` prints.
    """
    text = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
    # "</" inside a script element would end it, whatever a model or host is called.
    data = json.dumps({"map": placement, "plan": estimate}).replace("</", "<\\/")
    return text.replace("/*DATA*/null", data)
