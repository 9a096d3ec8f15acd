"""Transport protocol; peer copy and host bounce."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np

from engine.config import Transport as Wanted
from engine.device.device import Array, Device
from engine.errors import ConfigError, ShapeMismatch

PROBE_ROWS = (1, 8, 16)  # and the most that a call can have (rule 72)

log = logging.getLogger(__name__)


class Route(StrEnum):
    """How rows get from one context to another."""

    LOCAL = "local"  # there is one context only
    PEER = "peer"
    HOST = "host"


class Transport(Protocol):
    """Copies rows from one context into another; every route keeps every bit (rules 17, 68)."""

    route: Route

    def copy(self, x: Array, into: Array) -> None:
        """All of `x`, a buffer of the source, into one of the target; complete on return.

        Raises: ShapeMismatch when their shapes differ, or there is no room on the way.
        """


class DirectCopy:
    """From device to device: in one context (`local`), or between two (`peer`)."""

    def __init__(self, source: Device, target: Device) -> None:
        same = source.residency == target.residency
        self.route = Route.LOCAL if same else Route.PEER
        self._source, self._target = source, target

    def copy(self, x: Array, into: Array) -> None:
        """As `Transport.copy`."""
        _check(x, into)
        self._target.copy(x, into, self._source)


class HostBounce:
    """Through page-locked host memory of its own, which needs no capability (rule 69).

    Args:
        source: where rows are.
        target: where they go.
        count: floats that fit into the memory on the way.
    """

    route = Route.HOST

    def __init__(self, source: Device, target: Device, count: int) -> None:
        self._source, self._target = source, target
        self._memory = source.pinned(count, np.float32)

    def copy(self, x: Array, into: Array) -> None:
        """As `Transport.copy`."""
        _check(x, into)
        if x.size > self._memory.size:
            raise ShapeMismatch(
                f"{x.shape} rows do not fit into {self._memory.size} floats of host memory."
            )
        stop = self._memory[: x.size].reshape(x.shape)
        self._source.fetch(x, stop)
        self._target.store(stop, into)


def _check(x: Array, into: Array) -> None:
    if x.shape != into.shape or x.dtype != into.dtype:
        raise ShapeMismatch(
            f"{x.shape} {x.dtype} cannot be copied into {into.shape} {into.dtype}; "
            "exactly the payload moves (rule 66)."
        )


@dataclass(frozen=True, slots=True)
class Link:
    """The way from one context to another, chosen at boot and the same ever after."""

    source: Device
    target: Device
    route: Route
    probes: int  # integrity probes that passed: widths times directions

    def transport(self, count: int) -> Transport:
        """A transport for up to `count` floats at a time. Raises `OutOfMemory`."""
        if self.route is Route.HOST:
            return HostBounce(self.source, self.target, count)
        return DirectCopy(self.source, self.target)


def choose(source: Device, target: Device, wanted: Wanted, *, rows: int, width: int) -> Link:
    """How rows get from `source` to `target`: capability and probe decide (rules 68 to 72).

    Args:
        source: where rows are made.
        target: where they are read.
        wanted: of `--transport`.
        rows: the most of one copy.
        width: floats of a row.

    Raises:
        ConfigError: `peer` was asked for and this pair cannot, or no way keeps the bytes.
    """
    pair = f"{source.name} and {target.name}"
    if source.residency == target.residency:
        return Link(source, target, Route.LOCAL, 0)
    if wanted != "host":
        if not (source.reaches(target) and target.reaches(source)):
            why = f"{pair} cannot read each other's memory"
        elif passed := _keeps_bytes(source, target, Route.PEER, rows, width):
            return Link(source, target, Route.PEER, passed)
        else:
            why = f"a copy between {pair} came back wrong"
        if wanted == "peer":
            raise ConfigError(f"--transport peer: {why}; use auto or host.")
        log.warning("rows between %s go through the host: %s", pair, why)
    if passed := _keeps_bytes(source, target, Route.HOST, rows, width):
        return Link(source, target, Route.HOST, passed)
    raise ConfigError(f"--transport: a copy through the host between {pair} came back wrong.")


def _keeps_bytes(one: Device, other: Device, route: Route, rows: int, width: int) -> int:
    """Probes that passed, over every width in both directions; 0 as soon as one has not."""
    passed = 0
    widths = sorted({min(count, rows) for count in (*PROBE_ROWS, rows)})
    for source, target in ((one, other), (other, one)):
        transport = Link(source, target, route, 0).transport(rows * width)
        for count in widths:
            if not _probe(transport, source, target, count, width):
                return 0
            passed += 1
    return passed


def _probe(transport: Transport, source: Device, target: Device, rows: int, width: int) -> bool:
    """Copy a pattern onto its inverse and compare every byte (rule 72)."""
    bits = np.random.default_rng((rows, width)).integers(0, 2**32, (rows, width), np.uint32)
    pattern, inverse = bits.view(np.float32), (~bits).view(np.float32)
    sent, got = source.upload(pattern), target.upload(inverse)
    transport.copy(sent, got)
    return np.array_equal(target.download(got).view(np.uint32), bits)
