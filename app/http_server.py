"""The HTTP side of a running server: the app on its listener, and an orderly end of its answers."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Iterator, Sequence
from typing import Final

import uvicorn

from app import logs
from app.api import build_app
from app.chat.prompt import Prompter
from app.client import WorkerClient
from app.config import ApiKey, ServerConfig
from app.connection import connection
from app.health import Health
from app.identity import build_id, version_id
from app.metrics import Metrics
from app.services import Services
from app.supervisor import Supervisor

CLOSE_S: Final = 2  # for connections, once every answer is out
POLL_S: Final = 0.02


class _Uvicorn(uvicorn.Server):
    """uvicorn, with the signals left to us: the first one drains and closes nothing."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Made in a thread while the worker loads; serves on the loop.

    Raises: `ModelError` when the checkpoint's tokenizer, template or configs are broken.
    """

    def __init__(
        self, config: ServerConfig, health: Health, client: WorkerClient, supervisor: Supervisor
    ) -> None:
        logs.configure(config.log_format)
        self.log_move = logs.log_move
        health.build = build_id()
        prompter = Prompter.open(
            config.model_folder,
            limits=config.limits,
            decode_workers=config.decode_workers,
            clamp=config.clamp,
            sampling_defaults=config.sampling_defaults,
        )
        metrics = Metrics(health, version_id())
        self._app = build_app(Services(config, health, client, prompter, metrics, supervisor))
        self._task: asyncio.Task[None] | None = None
        self._server = _Uvicorn(
            uvicorn.Config(
                self._app,
                access_log=False,
                log_config=None,
                log_level="error",  # what it warns of is logged by `Connection`, in our form
                http=connection(config.silent_connection_s),
                lifespan="off",
                ws="none",
                server_header=False,
                timeout_keep_alive=math.ceil(config.idle_connection_s),
                timeout_graceful_shutdown=CLOSE_S,
            )
        )

    def start(self, listener: socket.socket) -> None:
        """Answer on this listener from now on."""
        self._task = asyncio.create_task(self._server.serve([listener]), name="http")

    async def finish(self, seconds: float) -> None:
        """Let running answers be written, at most so long, and close.

        New connections are answered all the while (R98).
        """
        until = asyncio.get_running_loop().time() + seconds
        while self._server.server_state.tasks and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(POLL_S)
        self._server.should_exit = True
        await self._closed()

    async def drop(self) -> None:
        """Close at once, whatever is being written."""
        self._server.should_exit = self._server.force_exit = True
        await self._closed()

    async def _closed(self) -> None:
        if self._task is not None:
            await asyncio.wait({self._task})

    def replace_keys(self, keys: Sequence[ApiKey]) -> None:
        """From now on these are accepted, and no others."""
        self._app.state.keys.replace(keys)
