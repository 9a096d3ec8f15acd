"""one judge and one latch: does every stage still do real work?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from threading import Lock
from time import monotonic

from engine.device.device import Device
from engine.errors import ContextLost, DeviceError, Overloaded
from engine.messages import Fault


class Verdict(Enum):
    """What a failure means (rule 88)."""

    REQUEST = "every stage still works: end this request, serve on"
    WORKER = "a stage is lost: admit nothing, replace the process"


class Latch:
    """Set once, by the first writer, and never cleared (R78); one in each worker (R79).

    Args:
        on_set: told the fault, once, in the thread of the first writer.
    """

    def __init__(self, on_set: Callable[[Fault], None] | None = None) -> None:
        self._on_set = on_set
        self._lock = Lock()
        self._held: tuple[Fault, float] | None = None

    def set(self, fault: Fault) -> bool:
        """Whether this caller was the first; a later fault changes nothing."""
        with self._lock:
            if self._held is not None:
                return False
            self._held = (fault, monotonic())
        if self._on_set:
            self._on_set(fault)
        return True

    @property
    def fault(self) -> Fault | None:
        """Whether it is set and why, in one read."""
        held = self._held
        return held[0] if held else None

    @property
    def age_s(self) -> float:
        """Seconds since it was set; 0.0 when it is not."""
        held = self._held
        return monotonic() - held[1] if held else 0.0


class Judge:
    """Decides by evidence: each stage does a tiny real piece of work, compared on the host.

    Neither the code nor the text of an error decides (R76). Used by the loop thread alone; the
    ages may be read from any thread.

    Args:
        devices: of the stages, in order.
        latch: where a lost stage is written down.
    """

    def __init__(self, devices: Sequence[Device], latch: Latch) -> None:
        self.devices = tuple(devices)
        self.latch = latch
        self.answered_at = [monotonic()] * len(self.devices)  # last good canary of each stage
        self.probes_passed = 0
        self.probes_failed = 0

    def verdict(self, error: BaseException, where: str) -> Verdict:
        """What a failure at `where` (`step`, `tower`, ...) means.

        Every failure is probed on every stage, raised or returned, whatever its type, with two
        exceptions: no room is never a lost context (rule 89), and a latched worker touches no
        device again (R80, R83).
        """
        if self.latch.fault is not None:
            return Verdict.WORKER
        if isinstance(error, Overloaded):
            return Verdict.REQUEST
        dead = self._probe()
        if not dead:
            return Verdict.REQUEST
        failed = error if isinstance(error, DeviceError) else None
        # on a card every context of the process dies with the one that faulted: name that one
        named = {self.devices[stage].name: stage for stage in reversed(dead)}
        stage = named.get(failed.device, min(dead)) if failed else min(dead)
        self._latch(stage, failed or dead[stage], where)
        return Verdict.WORKER

    def canaries(self) -> None:
        """A round trip on each stage while there is no work (R81); latches a lost one.

        One that fails is a failed device call like any other: the probe behind it decides (R76).
        """
        if self.latch.fault is None and self._probe() and (dead := self._probe()):
            self._latch(min(dead), dead[min(dead)], "idle")

    def lost(self) -> ContextLost:
        """The latched fault as an exception, to leave the loop with."""
        fault = self.latch.fault
        if fault is None:
            raise AssertionError("asked for the fault of a worker that has none")
        return ContextLost(fault.call, code=fault.code, device=fault.device)

    def _probe(self) -> dict[int, DeviceError | None]:
        """The stages that no longer answer, and the call that failed; None: a wrong result."""
        dead = {}
        for stage, device in enumerate(self.devices):
            before = device.failure
            if device.canary():
                self.answered_at[stage] = monotonic()
            else:
                dead[stage] = device.failure if device.failure is not before else None
        if dead:
            self.probes_failed += 1
        else:
            self.probes_passed += 1
        return dead

    def _latch(self, stage: int, cause: DeviceError | None, where: str) -> None:
        device = self.devices[stage].name
        call = cause.call if cause else "canary"
        code = cause.code if cause else 0
        outcome = f"failed with code {code}" if cause else "came back wrong"
        reason = f"{call} ({where}) {outcome} and stage {stage} does no more work"
        self.latch.set(Fault(reason=reason, code=code, call=call, device=device, stage=stage))
