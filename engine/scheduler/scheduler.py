"""plan(): who gets how many tokens; commit(): what came of it.

A plan may be made before the results of the one before it are on the host, so counts move on when a
step is planned, and a token that is on its way is only promised. Tokens that a request loses with
its slot are drawn again: a draw is a function of seed and position.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Callable
from typing import NamedTuple

from engine.cache.budget import CachePlan
from engine.cache.pages import PagePool, SlotId, SlotPool, SnapshotId
from engine.cache.prefix import PrefixCache
from engine.config import EngineConfig
from engine.errors import RequestFault, ServerError
from engine.messages import Event, Failed, Finished, Generate, RequestId, Token
from engine.scheduler import request as phases
from engine.scheduler.admission import Obstacle, obstacle, refusal
from engine.scheduler.holdings import Holdings
from engine.scheduler.plan import StepPlan, StepResult, Work
from engine.scheduler.request import Request, Running, Waiting
from engine.scheduler.rows import answer_row, prompt_rows
from engine.scheduler.shares import prompt_room, prompt_shares, ready, turns
from engine.spec import ModelSpec

MAX_REQUEUES = 3  # for want of device memory (rule 89)

INTERNAL = "The server failed while it worked on this request; the request was not at fault."
NO_ROOM = "The server has no room for this request now; try again later."

log = logging.getLogger(__name__)


class Booking(NamedTuple):
    """A sequence's part of a step on its way: it ends behind row `end - 1`."""

    request: Request
    running: Running
    end: int
    snapshot: SnapshotId | None


class Scheduler:
    """Owner of the requests. Host only, one thread; events gather until `take_events`."""

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        caches: CachePlan,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._spec = spec
        self._caches = caches
        self._clock = clock
        self._holdings = Holdings(caches)
        self._requests: dict[RequestId, Request] = {}
        self._queue: list[Request] = []  # in order of arrival
        self._running: list[Request] = []  # in order of arrival
        self._flights: dict[int, list[Booking]] = {}  # steps on their way, oldest first
        self._events: list[Event] = []
        self._arrivals = 0
        self._number = 0
        self._never_drawn = frozenset(spec.vision_ids) | {spec.image_token}
        self.waits_for: Obstacle | None = None  # what kept the head of the queue back last
        self.counters: dict[str, float] = {
            "prompt_rows_total": 0,
            "generated_tokens_total": 0,
            "preemptions_total": 0,
            "wasted_rows_total": 0,
            "capacity_refusals_total": 0,
            "prefix_cache_queries_total": 0,
            "prefix_cache_hits_total": 0,
        }

    # -- what the loop is told -----------------------------------------------------------------

    def add(self, ask: Generate) -> None:
        """Take a request in, or answer it at once with `Failed`.

        Raises: RequestFault when a request of this id is here already; that one is not touched.
        """
        if ask.request in self._requests:
            raise RequestFault(f"request {ask.request} is here already")
        if why := refusal(ask, self._spec, self._caches):
            log.error("request %s is refused: %s", ask.request, why.reason)
            over = why.code == "context_length_exceeded"
            self.counters["capacity_refusals_total"] += over
            self._events.append(Failed(ask.request, why.code, why.reason if over else INTERNAL))
            return
        # The queue is what waits behind free slots: a burst between two steps is not yet a queue.
        if len(self._queue) - self._holdings.slots.free >= self._config.queue_limit:
            self._events.append(Failed(ask.request, "overloaded", NO_ROOM))
            return
        now = self._clock()
        request = Request(
            ask=ask,
            arrival=self._arrivals,
            tokens=[*ask.prompt, *ask.emitted],
            limit=min(len(ask.prompt) + ask.max_tokens, self._caches.context),
            phase=Waiting(now),
            arrived_s=now,
        )
        self._arrivals += 1
        self._requests[request.id] = request
        self._queue.append(request)
        if ask.emitted:
            self._end_if_over(request, ask.emitted[-1])  # a replay may have all its tokens

    def abort(self, request_id: RequestId) -> None:
        """End a request without an event; one that is not here is over already."""
        if request := self._requests.get(request_id):
            self._finish(request, "aborted")

    def pause(self, request_id: RequestId) -> None:
        """Plan nothing for this request until `resume` (O85)."""
        if request := self._requests.get(request_id):
            request.paused = True

    def resume(self, request_id: RequestId) -> None:
        """Plan for this request again."""
        if request := self._requests.get(request_id):
            request.paused = False

    def expire(self) -> None:
        """End what has waited too long for its first slot (O63)."""
        oldest = self._clock() - self._config.queue_timeout_s
        for request in [r for r in self._queue if r.arrived_s <= oldest and not r.queue_s]:
            self.fail(request, "overloaded", NO_ROOM)

    def fail(self, request: Request, code: str, message: str) -> None:
        """End a request with an error; its slot is reset before the next one uses it (R29)."""
        if self._finish(request, "failed"):
            self._events.append(Failed(request.id, code, message))

    def requeue(self, request: Request) -> None:
        """Back to its place in the queue for want of memory, three times at most (rule 89)."""
        request.requeues += 1
        if request.requeues > MAX_REQUEUES:
            self.fail(request, "overloaded", NO_ROOM)
        elif isinstance(request.phase, Running):
            self._send_back(request, request.phase)

    # -- one step ------------------------------------------------------------------------------

    def admit(self) -> None:
        """Give slots and pages to waiting requests, by arrival, nobody overtaking (R74)."""
        self.waits_for = None
        if not self._queue:
            return
        # Who runs comes first: a page that it sat a step out for is not given to the queue.
        owed = sum(1 for seat in ready(self._running)[0] if not self._holdings.fits(seat.running))
        at = 0
        while at < len(self._queue):
            request = self._queue[at]
            if request.paused:
                at += 1
                continue
            match = self._holdings.find(request)
            self.waits_for = obstacle(request, self._holdings.room(owed, match))
            if self.waits_for:
                return
            now = self._clock()
            request.phase = running = self._holdings.seat(request, match, now)
            self._count_reuse(request, running)
            request.queue_s = request.queue_s or max(now - request.arrived_s, 1e-9)
            del self._queue[at]
            insort(self._running, request, key=_by_arrival)

    def starting(self) -> Request | None:
        """The one request whose pictures must be encoded before the next plan, if there is one.

        One a step, so that running answers wait for one tower run and not for many.
        """
        answers, prompts = ready(self._running)
        if all(seat.running.pictures_ready for seat in prompts):
            return None
        room = prompt_room(len(answers), self._config.step_tokens)
        shares = prompt_shares(prompts, room, self._clock())
        return next((s.request for s in shares if not s.running.pictures_ready), None)

    def pictures_ready(self, request: Request) -> None:
        """The image rows of this request are there; it may get rows."""
        if isinstance(running := request.phase, Running):
            running.pictures_ready = True

    def plan(self) -> StepPlan | None:
        """The next step; None when nobody can have a row."""
        answers, prompts = ready(self._running)
        work: list[Work] = []
        booked: list[Booking] = []
        holdings = self._holdings
        for seat in turns(answers, self._config.step_tokens, len(prompts)):
            request, running = seat
            # It may have been sent back to the queue a moment ago, for an older one's sake.
            if request.phase is running and self._grow(request, running):
                running.computed += 1
                save = holdings.snapshot_behind(running)
                work.append(answer_row(request, running, save))
                booked.append(Booking(request, running, running.computed, save))
        now = self._clock()
        if prompts:
            able = [s for s in prompts if s.running.pictures_ready and s.request.phase is s.running]
            room = prompt_room(len(work), self._config.step_tokens)
            for request, running, rows in prompt_shares(able, room, now):
                load = holdings.loaded(running)
                running.computed += rows
                save = holdings.snapshot_behind(running)
                work.append(prompt_rows(request, running, rows, load, save))
                booked.append(Booking(request, running, running.computed, save))
                self.counters["prompt_rows_total"] += rows
        if not work:
            return None
        self._number += 1
        for booking in booked:
            booking.running.last_step = self._number
            booking.running.turn_s = now
        self._flights[self._number] = booked
        return StepPlan(number=self._number, work=tuple(work))

    def commit(self, result: StepResult) -> list[ServerError]:
        """Take in what came of the oldest step on its way.

        Returns: the errors that ended a request; those of wasted rows are not among them.
        """
        errors = []
        for request, running, end, snapshot in self._flights.pop(result.number):
            if request.phase is not running:
                self.counters["wasted_rows_total"] += 1
                self._holdings.drop(snapshot)
            elif request.id in result.failed:
                self._holdings.drop(snapshot)
                errors.append(error := result.failed[request.id])
                self.fail(request, "internal_error", sentence(error))
            else:
                self._holdings.confirm(running, end, snapshot)
                if drawn := result.drawn.get(request.id):
                    self._commit_token(request, running, drawn.id, drawn.logprob)
        self._let_go()
        return errors

    def fail_step(self, number: int) -> None:
        """End every request of a step that failed as a whole (rule 90)."""
        for request, running, _, snapshot in self._flights.pop(number):
            self._holdings.drop(snapshot)
            if request.phase is running:
                self.fail(request, "internal_error", INTERNAL)
        self._let_go()

    def requeue_step(self, number: int) -> None:
        """Send every request of a step that found no memory back to the queue (rule 89)."""
        for request, running, _, snapshot in self._flights.pop(number):
            self._holdings.drop(snapshot)
            if request.phase is running:
                self.requeue(request)
        self._let_go()

    # -- what the loop reads -------------------------------------------------------------------

    def take_events(self) -> list[Event]:
        """Events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def take_freed(self) -> list[SlotId]:
        """Slots given back since the last call; their states are reset before the next plan."""
        return self._holdings.take_freed()

    def in_prompt(self, request_id: RequestId) -> bool:
        """Whether image rows of this request may still be needed: its prompt is not all planned."""
        request = self._requests.get(request_id)
        running = request.phase if request else None
        return (
            request is not None
            and isinstance(running, Running)
            and running.computed < request.prompt_tokens
        )

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def pages(self) -> PagePool:
        return self._holdings.pages

    @property
    def pages_free(self) -> int:
        """Pages that nobody needs, with those that are only kept for reuse."""
        return self._holdings.pages_free

    @property
    def prefixes(self) -> PrefixCache:
        return self._holdings.prefixes

    @property
    def slots(self) -> SlotPool:
        return self._holdings.slots

    # -- parts of plan and commit --------------------------------------------------------------

    def _grow(self, request: Request, running: Running) -> bool:
        """Make sure that one more row has a page; False when it must sit this step out.

        When there is none, the youngest request goes back to the queue (rule 89), paused ones
        first: they stand still anyway.
        """
        holdings = self._holdings
        while not holdings.fits(running):
            if holdings.grow(running):
                continue
            if holdings.pages_come_back:
                return False
            victim = max(self._running, key=_by_dispensability)
            if victim is request and running.promised:
                return False  # its last token is on its way: take that in first
            if victim is request and not holdings.can_ever_fit(running):
                self.fail(request, "overloaded", NO_ROOM)
                return False
            self.counters["preemptions_total"] += 1
            if isinstance(victim.phase, Running):
                holdings.enter(victim, victim.phase)  # it may be back before they are gone
                self._send_back(victim, victim.phase)
            if victim is request:
                return False
        return True

    def _commit_token(self, request: Request, running: Running, token: int, logprob: float) -> None:
        if not 0 <= token < self._spec.usable_vocab or token in self._never_drawn:
            self.fail(request, "internal_error", INTERNAL)  # rules 30, 85: before it is an index
            return
        if running.confirmed == running.prefix:
            self._holdings.enter(request, running)  # others with this prompt need not wait
        running.promised -= 1
        request.tokens.append(token)
        cached = 0
        if not request.prefill_s:  # its first token
            request.prefill_s = max(self._clock() - running.since_s, 1e-9)
            cached = request.cached_tokens or 0
        self.counters["generated_tokens_total"] += 1
        self._events.append(Token(request.id, token, logprob, cached))
        self._end_if_over(request, token)

    def _end_if_over(self, request: Request, last: int) -> None:
        """Finish the request if this token is its end; a stop id wins over the bound (O35)."""
        stops = last in request.ask.stop_ids
        if not stops and len(request.tokens) < request.limit:
            return
        self._finish(request, "stop" if stops else "length")
        self._events.append(
            Finished(
                request.id,
                reason="stop" if stops else "length",
                stop_id=last if stops else None,
                queue_s=request.queue_s,
                prefill_s=request.prefill_s,
                cached_tokens=request.cached_tokens or 0,
            )
        )

    def _finish(self, request: Request, outcome: phases.Outcome) -> bool:
        """End a request and give back what it holds; False when it was over already."""
        if isinstance(request.phase, phases.Finished):
            return False
        if isinstance(running := request.phase, Running):
            self._running.remove(request)
            if outcome == "failed":
                self._holdings.forget(running)
            elif outcome != "aborted" or running.last_step not in self._flights:
                self._holdings.enter(request, running)  # not of a walk that was cut off (rule 87)
            self._holdings.retire(running)
        else:
            self._queue.remove(request)
        request.phase = phases.Finished(outcome)
        del self._requests[request.id]
        self._let_go()
        return True

    def _send_back(self, request: Request, running: Running) -> None:
        """To the queue as prompt + emitted tokens; what it had computed is computed again."""
        self._running.remove(request)
        self._holdings.retire(running)
        request.phase = Waiting(self._clock())
        insort(self._queue, request, key=_by_arrival)
        self._let_go()

    def _count_reuse(self, request: Request, running: Running) -> None:
        self.counters["prefix_cache_queries_total"] += len(request.tokens)
        self.counters["prefix_cache_hits_total"] += running.reused
        if request.cached_tokens is None:
            request.cached_tokens = min(running.reused, request.prompt_tokens)

    def _let_go(self) -> None:
        self._holdings.let_go(next(iter(self._flights), self._number + 1))


def sentence(error: Exception) -> str:
    """What a client may read of an error: our own plain words, or a stable sentence (rule 92)."""
    return str(error) if type(error) is RequestFault else INTERNAL


def _by_arrival(request: Request) -> int:
    return request.arrival


def _by_dispensability(request: Request) -> tuple[bool, int]:
    return request.paused, request.arrival
