"""JSON text -> Python values, within the limits on depth and numbers (O13).

The fast reader (orjson) refuses bad UTF-8, lone surrogates, `NaN`, infinities and trailing text,
and takes the last of two equal keys. What it does not know is checked on its result: depth, and
integers beyond 64 bits, which it turns into floats. Only then is the text read a second time, by
the slow reader, to find the place for `param`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import orjson

from app.longtext import LONG, TooManyValues, lift, put_back
from engine.errors import RequestError

MAX_DEPTH: Final = 128
MOST_VALUES: Final = 200_000
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_LOWEST, _HIGHEST = -(2**63), 2**64 - 1
_DIGITS: Final = 20  # an integer with more is beyond 64 bits


class _Bad(NamedTuple):
    """Stands where a number cannot be held."""

    code: str
    text: str


def parse_object(data: bytes | bytearray, *, most_values: int = MOST_VALUES) -> dict[str, Any]:
    """The one JSON object in these bytes; a long text is read in pieces (`app.longtext`).

    Args:
        data: UTF-8, with or without a byte order mark.
        most_values: that a long text may hold: each costs the other threads their turn.

    Raises:
        RequestError: `invalid_json`, `request_too_large` for too many values, or `invalid_value`
            for an integer beyond 64 bits; `param` names the place of a bad number.
    """
    text = data[len(_BYTE_ORDER_MARK) :] if data.startswith(_BYTE_ORDER_MARK) else data
    strings: Mapping[str, str] = {}
    if len(text) > LONG:
        try:
            lifted = lift(text, most_values)
        except TooManyValues:
            raise RequestError(
                f"The body holds more than {most_values} values. Send fewer, or a text instead of "
                "a list.",
                code="request_too_large",
            ) from None
        text, strings = lifted.text, lifted.strings
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as broken:
        why = broken.msg if strings else str(broken)  # places are those of the shortened text
        raise _bad_number(text) or _invalid(f"The body is not JSON: {why}.") from None
    if not isinstance(value, dict):
        raise _invalid("The body has to be one JSON object.")
    depth_ok, all_small = _walk(value)
    if not depth_ok:
        raise _invalid(f"The body is nested deeper than {MAX_DEPTH} levels.")
    if not all_small and (error := _bad_number(text)):
        raise error
    if strings:
        put_back(value, strings)
    return value


def _walk(value: Any) -> tuple[bool, bool]:
    """Whether the depth is within the limit, and whether every float is below 2^63 in size."""
    level: list[Any] = [value]
    all_small = True
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for container in level:
            for child in container.values() if type(container) is dict else container:
                kind = type(child)
                if kind is dict or kind is list:
                    below.append(child)
                elif kind is float and abs(child) >= 2**63:
                    all_small = False
        if not below:
            return True, all_small
        level = below
    return False, all_small


def _bad_number(text: bytes | bytearray) -> RequestError | None:
    """The error for the first number that cannot be held, with its place; None if there is none."""
    try:
        value = json.loads(
            text, parse_constant=_constant, parse_float=_float, parse_int=_int, strict=False
        )
    except (ValueError, RecursionError):
        return None
    found = _first_bad(value, "")
    if found is None:
        return None
    place, bad = found
    return RequestError(f"{place}: {bad.text}.", code=bad.code, param=place)


def _first_bad(value: Any, place: str) -> tuple[str, _Bad] | None:
    stack = [(place, value)]
    while stack:
        where, item = stack.pop()
        if isinstance(item, _Bad):
            return where, item
        if isinstance(item, dict):
            stack += [(f"{where}.{key}" if where else key, child) for key, child in item.items()]
        elif isinstance(item, list):
            stack += [(f"{where}[{index}]", child) for index, child in enumerate(item)]
    return None


def _constant(text: str) -> _Bad:
    return _Bad("invalid_json", f"{text} is no JSON number")


def _float(text: str) -> float | _Bad:
    value = float(text)
    return _Bad("invalid_json", "the number is too large") if math.isinf(value) else value


def _int(text: str) -> int | _Bad:
    if len(text) <= _DIGITS and _LOWEST <= (value := int(text)) <= _HIGHEST:
        return value
    return _Bad("invalid_value", "the integer does not fit into 64 bits")


def _invalid(message: str) -> RequestError:
    return RequestError(message, code="invalid_json")
