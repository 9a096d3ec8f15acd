"""start, ping, drain, kill and replace the worker; the restart budget.

One task lives through one worker after the other. While a worker lives, notices arrive by call, its
end is a future, and a tick asks for its progress and judges that: a worker that answers pings and
makes no progress hangs all the same (R86). Nothing here touches a device or waits for the loop that
does.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Final

import msgspec

from app.client import WorkerClient
from app.config import ServerConfig, worker_environment
from app.errors import StateRefused
from app.health import SERVING, Health, State, WorkerView
from app.process import WorkerProcess, WorkerStuck
from engine.errors import RequestError
from engine.messages import (
    Fault,
    Inject,
    Latched,
    Loaded,
    LoadFailed,
    Loading,
    Notice,
    Ping,
    Pong,
    Ready,
)

UNRECOVERABLE: Final = 70  # O97
HUNG: Final = 71
BAD_LOAD: Final = 1
WORKER: Final = (sys.executable, "-P", "-m", "app.worker")  # -P: a folder `app` here is not ours

ORDER_S: Final = 1.0  # for a worker to take an order to fail

# The worker is killed at once, yet `faulted` and `hung` are told for so long, or until the next
# worker has loaded: a probe that comes by a few times a second must be able to see why (R91). This
# costs no time, because the next worker starts meanwhile; the contract allows 1 s.
VISIBLE_S: Final = 0.25

_LOST = "The worker that ran this request was lost to a fault; try again."
_STALLED = "The worker that ran this request made no more progress and was ended; try again."
_STOPPED = "The server stopped before this request was done; try again."


@dataclass(slots=True)
class _Life:
    """What became of one worker so far."""

    process: WorkerProcess
    judged_since: float | None = None  # progress is judged from warming on, a load never (R86)
    progress_at: float = 0.0  # as the worker last said it, on this clock
    stage: int = 0  # whose result is the oldest
    ready: bool = False
    fault: Fault | None = None
    hung: bool = False
    failed: LoadFailed | None = None


class Supervisor:
    """Keeps one worker serving, and says when that cannot be done any more.

    Args:
        config: the server's settings.
        health: every change of state goes here.
        client: its requests go to the worker that is ready, and end with one that is lost.
        command: the worker's program; tests give their own.
        on_loading: told each step of a load, for a progress bar.
    """

    def __init__(
        self,
        config: ServerConfig,
        health: Health,
        client: WorkerClient,
        *,
        command: Sequence[str] = WORKER,
        on_loading: Callable[[Loading], None] | None = None,
    ) -> None:
        self.exit_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.why = ""  # the exit code in words, for the last line of the log
        self.serving = asyncio.Event()  # set once, by the first self-test that passed
        self._config = config
        self._health = health
        self._client = client
        self._command = command
        self._on_loading = on_loading
        self._environment = worker_environment(config.engine.blas_threads)
        ours = str(Path(__file__).parents[1])  # the same program, installed or not
        path = self._environment.get("PYTHONPATH")
        self._environment["PYTHONPATH"] = f"{ours}{os.pathsep}{path}" if path else ours
        self._sockets = Path(tempfile.mkdtemp(prefix="stagelight-"))  # mode 0700
        self._deaths: deque[float] = deque()  # those inside the window
        self._life: _Life | None = None
        self._stopping = False
        self._task: asyncio.Task[None] | None = None
        self._recovery: tuple[int, str] | None = None  # told when it has been `faulted` long enough
        self._pings = 0
        self._heard: dict[int, asyncio.Future[None]] = {}  # pings that an order waits for

    async def start(self) -> None:
        """Start the first worker; returns when its process runs, long before it serves."""
        await self._begin(generation=0)
        self._task = asyncio.create_task(self._supervise(), name="supervisor")
        self._task.add_done_callback(self._on_end)

    async def inject(self, order: Inject) -> None:
        """Order a fault of the worker (rule 120); returns when the worker has the order.

        Raises:
            RequestError: fault injection is off.
            StateRefused: there is no worker to order it from.
        """
        if not self._config.fault_injection:
            raise RequestError("Faults can be ordered only with --fault-injection on.")
        life = self._life
        if life is None or not life.process.send(order):
            raise StateRefused("recovering", self._health.retry_after_s)
        self._ping(life)  # answered behind the order, unless that was to die or to hang at once
        number = self._pings
        heard = self._heard[number] = asyncio.get_running_loop().create_future()
        first = asyncio.FIRST_COMPLETED
        await asyncio.wait({heard, life.process.gone}, timeout=ORDER_S, return_when=first)
        self._heard.pop(number, None)

    async def drain_and_stop(self) -> None:
        """Refuse new requests, let the running ones finish within the limit, end the worker."""
        self._stopping = True
        self._health.drain(self._config.drain_s)
        try:
            await asyncio.wait_for(self._client.none_in_flight(), self._config.drain_s)
        except TimeoutError:
            self._client.fail_all("shutting_down", _STOPPED)
        await self.stop()

    def kill(self) -> None:
        """End the worker without asking it, and its requests as by a stop; `stop` tidies up."""
        self._unwatch()
        if self._life is not None:
            self._life.process.kill()

    async def stop(self) -> None:
        """End the worker now; whatever is in flight gets its one error. No child is left."""
        self._unwatch()
        if self._task is not None:
            await asyncio.wait({self._task})
        life = self._life
        if life is not None:
            self._client.detach()
            try:
                if not life.ready:
                    life.process.kill()
                await life.process.stop()
            except WorkerStuck as stuck:
                self._give_up(HUNG, str(stuck))
            life.process.close()
            if not self._config.supervise and (life.fault is not None or life.hung):
                self._give_up(_code(life), _cause(life))  # a fault is told, a stop or not (R84)
        shutil.rmtree(self._sockets, ignore_errors=True)

    def _unwatch(self) -> None:
        """From here on an end of the worker is ours and no fault."""
        self._stopping = True
        self._client.fail_all("shutting_down", _STOPPED)
        if self._task is not None:
            self._task.cancel()

    # -- one worker after the other -----------------------------------------------------------

    async def _supervise(self) -> None:
        generation = 0
        while True:
            assert self._life is not None
            life = self._life
            try:
                await self._watch(life)
            except WorkerStuck as stuck:
                self._give_up(HUNG, str(stuck))
                return
            life.process.close()
            if not self._may_go_on(life):
                return
            delay = self._after_death()
            if delay is None:
                self._give_up(_code(life), f"the restart budget is spent; last: {_cause(life)}")
                return
            self._recovery = (len(self._deaths), _cause(life))
            asyncio.get_running_loop().call_later(VISIBLE_S, self._recover)
            await asyncio.sleep(delay)
            generation += 1
            await self._begin(generation)

    async def _begin(self, generation: int) -> None:
        process = await WorkerProcess.start(
            self._command,
            msgspec.structs.replace(self._config.engine, generation=generation),
            sockets=self._sockets,
            environment=self._environment,
            on_notice=self._on_notice,
            on_events=self._client.on_frame,
        )
        self._life = _Life(process)
        self._show()

    def _recover(self) -> None:
        """The old worker is gone and was told long enough; does nothing a second time."""
        if self._recovery is not None and not self._stopping:
            attempt, why = self._recovery
            self._recovery = None
            self._health.recover(attempt, why)
            self._show()

    def _show(self) -> None:
        if self._life is not None and self._recovery is None:
            process = self._life.process
            self._forget_old_deaths()
            self._health.worker = WorkerView(process.pid, process.generation, len(self._deaths))

    async def _watch(self, life: _Life) -> None:
        """Ping and judge until the process is gone, whoever ended it."""
        process = life.process
        while not process.gone.done():
            await asyncio.wait({process.gone}, timeout=self._config.ping_period_s)
            if process.gone.done():
                break
            if life.fault is not None or life.hung:
                await process.reaped()
                break
            self._ping(life)
            self._judge(life)
        status = process.gone.result()
        if life.fault is None and not life.hung and status >= 0:
            await process.last_words()
        if life.failed is not None or life.fault is not None or life.hung:
            return
        if self._config.stay_in_load_failed and not self.serving.is_set():
            life.failed = LoadFailed(f"the worker ended with status {status}", BAD_LOAD)
        else:
            self._lose(life, Fault("worker_died", status, call="", device="", stage=-1))

    def _ping(self, life: _Life) -> None:
        self._pings += 1
        life.process.send(Ping(self._pings))

    def _may_go_on(self, life: _Life) -> bool:
        """Whether another worker may follow; else the reason is written down."""
        if self._stopping:
            return False
        if not self.serving.is_set():  # the first load (rule 97, D13)
            code = life.failed.exit_code if life.failed else BAD_LOAD
            if self._config.stay_in_load_failed and self._health.fail_load(_cause(life)):
                return False
            self._give_up(code, _cause(life))
            return False
        if life.failed is not None:
            self._lose(life, Fault(life.failed.message, life.failed.exit_code, "load", "", -1))
        if not self._config.supervise:
            self._give_up(_code(life), _cause(life))
        return self._config.supervise

    def _after_death(self) -> float | None:
        """Seconds until the next worker (rule 95); None when the budget is spent."""
        self._forget_old_deaths()
        self._deaths.append(monotonic())
        if len(self._deaths) > self._config.restart_budget:
            return None
        delays = self._config.restart_delays_s
        return delays[min(len(self._deaths), len(delays)) - 1] if delays else 0.0

    def _forget_old_deaths(self) -> None:
        since = monotonic() - self._config.restart_window_s
        while self._deaths and self._deaths[0] < since:
            self._deaths.popleft()

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._give_up(UNRECOVERABLE, f"the supervisor failed: {task.exception()}")

    def _give_up(self, code: int, why: str) -> None:
        self.why = why
        if not self.exit_code.done():
            self.exit_code.set_result(code)

    # -- what a worker says, and what it does not say -----------------------------------------

    def _on_notice(self, notice: Notice) -> None:
        life = self._life
        assert life is not None
        match notice:
            case Pong():
                self._health.heard(notice)
                if notice.n in self._heard:
                    self._heard.pop(notice.n).set_result(None)
                self._show()
                life.progress_at = monotonic() - notice.progress_age_s
                oldest = max(notice.stages, key=lambda s: s.last_result_age_s, default=None)
                life.stage = oldest.stage if oldest else 0
            case Loading(phase="weights"):
                self._health.loading(notice)
                if self._on_loading:
                    self._on_loading(notice)
            case Loaded():
                life.judged_since = monotonic()
                self._recover()
                self._health.warming(notice)
            case Ready():
                self._serve(life)
            case Latched(fault=fault):
                self._lose(life, fault)
            case LoadFailed():
                life.failed = notice
            case Loading():
                life.judged_since = monotonic()

    def _serve(self, life: _Life) -> None:
        life.ready = True
        life.progress_at = monotonic()
        self._client.attach(life.process.work)
        self._health.ready()
        self.serving.set()

    def _judge(self, life: _Life) -> None:
        """Soft and hard limit on the age of the last host-visible progress (R86, rule 104)."""
        if life.judged_since is None:
            return
        progress_at = max(life.judged_since, life.progress_at)
        age = monotonic() - progress_at
        state = self._health.state
        if age < self._config.stall_soft_s:
            if state is State.STALLED:
                self._health.progressed()
            return
        if state in SERVING or state is State.STALLED:
            self._health.stall(life.stage, progress_at)
        if age >= self._config.stall_hard_s:
            self._health.hang(f"no progress for {age:.1f} s")
            self._lose(life, None)

    def _lose(self, life: _Life, fault: Fault | None) -> None:
        """The worker is lost: to a fault, or (None) to a hang. The first reason counts."""
        if life.fault is not None or life.hung:
            return
        self._recover()
        self._client.detach()
        if fault is None:
            life.hung = True
            self._client.fail_all("engine_stalled", _STALLED)
        else:
            life.fault = fault
            self._health.fault(fault)
            self._client.fail_all("gpu_fault", _LOST)
        life.process.kill()


def _code(life: _Life) -> int:
    return HUNG if life.hung else UNRECOVERABLE


def _cause(life: _Life) -> str:
    if life.failed is not None:
        return " ".join(life.failed.message.split())
    if life.fault is None:
        return "the worker made no progress and was killed"
    if life.fault.reason == "worker_died":
        return f"worker_died (status {life.fault.code})"
    return life.fault.reason
