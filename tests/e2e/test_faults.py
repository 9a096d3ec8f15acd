"""Faults on order in a real server: told in time, never hidden by a 200, healed by a new worker."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Serve, Served, eventually, gone, long_answer, polled, question

pytestmark = [pytest.mark.e2e]

ON = ("--fault-injection", "on")
MANY = {"restart-budget": 1_000, "restart-delays-s": [0], "canary-period-s": 1}
IDLE_BOUND_S = 2.0  # the canary's period and 1 s more (R91)
PATHS = ("/health", "/health/live", "/v1/models")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for the faults that it survives."""
    folder: Path = tmp_path_factory.mktemp("faults")
    with Served([*ON], MANY, folder) as server:
        server.ready()
        yield server
        server.signal(signal.SIGTERM)
        assert server.ended() == 0


@pytest.mark.parametrize("fault", ["sticky", "returned"])
@pytest.mark.parametrize("where", ["step", "tower", "idle"])
def test_a_lost_context_is_told_and_the_next_worker_answers_right(
    server: Served, where: str, fault: str
) -> None:
    """R82, R91, R96, R100, rule 102: raised and returned; in a step, the tower, and while idle."""
    asked, before = question(), server.ready()["worker"]
    with polled(server, *PATHS) as poll:
        eventually(lambda: poll.of("/health") and poll.of("/v1/models"))
        began = time.monotonic()
        server.order(fault, where, code=700)
        if where != "idle":
            began = time.monotonic()
            refused = server.http.post("/v1/chat/completions", json=asked.body)
            assert refused.status_code == 503, refused.text
            assert refused.json()["error"]["code"] == "gpu_fault"
            assert "retry-after" in refused.headers
        eventually(lambda: poll.of("/health") and poll.of("/health")[-1].status == 503)
        server.ready()
        eventually(lambda: all(poll.of(path)[-1].status == 200 for path in PATHS))

    told = poll.first("/health", 503)
    assert told.at - began < (IDLE_BOUND_S if where == "idle" else 1.0)
    for path in ("/health", "/health/live"):
        body = poll.first(path, 503).body
        assert (body["status"], body["code"], body["device"], body["stage"]) == (
            "faulted",
            "gpu_fault",
            "cpu:0",
            0,
        )
        assert body["error_number"] == 700
        assert where in body["reason"]
        assert body["since_s"] < 1.0
    assert poll.first("/v1/models", 503).body["error"]["code"] in {"gpu_fault", "recovering"}
    for path in PATHS:
        assert poll.blocks(path) == [200, 503, 200], f"{path} flickered"
    assert poll.states() == ["ready", "faulted", "recovering", "ready"]

    after = server.worker()
    assert after["generation"] == before["generation"] + 1
    assert gone(before["pid"])
    assert server.ask(asked) == asked.answer


def test_a_streamed_answer_that_meets_a_fault_ends_with_one_error_event(server: Served) -> None:
    """O84, rule 98: a nested error object, the end of the body, and no [DONE]."""
    server.ready()
    with server.stream(long_answer(2_000)) as events:
        heard = [next(events) for _ in range(5)]
        server.order("sticky", "step", code=719)
        heard += list(events)
    error = json.loads(heard[-1])["error"]
    assert (error["code"], error["type"]) == ("gpu_fault", "server_error")
    assert "719" not in error["message"], "no driver text for clients (rule 92)"
    assert "[DONE]" not in heard
    assert sum("error" in json.loads(event) for event in heard) == 1
    server.ready()


def test_an_isolated_failure_is_a_500_of_its_request(server: Served) -> None:
    """R76, R101: the server stays ready, and the next answer is right."""
    asked = question()
    before = server.ready()["worker"]
    server.order("isolated", "step", code=716)
    refused = server.http.post("/v1/chat/completions", json=asked.body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (500, "internal_error")
    assert refused.headers["x-should-retry"] == "false"
    assert server.health()[0] == 200
    assert server.ask(asked) == asked.answer
    assert server.worker() == before


def test_rows_that_are_not_finite_never_become_an_answer(server: Served) -> None:
    """Rules 23, 120: NaN in the next image row is that request's 500, and only its own."""
    asked = question()
    before = server.ready()["worker"]
    server.order("nan_image", "tower")
    refused = server.http.post("/v1/chat/completions", json=asked.body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (500, "internal_error")
    assert server.ask(asked) == asked.answer
    assert server.worker() == before


def test_no_room_for_one_allocation_is_no_fault_and_no_error(server: Served) -> None:
    """Rule 89: tried again, and answered."""
    asked = question()
    before = server.ready()["worker"]
    server.order("out_of_memory", "tower")
    assert server.ask(asked) == asked.answer
    assert server.worker() == before


def test_a_fault_reaches_every_request_in_flight_once(server: Served) -> None:
    """Rule 98: running and queued ones alike, none silent, none with a finish reason."""
    server.ready()
    outcomes: list[str] = []

    def run() -> None:
        body = long_answer(4_000) | {"stream": False, "stream_options": None}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        outcomes.append(answer.json()["error"]["code"])

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    eventually(lambda: (server.health()[1].get("engine") or {}).get("running") == 8)
    os.kill(server.worker()["pid"], signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert outcomes == ["gpu_fault"] * 8
    server.ready()


def test_a_hang_is_stalled_then_hung_then_healed(serve: Serve) -> None:
    """R86, R90, R96, rules 99, 104: and health answers at once all the while."""
    limits = {"stall_soft_s": 1.0, "stall_hard_s": 2.5, "canary_period_s": 0.2}
    server = serve(*ON, **limits)
    server.ready()
    asked = question()
    server.order("hang", "step")
    with polled(server, "/health", "/health/live") as poll:
        answer = server.http.post("/v1/chat/completions", json=asked.body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_stalled")
        eventually(lambda: "recovering" in poll.states())
        server.ready()
        eventually(lambda: poll.of("/health")[-1].status == 200)
    states = poll.states()
    assert states[states.index("stalled") :] == ["stalled", "hung", "recovering", "ready"]
    stalled = next(s for s in poll.seen if s.body["status"] == "stalled")
    assert stalled.body["waiting_s"] >= 1.0
    assert stalled.body["engine"]["device_wait_s"] > 0
    assert poll.blocks("/health/live") == [200, 503, 200], "live is 503 only while hung"
    took = sorted(seen.took for seen in poll.seen)
    assert took[int(0.95 * len(took))] < 0.25, "no answer waits for the device"
    assert server.ask(asked) == asked.answer


def test_a_spent_budget_ends_the_server_with_70(serve: Serve) -> None:
    """Rules 95, 96, R84, R98: its last moments are answered by the table too."""
    server = serve(*ON, restart_budget=1, restart_delays_s=[0])
    server.ready()
    for generation in (0, 1):
        eventually(lambda g=generation: server.ready()["worker"]["generation"] == g)  # type: ignore[misc]
        os.kill(server.worker()["pid"], signal.SIGKILL)
        eventually(lambda: server.health()[0] != 200)
    assert server.ended() == 70
    assert "exit code 70" in server.err.splitlines()[-1]


@pytest.mark.parametrize(("fault", "code"), [("sticky", 70), ("hang", 71)])
def test_unsupervised_the_first_fault_ends_the_server(serve: Serve, fault: str, code: int) -> None:
    """R84, R100, rule 98: one error for what is in flight, and no 200 until the process ends."""
    server = serve(
        *ON, "--supervise", "off", stall_soft_s=0.5, stall_hard_s=1.0, canary_period_s=0.2
    )
    server.ready()
    worker = server.worker()["pid"]
    body: dict[str, Any] = long_answer(4_000)
    with polled(server, *PATHS) as poll:
        with server.stream(body) as events:
            next(events)
            server.order(fault, "step")
            last = list(events)[-1]
        assert json.loads(last)["error"]["code"] in {"gpu_fault", "engine_stalled"}
        assert server.ended() == code
    for path in PATHS:
        assert poll.blocks(path) in ([200], [200, 503])
    assert "recovering" not in poll.states()
    assert gone(worker)
    assert f"exit code {code}" in server.err.splitlines()[-1]


def test_faults_cannot_be_ordered_without_the_flag(serve: Serve) -> None:
    """Rule 120: off by default, and announced when it is on."""
    server = serve()
    server.ready()
    order = {"fault": "kill", "where": "now"}
    assert server.http.post("/_test/fault", json=order).status_code == 404
    assert "fault injection" not in server.err
    announced = serve(*ON)
    announced.ready()
    assert "fault injection is on" in announced.err
