"""async door to the worker: submit, stream events, abort.

Each admitted request has one entry here until its one terminal event is in; whoever reads it may
leave at any time. When a worker dies its requests end (`fail_all`). An entry belongs to this
process and not to a worker, so that a journal can hand it to the next worker instead.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import Final

import msgspec

from app.errors import StateRefused
from app.health import Asks, Health
from app.link import Link
from engine.errors import Overloaded
from engine.messages import (
    Abort,
    Command,
    Event,
    Failed,
    Finished,
    Generate,
    Pause,
    RequestId,
    Resume,
    Token,
)

BUFFERED_EVENTS: Final = 1_024  # O85: of one slow reader; then its generation pauses
RESUME_EVENTS: Final = 256  # and goes on when so few are left
SLOW_READER_S: Final = 60.0  # O85: paused so long, it is cancelled

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[Event, ...]).decode


class _Entry:
    """A request that was admitted: what came for it and who waits."""

    __slots__ = ("buffer", "ended", "expiry", "waiter")

    def __init__(self) -> None:
        self.buffer: deque[Event] = deque()
        self.ended = False  # its terminal event is in the buffer, or was read
        self.waiter: asyncio.Future[None] | None = None
        self.expiry: asyncio.TimerHandle | None = None  # set while paused

    def put(self, event: Event) -> None:
        self.buffer.append(event)
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class WorkerClient:
    """The requests of this server that are in flight, and the way to the worker that has them.

    Args:
        health: asked whether a request may come in, told how many are in.
        queue_limit: how many may wait beyond those that the worker runs at once (O63).
        slow_reader_s: how long a reader may leave its full buffer alone (O85).
    """

    def __init__(
        self, health: Health, *, queue_limit: int, slow_reader_s: float = SLOW_READER_S
    ) -> None:
        self._health = health
        self._queue_limit = queue_limit
        self._slow_reader_s = slow_reader_s
        self._link: Link | None = None
        self._entries: dict[RequestId, _Entry] = {}
        self._in_flight = 0
        self._none_left = asyncio.Event()
        self._none_left.set()

    @property
    def in_flight(self) -> int:
        """Requests that were admitted and whose terminal event has not come."""
        return self._in_flight

    @property
    def capacity(self) -> int | None:
        """How many may be in flight; None until a worker said what it can do."""
        loaded = self._health.loaded
        return loaded.max_sequences + self._queue_limit if loaded else None

    # -- for the routes -----------------------------------------------------------------------

    async def submit(self, generate: Generate) -> AsyncGenerator[Event]:
        """The events of one request, ending with its one `Finished` or `Failed`.

        Closing the generator early aborts the request. Nothing is sent before the first step.

        Raises:
            StateRefused: the state takes no request now (R96).
            Overloaded: as many as may be are in flight (O63).
        """
        generate, entry = self._admit(generate)
        request = generate.request
        try:
            while True:
                while not entry.buffer:
                    entry.waiter = asyncio.get_running_loop().create_future()
                    await entry.waiter
                event = entry.buffer.popleft()
                if entry.expiry is not None and len(entry.buffer) <= RESUME_EVENTS:
                    self._resume(request, entry)
                yield event
                if not isinstance(event, Token):
                    return
        finally:
            self._release(request, entry)

    # -- for the supervisor -------------------------------------------------------------------

    def attach(self, link: Link) -> None:
        """A worker is ready: requests go to it from now on."""
        self._link = link
        self._count(0)

    def detach(self) -> None:
        """The worker is gone or takes no more; requests in flight stay here."""
        self._link = None

    def on_frame(self, frame: bytes) -> None:
        """All events of one engine step."""
        for event in _decode(frame):
            entry = self._entries.get(event.request)
            if entry is None or entry.ended:
                continue  # its reader left, or it was ended here
            if isinstance(event, Finished | Failed):
                self._end(entry, event)
                continue
            entry.put(event)
            if len(entry.buffer) >= BUFFERED_EVENTS and entry.expiry is None:
                self._pause(event.request, entry)

    def fail_all(self, code: str, message: str) -> int:
        """End every request in flight with one error (rule 98); how many there were."""
        running = [(request, e) for request, e in self._entries.items() if not e.ended]
        for request, entry in running:
            self._end(entry, Failed(request=request, code=code, message=message))
        return len(running)

    async def none_in_flight(self) -> None:
        """Wait until every admitted request has its terminal event."""
        await self._none_left.wait()

    # -- inside -------------------------------------------------------------------------------

    def _admit(self, generate: Generate) -> tuple[Generate, _Entry]:
        refusal = self._health.refusal(Asks.GENERATION)
        if refusal is not None and refusal.code == "overloaded":
            raise Overloaded(str(refusal))
        if refusal is not None:
            raise refusal
        request = generate.request
        while request in self._entries:  # two clients may choose the same x-request-id
            request = RequestId(f"{request}+")
        if request != generate.request:
            generate = msgspec.structs.replace(generate, request=request)
        if not self._send(generate):
            raise StateRefused("recovering", self._health.retry_after_s)
        entry = self._entries[request] = _Entry()
        self._count(1)
        return generate, entry

    def _release(self, request: RequestId, entry: _Entry) -> None:
        del self._entries[request]
        if entry.expiry is not None:
            entry.expiry.cancel()
        if not entry.ended:
            entry.ended = True
            self._send(Abort(request=request))
            self._count(-1)

    def _end(self, entry: _Entry, event: Finished | Failed) -> None:
        entry.ended = True
        if entry.expiry is not None:
            entry.expiry.cancel()
            entry.expiry = None
        entry.put(event)
        self._count(-1)

    def _pause(self, request: RequestId, entry: _Entry) -> None:
        self._send(Pause(request=request))
        loop = asyncio.get_running_loop()
        entry.expiry = loop.call_later(self._slow_reader_s, self._give_up, request, entry)

    def _resume(self, request: RequestId, entry: _Entry) -> None:
        if entry.expiry is not None:
            entry.expiry.cancel()
        entry.expiry = None
        if not entry.ended:
            self._send(Resume(request=request))

    def _give_up(self, request: RequestId, entry: _Entry) -> None:
        """The reader let its buffer stand for too long: give its memory and its slot back."""
        self._send(Abort(request=request))
        entry.expiry = None
        entry.buffer.clear()
        message = f"The client read too slowly: {BUFFERED_EVENTS} events waited for it."
        self._end(entry, Failed(request=request, code="overloaded", message=message))

    def _send(self, command: Command) -> bool:
        return self._link is not None and self._link.send(_encode(command))

    def _count(self, change: int) -> None:
        self._in_flight += change
        if self._in_flight:
            self._none_left.clear()
        else:
            self._none_left.set()
        self._health.load(self._in_flight, self.capacity)
