"""Long strings of a JSON text, read in pieces: no single call holds the interpreter for long.

A reader in C keeps every other thread waiting until it is done: 0.1 to 0.3 s for a string of
60 MB, which is what a request with pictures looks like. So long strings are lifted out first and
decoded piece by piece; what remains of the text is short.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import orjson

LONG: Final = 64 * 1024  # bytes of a string that is lifted out
PIECE: Final = 1024 * 1024  # bytes of one call

# Whole characters and whole escapes, so that a piece can end behind any of them. A high surrogate
# counts only with its low one; what is neither is no JSON string, and its reader says so.
_PIECE: Final = re.compile(
    rb"(?:[^\"\\\x00-\x1f\x80-\xff]++"
    rb"|[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}"
    rb"|\\[^u]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}"
    rb"|\\u(?![dD][89abAB])[0-9a-fA-F]{4})*+"
)
_OUTSIDE: Final = re.compile(rb"[^\"]*+")
_QUOTE: Final = ord('"')
_SEPARATORS: Final = (b",", b"[", b"{")


class TooManyValues(Exception):
    """The text holds more values than the limit."""


@dataclass(slots=True)
class Lifted:
    """A JSON text without its long strings.

    Attributes:
        text: with a short name in the place of each.
        strings: name -> the string.
    """

    text: bytes | bytearray
    strings: dict[str, str] = field(default_factory=dict)


def lift(text: bytes | bytearray, most_values: int) -> Lifted:
    """Take the long strings out of a JSON text; a text that is broken comes back as it is.

    Args:
        text: UTF-8.
        most_values: that are read; counted by what stands before each.

    Raises:
        TooManyValues: there are more.
    """
    mark = secrets.token_hex(16)  # nobody can send it
    lifted = Lifted(bytearray())
    kept, place, values, size = 0, 0, 0, len(text)
    while place < size:
        end = _end_of(_OUTSIDE, text, place)
        between = text[place:end]
        values += sum(map(between.count, _SEPARATORS))
        if values > most_values:
            raise TooManyValues
        if end == size or text[end] != _QUOTE:
            place = end
            continue
        start, pieces = end + 1, [end + 1]
        while pieces[-1] < size and text[pieces[-1]] != _QUOTE:
            pieces.append(_end_of(_PIECE, text, pieces[-1]))
            if pieces[-1] == pieces[-2]:
                return Lifted(text)
        place = pieces[-1] + 1
        if pieces[-1] - start >= LONG:
            name = f"{mark}{len(lifted.strings)}"
            try:
                parts = [orjson.loads(b'"' + text[a:b] + b'"') for a, b in pairwise(pieces)]
            except orjson.JSONDecodeError:
                return Lifted(text)
            lifted.strings[name] = "".join(parts)
            lifted.text += text[kept:start]
            lifted.text += name.encode()
            kept = pieces[-1]
    if not lifted.strings:
        return Lifted(text)
    lifted.text += text[kept:]
    return lifted


def put_back(value: Any, strings: Mapping[str, str]) -> None:
    """Exchange the names in what was read of a lifted text for their strings, in place."""
    stack = [value]
    while stack:
        container = stack.pop()
        is_object = type(container) is dict
        for key, child in container.items() if is_object else enumerate(container):
            kind = type(child)
            if kind is dict or kind is list:
                stack.append(child)
            elif kind is str and child in strings:
                container[key] = strings[child]
        if is_object and not strings.keys().isdisjoint(container):
            named = [(strings.get(key, key), child) for key, child in container.items()]
            container.clear()
            container.update(named)


def _end_of(pattern: re.Pattern[bytes], text: bytes | bytearray, place: int) -> int:
    """How far the pattern goes from here, at most one piece."""
    found = pattern.match(text, place, place + PIECE)
    return place if found is None else found.end()
