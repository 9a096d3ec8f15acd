"""One connection of the load client: when each piece of an answer's text came.

The client must not be the load: this speaks HTTP/1.1 over plain asyncio with a C parser, and a
streamed token costs it about a quarter of what it costs a full client library (docs/log.md). The
first token is the first chunk with text in it: a role, or a marker that the server hides, does not
count.
"""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from typing import Any

import httptools
import msgspec


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One request as its client saw it; times in seconds of the machine's monotonic clock."""

    started_s: float
    first_s: float = 0.0
    ended_s: float = 0.0
    gaps_s: tuple[float, ...] = ()
    prompt_tokens: int = 0
    answer_tokens: int = 0
    failure: str = ""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    error: Any = None


_CHUNKS = msgspec.json.Decoder(_Chunk)


class Answer(asyncio.Protocol):
    """One connection; it sends a request and notes when each piece of the answer's text came."""

    def __init__(self) -> None:
        self._transport: asyncio.WriteTransport | None = None
        self._done: asyncio.Future[Sample] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def ask(self, request: bytes) -> asyncio.Future[Sample]:
        """Send one request; the future holds its sample, or raises `ConnectionError`."""
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._buffer, self._times = b"", list[float]()
        self._usage, self._failure, self._finished = _Usage(), "", False
        self._done = asyncio.get_running_loop().create_future()
        self._started_s = time.monotonic()
        self._transport.write(request)
        return self._done

    def data_received(self, data: bytes) -> None:
        self._now_s = time.monotonic()
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._buffer += body
        if self._parser.get_status_code() != 200:
            return  # an error object: read as a whole at its end
        *events, self._buffer = self._buffer.replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            self._on_event(event)

    def _on_event(self, event: bytes) -> None:
        kind, _, payload = event.partition(b":")
        payload = payload.strip()
        if kind != b"data":
            return
        if payload == b"[DONE]":
            self._finished = True
            return
        chunk = _CHUNKS.decode(payload)
        if chunk.error is not None:
            self._failure = str(chunk.error)[:300]
        if chunk.usage is not None:
            self._usage = chunk.usage
        if any(c.delta.content or c.delta.reasoning_content for c in chunk.choices):
            self._times.append(self._now_s)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status != 200:
            self._failure = f"status {status}: {self._buffer[:300].decode(errors='replace')}"
        elif not self._failure and not (self._finished and self._times):
            self._failure = "the stream ended without [DONE]" if self._times else "no text came"
        self._settle()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._failure = f"the connection ended: {exc or 'closed by the server'}"
            self._settle()

    def _settle(self) -> None:
        assert self._done is not None
        times = self._times or [0.0]
        sample = Sample(
            started_s=self._started_s,
            first_s=times[0],
            ended_s=time.monotonic(),
            gaps_s=tuple(b - a for a, b in pairwise(times)),
            prompt_tokens=self._usage.prompt_tokens,
            answer_tokens=self._usage.completion_tokens,
            failure=self._failure,
        )
        if not self._done.done():
            self._done.set_result(sample)
