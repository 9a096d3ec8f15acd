"""events -> server-sent bytes: framing, heartbeat, [DONE] (O78 to O85).

Only `data:` lines and comments: clients crash on others. The head goes out with the first event,
so that whatever fails before it is an ordinary refusal with a status of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.errors import answer_of
from app.logs import RequestRecord, log_failure
from engine.errors import ServerError

DONE: Final = b"data: [DONE]\n\n"
KEEP_ALIVE: Final = b": keep-alive\n\n"
HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class ClientGone(Exception):
    """The client closed the connection before the answer was complete."""


def frame(value: Any) -> bytes:
    """One event: `data: ` + JSON on one line + a blank line (O79)."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


@asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[None]:
    """Run the block; end it with `ClientGone` as soon as the client leaves.

    The body of the request has been read before: what `receive` still brings is the end.
    """
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("while_connected needs a task to end")
    gone = False

    async def listen() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    listener = asyncio.create_task(listen())
    try:
        yield
    except asyncio.CancelledError:
        if not gone or task.uncancel():
            raise  # the server itself ends this request
        raise ClientGone from None
    finally:
        listener.cancel()


class EventStream(Response):
    """A response that sends the frames of a generator as they come.

    Args:
        frames: complete frames, `data: ...` and its blank line; `[DONE]` is added here.
        keep_alive_s: seconds of silence before a comment; 0 sends none.
        record: of this request; an error after the head is noted there.
    """

    def __init__(
        self, frames: AsyncGenerator[bytes, None], *, keep_alive_s: float, record: RequestRecord
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(HEADERS)
        self._frames = frames
        self._keep_alive_s = keep_alive_s
        self._record = record
        self._started = False
        self._sent_at = 0.0
        self._turn = asyncio.Lock()  # the heartbeat never comes between head and event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI calls it so
        loop = asyncio.get_running_loop()
        self._sent_at = loop.time()
        beat = asyncio.create_task(self._beat(send)) if self._keep_alive_s else None
        try:
            async with while_connected(receive), aclosing(self._frames):
                async for data in self._frames:
                    await self._write(send, data)
                    self._sent_at = loop.time()
                await self._write(send, DONE)
        except ClientGone:
            raise
        except Exception as error:
            if not self._started:
                raise
            await self._write(send, self._error_frame(error))
        finally:
            if beat is not None:
                beat.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send, data: bytes) -> None:
        async with self._turn:
            if not self._started:
                self._started = True
                await send(
                    {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                )
            await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _beat(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        while True:
            silent = loop.time() - self._sent_at
            if silent >= self._keep_alive_s:
                await self._write(send, KEEP_ALIVE)
                self._sent_at = loop.time()
                silent = 0.0
            await asyncio.sleep(self._keep_alive_s - silent)

    def _error_frame(self, error: Exception) -> bytes:
        if not isinstance(error, ServerError):
            log_failure(self._record, error)
        answer = answer_of(error)
        self._record.error = answer.code
        return b"data: " + answer.body + b"\n\n"
