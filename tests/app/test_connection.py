"""A connection as a socket sees it: silence, endless heads, bytes that are no HTTP (O5, O12)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from app.connection import HEAD_BYTES, connection

GET = b"GET /a HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
SILENT_S = 0.3
PATIENCE_S = 10.0


class Echo:
    """Reads the body, sends the head, and then the body of its answer when it may."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.head_out = asyncio.Event()
        self.heard = b""

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            self.heard += message["body"]
            if not message["more_body"]:
                break
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        self.head_out.set()
        await self.may_end.wait()
        await send({"type": "http.response.body", "body": b"last"})


class Peer:
    """A client that sends bytes as they are."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def until(self, end: bytes) -> bytes:
        return await asyncio.wait_for(self._reader.readuntil(end), PATIENCE_S)

    async def rest(self) -> bytes:
        """All that comes until the server closes."""
        return await asyncio.wait_for(self._reader.read(), PATIENCE_S)

    def close(self) -> None:
        self._writer.close()


@asynccontextmanager
async def connected(
    app: Echo, *, silent_s: float = PATIENCE_S, idle_s: int = 75
) -> AsyncIterator[Peer]:
    config = uvicorn.Config(
        app, http=connection(silent_s), lifespan="off", log_config=None, timeout_keep_alive=idle_s
    )
    config.load()
    state, loop = ServerState(), asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: connection(silent_s)(config, state, {}), "127.0.0.1", 0
    )
    peer = Peer(*await asyncio.open_connection(*server.sockets[0].getsockname()))
    try:
        yield peer
    finally:
        peer.close()
        server.close()


def refusal(answer: bytes) -> tuple[int, dict[str, str], dict[str, Any]]:
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    [error] = json.loads(body).values()
    assert list(json.loads(body)) == ["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(status.split()[1]), headers, error


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        b"SSH-2.0-OpenSSH_9.0\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /a HTTP/3.7\r\nHost: x\r\n\r\n",
        b"BREW /a HTTP/1.1\r\nHost: x\r\n\r\n",
        b"CONNECT a:443 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /a HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        POST + b"not a length\r\n",
    ],
    ids=["tls", "ssh", "http2", "version", "method", "tunnel", "length", "lengths", "chunk"],
)
async def test_what_is_no_http_gets_the_error_object(data: bytes) -> None:
    """O5, O17: every answer that is not 2xx has the one body, and an id."""
    async with connected(Echo()) as peer:
        await peer.send(data)
        status, headers, error = refusal(await peer.rest())
    assert (status, error["code"], error["param"]) == (400, "invalid_value", None)
    assert headers["content-type"] == "application/json"
    assert headers["connection"] == "close"
    assert headers["x-request-id"].startswith("req_")
    assert headers["x-should-retry"] == "false"


async def test_garbage_behind_a_request_does_not_get_into_its_answer() -> None:
    """O5: half an answer is not followed by the head of another one."""
    app = Echo()
    app.may_end.clear()
    async with connected(app) as peer:
        await peer.send(GET + b"\r\n")
        await asyncio.wait_for(app.head_out.wait(), PATIENCE_S)
        await peer.send(b"\x00\x01\x02 garbage\r\n\r\n")
        answer = await peer.rest()
    assert answer.count(b"HTTP/1.1") == 1
    assert answer.endswith(b"first\r\n")


OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n"


@pytest.mark.parametrize("pieces", [1, 2, 300])
async def test_an_offer_of_another_protocol_is_not_taken(pieces: int) -> None:
    """O11: the JDK's client offers HTTP/2 with each first request; its body counts all the same."""
    app = Echo()
    bodies = [b'{"a": 1}', b'{"b": 2}']
    head = b"POST /a HTTP/1.1\r\nHost: x\r\n%bContent-Length: 8\r\n\r\n" % OFFER
    data = b"".join(head + body for body in bodies)
    step = -(-len(data) // pieces)
    async with connected(app) as peer:
        for at in range(0, len(data), step):
            await peer.send(data[at : at + step])
            await asyncio.sleep(0)
        for _ in bodies:
            assert (await peer.until(b"0\r\n\r\n")).startswith(b"HTTP/1.1 200")
    assert app.heard == b"".join(bodies)


def padded(size: int) -> bytes:
    """A whole request whose request line and headers have so many bytes, ends of lines included."""
    name = b"X-Pad: "
    return GET + name + b"a" * (size - len(GET) - len(name) - 2) + b"\r\n\r\n"


async def test_a_head_up_to_the_limit_is_served() -> None:
    """O12: 64 KiB."""
    async with connected(Echo()) as peer:
        await peer.send(padded(HEAD_BYTES))
        assert (await peer.until(b"last\r\n0\r\n\r\n")).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "head",
    [
        padded(HEAD_BYTES + 100),
        GET + b"".join(b"X-%d: %s\r\n" % (n, b"a" * 100) for n in range(700)) + b"\r\n",
        b"GET /" + b"a" * HEAD_BYTES + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=["one header", "many headers", "path"],
)
async def test_a_larger_head_is_refused(head: bytes) -> None:
    """O12: the path counts too."""
    async with connected(Echo()) as peer:
        await peer.send(head)
        status, _, error = refusal(await peer.rest())
    assert (status, error["code"]) == (413, "request_too_large")
    assert str(HEAD_BYTES) in error["message"]


async def test_a_head_without_an_end_is_not_kept() -> None:
    """O12: refused when the count passes the limit, not when the head is complete."""
    async with connected(Echo()) as peer:
        await peer.send(GET + b"X-Pad: ")
        await peer.send(b"a" * (HEAD_BYTES + 1))
        status, _, error = refusal(await peer.rest())
    assert (status, error["code"]) == (413, "request_too_large")


@pytest.mark.parametrize("said", [b"", b"GET", GET + b"X-Slow: a"])
async def test_a_client_that_owes_a_head_is_not_waited_for_for_ever(said: bytes) -> None:
    """O19: nothing, or half a head, and then silence."""
    async with connected(Echo(), silent_s=SILENT_S) as peer:
        if said:
            await peer.send(said)
        assert await peer.rest() == b""


async def test_half_a_head_after_an_answer_is_not_waited_for_for_ever() -> None:
    """O19: the idle limit ends with its first byte, the other one begins."""
    async with connected(Echo(), silent_s=SILENT_S) as peer:
        await peer.send(GET + b"\r\n")
        await peer.until(b"0\r\n\r\n")
        await asyncio.sleep(1.5 * SILENT_S)
        await peer.send(GET + b"\r\n")
        await peer.until(b"0\r\n\r\n")
        await peer.send(b"GET /b")
        assert await peer.rest() == b""


async def test_an_idle_connection_is_closed_after_its_own_limit() -> None:
    """O19."""
    async with connected(Echo(), idle_s=1) as peer:
        await peer.send(GET + b"\r\n")
        await peer.until(b"0\r\n\r\n")
        assert await peer.rest() == b""


async def test_a_long_answer_is_not_silence() -> None:
    """O19: also with the next request half sent."""
    app = Echo()
    app.may_end.clear()
    async with connected(app, silent_s=SILENT_S) as peer:
        await peer.send(GET + b"\r\nGET /b")
        await peer.until(b"first\r\n")
        await asyncio.sleep(2.5 * SILENT_S)
        app.may_end.set()
        assert await peer.until(b"0\r\n\r\n")
