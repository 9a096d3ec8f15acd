"""the loop body: add, step (plan -> run -> commit), abort."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from engine.config import EngineConfig
from engine.device.faults import Judge, Verdict
from engine.errors import NotFinite, OutOfMemory, ServerError
from engine.messages import (
    Event,
    Fault,
    Finished,
    Generate,
    PatchSpec,
    Picture,
    RequestId,
    Token,
)
from engine.models.overlay import Overlay, OverlayBuilder
from engine.pipeline.runner import StepRunner
from engine.scheduler.plan import StepPlan, StepResult
from engine.scheduler.request import Request
from engine.scheduler.scheduler import Scheduler, sentence
from engine.spec import ModelSpec

BAD_STEPS = 3  # steps in a row with rows that are not finite, after which the worker is lost (O86)

log = logging.getLogger(__name__)

NO_OVERLAYS: Mapping[RequestId, Overlay] = {}


class PatchedBuilder(OverlayBuilder, Protocol):
    """An overlay builder that says how it wants its pictures cut; the vision encoder is one."""

    @property
    def patches(self) -> PatchSpec: ...


@dataclass(frozen=True, slots=True)
class Flight:
    """A step on its way; holds on to the image rows it reads until its result is here (rule 61)."""

    plan: StepPlan
    overlays: Mapping[RequestId, Overlay]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The loop in numbers, as `Pong` tells them; counts in requests, pages and slots."""

    running: int
    waiting: int
    waits_for: str | None  # why the head of the queue waits
    pages_free: int
    pages_total: int
    slots_free: int
    slots_total: int
    tick_max_s: float  # longest step so far
    progress_age_s: float
    counters: dict[str, float]  # monotonic


class Engine:
    """Drives one pipeline. One thread calls it; any may read `stats`, `busy` and `progress_at`.

    Args:
        config: what the worker was told.
        spec: the model; its ids bound what may be sent in and drawn.
        pipeline: runs the steps.
        builder: makes image rows; None for a model without pictures.
        judge: decides what a failure means, and holds the latch.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        pipeline: StepRunner,
        builder: PatchedBuilder | None,
        judge: Judge,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec = spec
        self._pipeline = pipeline
        self._builder = builder
        self._judge = judge
        self._clock = clock
        self._scheduler = Scheduler(config, spec, pipeline.caches, clock)
        self._flights: deque[Flight] = deque()
        self._overlays: dict[RequestId, Overlay] = {}
        self._bad_steps = 0
        self._idle = True
        self._tick_max_s = 0.0
        self._counters: dict[str, float] = {
            "steps_total": 0,
            "overlays_built_total": 0,
            "bad_rows_total": 0,
            "request_faults_total": 0,
            "out_of_memory_total": 0,
        }
        self.progress_at = (
            clock()
        )  # when work was last finished where the host can see it (rule 79)

    # -- commands ------------------------------------------------------------------------------

    def add(self, ask: Generate) -> None:
        """Take a request in; what cannot be served is `Failed` in the next step's events.

        Raises: RequestFault when a request of this id is here already; that one is not touched.
        """
        self._scheduler.add(ask)
        if self._idle:
            self.progress_at = self._clock()  # the wait for a result begins here
        self._idle = False

    def abort(self, request: RequestId) -> None:
        """End a request without an event and give all back; nothing happens when it is over."""
        self._scheduler.abort(request)
        self._idle = False

    def pause(self, request: RequestId) -> None:
        """Plan nothing for a request until `resume`."""
        self._scheduler.pause(request)

    def resume(self, request: RequestId) -> None:
        """Plan for a request again."""
        self._scheduler.resume(request)
        self._idle = False

    # -- the loop ------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do.

        When not, wait for a command, and step once a beat all the same: queue times run on.
        """
        return not self._idle

    def step(self) -> list[Event]:
        """One turn: encode at most one request's pictures, run one step, take in the oldest result.

        Raises: ContextLost when the judge says that a stage is lost; the latch is set by then.
        """
        began = self._clock()
        scheduler = self._scheduler
        scheduler.expire()
        self._reset_freed_slots()  # of requests that left since the last turn
        scheduler.admit()
        turned_away = 0
        while (request := scheduler.starting()) and not self._encode(request):
            turned_away += 1  # the next one may have its turn
        plan = scheduler.plan()
        if plan is not None:
            self._submit(plan)
        due = len(self._flights) >= (1 if plan is None else self._pipeline.steps_in_flight)
        if due:
            self._take_in(self._flights.popleft())
        self._reset_freed_slots()
        if self._overlays:
            self._drop_overlays()
        events = scheduler.take_events()
        # A result can make room for the queue, so idle is a turn in which nothing came at all.
        self._idle = plan is None and not (due or events or turned_away)
        if plan is not None:
            self._tick_max_s = max(self._tick_max_s, self._clock() - began)
        return events

    def stats(self) -> EngineStats:
        """The loop in numbers; safe from any thread."""
        scheduler = self._scheduler
        return EngineStats(
            running=scheduler.running,
            waiting=scheduler.waiting,
            waits_for=scheduler.waits_for,
            pages_free=scheduler.pages_free,
            pages_total=scheduler.pages.total,
            slots_free=scheduler.slots.free,
            slots_total=scheduler.slots.total,
            tick_max_s=self._tick_max_s,
            progress_age_s=self._clock() - self.progress_at,
            counters=scheduler.counters | self._counters,
        )

    def self_test(self) -> int:
        """Make one token from a short prompt, with one picture when there is a builder.

        It goes the way of any request, so it warms up what the first request would wait for.

        Returns: the token.
        Raises: ServerError when no legal token came; ContextLost when a stage is lost.
        """
        ask = _self_test_request(self._spec, self._builder)
        self.add(ask)
        events: list[Event] = []
        while self.busy and not (events and not isinstance(events[-1], Token)):
            events += self.step()
        match events:
            case [Token(id=token, logprob=float(logprob)), Finished()] if logprob <= 0.0:
                return token
            case _:
                raise ServerError(f"the self-test ended in {events} and not in one token.")

    # -- parts of a step -----------------------------------------------------------------------

    def _encode(self, request: Request) -> bool:
        """Image rows for a request whose first rows come now; False when it cannot have them."""
        try:
            overlay = self._build(request.unseen_pictures)
        except (OutOfMemory, MemoryError) as error:
            self._counters["out_of_memory_total"] += 1
            log.warning("request %s finds no memory for its pictures: %s", request.id, str(error))
            self._scheduler.requeue(request)
            return False
        except Exception as error:  # noqa: BLE001 - rule 88: the judge decides what any error means
            self._judged(error, "tower", (request.id,))
            self._scheduler.fail(request, "internal_error", sentence(error))
            return False
        self._overlays[request.id] = overlay
        self._counters["overlays_built_total"] += 1
        self._scheduler.pictures_ready(request)
        self.progress_at = self._clock()
        return True

    def _build(self, pictures: tuple[Picture, ...]) -> Overlay:
        if self._builder is None:
            raise ServerError("a picture came to a worker without a tower")
        try:
            return self._builder.build(pictures)
        except (OutOfMemory, MemoryError):
            # Nothing of the session is written yet, so what was freed meanwhile may be tried once.
            return self._builder.build(pictures)

    def _submit(self, plan: StepPlan) -> None:
        overlays = self._overlays.copy() if self._overlays else NO_OVERLAYS
        self._flights.append(Flight(plan, overlays))
        try:
            try:
                self._pipeline.submit(plan, overlays)
            except (OutOfMemory, MemoryError):
                if self._pipeline.wrote:
                    raise
                self._pipeline.submit(plan, overlays)
        except (OutOfMemory, MemoryError) as error:
            self._no_memory(self._flights.pop(), error)
        except Exception as error:  # noqa: BLE001 - rule 88: the judge decides what any error means
            self._step_failed(self._flights.pop(), error)

    def _take_in(self, flight: Flight) -> None:
        try:
            result = self._pipeline.result(flight.plan.number)
        except (OutOfMemory, MemoryError) as error:
            self._no_memory(flight, error)
            return
        except Exception as error:  # noqa: BLE001 - rule 88: the judge decides what any error means
            self._step_failed(flight, error)
            return
        errors = self._scheduler.commit(result)
        self._counters["steps_total"] += 1
        self.progress_at = self._clock()
        self._count_bad_rows(result, sum(isinstance(error, NotFinite) for error in errors))

    def _no_memory(self, flight: Flight, error: Exception) -> None:
        """No room is never a lost stage: the step's requests go back to the queue (rule 89)."""
        self._counters["out_of_memory_total"] += 1
        log.warning("step %d finds no memory: %s", flight.plan.number, str(error))
        self._scheduler.requeue_step(flight.plan.number)

    def _step_failed(self, flight: Flight, error: Exception) -> None:
        self._judged(error, "step", tuple(work.request for work in flight.plan.work))
        self._scheduler.fail_step(flight.plan.number)

    def _judged(self, error: Exception, where: str, requests: tuple[RequestId, ...]) -> None:
        """Return when only these requests are hit. Raises ContextLost when a stage is lost."""
        # One line for an error that says what it is; an unknown one needs its traceback. The text
        # and not the error itself: through its frames it would keep image rows alive.
        trace = None if isinstance(error, ServerError) else error
        log.error("%s failed for %s: %s", where, ", ".join(requests), str(error), exc_info=trace)
        if self._judge.verdict(error, where) is Verdict.WORKER:
            raise self._judge.lost() from error
        self._counters["request_faults_total"] += len(requests)

    def _count_bad_rows(self, result: StepResult, bad: int) -> None:
        """Three steps in a row with rows that are not finite are the worker's fault (O86)."""
        if bad:
            self._bad_steps += 1
            self._counters["bad_rows_total"] += bad
            log.error("step %d has %d rows that are not finite", result.number, bad)
        elif result.drawn:
            self._bad_steps = 0
        if self._bad_steps >= BAD_STEPS:
            stage = len(self._pipeline.devices) - 1
            device = self._pipeline.devices[stage].name
            reason = f"{BAD_STEPS} steps in a row had rows that were not finite"
            self._judge.latch.set(Fault(reason, code=0, call="sample", device=device, stage=stage))
            raise self._judge.lost()

    def _reset_freed_slots(self) -> None:
        """Let the pipeline forget ended sequences before somebody else gets their slots (R29)."""
        for slot in self._scheduler.take_freed():
            self._pipeline.release(slot)

    def _drop_overlays(self) -> None:
        """Let go of image rows that no later step needs; steps on their way hold their own."""
        for request in [r for r in self._overlays if not self._scheduler.in_prompt(r)]:
            del self._overlays[request]


def _self_test_request(spec: ModelSpec, builder: PatchedBuilder | None) -> Generate:
    """A greedy request for one token: a few plain ids, and one small grey picture among them."""
    vision = {*spec.vision_ids, spec.image_token, *spec.end_ids}
    plain = [i for i in range(min(spec.usable_vocab, 64)) if i not in vision][:4]
    pictures: tuple[Picture, ...] = ()
    prompt = plain
    if builder is not None and spec.image_token is not None:
        picture = _grey_picture(builder.patches, position=1)
        pictures = (picture,)
        prompt = [*plain[:1], *[spec.image_token] * picture.tokens, *plain[1:]]
    return Generate(
        request=RequestId("self-test"), prompt=tuple(prompt), pictures=pictures, max_tokens=1
    )


def _grey_picture(patches: PatchSpec, position: int) -> Picture:
    """The smallest picture that the family cuts: one row of merged patches."""
    tokens = max(patches.min_tokens, 1)
    height, width = patches.merge, patches.merge * tokens
    row_bytes = 3 * patches.patch * patches.patch
    return Picture(
        patches=bytes([128]) * (height * width * row_bytes),
        grid=(1, height, width),
        position=position,
        tokens=tokens,
        digest="self-test",
    )
