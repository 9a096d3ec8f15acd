"""The worker's control thread: it answers pings, takes orders and says what happened, at once.

It owns its socket and nothing else; what it tells of the loop it reads from `Vitals`, which the
loop writes. So a loop that hangs in a device call is seen from outside, and seen as hanging.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import SimpleQueue
from time import monotonic
from typing import Final, Protocol

import msgspec
import zmq

from engine.device.device import Device
from engine.device.faults import Judge
from engine.messages import Carried, Control, Inject, Notice, Ping, Pong, StageReport, Stop

LINGER_MS: Final = 1_000  # so long the end of the process waits for its last notice to be read

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Control).decode


class Stats(Protocol):
    """What a loop counts, as one immutable record (counts of requests, pages and slots)."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def pages_free(self) -> int: ...
    @property
    def pages_total(self) -> int: ...
    @property
    def slots_free(self) -> int: ...
    @property
    def slots_total(self) -> int: ...
    @property
    def counters(self) -> Mapping[str, float]: ...


class Bell:
    """Wakes a thread that polls file descriptors; may be rung from any thread."""

    def __init__(self) -> None:
        self.fd, self._end = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._end, False)

    def ring(self) -> None:
        """Wake it; a bell that rings already is enough."""
        with suppress(BlockingIOError):
            os.write(self._end, b"!")

    def quiet(self) -> None:
        """Before looking for the reason, so that a later ring is not lost."""
        with suppress(BlockingIOError):
            os.read(self.fd, 4096)


class Vitals:
    """What the loop last did, for the control thread to tell; times are monotonic seconds."""

    def __init__(self) -> None:
        now = monotonic()
        self.beat_at = now
        self.progress_at = now  # a step's result, an idle canary, or the start of the warm-up
        self.tick_max_s = 0.0
        self.stats: Stats | None = None
        self.judge: Judge | None = None
        self.transport = Carried()
        self.counters: dict[str, float] = {}  # beside those of the engine

    def pong(self, n: int) -> Pong:
        """The answer to a ping."""
        now = monotonic()
        stats, judge = self.stats, self.judge
        devices = judge.devices if judge else ()
        once = dict.fromkeys(devices)  # stages may share one
        counters = dict(stats.counters) if stats else {}
        if judge:
            counters["device_probe_ok_total"] = judge.probes_passed
            counters["device_probe_miss_total"] = judge.probes_failed
        return Pong(
            n=n,
            fault=judge.latch.fault if judge else None,
            heartbeat_age_s=now - self.beat_at,
            progress_age_s=now - self.progress_at,
            device_wait_s=max((device.waiting_s for device in devices), default=0.0),
            tick_max_s=self.tick_max_s,
            running=stats.running if stats else 0,
            waiting=stats.waiting if stats else 0,
            pages_free=stats.pages_free if stats else 0,
            pages_total=stats.pages_total if stats else 0,
            slots_free=stats.slots_free if stats else 0,
            slots_total=stats.slots_total if stats else 0,
            allocations=sum(device.allocations[0] for device in once),
            allocated_bytes=sum(device.allocations[1] for device in once),
            stages=tuple(self._stage(n, device, now) for n, device in enumerate(devices)),
            transport=self.transport,
            counters=counters | self.counters,
        )

    def _stage(self, stage: int, device: Device, now: float) -> StageReport:
        assert self.judge is not None
        fault = self.judge.latch.fault
        return StageReport(
            stage=stage,
            device=device.name,
            state="faulted" if fault and fault.stage == stage else "ok",
            last_result_age_s=now - self.progress_at,
            canary_age_s=now - self.judge.answered_at[stage],
            waiting_s=device.waiting_s,
        )


class ControlThread(threading.Thread):
    """Answers the server for as long as the process lives.

    Args:
        address: of the server's control socket.
        vitals: of the loop.
        on_inject: takes an order to fail.
        on_stop: called when the server wants this process to end.
    """

    def __init__(
        self,
        address: str,
        vitals: Vitals,
        *,
        on_inject: Callable[[Inject], None],
        on_stop: Callable[[], None],
    ) -> None:
        super().__init__(name="control", daemon=True)
        self._address = address
        self._vitals = vitals
        self._on_inject = on_inject
        self._on_stop = on_stop
        self._bell = Bell()
        self._said: SimpleQueue[Notice | None] = SimpleQueue()

    def say(self, notice: Notice) -> None:
        """Tell the server; may be called from any thread and returns at once."""
        self._said.put(notice)
        self._bell.ring()

    def finish(self) -> None:
        """Send what was said and end the thread."""
        self._said.put(None)
        self._bell.ring()
        self.join()

    def run(self) -> None:
        """The thread."""
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        socket.set(zmq.LINGER, LINGER_MS)
        socket.connect(self._address)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._bell.fd, zmq.POLLIN)
        with socket:
            while True:
                ready = dict(poller.poll())
                if self._bell.fd in ready and not self._say_all(socket):
                    return
                if socket in ready:
                    self._obey(socket, _decode(socket.recv()))

    def _say_all(self, socket: zmq.Socket[bytes]) -> bool:
        self._bell.quiet()
        while not self._said.empty():
            notice = self._said.get()
            if notice is None:
                return False
            socket.send(_encode(notice))
        return True

    def _obey(self, socket: zmq.Socket[bytes], control: Control) -> None:
        match control:
            case Ping(n=n):
                socket.send(_encode(self._vitals.pong(n)))
            case Inject():
                self._on_inject(control)
            case Stop():
                self._on_stop()
