"""One HTTP connection: how long it may be silent, how large a head is, and what is no HTTP.

uvicorn's own answers to these are plain text or none; here they are the error object too (O5).
"""

from __future__ import annotations

import asyncio
import secrets
from time import monotonic
from typing import Final

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from app.errors import ErrorAnswer, TransportRefused, answer_of
from app.logs import RequestRecord, log_request

HEAD_BYTES: Final = 64 * 1024  # O12
_AROUND: Final = len(b": \r\n")  # of each header line

_NO_HTTP: Final = "These bytes are no HTTP/1.1 request; this server speaks plain HTTP."
_LARGE_HEAD: Final = f"The head of the request is larger than the limit of {HEAD_BYTES} bytes."


class HeadTooLarge(Exception):
    """The request line and the headers are above the limit; raised through the parser."""


class NoProxy(Exception):
    """CONNECT asks for a tunnel; raised through the parser."""


class Connection(HttpToolsProtocol):
    """uvicorn's connection with the limits of O12 and O19; `silent_s` is set by a subclass.

    A timer runs whenever the client owes the head of a request: from the start, and again from the
    first byte after an answer. In between, uvicorn's own timer waits for that first byte.
    """

    silent_s: float = 30.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._owed: asyncio.TimerHandle | None = None
        self._body_bytes = 0  # at most so many of the piece at hand belong to a body
        self._head_bytes = 0  # of a head that is not complete
        self._in_head = True
        self._large = False
        self._owe()

    def connection_lost(self, exc: Exception | None) -> None:
        self._settle()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._large or self.transport.is_closing():
            return
        in_body = self.cycle is not None and self.cycle.more_body
        self._body_bytes = len(data) if in_body else 0
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self.send_400_response("")
        if self.transport.is_closing():
            return
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self._large = True
                self.send_400_response(_LARGE_HEAD)
        elif self._answering:
            return
        self._owe()  # also for the rest of a body that was answered already

    def _feed(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offered:
                # Another protocol is offered, as some clients do with each first request (h2c),
                # and not taken. The parser would leave the body to that protocol: a new one gets
                # the same request without the offer.
                headers = [(name, value) for name, value in self.headers if name != b"upgrade"]
                lines = b"".join(b"%b: %b\r\n" % header for header in headers)
                head = b"%b %b HTTP/1.1\r\n%b\r\n" % (self.parser.get_method(), self.url, lines)
                self.parser = httptools.HttpRequestParser(self)
                data = head + data[offered.args[0] :]
            else:
                return

    def on_message_begin(self) -> None:
        self._in_head, self._head_bytes = True, -self._body_bytes
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        lines = sum(len(name) + len(value) + _AROUND for name, value in self.headers)
        if lines + len(self.url) > HEAD_BYTES:
            self._large = True
            raise HeadTooLarge
        if self.parser.get_method() == b"CONNECT":
            raise NoProxy
        self._in_head = False
        self._settle()
        if not self.parser.should_upgrade():  # else it comes again, see `_feed`
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's text is not used
        """Refuse with the error object, or just close when an answer is being written."""
        self._settle()
        if not (self._answering and self.cycle.response_started):
            code, text = (
                ("request_too_large", _LARGE_HEAD) if self._large else ("invalid_value", _NO_HTTP)
            )
            self._refuse(answer_of(TransportRefused(code, text)))
        self.transport.close()

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, told: ErrorAnswer) -> None:
        record = RequestRecord(
            request_id=f"req_{secrets.token_hex(16)}",
            method="-",
            path="-",
            started=monotonic(),
            status=told.status,
            error=told.code,
        )
        headers = {
            "content-type": "application/json",
            "content-length": str(len(told.body)),
            "connection": "close",
            "x-request-id": record.request_id,
            **told.headers,
        }
        lines = [f"{name}: {value}\r\n".encode("latin-1") for name, value in headers.items()]
        self.transport.write(b"".join([STATUS_LINE[told.status], *lines, b"\r\n", told.body]))
        log_request(record, monotonic())

    def _owe(self) -> None:
        """From now on a head has to come within the limit."""
        if self._owed is None:
            self._owed = self.loop.call_later(self.silent_s, self._end)

    def _end(self) -> None:
        self._owed = None
        if self._answering:
            self._owe()  # the next head may wait for this answer
        else:
            self.transport.close()

    def _settle(self) -> None:
        if self._owed is not None:
            self._owed.cancel()
            self._owed = None


def connection(silent_s: float) -> type[Connection]:
    """The class of connections that may be silent for so long."""

    class Limited(Connection):
        pass

    Limited.silent_s = silent_s
    return Limited
