"""One HTTP connection to an app, message by message: slow bodies, early leaves, what is sent."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI

Message = dict[str, Any]


class Connection:
    """Sends one request to an app and holds the connection open until told otherwise."""

    def __init__(self, app: FastAPI, method: str, path: str, **headers: str) -> None:
        self.sent: list[Message] = []
        self._news = asyncio.Event()
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        raw = [(name.replace("_", "-").encode(), text.encode()) for name, text in headers.items()]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": raw,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
            "app": app,
        }
        self.task = asyncio.ensure_future(app(scope, self._inbox.get, self._send))  # type: ignore[arg-type]

    async def _send(self, message: Message) -> None:
        self.sent.append(message)
        self._news.set()

    def body(self, data: bytes, *, more: bool = False) -> None:
        """A part of the request's body arrives."""
        self._inbox.put_nowait({"type": "http.request", "body": data, "more_body": more})

    def leave(self) -> None:
        """The client closes the connection."""
        self._inbox.put_nowait({"type": "http.disconnect"})

    async def until(self, count: int) -> list[Message]:
        """Wait until so many messages were sent by the app."""
        async with asyncio.timeout(20):
            while len(self.sent) < count:
                self._news.clear()
                await self._news.wait()
        return self.sent

    async def end(self) -> None:
        """Wait until the app is done with this request."""
        async with asyncio.timeout(20):
            await self.task

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): text.decode() for name, text in self.sent[0]["headers"]}

    @property
    def data(self) -> bytes:
        """The body of the answer so far."""
        return b"".join(message.get("body", b"") for message in self.sent)
