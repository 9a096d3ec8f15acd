"""A pipeline whose next token is a pure function of the tokens before it, kept as a device does.

Rows are written into pages and into a state of each slot; a token is drawn from what is read there,
so a page or slot that was given away too early, a row at a wrong place or a row that was forgotten
gives a wrong token and not a right one by luck. With `steps_in_flight=2` results come a step late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from engine.cache.budget import CachePlan
from engine.cache.pages import pages_for
from engine.config import EngineConfig
from engine.device.device import Device
from engine.device.faults import Judge, Latch
from engine.device.host import HostDevice
from engine.device.orders import FaultBoard
from engine.engine import Engine
from engine.errors import NotFinite
from engine.messages import Event, FinishReason, Generate, PatchSpec, Picture, RequestId
from engine.models.overlay import Overlay
from engine.scheduler.plan import Drawn, StepPlan, StepResult, Work
from engine.spec import ModelSpec

IMAGE = 90
SPEC = ModelSpec(
    family="fake",
    vocab=100,
    usable_vocab=96,
    hidden=4,
    layers=(),
    draft=None,
    residual=None,
    norm_eps=1e-5,
    context=512,
    end_ids=(2,),
    image_token=IMAGE,
    vision_ids=(IMAGE, 91, 92),
)
PATCHES = PatchSpec(
    family="fake",
    patch=2,
    merge=1,
    temporal=1,
    min_tokens=2,
    max_tokens=8,
    mean=(0.0, 0.0, 0.0),
    std=(1.0, 1.0, 1.0),
)


def next_token(tokens: Sequence[int], seed: int = 0, banned: Sequence[int] = ()) -> int:
    """The model: any plain id below 90, from every token before it."""
    state = 0
    for token in tokens:
        state = fold(state, token)
    return pick(state, seed, banned)


def fold(state: int, token: int) -> int:
    return (state * 1_000_003 + token + 1) % 2_147_483_647


def pick(state: int, seed: int, banned: Sequence[int]) -> int:
    token = (state ^ seed) % IMAGE
    while token in banned:
        token = (token + 1) % IMAGE
    return token


def answer(ask: Generate, context: int) -> tuple[list[int], FinishReason]:
    """All tokens of a request that runs alone and undisturbed, and why it ends."""
    tokens = list(ask.prompt)
    room = min(ask.max_tokens, context - len(tokens))
    for made in range(room):
        token = next_token(tokens, ask.sampling.seed, ask.stop_ids if made < ask.min_tokens else ())
        tokens.append(token)
        if token in ask.stop_ids:
            return tokens[len(ask.prompt) :], "stop"
    return tokens[len(ask.prompt) :], "length"


def a_plan_of_caches(
    *,
    slots: int = 4,
    pages: int = 64,
    page_tokens: int = 16,
    context: int = 512,
    snapshots: int = 0,
    snapshot_tokens: int = 32,
    reuse_bytes: int = 0,
) -> CachePlan:
    """Pages and snapshots of one byte each; reuse is off unless it has a budget."""
    return CachePlan(
        slots=slots,
        pages=pages,
        page_tokens=page_tokens,
        context=context,
        page_bytes=1,
        slot_bytes=1,
        snapshots=snapshots,
        snapshot_tokens=snapshot_tokens,
        reuse_bytes=reuse_bytes,
    )


@dataclass
class Slot:
    state: int = 0
    rows: int = 0
    last: int = -1  # the token that it drew last; only the "device" knows it


class FakePipeline:
    """Executes a step when it is submitted; says nothing of it before `result`.

    Args:
        caches: how many slots and pages there are.
        steps_in_flight: 1 as on the CPU, 2 as on a card.
        on_step: called with each plan before it runs; what it raises comes out of `submit`.
        late_errors: whether that comes out of `result` instead, as on a card.
    """

    def __init__(
        self,
        caches: CachePlan,
        *,
        steps_in_flight: int = 1,
        on_step: Callable[[StepPlan], None] | None = None,
        late_errors: bool = False,
        device: Device | None = None,
    ) -> None:
        self.caches = caches
        self.devices: tuple[Device, ...] = (device or HostDevice("cpu:0", 0, 0),)
        self.steps_in_flight = steps_in_flight
        self.wrote = False
        self.on_step = on_step
        self.late_errors = late_errors
        self.bad_rows: Callable[[Work], bool] = lambda _: False
        self.spoiled: Callable[[Work], int | None] = lambda _: None  # another id than the right one
        self.plans: list[StepPlan] = []
        self.on_their_way: deque[tuple[StepPlan, StepResult | Exception]] = deque()
        self.seen_images: list[tuple[RequestId, int]] = []
        self._slots = [Slot() for _ in range(caches.slots)]
        self._snapshots = [Slot()] * caches.snapshots
        self._pages = [[-1] * caches.page_tokens for _ in range(caches.pages)]

    def submit(self, plan: StepPlan, overlays: Mapping[RequestId, Overlay]) -> None:
        self.wrote = False
        late: Exception | None = None
        if self.on_step is not None:
            try:
                self.on_step(plan)
            except Exception as error:
                if not self.late_errors:
                    raise
                late = error
        self.plans.append(plan)
        result = self._run(plan, overlays)
        self.on_their_way.append((plan, late or result))

    def result(self, number: int) -> StepResult:
        plan, outcome = self.on_their_way.popleft()
        assert plan.number == number, "results are asked for in order"
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def release(self, slot: int) -> None:
        in_use = [w.slot for plan, _ in self.on_their_way for w in plan.work]
        assert slot not in in_use, f"slot {slot} is released and a step on its way uses it"
        self._slots[slot] = Slot()

    def _run(self, plan: StepPlan, overlays: Mapping[RequestId, Overlay]) -> StepResult:
        slots = [w.slot for w in plan.work]
        assert len(set(slots)) == len(slots), "a slot is planned twice"
        drawn: dict[RequestId, Drawn] = {}
        failed: dict[RequestId, NotFinite] = {}
        for slot_id, rows, snapshot in plan.loads:
            assert self._slots[slot_id].rows == 0, f"slot {slot_id} was not reset before a reuse"
            assert self._snapshots[snapshot].rows == rows, "a snapshot of another row"
            self._slots[slot_id] = replace(self._snapshots[snapshot], last=-1)
        for work in plan.work:
            slot = self._slots[work.slot]
            if work.fresh:
                assert slot.rows == 0, f"slot {work.slot} was not reset before {work.request}"
            assert slot.rows == work.start, f"{work.request}: {slot.rows} rows, not {work.start}"
            assert work.start + work.count <= self.caches.context - 1, "a row at C - 1 or above"
            tokens = work.tokens if work.tokens is not None else (slot.last,)
            self._write(work, tokens, overlays.get(work.request))
            for token in tokens:
                slot.state = fold(slot.state, token)
            slot.rows += work.count
            if work.draw is None:
                continue
            assert work.draw.position == slot.rows
            if self.bad_rows(work):
                failed[work.request] = NotFinite("on order")
                continue
            assert slot.state == self._state_from_pages(work), f"{work.request}: foreign rows"
            slot.last = pick(slot.state, work.draw.sampling.seed, work.draw.banned)
            spoiled = self.spoiled(work)
            drawn[work.request] = Drawn(slot.last if spoiled is None else spoiled, -0.5)
        for slot_id, snapshot in plan.saves:
            self._snapshots[snapshot] = replace(self._slots[slot_id])
        return StepResult(number=plan.number, drawn=drawn, failed=failed)

    def _write(self, work: Work, tokens: Sequence[int], overlay: Overlay | None) -> None:
        per_page = self.caches.page_tokens
        assert len(work.pages) >= pages_for(work.start + work.count, per_page)
        window = overlay.window(work.start, work.count) if overlay is not None else None
        spans = window.spans if window is not None else ()
        covered = {span.position + i for span in spans for i in range(span.length)}
        for i, token in enumerate(tokens):
            if token == IMAGE:
                assert work.tokens is not None, "a placeholder is fed to a decode step (rule 30)"
                assert i in covered, f"{work.request}: placeholder without an image row"
            position = work.start + i
            self._pages[work.pages[position // per_page]][position % per_page] = token
        self.seen_images += [(work.request, work.start + i) for i in sorted(covered)]

    def _state_from_pages(self, work: Work) -> int:
        per_page = self.caches.page_tokens
        state = 0
        for position in range(work.start + work.count):
            page = work.pages[position // per_page]
            state = fold(state, self._pages[page][position % per_page])
        return state


@dataclass
class FakeBuilder:
    """One overlay row for each placeholder; raises `error` instead as long as there is one."""

    device: HostDevice = field(default_factory=lambda: HostDevice("cpu:0", 0, 0))
    patches: PatchSpec = PATCHES
    built: list[tuple[Picture, ...]] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)

    def build(self, pictures: Sequence[Picture]) -> Overlay:
        if self.errors:
            raise self.errors.pop(0)
        self.built.append(tuple(pictures))
        spans = []
        rows = 0
        for picture in pictures:
            spans.append((picture.position, rows, picture.tokens))
            rows += picture.tokens
        return Overlay.of(self.device.zeros((rows, 4), "float32"), spans, self.device, 4)


class Clock:
    """Time that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Loop:
    """An engine over a fake pipeline, with all that a test wants to look at."""

    def __init__(
        self,
        *,
        caches: CachePlan | None = None,
        builder: FakeBuilder | None = None,
        steps_in_flight: int = 1,
        on_step: Callable[[StepPlan], None] | None = None,
        late_errors: bool = False,
        step_tokens: int = 64,
        queue_limit: int = 256,
        spec: ModelSpec = SPEC,
    ) -> None:
        self.caches = caches or a_plan_of_caches()
        self.board = FaultBoard()
        self.device = HostDevice("cpu:0", 0, 0, self.board)
        self.latch = Latch()
        self.judge = Judge([self.device], self.latch)
        self.clock = Clock()
        self.builder = builder
        self.pipeline = FakePipeline(
            self.caches,
            steps_in_flight=steps_in_flight,
            on_step=on_step,
            late_errors=late_errors,
            device=self.device,
        )
        config = EngineConfig(
            model="fake",
            max_sequences=self.caches.slots,
            step_tokens=step_tokens,
            page_tokens=self.caches.page_tokens,
            queue_limit=queue_limit,
        )
        self.engine = Engine(config, spec, self.pipeline, builder, self.judge, clock=self.clock)
        self.events: list[Event] = []

    def step(self) -> list[Event]:
        """One turn; a millisecond goes by."""
        self.clock.now += 0.001
        events = self.engine.step()
        self.events += events
        return events

    def run(self, turns: int = 5_000) -> list[Event]:
        """Until nothing is left to do."""
        for _ in range(turns):
            if not self.engine.busy:
                return self.events
            self.step()
        raise AssertionError(f"still busy after {turns} turns: {self.engine.stats()}")

    def of(self, request: str) -> list[Event]:
        """All events of one request so far."""
        return [event for event in self.events if event.request == request]

    def assert_all_given_back(self) -> None:
        stats = self.engine.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.pages_free == stats.pages_total
        assert stats.slots_free == stats.slots_total
        assert not self.pipeline.on_their_way

    def builder_calls(self) -> list[tuple[Picture, ...]]:
        """The pictures of each tower run."""
        assert self.builder is not None
        return self.builder.built
