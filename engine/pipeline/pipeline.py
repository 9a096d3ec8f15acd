"""the stages in order, with steps in flight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from threading import Lock

import numpy as np

from engine.device.device import Array
from engine.errors import ConfigRefused, NotFinite, RequestFault, ServerError
from engine.messages import RequestId
from engine.models.batch import Batch
from engine.models.overlay import Overlay
from engine.pipeline.boundary import Boundary
from engine.pipeline.intake import Intake
from engine.pipeline.stage import Stage
from engine.pipeline.transport import Route
from engine.sampling.sampler import Sampler
from engine.scheduler.plan import Drawn, StepPlan, StepResult

COUNTERS = (
    "split_steps_total",
    *(f"boundary_{what}_{route}_total" for what in ("copies", "rows") for route in Route),
)


class Pipeline:
    """A `StepRunner` that runs each step at once, as a CPU does; `result` only hands it out.

    The schedule is the serial walk: a step goes through all stages before the next one starts.

    Args:
        stages: in order; together all layers.
        boundaries: between each stage and the next.
        counters: where split steps and what crossed are counted; shared with who tells them.
    """

    steps_in_flight = 1

    def __init__(
        self,
        stages: Sequence[Stage],
        boundaries: Sequence[Boundary] = (),
        counters: dict[str, float] | None = None,
    ) -> None:
        first, last = stages[0], stages[-1]
        if any(stage.caches.context != first.caches.context for stage in stages):
            raise ConfigRefused(
                "stages have different capacities: "
                f"{[stage.caches.context for stage in stages]} rows; give all the same (R104)."
            )
        for number, (left, right) in enumerate(pairwise(stages)):
            link = boundaries[number].link if number < len(boundaries) else None
            if link is None or (link.source, link.target) != (left.device, right.device):
                raise AssertionError(f"no boundary from stage {number} to stage {number + 1}.")
        self.stages = tuple(stages)
        self.boundaries = tuple(boundaries)
        self.counters = counters if counters is not None else {}
        self.counters |= dict.fromkeys(COUNTERS, 0.0)
        self._walking = Lock()
        self.caches = first.caches
        self.devices = tuple(stage.device for stage in stages)
        self._intake = Intake(first.caches)
        self._sampler = Sampler(last.spec, last.ops, slots=last.caches.slots)
        self._results: dict[int, StepResult] = {}

    @property
    def wrote(self) -> bool:
        return any(stage.wrote for stage in self.stages)

    def submit(self, plan: StepPlan, overlays: Mapping[RequestId, Overlay]) -> None:
        """Run one step. Raises what a stage raises; then no result of this step will come."""
        for stage in self.stages:
            stage.wrote = False
        batch = self._intake.batch(plan, overlays)
        fresh = [work.slot for work in plan.work if work.fresh]
        # Loads come first: a place that one sequence reads may be another's to write.
        for slot, rows, snapshot in plan.loads:
            for stage in self.stages:
                stage.resume(slot, rows, snapshot)
        logits = self.walk(batch, fresh)
        for slot, snapshot in plan.saves:
            for stage in self.stages:
                stage.keep(slot, snapshot)
        self._results[plan.number] = self._draw(plan, logits)

    def walk(self, batch: Batch, fresh: list[int]) -> Array:
        """Through all stages; one walk at a time has the boundaries (rule 63)."""
        if not self._walking.acquire(blocking=False):
            raise RequestFault("another step is on its way through the stages.")
        try:
            x = self.stages[0].run(None, batch, fresh)
            if not self.boundaries:
                return x
            rest = replace(batch, overlays=()) if batch.overlays else batch
            for stage, boundary in zip(self.stages[1:], self.boundaries, strict=True):
                sent = boundary.send(x)
                self._count(boundary.link.route, len(sent))
                x = stage.run(sent, rest, fresh)
            self.counters["split_steps_total"] += 1
            return x
        finally:
            for boundary in self.boundaries:
                boundary.done()
            self._walking.release()

    def _count(self, route: Route, rows: int) -> None:
        self.counters[f"boundary_copies_{route}_total"] += 1
        self.counters[f"boundary_rows_{route}_total"] += rows

    def result(self, number: int) -> StepResult:
        """What came of a step that was submitted."""
        return self._results.pop(number)

    def release(self, slot: int) -> None:
        """Forget a slot's sequence on every stage."""
        for stage in self.stages:
            stage.release(slot)

    def _draw(self, plan: StepPlan, logits: Array) -> StepResult:
        """A token for each sequence whose last known token was among the step's rows."""
        slots, positions, banned, requests = [], [], [], []
        for work in plan.work:
            if draw := work.draw:
                self._sampler.set(work.slot, draw.sampling, draw.choice)
                slots.append(work.slot)
                positions.append(draw.position)
                banned.append(draw.banned)
                requests.append(work.request)
        if not slots:
            return StepResult(number=plan.number, drawn={})
        places = np.array(slots, np.intp)
        ids, logprobs = self._sampler.draw(logits, places, positions, banned)
        self._intake.note(places, ids)
        drawn: dict[RequestId, Drawn] = {}
        failed: dict[RequestId, ServerError] = {}
        for request, token, logprob in zip(requests, ids.tolist(), logprobs.tolist(), strict=True):
            if token < 0:
                failed[request] = NotFinite(
                    f"step {plan.number}: logits of {request} hold no token"
                )
            else:
                drawn[request] = Drawn(token, logprob)
        return StepResult(number=plan.number, drawn=drawn, failed=failed)
