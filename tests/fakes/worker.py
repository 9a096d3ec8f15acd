"""A real worker process with a trivial engine: it counts up from the last token of the prompt.

    python tests/fakes/worker.py CONFIG_JSON WORK_ADDRESS CONTROL_ADDRESS

Everything but the model is the product's own: life, loop, control thread, device, judge, orders.
`EngineConfig.model` is the script it plays: words with a comma between them.

    step=0.01      seconds that each step takes
    load=0.5       seconds that the load takes
    broken         the checkpoint cannot be read
    setting        the machine cannot have this setting
    die            the process ends while it loads
    die-later      the same, but only behind the first worker (generation 0)
    warm-hang      the self-test never returns
    crash          a bug leaves the first step of generation 0
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from app.control import Vitals
from app.life import Machine, Progress, main
from engine.config import EngineConfig
from engine.device.faults import Judge, Latch, Verdict
from engine.device.host import HostDevice
from engine.device.orders import FaultBoard
from engine.errors import ConfigError, ModelError, OutOfMemory
from engine.messages import Event, Failed, Finished, Generate, Loaded, PatchSpec, RequestId, Token

PATCHES = PatchSpec(
    family="fake",
    patch=2,
    merge=1,
    temporal=1,
    min_tokens=1,
    max_tokens=64,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
)


@dataclass(frozen=True)
class CountingStats:
    running: int
    waiting: int
    pages_free: int
    pages_total: int
    slots_free: int
    slots_total: int
    counters: dict[str, float]


class CountingEngine:
    """Each running request gets one token a step, the one after its last."""

    def __init__(
        self,
        config: EngineConfig,
        device: HostDevice,
        judge: Judge,
        board: FaultBoard,
        step_s: float,
    ) -> None:
        self.progress_at = time.monotonic()
        self._slots = config.max_sequences
        self._device = device
        self._judge = judge
        self._board = board
        self._step_s = step_s
        self._waiting: deque[Generate] = deque()
        self._running: dict[RequestId, tuple[Generate, int]] = {}
        self._paused: set[RequestId] = set()
        self._steps = 0

    @property
    def busy(self) -> bool:
        return bool(self._waiting) or any(r not in self._paused for r in self._running)

    def add(self, generate: Generate) -> None:
        self._waiting.append(generate)

    def abort(self, request: RequestId) -> None:
        self._running.pop(request, None)
        self._waiting = deque(g for g in self._waiting if g.request != request)

    def pause(self, request: RequestId) -> None:
        self._paused.add(request)

    def resume(self, request: RequestId) -> None:
        self._paused.discard(request)

    def step(self) -> list[Event]:
        events: list[Event] = []
        while self._waiting and len(self._running) < self._slots:
            generate = self._waiting.popleft()
            if not generate.pictures or self._tower(generate, events):
                self._running[generate.request] = (generate, 0)
        if not self._running:
            return events
        if self._step_s:
            time.sleep(self._step_s)
        try:
            self._device.launch("count", time.monotonic)
        except Exception as error:  # noqa: BLE001 - as the engine: the judge decides
            self._fail(error, "step", list(self._running), events)
            return events
        self._steps += 1
        self.progress_at = time.monotonic()
        for request, (generate, done) in list(self._running.items()):
            if request in self._paused:
                continue
            events.append(Token(request, generate.prompt[-1] + done + 1))
            self._running[request] = (generate, done + 1)
            if done + 1 == generate.max_tokens:
                del self._running[request]
                events.append(Finished(request, "length"))
        return events

    def stats(self) -> CountingStats:
        running = len(self._running)
        return CountingStats(
            running=running,
            waiting=len(self._waiting),
            pages_free=100 - running,
            pages_total=100,
            slots_free=self._slots - running,
            slots_total=self._slots,
            counters={"steps_total": self._steps},
        )

    def self_test(self) -> None:
        self._device.launch("self-test", time.monotonic)

    def _tower(self, generate: Generate, events: list[Event]) -> bool:
        try:
            with self._board.during("tower"):
                self._device.launch("tower", time.monotonic)
        except Exception as error:  # noqa: BLE001 - as the engine: the judge decides
            self._fail(error, "tower", [generate.request], events)
            return False
        return True

    def _fail(
        self, error: Exception, where: str, requests: list[RequestId], events: list[Event]
    ) -> None:
        if self._judge.verdict(error, where) is Verdict.WORKER:
            raise self._judge.lost() from error
        code = "overloaded" if isinstance(error, OutOfMemory) else "internal_error"
        for request in requests:
            self._running.pop(request, None)
            events.append(Failed(request, code, "this request failed"))


def crashing(engine: CountingEngine) -> Callable[[], list[Event]]:
    """A step with a bug that nobody catches."""

    def step() -> list[Event]:
        if engine.busy:
            raise ZeroDivisionError("a bug")
        return []

    return step


def build(
    config: EngineConfig, board: FaultBoard, latch: Latch, _vitals: Vitals, progress: Progress
) -> Machine:
    script = dict(word.partition("=")[::2] for word in config.model.split(","))
    if "broken" in script:
        raise ModelError("model.safetensors is cut; download it again.")
    if "setting" in script:
        raise ConfigError("--max-context does not fit this machine; use 64.")
    if "die" in script or ("die-later" in script and config.generation > 0):
        os.abort()
    until = time.monotonic() + float(script.get("load", "0"))
    progress(0, 1_000)
    while time.monotonic() < until:
        time.sleep(0.01)
        progress(500, 1_000)
    progress(1_000, 1_000)
    device = HostDevice("cpu:0", 0, config.generation, board)
    judge = Judge([device], latch)
    engine = CountingEngine(config, device, judge, board, float(script.get("step", "0")))
    if "crash" in script and config.generation == 0:
        engine.step = crashing(engine)  # type: ignore[method-assign]
    if "warm-hang" in script:
        engine.self_test = lambda: time.sleep(3_600)  # type: ignore[method-assign]
    loaded = Loaded(
        family="fake",
        context=4_096,
        max_sequences=config.max_sequences,
        pool_tokens=65_536,
        vocab=100_000,
        end_ids=(0,),
        patches=PATCHES,
        image_token=9,
        devices=config.devices,
    )
    return Machine(engine, judge, loaded)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:], build))
