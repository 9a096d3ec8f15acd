"""the stages in order, with steps in flight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from engine.device.device import Array
from engine.errors import ConfigRefused, NotFinite, ServerError
from engine.messages import RequestId
from engine.models.overlay import Overlay
from engine.pipeline.intake import Intake
from engine.pipeline.stage import Stage
from engine.sampling.sampler import Sampler
from engine.scheduler.plan import Drawn, StepPlan, StepResult


class Pipeline:
    """A `StepRunner` that runs each step at once, as a CPU does; `result` only hands it out."""

    steps_in_flight = 1

    def __init__(self, stages: Sequence[Stage]) -> None:
        first, last = stages[0], stages[-1]
        if any(stage.caches.context != first.caches.context for stage in stages):
            raise ConfigRefused(
                "stages have different capacities: "
                f"{[stage.caches.context for stage in stages]} rows; give all the same (R104)."
            )
        self.stages = tuple(stages)
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
        x: Array | None = None
        for stage in self.stages:
            x = stage.run(x, batch, fresh)
        if x is None:
            raise AssertionError("a pipeline has at least one stage")
        self._results[plan.number] = self._draw(plan, x)

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
