"""The door to the worker: one outcome a request, an abort for who leaves, room for slow readers.

The other end is a real socket that the test reads and writes as a worker would.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

import msgspec
import pytest
import zmq

from app.client import BUFFERED_EVENTS, RESUME_EVENTS, WorkerClient
from app.errors import StateRefused
from app.health import Health
from app.link import Link
from engine.errors import Overloaded
from engine.messages import (
    Abort,
    Command,
    Event,
    Failed,
    Finished,
    Generate,
    Pause,
    RequestId,
    Resume,
    Token,
)
from tests.fakes.services import LOADED


class Worker:
    """The far end of a work channel."""

    def __init__(self, address: str) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self.socket.set(zmq.LINGER, 0)
        self.address = address

    def connect(self) -> None:
        self.socket.connect(self.address)

    def say(self, *events: Event) -> None:
        self.socket.send(msgspec.msgpack.encode(events))

    async def hear(self) -> Command:
        while True:
            try:
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                await asyncio.sleep(0.001)
                continue
            command: Command = msgspec.msgpack.decode(frame, type=Command)
            return command


class Door:
    """A client in state `ready`, linked to a worker; room for 4 + 2 requests."""

    def __init__(self, folder: Path, slow_reader_s: float = 60.0) -> None:
        self.health = Health("m")
        self.client = WorkerClient(self.health, queue_limit=2, slow_reader_s=slow_reader_s)
        address = f"ipc://{folder}/work"
        self.link = Link(address, self.client.on_frame)
        self.worker = Worker(address)
        self.health.warming(LOADED)
        self.client.attach(self.link)
        self.health.ready()

    def close(self) -> None:
        self.link.close()
        self.worker.socket.close()


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[Door]:
    door = Door(tmp_path)
    door.worker.connect()
    yield door
    door.close()


def generate(name: str = "a") -> Generate:
    return Generate(request=RequestId(name), prompt=(1, 2), max_tokens=8)


def token(n: int, name: str = "a") -> Token:
    return Token(RequestId(name), n)


def end(name: str = "a") -> Finished:
    return Finished(RequestId(name), "stop")


async def first(events: AsyncGenerator[Event]) -> Event:
    return await anext(events)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0.001)


async def test_events_of_one_step_reach_each_request_that_they_are_for(door: Door) -> None:
    """A3: one frame a step, events in order, ending with the terminal one."""
    a = asyncio.create_task(collect(door.client.submit(generate("a"))))
    b = asyncio.create_task(collect(door.client.submit(generate("b"))))
    for _ in range(2):
        assert isinstance(await door.worker.hear(), Generate)
    assert door.client.in_flight == 2
    door.worker.say(token(1, "a"), token(5, "b"))
    door.worker.say(token(2, "a"), end("a"), token(6, "b"), end("b"), token(7, "b"))
    assert await a == [token(1, "a"), token(2, "a"), end("a")]
    assert await b == [token(5, "b"), token(6, "b"), end("b")]
    assert door.client.in_flight == 0


async def collect(events: AsyncGenerator[Event]) -> list[Event]:
    return [event async for event in events]


async def test_who_leaves_early_aborts_the_request(door: Door) -> None:
    """O85: the worker hears of it at once, and what still comes for it reaches nobody."""
    events = door.client.submit(generate())
    reader = asyncio.create_task(first(events))
    await door.worker.hear()
    door.worker.say(token(1))
    assert await reader == token(1)
    await events.aclose()
    assert await door.worker.hear() == Abort(RequestId("a"))
    assert door.client.in_flight == 0
    door.worker.say(token(2), end())
    await settle()


async def test_a_finished_request_is_not_aborted(door: Door) -> None:
    """O85: only who leaves early."""
    task = asyncio.create_task(collect(door.client.submit(generate())))
    await door.worker.hear()
    door.worker.say(end())
    await task
    await settle()
    with pytest.raises(zmq.Again):
        door.worker.socket.recv(zmq.NOBLOCK)


async def test_one_request_more_than_there_is_room_for_is_refused(door: Door) -> None:
    """O63: slots and queue are full, the state is `saturated`, and room comes back."""
    running = [asyncio.create_task(collect(door.client.submit(generate(str(n))))) for n in range(6)]
    await settle()
    assert str(door.health.state) == "saturated"
    with pytest.raises(Overloaded, match="6 of 6"):
        await first(door.client.submit(generate("x")))
    door.worker.say(end("0"))
    await running[0]
    assert str(door.health.state) == "ready"
    last = asyncio.create_task(collect(door.client.submit(generate("x"))))
    door.worker.say(*(end(str(n)) for n in range(1, 6)))
    await settle()
    door.worker.say(end("x"))
    await asyncio.gather(last, *running)


async def test_the_state_refuses_before_the_queue_does(door: Door) -> None:
    """R93: a full server that drains says `shutting_down`."""
    door.health.load(6, 6)
    door.health.drain(30.0)
    with pytest.raises(StateRefused) as refused:
        await first(door.client.submit(generate()))
    assert refused.value.code == "shutting_down"


async def test_every_request_in_flight_gets_exactly_one_error(door: Door) -> None:
    """Rule 98: also when the dead worker's last events arrive behind it."""
    running = [asyncio.create_task(collect(door.client.submit(generate(n)))) for n in "abc"]
    await settle()
    door.worker.say(token(1, "a"), end("b"))
    await settle()
    assert door.client.fail_all("gpu_fault", "the worker was lost") == 2
    door.worker.say(token(2, "a"), end("a"), end("c"))
    await asyncio.wait_for(door.client.none_in_flight(), 1)
    a, b, c = await asyncio.gather(*running)
    lost = [Failed(RequestId(n), "gpu_fault", "the worker was lost") for n in "ac"]
    assert (a, b, c) == ([token(1, "a"), lost[0]], [end("b")], [lost[1]])
    assert door.client.fail_all("gpu_fault", "again") == 0


async def test_what_comes_behind_the_end_of_a_request_changes_nothing(door: Door) -> None:
    """Rule 98: one terminal event, counted once, though its reader is slow to take it."""
    events = door.client.submit(generate())
    reader = asyncio.create_task(first(events))
    await door.worker.hear()
    door.worker.say(token(1))
    await reader
    assert door.client.fail_all("gpu_fault", "the worker was lost") == 1
    assert door.client.fail_all("gpu_fault", "again") == 0
    door.worker.say(token(2), end())
    await settle()
    assert door.client.in_flight == 0
    assert await collect(events) == [Failed(RequestId("a"), "gpu_fault", "the worker was lost")]


async def test_a_slow_reader_pauses_its_request_and_nobody_elses(door: Door) -> None:
    """O85: at 1,024 buffered events generation pauses, and goes on when they are read."""
    slow, quick = door.client.submit(generate("slow")), door.client.submit(generate("quick"))
    begun = asyncio.gather(first(slow), first(quick))
    await settle()
    door.worker.say(token(0, "slow"), token(0, "quick"))
    await begun
    for _ in range(2):
        await door.worker.hear()
    for n in range(1, BUFFERED_EVENTS + 1):
        door.worker.say(token(n, "slow"), token(n, "quick"))
        assert await first(quick) == token(n, "quick")
    assert await door.worker.hear() == Pause(RequestId("slow"))
    for n in range(1, BUFFERED_EVENTS - RESUME_EVENTS):
        assert await first(slow) == token(n, "slow")
    with pytest.raises(zmq.Again):
        door.worker.socket.recv(zmq.NOBLOCK)
    await first(slow)
    assert await door.worker.hear() == Resume(RequestId("slow"))
    await slow.aclose()
    await quick.aclose()


async def test_a_reader_that_never_comes_back_is_cut_off(tmp_path: Path) -> None:
    """O85: after the limit its slot and its buffer are given back."""
    door = Door(tmp_path, slow_reader_s=0.05)
    door.worker.connect()
    slow = door.client.submit(generate())
    begun = asyncio.create_task(first(slow))
    await settle()
    door.worker.say(*(token(n) for n in range(BUFFERED_EVENTS + 2)))
    await begun
    heard = [await door.worker.hear() for _ in range(3)]
    assert heard[1:] == [Pause(RequestId("a")), Abort(RequestId("a"))]
    assert door.client.in_flight == 0
    [failed] = await collect(slow)
    assert isinstance(failed, Failed)
    assert failed.code == "overloaded"
    door.close()


async def test_two_clients_may_choose_the_same_request_id(door: Door) -> None:
    """O17: the worker never sees two of one name."""
    running = [asyncio.create_task(collect(door.client.submit(generate()))) for _ in range(2)]
    names = []
    for _ in range(2):
        command = await door.worker.hear()
        assert isinstance(command, Generate)
        names.append(command.request)
    assert len(set(names)) == 2
    door.worker.say(*(Finished(name, "stop") for name in names))
    await asyncio.gather(*running)


async def test_what_is_sent_before_the_worker_connects_is_not_lost(tmp_path: Path) -> None:
    """Rule 98: a request admitted in the first moment of a worker is answered by it."""
    door = Door(tmp_path)
    task = asyncio.create_task(collect(door.client.submit(generate())))
    await settle()
    door.worker.connect()
    assert isinstance(await asyncio.wait_for(door.worker.hear(), 5), Generate)
    door.worker.say(end())
    assert await task == [end()]
    door.close()


async def test_a_request_that_finds_no_worker_is_told_so(door: Door) -> None:
    """R96: between two workers nothing is admitted."""
    door.client.detach()
    with pytest.raises(StateRefused) as refused:
        await first(door.client.submit(generate()))
    assert refused.value.code == "recovering"
