"""Request bodies: content type, size, time, and then JSON, off the event loop when large."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, TypeVar

from starlette.requests import Request

from app.config import Limits
from app.errors import TransportRefused, shown
from app.jsontext import parse_object
from app.sse import ClientGone

T = TypeVar("T")

# Bytes. O14 asks for a thread above 1 MiB; checking as many as fit below that, thousands of tiny
# parts, takes several hundred ms.
IN_THREAD_FROM: Final = 64 * 1024
_CLOSE: Final = {"connection": "close"}  # what is left of the body is not worth reading


async def read_body(
    request: Request, limits: Limits, understand: Callable[[dict[str, Any]], T]
) -> T:
    """What this request's JSON object says (O11 to O14).

    Args:
        request: whose body was not read yet.
        limits: of size and time.
        understand: checks the object's fields; a large one in a thread, as its parsing.

    Raises:
        TransportRefused: `unsupported_media_type`, `request_too_large`, `request_timeout`.
        RequestError: `invalid_json`, and whatever `understand` raises.
        ClientGone: the client left before the body was complete.
    """
    _check_type(request)
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limits.body_bytes:
        raise _too_large(limits)
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            data = await _read(request, limits)
    except TimeoutError:
        raise TransportRefused(
            "request_timeout",
            f"The body was not complete within {limits.body_timeout_s:g} s.",
            headers=_CLOSE,
        ) from None
    values = limits.body_values
    if len(data) > IN_THREAD_FROM:
        return await asyncio.to_thread(lambda: understand(parse_object(data, most_values=values)))
    return understand(parse_object(data, most_values=values))


async def _read(request: Request, limits: Limits) -> bytearray:
    """The whole body; 413 as soon as the count passes the limit."""
    data = bytearray()  # grows in place: joining 60 MB at the end would stop every other thread
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        data += message.get("body", b"")
        if len(data) > limits.body_bytes:
            raise _too_large(limits)
        if not message.get("more_body", False):
            return data


def _check_type(request: Request) -> None:
    encoding = request.headers.get("content-encoding", "identity").strip()
    if encoding.lower() != "identity":
        raise TransportRefused(
            "unsupported_media_type",
            f"Content-Encoding {shown(encoding)} is not taken; send the body as it is.",
        )
    given = request.headers.get("content-type", "")
    kind, *parameters = (part.strip().lower() for part in given.split(";"))
    charsets = [p.partition("=")[2].strip('" ') for p in parameters if p.startswith("charset")]
    if kind != "application/json" or any(c not in ("utf-8", "utf8") for c in charsets):
        raise TransportRefused(
            "unsupported_media_type",
            f"Content-Type is {shown(given) if given else 'absent'}; send application/json.",
        )


def _too_large(limits: Limits) -> TransportRefused:
    return TransportRefused(
        "request_too_large",
        f"The body is larger than the limit of {limits.body_bytes} bytes.",
        headers=_CLOSE,
    )
