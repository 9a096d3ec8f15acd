"""The default model as the prompt side sees it: its folder, its worker's words, its questions."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from engine.messages import Loaded, PatchSpec

FOLDER = Path(__file__).parents[3] / "app" / "models" / "glimmer"
ROWS = 1024  # of the embedding
IMAGE, IMAGE_START, IMAGE_END = 998, 974, 975
THINK, THINK_END = 985, 986
USER, ASSISTANT, SYSTEM, OBSERVATION = 971, 972, 970, 973

LOADED = Loaded(
    family="glm5_next",
    context=8192,
    max_sequences=64,
    pool_tokens=65_536,
    vocab=1000,
    end_ids=(964, 971, 973),
    patches=PatchSpec(
        family="glm5_next",
        patch=8,
        merge=2,
        temporal=2,
        min_tokens=49,
        max_tokens=81,
        mean=(0.48145466, 0.4578275, 0.40821073),
        std=(0.26862954, 0.26130258, 0.27577711),
    ),
    image_token=IMAGE,
    vision_ids=(974, 975, 976, 977, 998, 999),
)
TEXT_ONLY = msgspec.structs.replace(LOADED, patches=None, image_token=None, vision_ids=())

REFERENCE = json.loads((FOLDER / "reference.json").read_text("utf-8"))["prompts"]
SAMPLES = json.loads((FOLDER / "samples" / "samples.json").read_text("utf-8"))["samples"]


def said(text: Any, role: str = "user") -> dict[str, Any]:
    """One message."""
    return {"role": role, "content": text}


def text(words: str) -> dict[str, Any]:
    """A text part."""
    return {"type": "text", "text": words}


def picture(file: str) -> dict[str, Any]:
    """An image part with a file of the samples."""
    data = base64.b64encode((FOLDER / file).read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def as_sent(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of `reference.json` as a client would send it."""
    content = message["content"]
    if isinstance(content, list):
        content = [picture(p["file"]) if p["type"] == "image" else p for p in content]
    return {**message, "content": content}
