"""StepRunner: what the engine loop needs of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from engine.cache.budget import CachePlan
from engine.device.device import Device
from engine.messages import RequestId
from engine.models.overlay import Overlay
from engine.scheduler.plan import StepPlan, StepResult


class StepRunner(Protocol):
    """Runs plans in the order they are submitted; one thread calls it."""

    caches: CachePlan
    steps_in_flight: int  # steps that may be submitted before the first one's result is asked for

    @property
    def devices(self) -> tuple[Device, ...]:
        """Of the stages, in order."""

    @property
    def wrote(self) -> bool:
        """Whether the last step that raised may have changed a sequence's state."""

    def submit(self, plan: StepPlan, overlays: Mapping[RequestId, Overlay]) -> None:
        """Queue one step. What a device or our own code raises comes out as it is."""

    def result(self, number: int) -> StepResult:
        """What came of step `number`, the oldest one on its way; waits for it."""

    def release(self, slot: int) -> None:
        """Forget a slot's sequence; no step on its way uses it. Host bookkeeping only."""
