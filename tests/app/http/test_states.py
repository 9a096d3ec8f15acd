"""Every row of R96 through the real router, HEAD included (O94, R96, R97, test plan 18.10)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from app.health import Health
from tests.app.http.test_errors import error_of
from tests.fakes.services import LOADED, Server, a_fault, a_pong, a_server

GENERATION = ["/v1/chat/completions", "/v1/chat", "/v1/completions"]
TOKENS = ["/tokenize", "/detokenize"]
MODELS = ["/v1/models", "/v1/models/M"]


def serving(health: Health) -> None:
    health.warming(LOADED)
    health.ready()


def warming(health: Health) -> None:
    health.warming(LOADED)


def saturated(health: Health) -> None:
    serving(health)
    health.load(5, 5)


def degraded(health: Health) -> None:
    serving(health)
    health.part_off("vision", "the vision tower is off")


def stalled(health: Health) -> None:
    serving(health)
    health.stall(0, 0.0)


def hung(health: Health) -> None:
    stalled(health)
    health.hang("no progress")


def faulted(health: Health) -> None:
    serving(health)
    health.fault(a_fault())


def recovering(health: Health) -> None:
    faulted(health)
    health.recover(1, "device context lost")


def draining(health: Health) -> None:
    serving(health)
    health.drain(30)


def load_failed(health: Health) -> None:
    health.fail_load("config.json is missing")


# state -> how to get there; /health; /health/live; code of the refusals; /tokenize; Retry-After
WALK: dict[str, tuple[Callable[[Health], None], int, int, str | None, int, int]] = {
    "loading": (lambda _: None, 503, 200, "model_not_loaded", 503, 2),
    "warming": (warming, 503, 200, "model_not_ready", 200, 2),
    "ready": (serving, 200, 200, None, 200, 0),
    "saturated": (saturated, 200, 200, None, 200, 5),
    "degraded": (degraded, 200, 200, None, 200, 0),
    "draining": (draining, 503, 200, "shutting_down", 503, 30),
    "stalled": (stalled, 503, 200, "engine_stalled", 200, 2),
    "hung": (hung, 503, 503, "engine_stalled", 200, 2),
    "faulted": (faulted, 503, 503, "gpu_fault", 200, 2),
    "load_failed": (load_failed, 503, 503, "model_not_loaded", 503, 60),
    "recovering": (recovering, 503, 200, "recovering", 200, 2),
}


def in_state(state: str) -> Server:
    server = a_server(ready=False)
    WALK[state][0](server.health)
    assert server.health.state == state
    return server


def body_of(path: str) -> dict[str, Any]:
    if path == "/tokenize" or path == "/v1/completions":
        return {"model": "M", "prompt": "hi"}
    if path == "/detokenize":
        return {"tokens": [1]}
    return {"model": "M", "messages": [{"role": "user", "content": "hi"}]}


def refused(answer: Any, code: str, retry: int) -> None:
    error = error_of(answer)
    assert (answer.status_code, error["code"], error["type"]) == (503, code, "server_error")
    assert answer.headers["retry-after"] == str(retry)
    assert answer.headers["retry-after-ms"] == str(retry * 1000)


@pytest.mark.parametrize("state", WALK)
async def test_every_endpoint_answers_as_the_row_of_the_state_says(state: str) -> None:
    """R96: all columns of one row."""
    _, health, live, code, tokens, retry = WALK[state]
    server = in_state(state)
    async with server.client() as http:
        ready = await http.get("/health")
        assert ready.status_code == health
        assert ready.json()["status"] == ("ready" if state == "saturated" else state)
        assert len(ready.content) < 4096

        alive = await http.get("/health/live")
        assert alive.status_code == live
        if live == 200:
            assert alive.json() == {"status": "alive"}
        else:
            assert alive.json()["status"] == state

        for path in ("/health", "/health/live"):
            head = await http.head(path)
            assert head.status_code == (await http.get(path)).status_code
            assert head.content == b""

        for path in MODELS:
            answer = await http.get(path)
            if code is None:
                assert answer.status_code == 200
            else:
                refused(answer, code, retry)

        for path in GENERATION:
            for stream in (False, True):
                answer = await http.post(path, json=body_of(path) | {"stream": stream})
                if state == "saturated":
                    refused(answer, "overloaded", retry)
                elif code is None:
                    assert answer.status_code == 200, answer.text
                else:
                    refused(answer, code, retry)

        for path in TOKENS:
            answer = await http.post(path, json=body_of(path))
            if tokens == 200:
                assert answer.status_code == 200, answer.text
            else:
                refused(answer, str(code), retry)

        metrics = await http.get("/metrics")
        assert metrics.status_code == 200
        assert f'stagelight_engine_state{{state="{state}"}} 1.0' in metrics.text
        assert metrics.text.count("stagelight_engine_state{") == len(WALK)
        fault = 1.0 if state == "faulted" else 0.0
        assert f"stagelight_gpu_fault {fault}" in metrics.text

        for path in ("/version", "/openapi.json", "/docs"):
            assert (await http.get(path)).status_code == 200


@pytest.mark.parametrize("state", WALK)
async def test_wrong_input_is_looked_at_only_where_it_could_be_right(state: str) -> None:
    """R97: paths and methods always, models and JSON only in serving states."""
    code = "overloaded" if state == "saturated" else WALK[state][3]
    server = in_state(state)
    headers = {"content-type": "application/json"}
    async with server.client() as http:
        assert (await http.get("/nope")).status_code == 404
        assert (await http.post("/health")).status_code == 405
        unknown = await http.get("/v1/models/no-such")
        broken = await http.post("/v1/chat/completions", content=b"{", headers=headers)
    if code is None or state == "saturated":
        assert error_of(unknown)["code"] == "model_not_found"
    else:
        assert error_of(unknown)["code"] == code
    assert error_of(broken)["code"] == (code or "invalid_json")


async def test_health_answers_without_waiting_for_anything() -> None:
    """O93: with a worker that says nothing and a request that hangs."""
    import asyncio

    from tests.fakes.services import Wait

    server = a_server(lambda _: [Wait(asyncio.Event())])
    server.health.heard(a_pong(device_wait_s=99.0, running=1))
    async with server.client() as http:
        hanging = asyncio.create_task(
            http.post("/v1/chat/completions", json=body_of("/v1/chat/completions"))
        )
        while not server.engine.seen:
            await asyncio.sleep(0)
        answer = await asyncio.wait_for(http.get("/health"), 1)
        hanging.cancel()
        await asyncio.wait([hanging])
    assert answer.json()["engine"]["device_wait_s"] >= 99.0
