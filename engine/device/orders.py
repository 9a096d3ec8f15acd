"""Faults on order (rule 120): each waits for its kind of call, strikes once and is gone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

from engine.messages import Inject

Phase = Literal["load", "step", "tower", "idle"]


class Strikable(Protocol):
    """A device that can be lost at once, without a call that fails for it."""

    def lose(self, order: Inject) -> None:
        """From now on every call fails; nobody was told yet."""


class FaultBoard:
    """The orders of one worker, and what its loop does at the moment.

    The loop says what it does (`during`), each device asks at each call whether an order strikes
    (`take`). The control thread gives orders; a plain list is enough between the two, because an
    order is only ever appended by one and removed by the other.
    """

    def __init__(self) -> None:
        self.armed = False  # read at each device call: false costs one attribute
        self.struck = 0
        self._orders: list[Inject] = []
        self._devices: list[Strikable] = []
        self._phase: Phase = "load"

    def enrol(self, device: Strikable) -> None:
        """Devices are enrolled in the order of their stages."""
        self._devices.append(device)

    def order(self, inject: Inject) -> None:
        """Take an order; `now` strikes at once. An unknown stage is refused with IndexError."""
        if inject.stage not in range(len(self._devices)):
            raise IndexError(inject.stage)
        device = self._devices[inject.stage]
        if inject.where != "now":
            self._orders.append(inject)
            self.armed = True
            return
        self.struck += 1
        if inject.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        device.lose(inject)

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """What the loop does inside the block."""
        before, self._phase = self._phase, phase
        try:
            yield
        finally:
            self._phase = before

    def take(self, device: Strikable, call: str) -> Inject | None:
        """The order that strikes at this call of this device, if there is one; it is used up."""
        for order in self._orders:
            if self._devices[order.stage] is device and self._due(order, call):
                self._orders.remove(order)
                self.armed = bool(self._orders)
                self.struck += 1
                return order
        return None

    def _due(self, order: Inject, call: str) -> bool:
        if order.fault == "out_of_memory" or order.where == "alloc":
            return call == "allocate" and order.where in ("alloc", self._phase)
        if order.fault == "nan_image":
            return self._phase == "tower" and call != "allocate"  # a new buffer is written over
        return order.where == self._phase
