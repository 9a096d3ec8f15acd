"""what a checkpoint says about answers: sampling defaults, end ids, embedding rows."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ModelError

CONFIG = "config.json"
GENERATION = "generation_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """Sampling of a request that says nothing (O29); `do_sample: false` is temperature 0."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What the prompt side needs of `config.json` and `generation_config.json`.

    Attributes:
        rows: of the embedding; every token id is below.
        image_token: the placeholder of image rows; None for a model without pictures.
        end_ids: ids that end an answer, from both files.
    """

    rows: int
    image_token: int | None
    end_ids: tuple[int, ...]
    defaults: Defaults


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read both files. Raises `ModelError` naming the file, the field and the mend."""
    config = _read(folder / CONFIG)
    if config is None:
        raise ModelError(
            f"{folder / CONFIG} is missing. Name a folder with a checkpoint in Hugging Face layout."
        )
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    rows = text.get("vocab_size", config.get("vocab_size"))
    if not isinstance(rows, int) or rows < 1:
        raise ModelError(
            f"{folder / CONFIG} has no vocab_size. Use the config.json of the checkpoint."
        )
    image_token = config.get("image_token_id")
    generation = _read(folder / GENERATION) or {}
    ends = [generation.get("eos_token_id"), config.get("eos_token_id"), text.get("eos_token_id")]
    return Checkpoint(
        rows=rows,
        image_token=image_token if _is_count(image_token) else None,
        end_ids=tuple(dict.fromkeys(id_ for end in ends for id_ in _ids(end))),
        defaults=_defaults(generation, folder / GENERATION),
    )


def _defaults(generation: Mapping[str, Any], path: Path) -> Defaults:
    greedy = generation.get("do_sample") is False
    return Defaults(
        temperature=0.0 if greedy else _number(generation, "temperature", 1.0, path, high=2.0),
        top_p=_number(generation, "top_p", 1.0, path, high=1.0),
        top_k=max(0, int(_number(generation, "top_k", 0, path, low=-1.0))),
        min_p=_number(generation, "min_p", 0.0, path, high=1.0),
    )


def _number(
    generation: Mapping[str, Any],
    name: str,
    default: float,
    path: Path,
    *,
    low: float = 0.0,
    high: float = math.inf,
) -> float:
    value = generation.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ModelError(
            f"{path}: {name} is {json.dumps(value)[:100]}; use a number from {low:g} to {high:g}."
        )
    return value


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [id_ for id_ in values if _is_count(id_)]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _read(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path} cannot be read: {error}. Use the file of the checkpoint."
        ) from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is no JSON object. Use the file of the checkpoint.")
    return value
