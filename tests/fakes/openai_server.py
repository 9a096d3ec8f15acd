"""A small OpenAI-compatible server over real sockets: words as tokens, faults on order."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

TEMPLATE_TOKENS = 7


def count_tokens(text: str) -> int:
    """A word is a token, and so is each mark that ends it."""
    return TEMPLATE_TOKENS + len(text.split()) + sum(text.count(mark) for mark in ".,!")


@dataclass
class Manner:
    """How the server behaves; the tests set what they look at."""

    first_text_s: float = 0.0  # between the role chunk and the first text
    token_s: float = 0.0
    has_tokenize: bool = True
    status: int = 200
    fails_every: int = 0  # each n-th request ends with an error event
    ends_without_done: bool = False
    seen: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    at_once: int = 0  # most requests that ran at the same time


class OpenAIServer:
    """`with OpenAIServer(Manner()) as server: server.url`."""

    def __init__(self, manner: Manner) -> None:
        self.manner = manner
        self._lock, self._running = threading.Lock(), 0
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:  # noqa: ARG002 (its name)
                return

            def do_GET(self) -> None:
                self._json(200, {"data": [{"id": "words"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/tokenize":
                    text = body["messages"][0]["content"]
                    known = fake.manner.has_tokenize
                    self._json(200 if known else 404, {"count": count_tokens(text)})
                elif fake.manner.status != 200:
                    self._json(fake.manner.status, {"error": {"message": "no room"}})
                elif body.get("stream"):
                    self._stream(body, fake.begin(body, dict(self.headers.items())))
                    fake.end()
                else:
                    count = count_tokens(body["messages"][0]["content"])
                    self._json(200, {"usage": {"prompt_tokens": count}})

            def _json(self, status: int, value: Any) -> None:
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def _stream(self, body: dict[str, Any], number: int) -> None:
                manner = fake.manner
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                self._event(choice({"role": "assistant", "content": ""}))
                time.sleep(manner.first_text_s)
                if manner.fails_every and number % manner.fails_every == 0:
                    self._event({"error": {"message": "broken", "code": "internal_error"}})
                    self._chunk(b"")
                    return
                for _ in range(body["max_tokens"]):
                    self._event(choice({"content": "word "}))
                    time.sleep(manner.token_s)
                content = body["messages"][0]["content"]
                text = content if isinstance(content, str) else content[-1]["text"]
                usage = {
                    "prompt_tokens": count_tokens(text),
                    "completion_tokens": body["max_tokens"],
                }
                self._event({"choices": [], "usage": usage})
                if not manner.ends_without_done:
                    self._chunk(b"data: [DONE]\n\n")
                self._chunk(b"")

            def _event(self, value: Any) -> None:
                self._chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

            def _chunk(self, data: bytes) -> None:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def begin(self, body: dict[str, Any], headers: dict[str, str]) -> int:
        with self._lock:
            self.manner.seen.append(body)
            self.manner.headers.append(headers)
            self._running += 1
            self.manner.at_once = max(self.manner.at_once, self._running)
            return len(self.manner.seen)

    def end(self) -> None:
        with self._lock:
            self._running -= 1

    def __enter__(self) -> OpenAIServer:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


def choice(delta: dict[str, Any]) -> dict[str, Any]:
    """One chunk of a stream."""
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
