"""The Device protocol: memory, waiting, and which context a buffer lives in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import numpy.typing as npt

from engine.errors import DeviceError

Array = npt.NDArray[Any]  # a NumPy array, or a CuPy array that answers the same calls
P = ParamSpec("P")
T = TypeVar("T")


class Residency(NamedTuple):
    """Where a buffer can be dereferenced (rule 4): neighbours iff all three are equal."""

    generation: int  # of the worker process
    ordinal: int  # of the device
    context: int  # handle of the context


class Device(Protocol):
    """One device context of this worker; every call that can fail on it goes through here (R77).

    A failed call, raised or returned by the driver, leaves as `DeviceError`; the judge decides
    what it means. Calls after a sticky fault fail with the same code for ever, as on a card.
    """

    name: str  # as on the command line: `cpu:0`, `cuda:1`
    is_cuda: bool
    residency: Residency
    failure: DeviceError | None  # the last failed call of this context, for the judge to quote

    @property
    def waiting_s(self) -> float:
        """Seconds spent so far in the device call going on; 0.0 when in none. Thread-safe."""

    @property
    def allocations(self) -> tuple[int, int]:
        """Live allocations of this context: (count, bytes)."""

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
        """A new buffer with undefined contents. Raises `OutOfMemory` when there is no room."""

    def zeros(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
        """A new buffer of zeros. Raises `OutOfMemory` when there is no room."""

    def free(self, array: Array) -> None:
        """Give a buffer of `empty`, `zeros` or `upload` back; freeing twice does nothing."""

    def upload(self, array: npt.NDArray[Any]) -> Array:
        """A new buffer with the host array's contents; complete when this returns."""

    def download(self, array: Array) -> npt.NDArray[Any]:
        """The contents on the host; waits for all work queued before it."""

    def pinned(self, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Host memory (count,) that copies to and from this device need no stop beside.

        Raises: `OutOfMemory` when there is no room.
        """

    def fetch(self, array: Array, into: npt.NDArray[Any]) -> None:
        """Copy a buffer of ours to host memory; complete when this returns (rule 18)."""

    def store(self, array: npt.NDArray[Any], into: Array) -> None:
        """Copy host memory into a buffer of ours; complete when this returns (rule 18)."""

    def copy(self, array: Array, into: Array, source: Device) -> None:
        """Copy a buffer of `source`'s context into one of ours, without a stop on the host.

        Waits for the work that `source` has queued; complete when this returns (rule 19).
        """

    def reaches(self, other: Device) -> bool:
        """Ask the driver whether this device can read the other's memory (rule 70)."""

    def locate(self, array: Array) -> Residency | None:
        """Ask the driver where the buffer lives (rule 3); None when no context of ours owns it."""

    def launch(self, call: str, kernel: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run one named piece of device work, observed: the one way to a kernel."""

    def synchronize(self) -> None:
        """Wait until all queued work is done."""

    def canary(self) -> bool:
        """Do a tiny real piece of work and compare it on the host (R76); False when it fails.

        Synchronises, allocates 16 floats, writes, reads back, compares. Never raises `DeviceError`.
        """
