"""A real `stagelight serve` on a free port of the loopback, watched over HTTP."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import pytest

from app.config import plain_environment
from app.local_server import free_port

SAMPLES = Path(__file__).parents[2] / "app" / "models" / "glimmer" / "samples"
PATIENCE_S = 60.0  # a machine that builds something else meanwhile is slow, not wrong
COMMAND = (sys.executable, "-m", "app", "serve")


def eventually(condition: Callable[[], Any], seconds: float = PATIENCE_S) -> Any:
    """The first true value of the condition."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if found := condition():
            return found
        time.sleep(0.005)
    raise AssertionError(f"it did not come true within {seconds} s")


@dataclass(frozen=True)
class Question:
    """A picture that the model was shown in training, and what it answers."""

    body: dict[str, Any]
    answer: str


def question(number: int = 0, asked: int = 1) -> Question:
    sample = json.loads((SAMPLES / "samples.json").read_text())["samples"][number]
    data = base64.b64encode((SAMPLES / sample["file"]).read_bytes()).decode()
    kind = "jpeg" if sample["file"].endswith("jpg") else "png"
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{data}"}},
        {"type": "text", "text": sample["questions"][asked]["question"]},
    ]
    body = {"model": "glimmer", "messages": [{"role": "user", "content": parts}], "temperature": 0}
    return Question(body, sample["questions"][asked]["answer"])


def long_answer(tokens: int) -> dict[str, Any]:
    """A streamed request that goes on for exactly so many tokens."""
    return {
        "model": "glimmer",
        "messages": [{"role": "user", "content": "Hello"}],
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


class Served:
    """One server process of our own.

    Args:
        flags: of `stagelight serve`.
        settings: keys of the TOML file: what has no flag.
        folder: for that file and for what the process writes.
        model: a folder or a built-in name.
    """

    def __init__(
        self, flags: list[str], settings: dict[str, Any], folder: Path, model: str = "glimmer"
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        if settings:
            file = folder / f"settings-{self.port}.toml"
            file.write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in settings.items()))
            flags = [*flags, "--config", str(file)]
        self._out = (folder / f"out-{self.port}").open("w+")
        self._err = (folder / f"err-{self.port}").open("w+")
        self.process = subprocess.Popen(
            [*COMMAND, model, "--port", str(self.port), *flags],
            stdout=self._out,
            stderr=self._err,
            env=plain_environment(),
        )
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE_S)

    def __enter__(self) -> Served:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._out.close()
        self._err.close()

    @property
    def out(self) -> str:
        self._out.seek(0)
        return self._out.read()

    @property
    def err(self) -> str:
        self._err.seek(0)
        return self._err.read()

    def health(self) -> tuple[int, dict[str, Any]]:
        """Status and body of /health; (0, {}) while nobody listens."""
        try:
            answer = self.http.get("/health")
        except httpx.TransportError:
            return 0, {}
        return answer.status_code, answer.json()

    def ready(self) -> dict[str, Any]:
        """Wait for 200 of /health; its body."""

        def look() -> dict[str, Any] | None:
            assert self.process.poll() is None, f"it ended: {self.err}"
            status, body = self.health()
            return body if status == 200 else None

        body: dict[str, Any] = eventually(look)
        return body

    def state(self) -> str:
        return str(self.health()[1].get("status"))

    def worker(self) -> dict[str, Any]:
        worker: dict[str, Any] = self.health()[1]["worker"]
        return worker

    def ask(self, asked: Question) -> str:
        """The answer's text; any other status fails."""
        answer = self.http.post("/v1/chat/completions", json=asked.body)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["message"]["content"]
        return text

    def order(self, fault: str, where: str, **more: Any) -> None:
        """Order a fault of the worker."""
        body = {"fault": fault, "where": where, **more}
        assert self.http.post("/_test/fault", json=body).status_code == 200

    @contextmanager
    def stream(self, body: dict[str, Any]) -> Iterator[Iterator[str]]:
        """The data of each event of a streamed answer, as text."""
        with (
            httpx.Client(base_url=self.url, timeout=PATIENCE_S) as http,
            http.stream("POST", "/v1/chat/completions", json=body) as answer,
        ):
            assert answer.status_code == 200
            yield (line[6:] for line in answer.iter_lines() if line.startswith("data: "))

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def ended(self) -> int:
        """Wait for the end of the process; its exit code. No child may be left (O98)."""
        return self.process.wait(PATIENCE_S)


@dataclass
class Seen:
    """One answer to a poll; times in seconds, `at` of the monotonic clock."""

    at: float
    took: float
    path: str
    status: int
    body: dict[str, Any]


@dataclass
class Poll:
    """What a probe at 50 Hz saw of the endpoints of the table (R100)."""

    seen: list[Seen] = field(default_factory=list)

    def of(self, path: str) -> list[Seen]:
        return [s for s in self.seen if s.path == path]

    def blocks(self, path: str) -> list[int]:
        """The statuses of a path in order, neighbours that are equal once."""
        codes = [s.status for s in self.of(path)]
        return [c for n, c in enumerate(codes) if n == 0 or codes[n - 1] != c]

    def states(self) -> list[str]:
        """The states that /health told, in order, neighbours that are equal once."""
        told = [s.body["status"] for s in self.of("/health")]
        return [t for n, t in enumerate(told) if n == 0 or told[n - 1] != t]

    def first(self, path: str, status: int) -> Seen:
        return next(s for s in self.of(path) if s.status == status)


@contextmanager
def polled(server: Served, *paths: str) -> Iterator[Poll]:
    """Poll each path at 50 Hz, on a new connection each time, until the block ends."""
    poll, stop = Poll(), threading.Event()

    def run(path: str) -> None:
        while not stop.wait(0.02):
            connection = HTTPConnection("127.0.0.1", server.port, timeout=5)
            asked = time.monotonic()
            try:
                connection.request("GET", path)
                answer = connection.getresponse()
                body = json.loads(answer.read())
                now = time.monotonic()
            except OSError:
                continue  # the process is ending
            finally:
                connection.close()
            poll.seen.append(Seen(now, now - asked, path, answer.status, body))

    threads = [threading.Thread(target=run, args=(path,)) for path in paths]
    for thread in threads:
        thread.start()
    try:
        yield poll
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def gone(pid: int) -> bool:
    """Whether no process has this id, or only one that nobody waits for any more."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z"


Serve = Callable[..., Served]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts servers; each is ended with the test."""
    started: list[Served] = []

    def start(*flags: str, model: str = "glimmer", **settings: Any) -> Served:
        named = {name.replace("_", "-"): value for name, value in settings.items()}
        started.append(Served(list(flags), named, tmp_path, model))
        return started[-1]

    yield start
    for server in started:
        with server:
            if server.process.poll() is None:
                server.signal(signal.SIGTERM)
                server.process.wait(PATIENCE_S)
