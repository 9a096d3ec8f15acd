"""HostDevice: host memory in contexts of its own (cpu:0, cpu:1); faults on order (rule 120).

Each device is a context that behaves as one on a card: its buffers have an owner that can be asked
for, a call inside it can be seen from outside while it lasts, a sticky fault fails every later call
with the same code for ever, and a call fails in one of two ways, by raising or by returning a
status. `launch` is the one wrapper (R77): every call goes through it and leaves as `DeviceError`.
"""

from __future__ import annotations

import os
import signal
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from threading import Event
from time import monotonic
from typing import Any, NamedTuple, ParamSpec, TypeVar
from weakref import ref

import numpy as np
import numpy.typing as npt

from engine.device.device import Array, Device, Residency
from engine.device.orders import FaultBoard
from engine.errors import DeviceError, OutOfMemory
from engine.messages import Inject

P = ParamSpec("P")
T = TypeVar("T")

_CANARY = np.arange(1.0, 17.0, dtype=np.float32)  # 16 floats (R76)
_RECENT = 1024  # results of launches that may still be asked for: several steps' worth
_CONTEXTS = count(1)


class DriverError(Exception):
    """How the simulated driver raises; it never leaves this module."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class _Owned(NamedTuple):
    end: int
    residency: Residency
    alive: ref[Array]


class _AddressMap:
    """Which context owns which addresses: of the whole process, as a driver knows it."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._owned: dict[int, _Owned] = {}

    def enter(self, array: Array, residency: Residency, gone: Callable[[], None]) -> None:
        start = _address(array)
        if not array.nbytes or start in self._owned:
            return

        def forget(dead: ref[Array]) -> None:
            # the allocator may hand the address out again, so only the dead one's entry goes
            owned = self._owned.get(start)
            if owned is not None and owned.alive is dead:
                self.leave(start)
                gone()

        insort(self._starts, start)
        self._owned[start] = _Owned(start + array.nbytes, residency, ref(array, forget))

    def leave(self, start: int) -> bool:
        if self._owned.pop(start, None) is None:
            return False
        self._starts.pop(bisect_right(self._starts, start) - 1)
        return True

    def owner(self, address: int) -> Residency | None:
        place = bisect_right(self._starts, address) - 1
        if place < 0:
            return None
        owned = self._owned[self._starts[place]]
        return owned.residency if address < owned.end else None


_ADDRESSES = _AddressMap()


class HostDevice:
    """One simulated context in host memory.

    Args:
        name: as on the command line, e.g. `cpu:0`.
        ordinal: number of the device.
        generation: of the worker process; part of the residency of each buffer.
        faults: orders to fail; None, and nothing ever fails on order.
    """

    is_cuda = False

    def __init__(
        self, name: str, ordinal: int, generation: int, faults: FaultBoard | None = None
    ) -> None:
        self.name = name
        self.residency = Residency(generation, ordinal, next(_CONTEXTS))
        self.failure: DeviceError | None = None
        self._faults = faults
        self._lost: Inject | None = None
        self._since = 0.0
        self._count = 0
        self._bytes = 0
        self._made: deque[ref[Array]] = deque(maxlen=_RECENT)
        if faults is not None:
            faults.enrol(self)

    @property
    def waiting_s(self) -> float:
        """Seconds in the device call that is going on; 0.0 when in none."""
        since = self._since
        return monotonic() - since if since else 0.0

    @property
    def allocations(self) -> tuple[int, int]:
        """Live buffers of this context: (count, bytes)."""
        return self._count, self._bytes

    # -- memory -------------------------------------------------------------------------------

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
        """A new buffer with undefined contents. Raises `OutOfMemory` when there is no room."""
        return self._own(self.launch("allocate", np.empty, tuple(shape), dtype))

    def zeros(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
        """A new buffer of zeros. Raises `OutOfMemory` when there is no room."""
        return self._own(self.launch("allocate", np.zeros, tuple(shape), dtype))

    def free(self, array: Array) -> None:
        """Give a buffer back; freeing twice does nothing."""
        self.launch("free", self._free, array)

    def upload(self, array: npt.NDArray[Any]) -> Array:
        """A new buffer with the host array's contents."""
        buffer = self.empty(array.shape, array.dtype)
        self.launch("host to device", np.copyto, buffer, array)
        return buffer

    def download(self, array: Array) -> npt.NDArray[Any]:
        """A copy of the contents on the host."""
        return self.launch("device to host", _copied, array)

    def pinned(self, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Host memory: of no context."""
        memory = self.launch("allocate", np.empty, (count,), dtype)
        self._made.pop()
        return memory

    def fetch(self, array: Array, into: npt.NDArray[Any]) -> None:
        """Copy a buffer of ours to host memory."""
        self.launch("device to host", np.copyto, into, array)

    def store(self, array: npt.NDArray[Any], into: Array) -> None:
        """Copy host memory into a buffer of ours."""
        self.launch("host to device", np.copyto, into, array)

    def copy(self, array: Array, into: Array, source: Device) -> None:
        """Copy a buffer of the source's context into one of ours."""
        source.synchronize()
        self.launch("device to device", np.copyto, into, array)

    def reaches(self, other: Device) -> bool:
        """Whether this device can read the other's memory: simulated ones all can."""
        return not other.is_cuda

    def locate(self, array: Array) -> Residency | None:
        """Which context owns the buffer's memory (rule 3); None when none of ours does.

        Results of launches are found as well as allocated buffers, and so are views of either.
        """
        return self.launch("pointer attributes", self._locate, array)

    # -- work ---------------------------------------------------------------------------------

    def launch(self, call: str, kernel: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run one named piece of device work: the wrapper that sees every call.

        Raises: `DeviceError` when the driver raised or returned an error; `OutOfMemory`.
        """
        outer, self._since = self._since, monotonic()
        try:
            faults = self._faults
            if faults is None or not (faults.armed or self._lost):
                result = kernel(*args, **kwargs)  # some 250 times a step: nothing else here
            else:
                result = _checked(*self._driven(call, kernel, *args, **kwargs))
        except DriverError as error:
            self.failure = DeviceError(call, code=error.code, device=self.name)
            raise self.failure from error
        except MemoryError as error:
            raise OutOfMemory(f"{self.name} has no room for {call}: {error}") from error
        finally:
            self._since = outer
        if type(result) is np.ndarray:
            self._made.append(ref(result))  # type: ignore[arg-type] # an array, just seen
        return result

    def synchronize(self) -> None:
        """Wait until all queued work is done: here it always is."""
        self.launch("synchronize", _nothing)

    def canary(self) -> bool:
        """Do a tiny real piece of work and compare it on the host (R76)."""
        try:
            self.synchronize()
            probe = self.empty(_CANARY.shape, _CANARY.dtype)
            self.launch("host to device", np.copyto, probe, _CANARY)
            same = np.array_equal(self.download(probe), _CANARY)
            self.free(probe)
        except OutOfMemory:
            return True  # it answered, and has no room: never a sign of a lost context (rule 89)
        except DeviceError:
            return False
        return same

    def lose(self, order: Inject) -> None:
        """From now on calls fail (or hang once), as an asynchronous fault does: found later."""
        self._lost = order

    # -- inside -------------------------------------------------------------------------------

    def _driven(
        self, call: str, kernel: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> tuple[int, T]:
        """The simulated driver: (status, result), or an exception, as the order says."""
        order = self._lost
        if order is None and self._faults is not None and self._faults.armed:
            order = self._faults.take(self, call)
        match order.fault if order else None:
            case "sticky" | "returned" | "isolated":
                assert order is not None
                self._lost = None if order.fault == "isolated" else order
                if order.fault == "returned":
                    return order.code, None  # type: ignore[return-value] # nobody reads it
                raise DriverError(order.code)
            case "hang":
                assert order is not None
                self._lost = None
                Event().wait(order.seconds)  # as in a driver call: the interpreter lock is free
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "out_of_memory":
                self._lost = None
                raise MemoryError("on order")
        result = kernel(*args, **kwargs)
        if order is not None and order.fault == "nan_image":
            self._lost = None if _spoiled(result) else order  # else the next call's result
        return 0, result

    def _own(self, buffer: Array) -> Array:
        self._made.pop()  # no result of a kernel: it has an entry of its own until it is freed
        size = buffer.nbytes
        if not size:
            return buffer
        self._count += 1
        self._bytes += size
        _ADDRESSES.enter(buffer, self.residency, lambda: self._gone(size))
        return buffer

    def _free(self, buffer: Array) -> None:
        if _ADDRESSES.leave(_address(buffer)):
            self._gone(buffer.nbytes)

    def _gone(self, size: int) -> None:
        self._count -= 1
        self._bytes -= size

    def _locate(self, array: Array) -> Residency | None:
        address = _address(array)
        owner = _ADDRESSES.owner(address)
        if owner is not None:
            return owner
        for made in reversed(self._made):
            result = made()
            if result is None:
                continue
            start = _address(result)
            if start <= address < start + result.nbytes:
                # keep it findable for as long as it lives, however many launches follow
                _ADDRESSES.enter(result, self.residency, _nothing)
                return self.residency
        return None


def _address(array: Array) -> int:
    return array.__array_interface__["data"][0]  # type: ignore[no-any-return] # an int


def _checked(status: int, result: T) -> T:
    """A returned error is an error exactly as a raised one (rule 88)."""
    if status:
        raise DriverError(status)
    return result


def _copied(array: Array) -> npt.NDArray[Any]:
    return array.copy()


def _nothing() -> None:
    return None


def _spoiled(result: object) -> bool:
    if isinstance(result, np.ndarray) and result.dtype.kind == "f" and result.size:
        result.flat[0] = np.nan
        return True
    return False
