"""readers that families share: typed fields of a config, end ids, usable vocabulary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import ModelError


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file of the checkpoint. Raises `ModelError` naming file and mend."""
    try:
        value = json.loads(file.read_bytes())
    except OSError as error:
        raise ModelError(
            f"{file}: cannot be read ({error.strerror}). Use a folder in Hugging Face layout."
        ) from error
    except ValueError as error:
        raise ModelError(f"{file}: not JSON ({error}). Download the checkpoint again.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file}: holds no JSON object. Download the checkpoint again.")
    return value


class Fields:
    """Fields of one JSON object by name and type; a missing or mistyped one is a `ModelError`.

    Args:
        values: the object.
        where: what to call it in messages, e.g. `config.json text_config`.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, value, "an integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, value, "a number")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def names(self, name: str) -> tuple[str, ...] | None:
        """A list of strings, or None when the field is absent."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(name, value, "a list of names")
        return tuple(value)

    def integers(self, name: str) -> tuple[int, ...] | None:
        """One integer or a list of them, or None when the field is absent."""
        value = self.values.get(name)
        if value is None:
            return None
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            raise self._wrong(name, value, "an integer or a list of integers")
        return tuple(items)

    def inner(self, name: str) -> Fields | None:
        """An object inside, or None when the field is absent."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(name, value, "an object")
        return Fields(value, f"{self.where} {name}")

    def _value(self, name: str, default: object) -> object:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelError(
                f"{self.where}: the field {name} is missing. Use the checkpoint's own config.json."
            )
        return value

    def _wrong(self, name: str, value: object, wanted: str) -> ModelError:
        return ModelError(f"{self.where}: {name} is {value!r}, but must be {wanted}.")


def end_ids(folder: Path, config: Fields) -> tuple[int, ...]:
    """Ids that end an answer: of generation_config.json, else of the config; () when unnamed."""
    file = folder / "generation_config.json"
    if file.is_file():
        named = Fields(read_json(file), str(file)).integers("eos_token_id")
        if named:
            return named
    return config.integers("eos_token_id") or ()


def usable_vocab(folder: Path, vocab: int) -> int:
    """Ids below this have a token; the rest are padding rows that must not be drawn.

    Without a tokenizer file every row counts.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        return vocab
    tokenizer = read_json(file)
    model = tokenizer.get("model")
    known = model.get("vocab") if isinstance(model, dict) else None
    ids: list[int] = []
    if isinstance(known, dict):
        ids += [value for value in known.values() if isinstance(value, int)]
    elif isinstance(known, list):
        ids.append(len(known) - 1)
    for token in tokenizer.get("added_tokens") or ():
        ids += [value for value in (token.get("id"),) if isinstance(value, int)]
    return min(vocab, max(ids) + 1) if ids else vocab
