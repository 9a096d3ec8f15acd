"""The truth table R96, its moves R99 and its bodies O95: alone, and through the real router."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import orjson
import pytest

from app.health import MOVES, SERVING, Asks, Hang, Health, State, Supervision, WorkerView
from engine.messages import Carried, Fault, Loading, Pong, StageReport
from tests.fakes.services import LOADED, MODEL, Server, a_server

FAULT = Fault("kda (step) failed with code 700", code=700, call="kda", device="cpu:1", stage=1)
RETRY_2 = ("2", "2000")
RETRY_5 = ("5", "5000")


def loading(health: Health) -> None:
    health.loading(Loading("weights", 1, 4))


def warming(health: Health) -> None:
    health.warming(LOADED)


def ready(health: Health) -> None:
    warming(health)
    health.ready()


def saturated(health: Health) -> None:
    ready(health)
    health.load(12, 12)


def degraded(health: Health) -> None:
    ready(health)
    health.part_off("speculation_off", "The drafter failed its check.")


def draining(health: Health) -> None:
    ready(health)
    health.drain(30.0)


def stalled(health: Health) -> None:
    ready(health)
    health.stall(0, health._clock() - 31.0)


def hung(health: Health) -> None:
    stalled(health)
    health.hang("no progress for 120.0 s")


def faulted(health: Health) -> None:
    ready(health)
    health.fault(FAULT)


def load_failed(health: Health) -> None:
    health.fail_load("model.safetensors is cut; download it again.")


def recovering(health: Health) -> None:
    faulted(health)
    health.recover(1, FAULT.reason)


# R96, a row each: how it is entered, /health with the fields it adds, /health/live, the code of
# /v1/models, of generation, of /tokenize (None is 200), and the retry headers.
Row = tuple[
    Callable[[Health], None],
    int,
    dict[str, Any],
    int,
    str | None,
    str | None,
    str | None,
    tuple[str, str],
]
TABLE: dict[State, Row] = {
    State.LOADING: (
        loading,
        503,
        {"phase": "weights", "progress": 0.25, "bytes_done": 1, "bytes_total": 4},
        200,
        *("model_not_loaded",) * 3,
        RETRY_2,
    ),
    State.WARMING: (
        warming,
        503,
        {},
        200,
        "model_not_ready",
        "model_not_ready",
        None,
        RETRY_2,
    ),
    State.READY: (
        ready,
        200,
        {"model": MODEL, "max_model_len": 512},
        200,
        None,
        None,
        None,
        RETRY_5,
    ),
    State.SATURATED: (
        saturated,
        200,
        {"status": "ready", "saturated": True},
        200,
        None,
        "overloaded",
        None,
        RETRY_5,
    ),
    State.DEGRADED: (degraded, 200, {"ready": True}, 200, None, None, None, RETRY_5),
    State.DRAINING: (draining, 503, {}, 200, *("shutting_down",) * 3, ("30", "30000")),
    State.STALLED: (
        stalled,
        503,
        {"stage": 0, "waiting_s": 31.0},
        200,
        "engine_stalled",
        "engine_stalled",
        None,
        RETRY_2,
    ),
    State.HUNG: (
        hung,
        503,
        {"reason": "no progress for 120.0 s"},
        503,
        "engine_stalled",
        "engine_stalled",
        None,
        RETRY_2,
    ),
    State.FAULTED: (
        faulted,
        503,
        {
            "reason": FAULT.reason,
            "code": "gpu_fault",
            "error_number": 700,
            "device": "cpu:1",
            "stage": 1,
        },
        503,
        "gpu_fault",
        "gpu_fault",
        None,
        RETRY_2,
    ),
    State.LOAD_FAILED: (
        load_failed,
        503,
        {"reason": "model.safetensors is cut; download it again."},
        503,
        *("model_not_loaded",) * 3,
        ("60", "60000"),
    ),
    State.RECOVERING: (
        recovering,
        503,
        {"attempt": 1, "reason": FAULT.reason},
        200,
        "recovering",
        "recovering",
        None,
        RETRY_2,
    ),
}
every_state = pytest.mark.parametrize("state", list(State), ids=str)


def in_state(state: State) -> Server:
    server = a_server(ready=False)
    TABLE[state][0](server.health)
    assert server.health.state is state
    return server


@every_state
async def test_health_answers_by_the_table(state: State) -> None:
    """R94, R96, O95: status, fields of the state, live; and HEAD mirrors GET (R97)."""
    _, status, fields, live, *_ = TABLE[state]
    async with in_state(state).client() as http:
        answer = await http.get("/health")
        body = answer.json()
        assert answer.status_code == status
        assert body.items() >= {"status": state.value, **fields}.items()
        assert (body["ready"], body["live"]) == (status == 200, live == 200)
        assert (body["reasons"] == []) == (state is State.READY)
        alive = await http.get("/health/live?x=1")
        assert alive.status_code == live
        assert (alive.json() == {"status": "alive"}) == (live == 200)
        if live == 503:
            assert alive.json()["status"] == body["status"]
        for path, want in (("/health", status), ("/health/live", live)):
            head = await http.head(path)
            assert (head.status_code, head.content) == (want, b"")
            assert "retry-after" not in head.headers
        assert (await http.get("/metrics")).status_code == 200
        assert f'engine_state{{state="{state}"}} 1.0' in (await http.get("/metrics")).text


@every_state
async def test_every_other_endpoint_answers_by_the_table(state: State) -> None:
    """R96, R97, O9: the state's 503 with retry headers, before anything else is looked at."""
    _, _, _, _, models, generation, tokens, retry = TABLE[state]
    server = in_state(state)
    chat = server.ask(max_tokens=2)
    async with server.client() as http:
        asked = [
            (await http.get("/v1/models"), models),
            (await http.get(f"/v1/models/{MODEL}"), models),
            (await http.post("/v1/chat/completions", json=chat), generation),
            (await http.post("/v1/chat", json=chat), generation),
            (await http.post("/v1/completions", json={"model": MODEL, "prompt": "a"}), generation),
            (await http.post("/tokenize", json={"prompt": "a"}), tokens),
            (await http.post("/detokenize", json={"tokens": [5]}), tokens),
        ]
        for answer, code in asked:
            told = (answer.request.url.path, answer.status_code, answer.text)
            assert answer.status_code == (503 if code else 200), told
            if code:
                error = answer.json()["error"]
                assert (error["code"], error["type"]) == (code, "server_error"), told
                assert shown(answer) == retry, told
        unknown = await http.get("/v1/models/other")
        malformed = await http.post(
            "/v1/chat/completions", content=b"{", headers={"content-type": "application/json"}
        )
        serves = state in SERVING
        assert unknown.status_code == (404 if serves else 503)
        assert malformed.status_code == (503 if generation else 400)
        assert (await http.get("/nowhere")).status_code == 404
        assert (await http.delete("/health")).status_code == 405


def shown(answer: httpx.Response) -> tuple[str, str]:
    return answer.headers["retry-after"], answer.headers["retry-after-ms"]


async def test_a_degraded_server_with_a_full_queue_says_both() -> None:
    """D13: /health 200 `degraded` with `saturated: true`, generation 503 `overloaded`."""
    server = in_state(State.DEGRADED)
    server.health.load(12, 12)
    async with server.client() as http:
        body = (await http.get("/health")).json()
        assert (body["status"], body["saturated"]) == ("degraded", True)
        refused = await http.post("/v1/chat/completions", json=server.ask())
        assert refused.json()["error"]["code"] == "overloaded"


def test_a_fault_outranks_everything_and_keeps_its_first_reason() -> None:
    """R78, R93: a loaded model never outranks it, and a second fault changes nothing."""
    health = Health("m")
    assert health.fault(FAULT), "a fault before any model is loaded is `faulted`, not `loading`"
    assert not health.fault(Fault("later", 1, "c", "cpu:0", 0))
    assert not health.warming(LOADED)
    assert not health.ready()
    assert health.body()["reason"] == FAULT.reason


def test_tokens_of_a_faulted_server_need_a_loaded_model() -> None:
    """R96: /tokenize is 200 in `faulted` only if there is a tokenizer's model."""
    health = Health("m")
    health.fault(FAULT)
    refusal = health.refusal(Asks.TOKENS)
    assert refusal is not None
    assert refusal.code == "gpu_fault"


def test_the_old_reason_is_told_until_the_new_worker_serves() -> None:
    """R78, R92: with code, device and stage."""
    health = Health("m")
    recovering(health)
    health.warming(LOADED)
    assert health.state is State.RECOVERING, "a new worker's warm-up is part of recovering (R99)"
    assert health.body()["reasons"][1].items() >= {"error_number": 700, "stage": 1}.items()
    health.ready()
    assert health.body()["reasons"] == []
    health.drain(30.0)
    assert [reason["code"] for reason in health.body()["reasons"]] == ["draining"]


def test_the_transport_between_stages_is_shown() -> None:
    """O95, rule 110: route and integrity; nothing is carried with one stage."""
    health = Health("m")
    ready(health)
    assert health.body()["transport"] == {"route": None, "integrity": None}
    health.heard(a_pong(stages=1))
    assert health.body()["transport"] == {"route": None, "integrity": None}
    health.heard(msgspec.structs.replace(a_pong(stages=2), transport=Carried("peer", "ok")))
    assert health.body()["transport"] == {"route": "peer", "integrity": "ok"}


def test_ages_go_on_while_the_worker_is_silent() -> None:
    """O95, R90: the body never vouches for a worker that says nothing any more."""
    now = [100.0]
    health = Health("m", clock=lambda: now[0])
    ready(health)
    health.heard(a_pong(stages=1))
    now[0] += 7.0
    engine = health.body()["engine"]
    assert engine["heartbeat_age_s"] == 7.1
    assert engine["last_step_age_s"] == 7.2
    assert engine["stages"][0]["canary_age_s"] == 7.4


def test_a_drain_tells_how_long_it_may_still_take() -> None:
    """O9: the rest of the drain time, in whole seconds from 1 to 60."""
    now = [0.0]
    health = Health("m", clock=lambda: now[0])
    ready(health)
    health.drain(90.0)
    assert health.retry_after_s == 60.0
    now[0] = 80.0
    assert health.retry_after_s == 10.0
    now[0] = 200.0
    assert health.retry_after_s == 1.0


@every_state
def test_every_body_stays_small(state: State) -> None:
    """O95: below 4 KiB, whatever the worker, the model's name and the reasons are."""
    health = Health("m" * 5_000, build="1.0.0+12345678")
    TABLE[state][0](health)
    health.fault_told = Fault("why " * 2_000, 700, "call", "cuda:15", 15)
    health._why = "because " * 2_000
    for n in range(30):
        health.part_off(f"part_{n}", "off " * 500)
    health.worker = WorkerView(4_194_304, 999, 3)
    health.heard(a_pong(stages=64))
    assert len(orjson.dumps(health.body())) < 4_096


def a_pong(stages: int) -> Pong:
    return Pong(
        n=1,
        fault=None,
        heartbeat_age_s=0.1,
        progress_age_s=0.2,
        device_wait_s=123_456.789,
        tick_max_s=0.01,
        running=64,
        waiting=256,
        pages_free=1,
        pages_total=2,
        slots_free=3,
        slots_total=4,
        allocations=5,
        allocated_bytes=6,
        stages=tuple(
            StageReport(n, "cuda:15", "faulted", 123.456, 0.4, 0.0) for n in range(stages)
        ),
    )


# R99, written out once more and by hand: what is not here must be refused.
S = State
LEGAL = {
    (S.LOADING, S.WARMING),
    (S.LOADING, S.LOAD_FAILED),
    (S.WARMING, S.READY),
    (S.WARMING, S.LOAD_FAILED),
    (S.WARMING, S.HUNG),
    (S.READY, S.STALLED),
    (S.READY, S.HUNG),  # a lost peer
    (S.STALLED, S.READY),
    (S.STALLED, S.HUNG),
    (S.DRAINING, S.HUNG),
    (S.FAULTED, S.RECOVERING),
    (S.HUNG, S.RECOVERING),
    (S.RECOVERING, S.READY),
    (S.RECOVERING, S.HUNG),
    *((s, S.FAULTED) for s in State if s not in SERVING | {S.FAULTED}),
    (S.READY, S.FAULTED),
    *((s, S.DRAINING) for s in State if s not in SERVING | {S.FAULTED, S.HUNG, S.DRAINING}),
    (S.READY, S.DRAINING),
}


@pytest.mark.parametrize("supervision", list(Supervision))
def test_ten_thousand_random_transitions_keep_to_the_table(supervision: Supervision) -> None:
    """R99: no other move is accepted, and each state answers with its row and no other (R100)."""
    draw = random.Random(99)
    health, model, visited, refused = Health("m", supervision=supervision), S.LOADING, set(), 0
    verbs: dict[str, tuple[State, Callable[[Health], bool]]] = {
        "warming": (S.WARMING, lambda h: h.warming(LOADED)),
        "ready": (S.READY, Health.ready),
        "progressed": (S.READY, Health.progressed),
        "stall": (S.STALLED, lambda h: h.stall(0, 0.0)),
        "hang": (S.HUNG, lambda h: h.hang("no progress")),
        "peer lost": (S.HUNG, lambda h: h.hang("peer lost", Hang.PEER_LOST)),
        "fault": (S.FAULTED, lambda h: h.fault(FAULT)),
        "recover": (S.RECOVERING, lambda h: h.recover(1, "why")),
        "drain": (S.DRAINING, lambda h: h.drain(30.0)),
        "fail": (S.LOAD_FAILED, lambda h: h.fail_load("why")),
    }
    for _ in range(10_000):
        if model in {S.FAULTED, S.DRAINING, S.LOAD_FAILED, S.HUNG} and draw.random() < 0.3:
            health, model = Health("m", supervision=supervision), S.LOADING  # a new process
        name = draw.choice(list(verbs))
        to, verb = verbs[name]
        legal = (model, to) in LEGAL
        if name == "ready":
            legal = model in {S.WARMING, S.RECOVERING}
        elif name == "progressed":
            legal = model is S.STALLED
        elif name == "hang" and model is S.READY:
            legal = False  # the soft limit comes before the hard one
        elif name == "recover":
            legal = legal and supervision is Supervision.ON
        same = (model, name) in {(S.STALLED, "stall"), (S.RECOVERING, "warming")}
        assert verb(health) == (legal or same), f"{name} in {model}"
        refused += not (legal or same)
        model = to if legal else model
        full, part = draw.random() < 0.3, draw.random() < 0.3
        health.load(4, 4 if full else 5)
        if part:
            health.part_off("p", "off")
        else:
            health.part_on("p")
        shown_as = model
        if model is S.READY:
            shown_as = S.DEGRADED if part else S.SATURATED if full else S.READY
        visited.add(shown_as)
        assert health.state is shown_as
        status, body = health.ready_body()
        assert status == TABLE[shown_as][1]
        assert body["status"] == ("ready" if shown_as is S.SATURATED else shown_as)
        assert health.live_body()[0] == TABLE[shown_as][3]
        refusal = health.refusal(Asks.GENERATION)
        want = "overloaded" if model is S.READY and full else TABLE[shown_as][5]
        assert (refusal.code if refusal else None) == want
    everything = set(State) if supervision is Supervision.ON else set(State) - {S.RECOVERING}
    assert visited == everything, "a state was never walked through"
    assert refused > 1_000


def test_the_table_of_moves_is_the_contracts() -> None:
    """R99: the product's own table, row by row."""
    assert {(a, b) for a, reached in MOVES.items() for b in reached} == LEGAL
