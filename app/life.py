"""One life of a worker: load, test, serve until stopped or lost.

What it loads is given to it, so that the same life is led by a real engine and by a test's. After
the latch is set it touches no device again and waits to be killed (R83).
"""

from __future__ import annotations

import gc
import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Final, Protocol

import msgspec
import zmq

from app.control import Bell, ControlThread, Stats, Vitals
from engine.config import EngineConfig
from engine.device.faults import Judge, Latch, Verdict
from engine.device.orders import FaultBoard
from engine.errors import ConfigError, ContextLost, RequestFault, ServerError
from engine.messages import (
    Abort,
    Command,
    Event,
    Failed,
    Generate,
    Inject,
    Latched,
    Loaded,
    LoadFailed,
    Loading,
    Pause,
    Ready,
    RequestId,
    Resume,
)

BAD_LOAD: Final = 1
USAGE: Final = 2
UNRECOVERABLE: Final = 70
KILLED_BY_S: Final = 10.0  # after the latch the server kills this process long before
STATS_S: Final = 0.05  # so often the counts are looked at while steps run
LOADING_S: Final = 0.1

log = logging.getLogger(__name__)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Command).decode


class Loop(Protocol):
    """What this process needs of the engine; see `engine.engine.Engine`."""

    @property
    def busy(self) -> bool: ...
    @property
    def progress_at(self) -> float: ...
    def add(self, generate: Generate) -> None: ...
    def abort(self, request: RequestId) -> None: ...
    def pause(self, request: RequestId) -> None: ...
    def resume(self, request: RequestId) -> None: ...
    def step(self) -> list[Event]: ...
    def stats(self) -> Stats: ...
    def self_test(self) -> object: ...


@dataclass(frozen=True, slots=True)
class Machine:
    """A loaded model, ready to be tested."""

    engine: Loop
    judge: Judge
    loaded: Loaded


Progress = Callable[[int, int], None]  # bytes done, bytes in all
Build = Callable[[EngineConfig, FaultBoard, Latch, Vitals, Progress], Machine]


class Worker:
    """One life: load, test, serve until stopped or lost.

    Args:
        config: what to do.
        work: address of the socket that requests come from and events go to.
        control: address of the socket for everything else.
    """

    def __init__(self, config: EngineConfig, work: str, control: str) -> None:
        self._config = config
        self._address = work
        self._board = FaultBoard()
        self._vitals = Vitals()
        self._latch = Latch(lambda fault: self._control.say(Latched(fault)))
        self._bell = Bell()
        self._stop = threading.Event()
        self._loading_at = 0.0
        self._control = ControlThread(
            control, self._vitals, on_inject=self._inject, on_stop=self._end
        )

    def run(self, build: Build) -> int:
        """The whole life; returns the exit code."""
        self._control.start()
        try:
            machine = self._load(build)
            return machine if isinstance(machine, int) else self._serve(machine)
        except ContextLost:
            return self._wait_for_the_end()
        finally:
            self._control.finish()

    # -- load ---------------------------------------------------------------------------------

    def _load(self, build: Build) -> Machine | int:
        """A tested machine, or the exit code when there is none."""
        try:
            self._control.say(Loading("weights"))
            machine = build(self._config, self._board, self._latch, self._vitals, self._progress)
            self._vitals.judge = machine.judge
            self._vitals.progress_at = monotonic()
            self._control.say(machine.loaded)
            self._control.say(Loading("warming"))
            self._test(machine)
        except ConfigError as error:
            return self._fail(str(error), USAGE)
        except ContextLost:
            raise
        except ServerError as error:
            return self._fail(str(error), BAD_LOAD)
        except Exception as error:
            log.exception("the load failed")
            return self._fail(f"the load failed inside: {type(error).__name__}", BAD_LOAD)
        return machine

    def _test(self, machine: Machine) -> None:
        """One token on every stage, one picture when there is a tower, a canary on each device."""
        try:
            machine.engine.self_test()
        except Exception as error:
            if machine.judge.verdict(error, "self-test") is Verdict.WORKER:
                raise machine.judge.lost() from error
            raise
        machine.judge.canaries()
        if self._latch.fault is not None:
            raise machine.judge.lost()

    def _progress(self, done: int, total: int) -> None:
        now = monotonic()
        if done >= total or now - self._loading_at >= LOADING_S:
            self._loading_at = now
            self._control.say(Loading("weights", done, total))

    def _fail(self, message: str, code: int) -> int:
        self._control.say(LoadFailed(message, code))
        return code

    # -- serve --------------------------------------------------------------------------------

    def _serve(self, machine: Machine) -> int:
        engine, judge, vitals = machine.engine, machine.judge, self._vitals
        gc.collect()
        gc.freeze()  # the model stays: no collection needs to look at it again
        work: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            work.set(option, 0)
        work.connect(self._address)
        poller = zmq.Poller()
        poller.register(work, zmq.POLLIN)
        poller.register(self._bell.fd, zmq.POLLIN)
        vitals.stats = engine.stats()
        vitals.progress_at = canary_at = stats_at = monotonic()
        self._control.say(Ready())
        with work:
            while not self._stop.is_set() and self._latch.fault is None:
                now = vitals.beat_at = monotonic()
                if not engine.busy:
                    vitals.stats = engine.stats()
                    until_canary = canary_at + self._config.canary_period_s - now
                    if until_canary <= 0:
                        with self._board.during("idle"):
                            judge.canaries()
                        vitals.progress_at = canary_at = monotonic()
                        continue
                    wait_s = min(until_canary, self._config.beat_period_s)
                    poller.poll(math.ceil(1_000 * wait_s))
                    self._bell.quiet()
                self._take_commands(work, engine)
                began = monotonic()
                with self._board.during("step"):  # at each beat too: what waits can expire
                    events = engine.step()
                if events:
                    work.send(_encode(tuple(events)))
                done = monotonic()
                vitals.tick_max_s = max(vitals.tick_max_s, done - began)
                vitals.progress_at = max(vitals.progress_at, engine.progress_at)
                if done - stats_at > STATS_S:
                    stats_at, vitals.stats = done, engine.stats()
        return 0 if self._latch.fault is None else self._wait_for_the_end()

    @staticmethod
    def _take_commands(work: zmq.Socket[bytes], engine: Loop) -> None:
        while True:
            try:
                frame = work.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            match _decode(frame):
                case Generate() as generate:
                    try:
                        engine.add(generate)
                    except ServerError as error:
                        work.send(_encode((_refused(generate, error),)))
                case Abort(request=request):
                    engine.abort(request)
                case Pause(request=request):
                    engine.pause(request)
                case Resume(request=request):
                    engine.resume(request)

    def _wait_for_the_end(self) -> int:
        """No device work any more: the server, told by the latch, ends this process."""
        self._stop.wait(KILLED_BY_S)
        return UNRECOVERABLE

    # -- called by the control thread ---------------------------------------------------------

    def _inject(self, order: Inject) -> None:
        if not self._config.fault_injection:
            return
        try:
            self._board.order(order)
        except IndexError:
            log.warning("a fault was ordered for stage %d, which does not exist", order.stage)

    def _end(self) -> None:
        self._stop.set()
        self._bell.ring()


def _refused(generate: Generate, error: ServerError) -> Failed:
    code = "internal_error" if isinstance(error, RequestFault) else "overloaded"
    return Failed(request=generate.request, code=code, message=str(error))


def end_with_the_server() -> None:
    """Start the thread that ends this process at once when its standard input is closed."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(0)

    threading.Thread(target=watch, name="server watch", daemon=True).start()


def main(arguments: Sequence[str], build: Build) -> int:
    """Run a worker as its server ordered it.

    Args:
        arguments: the configuration as JSON, the work address, the control address.
        build: makes the machine to run.
    """
    logging.basicConfig(level=logging.WARNING, format="worker: %(levelname)s %(message)s")
    for ours in ("app", "engine", "vision"):
        logging.getLogger(ours).setLevel(logging.INFO)  # receipts (rule 24) and the boot's choices
    for interrupt in (signal.SIGINT, signal.SIGTERM):
        signal.signal(interrupt, signal.SIG_IGN)  # sent to the whole group: the server decides
    end_with_the_server()
    config, work, control = arguments
    worker = Worker(msgspec.json.decode(config, type=EngineConfig), work, control)
    code = worker.run(build)
    zmq.Context.instance().term()  # the last notice is out
    return code
