"""The states, the legal moves, and what each endpoint answers in each.

Only the supervisor and the worker's client write here; the routes read. Everything is memory of
this process: no lock, no wait, no device (R90, O93). The table is R96, its precedence R93, its
moves R99. Ready, saturated and degraded are one stored state, *serving*; which of them shows
follows from the load and from the parts that are off, never from what somebody remembered to set.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from time import monotonic
from typing import Any, Final

from app.errors import CAPACITY_RETRY_S, STATE_RETRY_S, StateRefused
from engine.messages import Carried, Fault, Loaded, Loading, Pong, StageReport

LOAD_FAILED_RETRY_S: Final = 60.0  # O9
_TEXT: Final = 160  # characters of a quoted text: a body stays below 4 KiB (O95)
_STAGES: Final = 12  # stages shown, for the same reason


class State(StrEnum):
    """The rows of R96, highest precedence first (R93)."""

    FAULTED = "faulted"
    HUNG = "hung"
    STALLED = "stalled"
    LOAD_FAILED = "load_failed"
    DRAINING = "draining"
    RECOVERING = "recovering"
    LOADING = "loading"
    WARMING = "warming"
    DEGRADED = "degraded"
    SATURATED = "saturated"
    READY = "ready"


SERVING: Final = frozenset({State.READY, State.SATURATED, State.DEGRADED})
NOT_LIVE: Final = frozenset({State.FAULTED, State.HUNG, State.LOAD_FAILED})  # R94


class Asks(Enum):
    """What a request wants; each is refused in states of its own (the columns of R96)."""

    GENERATION = "an answer"
    MODELS = "the model list"
    TOKENS = "tokens of a text, or the text of tokens"


class Hang(Enum):
    """Why a worker counts as hung (R86, R88)."""

    NO_PROGRESS = "no progress"
    PEER_LOST = "peer lost"


class Supervision(Enum):
    """Whether a lost worker is replaced: after `OFF` a fault ends only with the process (R99)."""

    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class WorkerView:
    """The worker as a body shows it; `restarts` are those inside the budget's window."""

    pid: int
    generation: int
    restarts: int


# R99. READY stands for every serving state here. What is not listed is refused.
_END = {State.FAULTED, State.DRAINING}  # where almost every state may go
MOVES: Final[Mapping[State, set[State]]] = {
    State.LOADING: _END | {State.WARMING, State.LOAD_FAILED},
    State.WARMING: _END | {State.READY, State.LOAD_FAILED, State.HUNG},
    State.READY: _END | {State.STALLED, State.HUNG},
    State.STALLED: _END | {State.READY, State.HUNG},
    State.DRAINING: {State.HUNG, State.FAULTED},
    State.LOAD_FAILED: _END,
    State.FAULTED: {State.RECOVERING},
    State.HUNG: {State.RECOVERING, State.FAULTED},
    State.RECOVERING: _END | {State.READY, State.HUNG},
}

_REFUSAL: Final[Mapping[State, str]] = {  # the code of a refused generation (R96)
    State.LOADING: "model_not_loaded",
    State.WARMING: "model_not_ready",
    State.DRAINING: "shutting_down",
    State.STALLED: "engine_stalled",
    State.HUNG: "engine_stalled",
    State.FAULTED: "gpu_fault",
    State.LOAD_FAILED: "model_not_loaded",
    State.RECOVERING: "recovering",
}
_WITHOUT_TOKENS: Final = frozenset({State.LOADING, State.DRAINING, State.LOAD_FAILED})


class Health:
    """What this server is able to do now, and why not more.

    Args:
        model: the served name.
        build: version of this program, as `/version` tells it.
        supervision: whether a lost worker is replaced.
        clock: monotonic seconds; tests give their own.
        on_move: told (old state, new state, accepted) at each wanted move, refused ones too.
    """

    def __init__(
        self,
        model: str,
        *,
        build: str = "",
        supervision: Supervision = Supervision.ON,
        clock: Callable[[], float] = monotonic,
        on_move: Callable[[State, State, bool], None] | None = None,
    ) -> None:
        self.boot_id = secrets.token_hex(8)
        self.loaded: Loaded | None = None
        self.worker: WorkerView | None = None
        self.fault_told: Fault | None = None  # kept until the next worker serves (R78)
        self.pong: Pong | None = None
        self._model = model
        self.build = build
        self._supervision = supervision
        self._clock = clock
        self._on_move = on_move
        self._started = self._entered = self._heard = clock()
        self._state = State.LOADING
        self._loading = Loading("weights")
        self._why = ""  # of hung, load_failed, recovering
        self._stage = 0  # of stalled and hung
        self._attempt = 0
        self._drain_until = 0.0
        self._progress_at = clock()
        self._parts_off: dict[str, str] = {}
        self._in_flight = 0
        self._capacity: int | None = None

    # -- what the routes read -----------------------------------------------------------------

    @property
    def state(self) -> State:
        """The row of R96 that holds now."""
        if self._state is not State.READY:
            return self._state
        if self._parts_off:
            return State.DEGRADED
        return State.SATURATED if self.saturated else State.READY

    @property
    def saturated(self) -> bool:
        """Whether as many requests are admitted as may be (O63)."""
        return self._capacity is not None and self._in_flight >= self._capacity

    @property
    def pong_age_s(self) -> float:
        """How old the worker's last words are; every age in them has grown by it since."""
        return max(0.0, self._clock() - self._heard)

    @property
    def live(self) -> bool:
        """Whether a restart from outside would not help (R94)."""
        return self._state not in NOT_LIVE

    def refusal(self, asks: Asks) -> StateRefused | None:
        """The 503 that the state has for such a request, or None when it may go on (R96, O9)."""
        if self._state is State.READY:
            full = asks is Asks.GENERATION and self.saturated
            return StateRefused("overloaded", CAPACITY_RETRY_S, self._full()) if full else None
        if asks is Asks.TOKENS and self.loaded and self._state not in _WITHOUT_TOKENS:
            return None
        return StateRefused(_REFUSAL[self._state], self.retry_after_s)

    @property
    def retry_after_s(self) -> float:
        """When a refused client may try again (O9)."""
        if self._state is State.DRAINING:
            return min(60.0, max(1.0, self._drain_until - self._clock()))
        return LOAD_FAILED_RETRY_S if self._state is State.LOAD_FAILED else STATE_RETRY_S

    def ready_body(self) -> tuple[int, dict[str, Any]]:
        """Status and body of `GET /health` (R96, O95)."""
        return (200 if self._state is State.READY else 503), self.body()

    def live_body(self) -> tuple[int, dict[str, Any]]:
        """Status and body of `GET /health/live` (R94, O95)."""
        return (200, {"status": "alive"}) if self.live else (503, self.body())

    def body(self) -> dict[str, Any]:
        """The whole body of O95; below 4 KiB of JSON."""
        state, now = self.state, self._clock()
        worker, loaded = self.worker, self.loaded
        carried = self.pong.transport if self.pong else Carried()
        return {
            "status": (State.READY if state is State.SATURATED else state).value,
            "ready": self._state is State.READY,
            "live": self.live,
            **self._fields(state, now),
            "reasons": self._reasons(state, now),
            "model": _short(self._model),
            "max_model_len": loaded.context if loaded else None,
            "uptime_s": round(now - self._started, 3),
            "boot_id": self.boot_id,
            "build": self.build,
            "worker": {
                "pid": worker.pid if worker else None,
                "generation": worker.generation if worker else 0,
                "restarts_in_window": worker.restarts if worker else 0,
            },
            "engine": self._engine(),
            "transport": {"route": carried.route, "integrity": carried.integrity},
            "device_probe": None,
        }

    # -- what the supervisor writes -----------------------------------------------------------

    def loading(self, notice: Loading) -> None:
        """How far the load is; no state changes by it."""
        self._loading = notice

    def warming(self, loaded: Loaded) -> bool:
        """The weights are in. A replacement stays `recovering` until its self-test has passed."""
        self.loaded = loaded
        return self._state is State.RECOVERING or self._move(State.WARMING)

    def ready(self) -> bool:
        """The self-test produced a token on every stage."""
        if self._state not in {State.WARMING, State.RECOVERING}:
            return self._refused(State.READY)
        self.fault_told = None
        return self._move(State.READY)

    def stall(self, stage: int, progress_at: float) -> bool:
        """No host-visible progress for the soft limit; `progress_at` is of this clock (R86)."""
        self._stage, self._progress_at = stage, progress_at
        return self._state is State.STALLED or self._move(State.STALLED)

    def progressed(self) -> bool:
        """Progress is back: `stalled` ends."""
        if self._state is not State.STALLED:
            return self._refused(State.READY)
        return self._move(State.READY)

    def hang(self, why: str, cause: Hang = Hang.NO_PROGRESS) -> bool:
        """The hard limit passed, or a peer is lost (R86, R88)."""
        if self._state is State.READY and cause is Hang.NO_PROGRESS:
            return self._refused(State.HUNG)
        return self._move(State.HUNG, why)

    def fault(self, fault: Fault) -> bool:
        """A stage is lost or the worker died: the first reason is kept (R78)."""
        if not self._move(State.FAULTED):
            return False
        self.fault_told = fault
        return True

    def recover(self, attempt: int, why: str) -> bool:
        """The old worker is gone and a new one is on its way."""
        if not self._move(State.RECOVERING, why):
            return False
        self._attempt, self.pong = attempt, None
        return True

    def drain(self, seconds: float) -> bool:
        """A stop was asked for; running requests have so long."""
        self._drain_until = self._clock() + seconds
        return self._move(State.DRAINING)

    def fail_load(self, why: str) -> bool:
        """The model cannot be loaded and the process was told to stay."""
        return self._move(State.LOAD_FAILED, why)

    def heard(self, pong: Pong) -> None:
        """The worker as it saw itself just now."""
        self.pong, self._heard = pong, self._clock()

    def load(self, in_flight: int, capacity: int | None) -> None:
        """How many requests are admitted, and how many may be; None while no worker says."""
        self._in_flight, self._capacity = in_flight, capacity

    def part_off(self, code: str, message: str) -> None:
        """An optional part does not work: serving goes on as `degraded`."""
        self._parts_off[code] = message

    def part_on(self, code: str) -> None:
        """The part works again."""
        self._parts_off.pop(code, None)

    # -- inside -------------------------------------------------------------------------------

    def _move(self, to: State, why: str = "") -> bool:
        legal = MOVES[self._state]
        if to is State.RECOVERING and self._supervision is Supervision.OFF:
            legal = set()
        if to not in legal:
            return self._refused(to)
        before, self._state, self._why = self._state, to, why
        self._entered = self._clock()
        if self._on_move:
            self._on_move(before, to, True)  # noqa: FBT003 - the callback's signature names it
        return True

    def _refused(self, to: State) -> bool:
        if self._on_move:
            self._on_move(self._state, to, False)  # noqa: FBT003 - as above
        return False

    def _fields(self, state: State, now: float) -> dict[str, Any]:
        """What the row of R96 adds at the top level."""
        match state:
            case State.LOADING:
                notice = self._loading
                total = notice.bytes_total
                return {
                    "phase": notice.phase,
                    "progress": round(notice.bytes_done / total, 4) if total else 0.0,
                    "bytes_done": notice.bytes_done,
                    "bytes_total": total,
                    "elapsed_s": round(now - self._started, 3),
                }
            case State.FAULTED if self.fault_told:
                told = _told(self.fault_told)
                return {"reason": told.pop("message"), **told, "since_s": self._since(now)}
            case State.HUNG | State.LOAD_FAILED:
                return {"reason": _short(self._why)}
            case State.RECOVERING:
                return {"attempt": self._attempt, "reason": _short(self._why)}
            case State.STALLED:
                return {"stage": self._stage, "waiting_s": self._waiting(now)}
            case _:
                return {"saturated": True} if self._state is State.READY and self.saturated else {}

    def _reasons(self, state: State, now: float) -> list[dict[str, Any]]:
        since = self._since(now)
        parts = [
            {"code": code, "message": _short(text)}
            for code, text in list(self._parts_off.items())[:5]
        ]
        full = [{"code": "saturated", "message": self._full()}] if self.saturated else []
        told = [{**_told(self.fault_told), "since_s": since}] if self.fault_told else []
        match state:
            case State.READY:
                return []
            case State.SATURATED:
                return full
            case State.DEGRADED:
                return parts + full
            case State.FAULTED:
                return told
            case State.STALLED:
                message = f"no result for {self._waiting(now):g} s"
                return [{"code": state.value, "message": message, "stage": self._stage}]
            case State.LOADING:
                message = "the weights are being read"
            case State.WARMING:
                message = "the weights are in and the self-test runs"
            case State.DRAINING:
                message = "a stop was asked for; running requests finish"
            case _:
                message = _short(self._why)
        return [{"code": state.value, "message": message, "since_s": since}, *told]

    def _engine(self) -> dict[str, Any] | None:
        pong = self.pong
        if pong is None:
            return None
        older = self.pong_age_s

        def stage(report: StageReport) -> dict[str, Any]:
            return {
                "stage": report.stage,
                "device": report.device,
                "state": report.state,
                "last_result_age_s": round(report.last_result_age_s + older, 3),
                "canary_age_s": round(report.canary_age_s + older, 3),
            }

        return {
            "heartbeat_age_s": round(pong.heartbeat_age_s + older, 3),
            "last_step_age_s": round(pong.progress_age_s + older, 3),
            "device_wait_s": round(pong.device_wait_s + older if pong.device_wait_s else 0.0, 3),
            "tick_max_s": round(pong.tick_max_s, 4),
            "running": pong.running,
            "waiting": pong.waiting,
            "stages": [stage(report) for report in pong.stages[:_STAGES]],
        }

    def _since(self, now: float) -> float:
        return round(now - self._entered, 3)

    def _waiting(self, now: float) -> float:
        return round(now - self._progress_at, 1)

    def _full(self) -> str:
        return f"{self._in_flight} of {self._capacity} requests are admitted; try again later."


def _told(fault: Fault) -> dict[str, Any]:
    return {
        "message": _short(fault.reason),
        "code": _REFUSAL[State.FAULTED],
        "error_number": fault.code,  # of the driver, or the exit status of a worker that died
        "device": fault.device or None,
        "stage": fault.stage if fault.stage >= 0 else None,
    }


def _short(text: str) -> str:
    return text if len(text) <= _TEXT else text[: _TEXT - 4] + " ..."
