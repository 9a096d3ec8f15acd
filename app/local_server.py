"""A `stagelight serve` of our own on a free port: started, watched, stopped at the end."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException
from types import TracebackType
from typing import Any

from app.config import DEFAULT_MODEL, plain_environment
from engine.errors import ServerError

READY_LIMIT_S = 60.0
STOP_LIMIT_S = 40.0
POLL_S = 0.01


class ServerFailed(ServerError):
    """The server that a command started did not become ready, or did not end well."""


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class LocalServer:
    """A `stagelight serve` of our own on a free port: started, watched, and stopped at the end.

    It gets no setting of this process's environment, only the flags given here.
    """

    def __init__(self, model: str = DEFAULT_MODEL, flags: Sequence[str] = ()) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.ready_s = 0.0  # from the start of the process to the first 200 of /health
        self.exit_code: int | None = None
        place = ("--host", "127.0.0.1", "--port", str(self.port))
        # -P: a folder `app` in the working directory is not ours.
        command = (sys.executable, "-P", "-m", "app", "serve", model, *place, *flags)
        self._log = tempfile.TemporaryFile(  # noqa: SIM115 (closed by __exit__)
            mode="w+", encoding="utf-8", errors="replace"
        )
        self._started_s = time.monotonic()
        self._process = subprocess.Popen(
            command, env=plain_environment(), stdout=self._log, stderr=subprocess.STDOUT
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> LocalServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        self._log.close()

    def health(self) -> tuple[int, dict[str, Any]]:
        """Status and body of /health. Raises `OSError` while nobody listens."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())
        except (HTTPException, ValueError) as error:
            raise ConnectionError(f"/health gave no JSON: {error}") from error
        finally:
            connection.close()

    def wait_until_ready(self) -> None:
        """Return at the first 200 of /health.

        Raises:
            ServerFailed: the process ended, or `READY_LIMIT_S` passed; with its last lines.
        """
        while time.monotonic() - self._started_s < READY_LIMIT_S:
            try:
                status, _ = self.health()
            except OSError:
                status = 0
            if status == 200:
                self.ready_s = time.monotonic() - self._started_s
                return
            if self._process.poll() is not None:
                raise ServerFailed(
                    f"the server ended with code {self._process.returncode} before it was ready: "
                    f"{self.last_lines()}"
                )
            time.sleep(POLL_S)
        raise ServerFailed(f"not ready after {READY_LIMIT_S:.0f} s: {self.last_lines()}")

    def last_lines(self, count: int = 5) -> str:
        """The end of what the server wrote."""
        self._log.seek(0)
        return " | ".join(self._log.read().strip().splitlines()[-count:]) or "it said nothing"

    def stop(self) -> int:
        """Let it drain and end; kill it when it does not. Returns its exit code."""
        if self.exit_code is None:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
            try:
                self.exit_code = self._process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self.exit_code = self._process.wait()
        return self.exit_code
