"""One worker process as the server holds it: its start, its two links, its notices, its end.

The process is always a fresh interpreter (rule 93). It lives exactly as long as this object wants:
its standard input is a pipe whose end tells it that the server is gone, so no child is ever left.
"""

from __future__ import annotations

import asyncio
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from app.link import Link
from engine.config import EngineConfig
from engine.messages import Control, Notice, Stop

LAST_WORDS_S: Final = 0.2  # a notice may still be on its way when the process is gone
STOP_S: Final = 2.0  # for a worker that was asked to end
KILL_S: Final = 10.0  # R85: who survives a kill for so long is stuck in the driver

_STDERR: Final = 2

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Notice).decode


class WorkerStuck(Exception):
    """The process survived its kill: no second one may be started beside it (R85)."""


class WorkerProcess:
    """A worker that was started; `start` makes one."""

    def __init__(self, process: Process, generation: int, control: Link, work: Link) -> None:
        self._process = process
        self._control = control
        self._gone = asyncio.ensure_future(process.wait())
        self.generation = generation
        self.pid = process.pid
        self.work = work

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        config: EngineConfig,
        *,
        sockets: Path,
        environment: Mapping[str, str],
        on_notice: Callable[[Notice], None],
        on_events: Callable[[bytes], None],
    ) -> WorkerProcess:
        """Bind both links and start the interpreter.

        Args:
            command: the worker's program; its arguments are the configuration as JSON and the
                addresses of the work and the control socket.
            config: what the worker is told to do; its generation names the sockets.
            sockets: a private folder, mode 0700.
            environment: of the child, whole: it sets the BLAS threads before NumPy is imported.
            on_notice: called on the loop for each notice of the control channel.
            on_events: called on the loop with each frame of the work channel.
        """
        # each generation has sockets of its own: a frame of a dead worker reaches nobody
        at = {name: f"ipc://{sockets}/{name}-{config.generation}" for name in ("work", "control")}
        work = Link(at["work"], on_events)
        control = Link(at["control"], lambda frame: on_notice(_decode(frame)))
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                msgspec.json.encode(config).decode(),
                at["work"],
                at["control"],
                stdin=PIPE,
                stdout=_STDERR,  # standard output has the server's ready line and nothing else
                env=dict(environment),
            )
        except OSError:
            work.close()
            control.close()
            raise
        return cls(process, config.generation, control, work)

    @property
    def gone(self) -> asyncio.Future[int]:
        """Done when the process has ended and was reaped; its exit status, -n after signal n."""
        return self._gone

    def send(self, control: Control) -> bool:
        """Say something on the control channel; False when the worker does not listen yet."""
        return self._control.send(_encode(control))

    def kill(self) -> None:
        """End it at once; one that hangs in a driver call hears nothing else (rule 99)."""
        if not self._gone.done():
            self._process.kill()

    async def reaped(self, limit_s: float = KILL_S) -> int:
        """Wait for the end after a kill.

        Raises: `WorkerStuck` when it is still there after the limit (R85).
        """
        done, _ = await asyncio.wait({self._gone}, timeout=limit_s)
        if not done:
            raise WorkerStuck(f"worker {self.pid} is still there {limit_s:g} s after its kill")
        return self._gone.result()

    async def last_words(self) -> None:
        """Hand over the notices that are still on their way from a process that ended by itself."""
        until = asyncio.get_running_loop().time() + LAST_WORDS_S
        while asyncio.get_running_loop().time() < until:
            self._control.read()
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Ask it to end, and kill it when it does not."""
        if self.send(Stop()):
            await asyncio.wait({self._gone}, timeout=STOP_S)
        self.kill()
        await self.reaped()

    def close(self) -> None:
        """Close both links and the pipe."""
        self._control.close()
        self.work.close()
        if self._process.stdin is not None:
            self._process.stdin.close()
