"""A worker that dies, faults, hangs or cannot load: what the server says, and what comes next.

The worker is a real process (tests/fakes/worker.py); only its model is made up.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from app.client import WorkerClient
from app.config import ServerConfig
from app.health import Asks, Health, State, Supervision
from app.supervisor import Supervisor
from engine.config import EngineConfig
from engine.errors import RequestError
from engine.messages import (
    Event,
    Failed,
    Finished,
    Generate,
    Inject,
    Picture,
    RequestId,
    Token,
)

WORKER = (sys.executable, str(Path(__file__).parents[1] / "fakes" / "worker.py"))
LIMITS = {"stall_soft_s": 0.5, "stall_hard_s": 1.5}  # above what a busy machine keeps us waiting
LONG = 4_000  # tokens of an answer that is still running when something happens


class House:
    """One supervised worker and everything that a server has around it, without HTTP."""

    def __init__(self, script: str = "step=0.001", **settings: Any) -> None:
        engine = EngineConfig(
            model=script,
            max_sequences=settings.pop("max_sequences", 8),
            queue_limit=settings.pop("queue_limit", 8),
            canary_period_s=settings.pop("canary_period_s", 0.1),
            fault_injection=settings.get("fault_injection", True),
        )
        self.config = ServerConfig(
            model="fake",
            model_folder=Path(),
            served_model_name="fake",
            host="127.0.0.1",
            port=0,
            engine=engine,
            **{"fault_injection": True, "ping_period_s": 0.02, **settings},
        )
        supervision = Supervision.ON if self.config.supervise else Supervision.OFF
        self.moves: list[State] = [State.LOADING]
        self.refused: list[tuple[State, State]] = []
        self.gone_at_recovery = False  # whether the old worker was, when the state said so
        self.health = Health("fake", supervision=supervision, on_move=self._moved)
        self.client = WorkerClient(self.health, queue_limit=engine.queue_limit)
        self.supervisor = Supervisor(self.config, self.health, self.client, command=WORKER)
        self._number = 0

    def _moved(self, before: State, to: State, accepted: bool) -> None:
        if accepted:
            self.moves.append(to)
            if to is State.RECOVERING:
                self.gone_at_recovery = gone(self.pid)
        else:
            self.refused.append((before, to))

    def generate(self, start: int = 10, tokens: int = 5, pictures: int = 0) -> Generate:
        self._number += 1
        picture = Picture(patches=b"", grid=(1, 1, 1), position=0, tokens=1, digest="")
        return Generate(
            request=RequestId(f"r{self._number}"),
            prompt=(1, start),
            max_tokens=tokens,
            pictures=(picture,) * pictures,
        )

    async def answer(self, start: int = 10, tokens: int = 5, pictures: int = 0) -> list[Event]:
        return [e async for e in self.client.submit(self.generate(start, tokens, pictures))]

    async def serving(self) -> None:
        await asyncio.wait_for(self.supervisor.serving.wait(), 20)

    async def until(self, state: State) -> None:
        await eventually(lambda: self.health.state is state)

    @property
    def pid(self) -> int:
        assert self.health.worker is not None
        return self.health.worker.pid

    @property
    def generation(self) -> int:
        assert self.health.worker is not None
        return self.health.worker.generation


async def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it never came true"
        await asyncio.sleep(0.002)


def tokens(events: list[Event]) -> list[int]:
    return [event.id for event in events if isinstance(event, Token)]


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


Build = Callable[..., Awaitable[House]]


@pytest.fixture
async def start() -> AsyncIterator[Build]:
    houses: list[House] = []

    async def build(script: str = "step=0.001", **settings: Any) -> House:
        house = House(script, **settings)
        houses.append(house)
        await house.supervisor.start()
        return house

    yield build
    for house in houses:
        pids = {house.pid}
        await house.supervisor.stop()
        assert all(gone(pid) for pid in pids), "a child is left"


async def test_a_worker_loads_warms_and_serves_in_that_order(start: Build) -> None:
    """R99: loading, warming, ready; R96: nothing before has a 200."""
    house = await start()
    assert house.health.state is State.LOADING
    await house.serving()
    assert house.moves == [State.LOADING, State.WARMING, State.READY]
    assert tokens(await house.answer(start=7, tokens=3)) == [8, 9, 10]


async def test_the_load_tells_how_far_it_is(start: Build) -> None:
    """O95: phase, progress, bytes; R86: no limit runs on a load, however long."""
    house = await start("load=0.6", stall_soft_s=0.05, stall_hard_s=0.1)
    await eventually(lambda: house.health.body().get("progress") == 0.5)
    body = house.health.body()
    assert (body["status"], body["phase"], body["bytes_total"]) == ("loading", "weights", 1_000)
    await house.serving()
    assert State.HUNG not in house.moves


@pytest.mark.parametrize(
    ("script", "code", "words"),
    [
        ("broken", 1, "model.safetensors"),
        ("setting", 2, "--max-context"),
        ("die", 1, "worker_died"),
    ],
)
async def test_a_first_load_that_fails_ends_the_boot(
    start: Build, script: str, code: int, words: str
) -> None:
    """Rule 97, O97: no restart attempt, the reason in words."""
    house = await start(script)
    assert await asyncio.wait_for(house.supervisor.exit_code, 20) == code
    assert words in house.supervisor.why
    assert "\n" not in house.supervisor.why
    assert house.generation == 0


async def test_a_failed_load_stays_when_told_to(start: Build) -> None:
    """R96: `load_failed` is an answer, for who wants to look inside."""
    house = await start("broken", stay_in_load_failed=True)
    await house.until(State.LOAD_FAILED)
    assert house.health.live_body()[0] == 503
    assert not house.supervisor.exit_code.done()


async def test_a_killed_worker_is_replaced_and_the_next_answer_is_right(start: Build) -> None:
    """R88, rule 98: one error each, then faulted, recovering, ready; the server stays."""
    house = await start()
    await house.serving()
    running = [asyncio.create_task(house.answer(tokens=LONG)) for _ in range(4)]
    await eventually(lambda: house.client.in_flight == 4)
    first, killed_at = house.pid, time.monotonic()

    os.kill(first, signal.SIGKILL)
    await house.until(State.FAULTED)
    assert time.monotonic() - killed_at < 0.5
    body = house.health.body()
    assert (body["reason"], body["error_number"], body["device"]) == ("worker_died", -9, None)
    for events in await asyncio.gather(*running):
        assert [type(e) for e in events if not isinstance(e, Token)] == [Failed]
        assert isinstance(events[-1], Failed)
        assert events[-1].code == "gpu_fault"
    await house.until(State.READY)
    assert house.gone_at_recovery, "live is 200 again only after the old worker is gone"
    assert gone(first)
    assert tokens(await house.answer(start=20, tokens=2)) == [21, 22]
    assert house.generation == 1
    assert house.moves[-3:] == [State.FAULTED, State.RECOVERING, State.READY]
    assert house.refused == []


@pytest.mark.parametrize("fault", ["sticky", "returned"])
@pytest.mark.parametrize("where", ["step", "tower", "idle"])
async def test_a_lost_context_is_told_with_reason_code_device_and_stage(
    start: Build, fault: Any, where: Any
) -> None:
    """Rule 102, R82, R91: raised or returned, in a step, in the tower, or with no traffic."""
    house = await start()
    await house.serving()
    await house.supervisor.inject(Inject(fault=fault, where=where, code=700))
    asked = None
    if where != "idle":
        asked = asyncio.create_task(house.answer(pictures=int(where == "tower")))
    began = time.monotonic()
    await house.until(State.FAULTED)
    assert time.monotonic() - began < 1.0
    status, body = house.health.live_body()
    assert (status, body["status"]) == (503, "faulted")
    assert (body["code"], body["device"], body["stage"]) == ("gpu_fault", "cpu:0", 0)
    assert body["error_number"] == 700
    assert where in body["reason"]
    assert body["reasons"][0]["message"] == body["reason"]
    if asked is not None:
        [failed] = await asked
        assert isinstance(failed, Failed)
        assert failed.code == "gpu_fault"

    await house.until(State.READY)
    assert tokens(await house.answer(start=3, tokens=1)) == [4]
    assert house.generation == 1


async def test_a_bug_that_nobody_catches_ends_the_worker_and_not_the_service(start: Build) -> None:
    """R88: the process ends at once, and its end is seen at once."""
    house = await start("crash")
    await house.serving()
    began = time.monotonic()
    [failed] = await house.answer()
    assert isinstance(failed, Failed)
    assert failed.code == "gpu_fault"
    assert time.monotonic() - began < 2.0
    assert house.health.fault_told is not None
    assert (house.health.fault_told.reason, house.health.fault_told.code) == ("worker_died", 1)
    await house.until(State.READY)
    assert len(await house.answer(tokens=2)) == 3


async def test_an_isolated_failure_ends_its_requests_and_nothing_else(start: Build) -> None:
    """R76, rule 88: the worker stays, the code of the client is 500's."""
    house = await start()
    await house.serving()
    await house.supervisor.inject(Inject(fault="isolated", where="step", code=716))
    [failed] = await house.answer()
    assert isinstance(failed, Failed)
    assert failed.code == "internal_error"
    assert len(await house.answer(tokens=2)) == 3
    assert house.moves[-1] is State.READY


async def test_a_hang_is_stalled_then_hung_then_replaced(start: Build) -> None:
    """R86, rules 99, 104: by progress, though the worker answers its pings all the while."""
    house = await start(**LIMITS)
    await house.serving()
    running = asyncio.create_task(house.answer(tokens=LONG))
    await eventually(lambda: house.client.in_flight == 1)
    await house.supervisor.inject(Inject(fault="hang", where="step"))
    await house.until(State.STALLED)
    body = house.health.body()
    assert body["waiting_s"] >= LIMITS["stall_soft_s"]
    assert body["engine"]["device_wait_s"] > 0
    assert house.health.live_body()[0] == 200
    refusal = house.health.refusal(Asks.GENERATION)
    assert refusal is not None
    assert refusal.code == "engine_stalled"
    await house.until(State.HUNG)
    failed = (await running)[-1]
    assert isinstance(failed, Failed)
    assert failed.code == "engine_stalled"
    await house.until(State.READY)
    assert house.moves[-4:] == [State.STALLED, State.HUNG, State.RECOVERING, State.READY]
    assert tokens(await house.answer(start=1, tokens=1)) == [2]


async def test_a_stall_that_ends_by_itself_loses_nothing(start: Build) -> None:
    """Rule 104: back to serving when the call returns between the limits."""
    house = await start(stall_soft_s=0.5, stall_hard_s=20.0)
    await house.serving()
    await house.supervisor.inject(Inject(fault="hang", where="step", seconds=1.5))
    events = await house.answer(tokens=3)
    assert isinstance(events[-1], Finished)
    await house.until(State.READY)
    assert house.moves[-2:] == [State.STALLED, State.READY]
    assert house.generation == 0


async def test_an_idle_worker_whose_canary_never_returns_is_found(start: Build) -> None:
    """Rule 103: while idle the canary is the progress."""
    house = await start(**LIMITS)
    await house.serving()
    await house.supervisor.inject(Inject(fault="hang", where="idle"))
    await house.until(State.HUNG)
    await house.until(State.READY)


async def test_a_busy_worker_with_progress_is_never_stalled(start: Build) -> None:
    """Rule 104: long work is no hang, beyond both limits."""
    house = await start("step=0.02", **LIMITS)
    await house.serving()
    events = await house.answer(tokens=100)
    assert isinstance(events[-1], Finished)
    assert house.moves == [State.LOADING, State.WARMING, State.READY]


async def test_a_stopped_process_counts_as_hanging(start: Build) -> None:
    """R86: no pong at all is no progress either."""
    house = await start(**LIMITS)
    await house.serving()
    os.kill(house.pid, signal.SIGSTOP)
    await house.until(State.HUNG)
    await house.until(State.READY)
    assert house.generation == 1


async def test_a_self_test_that_never_returns_is_hung(start: Build) -> None:
    """R86: the limits hold from `warming` on; the first load's failure ends the boot with 1."""
    house = await start("warm-hang", **LIMITS)
    assert await asyncio.wait_for(house.supervisor.exit_code, 20) == 1
    assert house.moves == [State.LOADING, State.WARMING, State.HUNG]


@pytest.mark.parametrize(("order", "code"), [("sticky", 70), ("hang", 71)])
async def test_a_spent_budget_ends_the_server(start: Build, order: Any, code: int) -> None:
    """Rules 95, 96, R84: 70, and 71 after a hang; the state stays what it was."""
    house = await start(restart_budget=1, restart_delays_s=(0.0,), **LIMITS)
    await house.serving()
    os.kill(house.pid, signal.SIGKILL)
    await eventually(lambda: house.moves[-2:] == [State.RECOVERING, State.READY])
    await house.supervisor.inject(Inject(fault=order, where="idle"))
    assert await asyncio.wait_for(house.supervisor.exit_code, 20) == code
    assert house.moves[-1] is (State.HUNG if code == 71 else State.FAULTED)
    assert "budget" in house.supervisor.why
    assert house.generation == 1


async def test_deaths_outside_the_window_do_not_count(start: Build) -> None:
    """Rule 95: the budget is of a window."""
    house = await start(restart_budget=1, restart_delays_s=(0.0,), restart_window_s=0.1)
    await house.serving()
    for generation in (1, 2):
        os.kill(house.pid, signal.SIGKILL)
        await eventually(lambda g=generation: house.generation == g)  # type: ignore[misc]
        await house.until(State.READY)
        await asyncio.sleep(0.1)
    assert not house.supervisor.exit_code.done()


async def test_a_worker_that_dies_before_its_self_test_counts_against_the_budget(
    start: Build,
) -> None:
    """Rule 97: and the state goes from recovering to faulted and back, R99."""
    house = await start("die-later,step=0.001", restart_budget=2, restart_delays_s=(0.0,))
    await house.serving()
    os.kill(house.pid, signal.SIGKILL)
    assert await asyncio.wait_for(house.supervisor.exit_code, 20) == 70
    assert house.moves[3:] == [State.FAULTED, State.RECOVERING] * 2 + [State.FAULTED]
    assert house.generation == 2


async def test_the_delay_before_a_restart_is_recovering_with_the_reason(start: Build) -> None:
    """Rule 95: and the old reason is told until the next worker serves (R78)."""
    house = await start(restart_delays_s=(1.2,))
    await house.serving()
    await house.supervisor.inject(Inject(fault="sticky", where="idle", code=719))
    await house.until(State.RECOVERING)
    generation, at = house.generation, time.monotonic()
    body = house.health.body()
    assert (body["attempt"], body["live"]) == (1, True)
    assert "719" in body["reason"]
    assert body["reasons"][1]["error_number"] == 719
    await eventually(lambda: house.generation == generation + 1)
    assert time.monotonic() - at > 0.4
    await house.until(State.READY)
    assert house.health.body()["reasons"] == []


@pytest.mark.parametrize(
    ("order", "code", "told"), [("sticky", 70, "gpu_fault"), ("hang", 71, "engine_stalled")]
)
async def test_unsupervised_the_first_fault_ends_the_server(
    start: Build, order: Any, code: int, told: str
) -> None:
    """R84, rule 98: nothing is started again, and everything in flight gets its one error."""
    house = await start(supervise=False, max_sequences=2, **LIMITS)
    await house.serving()
    asked = [asyncio.create_task(house.answer(tokens=LONG)) for _ in range(6)]
    await eventually(lambda: house.client.in_flight == 6)
    await house.supervisor.inject(Inject(fault=order, where="step"))
    outcomes = await asyncio.gather(*asked)
    assert [[e.code for e in events if isinstance(e, Failed)] for events in outcomes] == [
        [told]
    ] * 6
    assert await asyncio.wait_for(house.supervisor.exit_code, 20) == code
    assert house.generation == 0
    assert State.RECOVERING not in house.moves


async def test_a_drain_lets_running_answers_finish_and_takes_no_new_ones(start: Build) -> None:
    """Rule 113, O98: then the worker ends by itself."""
    house = await start("step=0.005")
    await house.serving()
    running = asyncio.create_task(house.answer(start=0, tokens=60))
    await eventually(lambda: house.client.in_flight == 1)
    draining = asyncio.create_task(house.supervisor.drain_and_stop())
    await house.until(State.DRAINING)
    refusal = house.health.refusal(Asks.GENERATION)
    assert refusal is not None
    assert refusal.code == "shutting_down"
    assert tokens(await running) == list(range(1, 61))
    await draining
    assert gone(house.pid)
    assert not house.supervisor.exit_code.done(), "a stop on request is no failure"


async def test_a_drain_ends_at_its_limit(start: Build) -> None:
    """O98: what still runs gets `shutting_down`."""
    house = await start("step=0.005", drain_s=0.3)
    await house.serving()
    running = asyncio.create_task(house.answer(tokens=LONG))
    await eventually(lambda: house.client.in_flight == 1)
    await house.supervisor.drain_and_stop()
    failed = (await running)[-1]
    assert isinstance(failed, Failed)
    assert failed.code == "shutting_down"
    assert gone(house.pid)


async def test_a_fault_during_a_drain_is_a_fault(start: Build) -> None:
    """R93: it outranks the drain; unsupervised the code says so (R84: never 0)."""
    house = await start("step=0.005", supervise=False)
    await house.serving()
    running = asyncio.create_task(house.answer(tokens=LONG))
    await eventually(lambda: house.client.in_flight == 1)
    draining = asyncio.create_task(house.supervisor.drain_and_stop())
    await house.until(State.DRAINING)
    os.kill(house.pid, signal.SIGKILL)
    await draining
    failed = (await running)[-1]
    assert isinstance(failed, Failed)
    assert failed.code == "gpu_fault"
    assert house.health.state is State.FAULTED
    assert house.supervisor.exit_code.result() == 70


async def test_a_stop_during_the_load_leaves_no_child(start: Build) -> None:
    """O98: whatever the worker is doing."""
    house = await start("load=60")
    await eventually(lambda: house.health.body().get("progress") == 0.5)
    await house.supervisor.drain_and_stop()
    assert gone(house.pid)


async def test_a_worker_ends_when_its_server_is_gone(start: Build) -> None:
    """Rule 113: by the closed pipe, even without a word."""
    house = await start("load=60")
    await eventually(lambda: house.health.body().get("progress") == 0.5)
    life = house.supervisor._life
    assert life is not None
    assert life.process._process.stdin is not None
    life.process._process.stdin.close()
    assert await asyncio.wait_for(life.process.gone, 5) == 0


async def test_no_order_to_fail_is_obeyed_without_the_flag(start: Build) -> None:
    """Rule 120: refused by the server, and not known to the worker either."""
    house = await start(fault_injection=False)
    await house.serving()
    with pytest.raises(RequestError, match="--fault-injection on"):
        await house.supervisor.inject(Inject(fault="kill", where="now"))
    life = house.supervisor._life
    assert life is not None
    life.process.send(Inject(fault="kill", where="now"))
    assert len(await house.answer(tokens=3)) == 4


async def test_the_pong_says_how_old_everything_is(start: Build) -> None:
    """O95: worker, ages of beat, progress and canary, counts, stages."""
    house = await start()
    await house.serving()
    await house.answer(tokens=3)
    await eventually(
        lambda: bool(house.health.pong and house.health.pong.counters.get("steps_total"))
    )
    body = house.health.body()
    assert body["worker"] == {"pid": house.pid, "generation": 0, "restarts_in_window": 0}
    assert body["engine"]["last_step_age_s"] < 1
    assert body["engine"]["heartbeat_age_s"] < 1.5
    [stage] = body["engine"]["stages"]
    assert (stage["stage"], stage["device"], stage["state"]) == (0, "cpu:0", "ok")
    assert stage["canary_age_s"] < 1
