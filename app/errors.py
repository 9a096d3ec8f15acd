"""table: exception type -> HTTP status and OpenAI error body.

Nothing here imports the web framework, so that every part of the server process may raise these
before it is loaded. `answer_of` turns any exception into one `ErrorAnswer`; the routes, the
middleware and the streams (O84) all use it, so that one error looks the same everywhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import orjson

from engine.errors import Overloaded, RequestError, RequestFault, ServerError

BODY_BYTES: Final = 2048  # O6: every error body stays below this
SHOWN_CHARACTERS: Final = 100  # O6: of an input value
PARAM_CHARACTERS: Final = 200
CAPACITY_RETRY_S: Final = 5.0  # O9: capacity and parts
STATE_RETRY_S: Final = 2.0  # O9: loading, warming, recovering, stalled, hung, faulted

# O8, a row each: code -> status. The type follows from the status (`_type_of`).
STATUS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "invalid_json": 400,
        "missing_required_parameter": 400,
        "invalid_type": 400,
        "invalid_value": 400,
        "unsupported_parameter": 400,
        "unsupported_modality": 400,
        "context_length_exceeded": 400,
        "invalid_json_schema": 400,
        "invalid_grammar": 400,
        "invalid_tool_schema": 400,
        "invalid_tool_call": 400,
        "template_error": 400,
        "invalid_image_url": 400,
        "invalid_image": 400,
        "unsupported_image_format": 400,
        "image_too_large": 400,
        "image_aspect_ratio": 400,
        "too_many_images": 400,
        "image_url_not_allowed": 400,
        "image_download_failed": 400,
        "image_input_disabled": 400,
        "invalid_api_key": 401,
        "missing_api_key": 401,
        "model_not_found": 404,
        "not_found": 404,
        "endpoint_not_supported": 404,
        "method_not_allowed": 405,
        "request_timeout": 408,
        "deadline_exceeded": 408,
        "request_too_large": 413,
        "unsupported_media_type": 415,
        "rate_limit_exceeded": 429,
        "internal_error": 500,
        "overloaded": 503,
        "model_not_loaded": 503,
        "model_not_ready": 503,
        "recovering": 503,
        "engine_stalled": 503,
        "shutting_down": 503,
        "gpu_fault": 503,
        "part_unavailable": 503,
    }
)

_STATE_MESSAGE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "overloaded": "The server has no room for another request now. Try again later.",
        "model_not_loaded": "The model is not loaded. Try again later.",
        "model_not_ready": "The model is loaded and being tested. Try again in a moment.",
        "recovering": "The server is starting a new worker. Try again in a moment.",
        "engine_stalled": "The engine makes no progress at the moment. Try again in a moment.",
        "shutting_down": "The server is stopping and takes no new requests.",
        "gpu_fault": "The worker was lost to a fault. Try again in a moment.",
        "part_unavailable": "A part that this request needs is off at the moment. Try again later.",
    }
)
_OUR_FAULT: Final = "This request failed inside the server and will not be run again."


class StateRefused(ServerError):
    """The state of the server refuses this request (R96, O94); a later try can succeed.

    Args:
        code: of O8, one of the 503 rows, e.g. `model_not_loaded`.
        retry_after_s: for the headers of O9; whole seconds from 1 to 60 are made of it.
        message: a sentence for people; the default says what the code means.
    """

    def __init__(self, code: str, retry_after_s: float, message: str | None = None) -> None:
        super().__init__(message or _STATE_MESSAGE[code])
        self.code = code
        self.retry_after_s = retry_after_s


class AnswerFailed(ServerError):
    """A running answer ended with an error (a `Failed` event); `code` is of O8."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class TransportRefused(ServerError):
    """The request is refused before its fields are read: path, method, key, type, size (O1).

    Args:
        code: of O8, e.g. `method_not_allowed`.
        message: a sentence for people.
        headers: what the answer carries beside the usual, e.g. `Allow`.
    """

    def __init__(
        self, code: str, message: str, *, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.headers = dict(headers or {})


class FieldErrors(RequestError):
    """Several fields are wrong; the first decides `param` and `code`, at most 5 are told (O6)."""

    listed = 5

    def __init__(self, problems: Sequence[RequestError]) -> None:
        first = problems[0]
        told = [str(p) for p in problems[: self.listed]]
        more = len(problems) - len(told)
        rest = f" (and {more} more)" if more > 0 else ""
        super().__init__(" ".join(told) + rest, code=first.code, param=first.param)


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """What a client gets: status, the error object as bytes, and the headers that go with it."""

    status: int
    code: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)


def shown(value: Any) -> str:
    """An input value for a message: up to 100 characters of JSON text, containers by size (O6)."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if isinstance(value, str):
        # cut before and after: escapes make it longer, and a 5 MB string must cost nothing
        text = json.dumps(value[:SHOWN_CHARACTERS], ensure_ascii=False)
        short = len(value) <= SHOWN_CHARACTERS and len(text) <= SHOWN_CHARACTERS
        return text if short else text[: SHOWN_CHARACTERS - 4].rstrip('"\\') + '..."'
    return json.dumps(value)[:SHOWN_CHARACTERS]


def error_object(code: str, message: str, param: str | None = None) -> bytes:
    """The error object of O5 as JSON bytes, below 2,048 whatever is put in (O6)."""
    status = STATUS.get(code, 500)
    text = _clean(message) or code
    place = None if param is None else _clean(param)[:PARAM_CHARACTERS]
    while True:
        error = {"message": text, "type": _type_of(status), "param": place, "code": code}
        body = orjson.dumps({"error": error})
        if len(body) < BODY_BYTES:
            return body
        text = text[: len(text) * 3 // 4].rstrip() + " ..."


def answer_of(error: BaseException) -> ErrorAnswer:
    """The answer that an exception means (O8); whatever is not ours is 500 `internal_error`."""
    match error:
        case StateRefused():
            return _answer(error.code, str(error), headers=retry_headers(error.retry_after_s))
        case AnswerFailed():
            code = error.code if STATUS.get(error.code, 0) >= 500 else "internal_error"
            headers = retry_headers(_retry_of(code)) if STATUS[code] == 503 else None
            return _answer(code, str(error), headers=headers)
        case TransportRefused():
            return _answer(error.code, str(error), headers=error.headers)
        case RequestError():
            code = error.code if STATUS.get(error.code, 500) < 500 else "invalid_value"
            return _answer(code, str(error), param=error.param)
        case Overloaded():
            return _answer("overloaded", str(error), headers=retry_headers(CAPACITY_RETRY_S))
        case RequestFault():
            return _answer("internal_error", f"{_OUR_FAULT} {error}")
        case _:
            return _answer("internal_error", _OUR_FAULT)


def retry_headers(retry_after_s: float) -> dict[str, str]:
    """`Retry-After` in whole seconds from 1 to 60 and the same time in milliseconds (O9)."""
    seconds = min(60, max(1, math.ceil(retry_after_s)))
    return {"retry-after": str(seconds), "retry-after-ms": str(seconds * 1000)}


def _retry_of(code: str) -> float:
    return CAPACITY_RETRY_S if code in {"overloaded", "part_unavailable"} else STATE_RETRY_S


def _answer(
    code: str,
    message: str,
    *,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> ErrorAnswer:
    status = STATUS.get(code, 500)
    extra = dict(headers or {})
    if status not in {408, 429, 503}:
        extra["x-should-retry"] = "false"  # clients retry every 408, 409, 429 and 5xx unasked
    if status == 401:
        extra["www-authenticate"] = "Bearer"
    return ErrorAnswer(status, code, error_object(code, message, param), extra)


def _type_of(status: int) -> str:
    if status >= 500:
        return "server_error"
    return {401: "authentication_error", 429: "rate_limit_error"}.get(
        status, "invalid_request_error"
    )


def _clean(text: str) -> str:
    """Valid UTF-8 of bounded length: lone surrogates would make the body unwritable."""
    return text[:BODY_BYTES].encode("utf-8", "replace").decode("utf-8")
