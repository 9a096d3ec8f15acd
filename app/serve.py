"""The server process: bind, start the worker, build the app, answer until stopped or lost.

    bind -> worker process -> (web framework, tokenizer) -> answering: loading ... ready
                 |                                              |
                 +--- loads while the server imports ---+       first signal: drain, exit 0
                                                                second signal: end at once
                                                                no worker any more: exit 70, 71

The listener is there before anything heavy is imported, so a probe is never refused (R98), and it
answers until the process ends, whatever the reason of the end.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from app.client import WorkerClient
from app.config import ServerConfig, read_api_keys
from app.health import Health, State, Supervision
from app.progress import LoadProgress
from app.supervisor import HUNG, UNRECOVERABLE, Supervisor
from engine.errors import ConfigError, ServerError

if TYPE_CHECKING:
    from app.http_server import HttpServer  # the web framework: imported when the worker loads

BACKLOG: Final = 2_048
FAULT_ANSWERS_S: Final = 15.0  # R84: so long a server without a worker answers what is in flight
LAST_BYTES_S: Final = 5.0  # for answers that are complete and not yet written
MARGIN_S: Final = 15.0  # R85: after its limit an end that is stuck is made by the watchdog

_WILDCARDS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_WORDS: Final = {UNRECOVERABLE: "no worker can serve any more", HUNG: "hung and unrecoverable"}


async def serve(config: ServerConfig) -> int:
    """Serve until a signal or the end of the last worker; returns the exit code (O97).

    Raises:
        ServerError: the port is in use, or the model's files for prompts are broken (exit 1).
        ConfigError: an address that this machine does not have (exit 2).
    """
    listener = bind(config.host, config.port)
    try:
        return await Server(config, listener).run()
    finally:
        listener.close()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        ServerError: the port is in use.
        ConfigError: the address is not ours, or the port needs rights that we do not have.
    """
    try:
        [family, kind, proto, _, address] = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host} is no address: {error.strerror}.") from error
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ServerError(
                f"port {port} of {host} is in use; end the server that has it, or give --port."
            ) from error
        raise ConfigError(
            f"--host {host} --port {port} cannot be listened on: {error.strerror}."
        ) from error
    return listener


@dataclass
class _Moves:
    """State changes; those before the log is set up are kept for it."""

    log: Callable[[State, State, bool], None] | None = None
    kept: list[tuple[State, State, bool]] = field(default_factory=list)

    def __call__(self, before: State, to: State, accepted: bool) -> None:  # noqa: FBT001 - Health's
        if self.log is None:
            self.kept.append((before, to, accepted))
        else:
            self.log(before, to, accepted)

    def open(self, log: Callable[[State, State, bool], None]) -> None:
        self.log = log
        for move in self.kept:
            log(*move)


class Server:
    """One server process, from its bound listener to its exit code."""

    def __init__(self, config: ServerConfig, listener: socket.socket) -> None:
        self._config = config
        self._listener = listener
        self._moves = _Moves()
        supervision = Supervision.ON if config.supervise else Supervision.OFF
        self._health = Health(
            config.served_model_name, supervision=supervision, on_move=self._moves
        )
        self._client = WorkerClient(
            self._health,
            queue_limit=config.engine.queue_limit,
            slow_reader_s=config.slow_reader_s,
        )
        self._progress = LoadProgress(sys.stderr, config.served_model_name)
        self._supervisor = Supervisor(config, self._health, self._client, on_loading=self._progress)
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> int:
        """The whole life of the process."""
        self._listen_to_signals()
        for line in self._config.warnings:
            _say(line)
        announce: asyncio.Task[None] | None = None
        try:
            await self._supervisor.start()
            http = await asyncio.to_thread(self._prepare)
            self._moves.open(http.log_move)
            http.start(self._listener)
            announce = asyncio.create_task(self._announce())
            self._reload_keys_into(http)
            return await self._until_the_end(http)
        finally:
            if announce is not None:
                announce.cancel()
            self._progress.close()
            await self._supervisor.stop()

    def _prepare(self) -> HttpServer:
        """Everything heavy, in a thread: the worker loads meanwhile and is listened to."""
        from app.http_server import HttpServer

        return HttpServer(self._config, self._health, self._client, self._supervisor)

    async def _until_the_end(self, http: HttpServer) -> int:
        exit_code = self._supervisor.exit_code
        stop = asyncio.create_task(self._stop.wait())
        either: set[asyncio.Future[Any]] = {stop, exit_code}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if exit_code.done():
            _watchdog(FAULT_ANSWERS_S + MARGIN_S, exit_code.result())
            await http.finish(FAULT_ANSWERS_S)
        else:
            _watchdog(self._config.drain_s + MARGIN_S, 0)
            await self._drain(http)
        if not exit_code.done():
            return 0
        code, why = exit_code.result(), self._supervisor.why
        _say(f"{_WORDS[code]}: {why} (exit code {code})" if code in _WORDS else why)
        return code

    async def _drain(self, http: HttpServer) -> None:
        """Running requests finish, unless a second signal says that nobody waits for them."""
        drain = asyncio.create_task(self._drain_and_finish(http))
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait({drain, hurry}, return_when=asyncio.FIRST_COMPLETED)
        if hurry.done():
            self._supervisor.kill()
            await http.drop()
        for task in (drain, hurry):
            task.cancel()
        await asyncio.wait({drain, hurry})

    async def _drain_and_finish(self, http: HttpServer) -> None:
        await self._supervisor.drain_and_stop()
        await http.finish(LAST_BYTES_S)

    async def _announce(self) -> None:
        """The ready line, after the self-test and not before (R98)."""
        await self._supervisor.serving.wait()
        host, port = self._listener.getsockname()[:2]
        host = _WILDCARDS.get(host, host)
        shown = f"[{host}]" if ":" in host else host
        name = self._config.served_model_name
        sys.stdout.write(f"Stagelight serves {name} at http://{shown}:{port}\n")
        sys.stdout.flush()

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        (self._hurry if self._stop.is_set() else self._stop).set()

    def _reload_keys_into(self, http: HttpServer) -> None:
        """On SIGHUP the key file is read again; a broken one changes nothing (O15)."""
        file = self._config.api_key_file
        if file is None:
            return

        def reload() -> None:
            try:
                http.replace_keys(read_api_keys(file))
            except ConfigError as error:
                _say(f"the old keys stay: {error}")

        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)


def _watchdog(seconds: float, code: int) -> None:
    """End the process when its own end takes too long: no exit depends on a device (R85)."""
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()


def _say(line: str) -> None:
    sys.stderr.write(f"stagelight: {line}\n")
    sys.stderr.flush()
