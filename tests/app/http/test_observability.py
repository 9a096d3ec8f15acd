"""Metrics and log lines: what is counted, what is told, and what never is (O100, O101, R102)."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
import structlog

from app import logs
from app.health import Health, State, WorkerView
from app.metrics import Metrics
from engine.messages import Failed, RequestId, StageReport
from tests.app.http.test_errors import CHAT
from tests.fakes.services import a_fault, a_pong, a_server, ids, picture, says

SECRET = "the colour of my secret garden"


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """Where log lines go in one test, as JSON."""
    stream = io.StringIO()
    logs.configure("json", stream)
    yield stream
    structlog.reset_defaults()


def records(stream: io.StringIO) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in stream.getvalue().splitlines()]


async def test_a_request_has_one_line_at_its_end(lines: io.StringIO) -> None:
    """O100: who, what, how long, how many; the same id as in the answer."""
    server = a_server(says("Red."), keys=["k-secret"])
    headers = {
        "x-api-key": "k-secret",
        "x-client-request-id": "c-1",
        "x-stainless-retry-count": "2",
    }
    body = server.ask(stream=True, user="alice", foo=1)
    async with server.client("k-secret") as http:
        answer = await http.post(f"{CHAT}?token=x", json=body, headers=headers)
    (record,) = records(lines)
    assert record["event"] == "request"
    assert record["request_id"] == answer.headers["x-request-id"]
    expected = {
        "key": "key0",
        "method": "POST",
        "path": CHAT,
        "status": 200,
        "stream": True,
        "model": "M",
        "finish_reason": "stop",
        "completion_tokens": len(ids("</think>Red.")),
        "reasoning_tokens": 1,
        "client_request_id": "c-1",
        "retry_count": 2,
        "ignored": "user,foo",
    }
    assert expected.items() <= record.items()
    assert record["prompt_tokens"] == len(server.engine.seen[0].prompt)
    assert record["total_ms"] >= record["first_token_ms"] >= 0
    assert record["timestamp"]


async def test_no_line_holds_content_or_a_key(lines: io.StringIO) -> None:
    """O61, O100: prompts, answers, pictures, users and keys, under no setting."""
    server = a_server(says(SECRET), keys=["k-secret"])
    content = [{"type": "text", "text": SECRET}, picture()]
    good = server.ask(user=SECRET) | {"messages": [{"role": "user", "content": content}]}
    wrong = server.ask(SECRET, temperature=SECRET, model=SECRET)
    async with server.client("k-secret") as http:
        await http.post(CHAT, json=good)
        await http.post(CHAT, json=wrong)
        await http.post(CHAT, json=server.ask(SECRET, model=SECRET))
        await http.get("/v1/models", headers={"authorization": "Bearer k-wrong"})
    text = lines.getvalue()
    assert len(records(lines)) == 4
    for secret in ("secret", "garden", "k-wrong", picture()["image_url"]["url"][30:60]):
        assert secret not in text


async def test_a_failure_inside_is_told_by_type_and_place_only(lines: io.StringIO) -> None:
    """O100, D14: the exception's text may quote the client or the driver."""

    def breaks(_: object) -> Any:
        raise KeyError(SECRET)

    server = a_server(breaks)
    async with server.client() as http:
        await http.post(CHAT, json=server.ask())
    failure, request = records(lines)
    assert failure["error"] == "KeyError"
    assert any("breaks" in call for call in failure["calls"])
    assert failure["request_id"] == request["request_id"]
    assert request["error"] == "internal_error"
    assert SECRET not in lines.getvalue()


async def test_errors_and_cancelled_requests_say_so(lines: io.StringIO) -> None:
    """O84, O85, O100: a stream that fails has status 200 and `stream_error`."""
    failed = Failed(request=RequestId("r"), code="internal_error", message="x")
    server = a_server(lambda _: [*ids("</think>Hi"), failed])
    async with server.client() as http:
        await http.post(CHAT, json=server.ask(stream=True))
        await http.post(CHAT, json=server.ask())
        await http.post(CHAT, json={})
    stream, whole, wrong = records(lines)
    assert (stream["status"], stream["stream_error"]) == (200, "internal_error")
    assert (whole["status"], whole["error"]) == (500, "internal_error")
    assert (wrong["status"], wrong["error"]) == (400, "missing_required_parameter")


async def test_probes_and_scrapes_have_no_line(lines: io.StringIO) -> None:
    """O100."""
    async with a_server().client() as http:
        for path in ("/health", "/health/live", "/metrics"):
            await http.get(path)
            await http.head(path)
    assert records(lines) == []


async def test_what_a_client_sends_cannot_break_a_line(lines: io.StringIO) -> None:
    """O17: ids, paths and names are plain or left out."""
    async with a_server().client() as http:
        headers = {b"x-client-request-id": b"a\tb", b"x-stainless-retry-count": b"many"}
        await http.get("/no%0Apath%1b[31m", headers=headers)
    (record,) = records(lines)
    assert "%0A" in record["path"]
    assert "client_request_id" not in record
    assert "retry_count" not in record


def test_state_changes_have_a_line(lines: io.StringIO) -> None:
    """O100, R99: a move that is not allowed is an error line."""
    logs.log_move(State.LOADING, State.WARMING, True)
    logs.log_move(State.LOADING, State.READY, False)
    first, second = records(lines)
    assert (first["level"], first["before"], first["state"]) == ("info", "loading", "warming")
    assert (second["level"], second["wanted"]) == ("error", "ready")


def test_text_lines_are_plain_where_nobody_looks() -> None:
    """O100: no colours into a file."""
    stream = io.StringIO()
    logs.configure("text", stream)
    structlog.get_logger().info("request", status=200)
    structlog.reset_defaults()
    assert "status=200" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


NAMES = [
    *("requests_running", "requests_waiting", "requests_total", "requests_failed_total"),
    *("requests_cancelled_total", "admission_rejections_total", "prompt_tokens_total"),
    *("image_tokens_total", "cached_tokens_total", "generation_tokens_total"),
    *("reasoning_tokens_total", "time_to_first_token_seconds", "inter_token_latency_seconds"),
    *("e2e_request_latency_seconds", "queue_time_seconds", "prefill_time_seconds"),
    *("image_decode_seconds", "vision_encode_seconds", "schema_compile_seconds"),
    *("kv_cache_usage_ratio", "prefix_cache_queries_total", "prefix_cache_hits_total"),
    *("encoder_cache_queries_total", "encoder_cache_hits_total"),
    *("preemptions_total", "drafts_proposed_total", "drafts_accepted_total"),
    *("non_finite_rows_total", "engine_state", "scheduler_heartbeat_age_seconds"),
    *("last_step_age_seconds", "device_wait_seconds", "gpu_fault", "worker_restarts_total"),
    *("requests_replayed_total", "requests_convicted_total", "weights_repaired_total"),
    *("client_retries_total", "build_info", "capacity_refusals_total", "replays_total"),
    *("captures_total", "graphs_live", "cursor_reconciles_total", "device_live_allocations"),
    *("device_live_bytes", "drafter_errors_total", "device_probe_total"),
]  # fmt: skip


async def test_every_name_of_the_contract_is_there() -> None:
    """O101, R102: each with the project's prefix."""
    server = a_server()
    server.health.heard(
        a_pong(counters={"vision_encode_seconds_sum": 0.5, "vision_encode_seconds_count": 2})
    )
    async with server.client() as http:
        answer = await http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    for name in NAMES:
        assert f"# TYPE stagelight_{name} " in answer.text, name
    for line in answer.text.splitlines():
        assert line.startswith(("#", "stagelight_")), line


async def test_requests_tokens_and_times_are_counted() -> None:
    """O101: by endpoint, status and reason; bounded labels."""
    server = a_server(says("Red, green, blue."))
    async with server.client() as http:
        for stream in (False, True):
            await http.post(CHAT, json=server.ask(stream=stream))
        await http.post(CHAT, json=server.ask(n=2), headers={"x-stainless-retry-count": "1"})
        await http.get("/nobody/knows/this")
        text = (await http.get("/metrics")).text
    count = len(ids("</think>Red, green, blue."))
    prompt = len(server.engine.seen[0].prompt)
    for line in (
        f'requests_total{{endpoint="{CHAT}",finish_reason="stop",status="200"}} 2.0',
        f'requests_total{{endpoint="{CHAT}",finish_reason="",status="400"}} 1.0',
        'requests_total{endpoint="unknown",finish_reason="",status="404"} 1.0',
        'requests_failed_total{code="unsupported_parameter"} 1.0',
        f"prompt_tokens_total {2.0 * prompt}",
        f"generation_tokens_total {2.0 * count}",
        "reasoning_tokens_total 2.0",
        "time_to_first_token_seconds_count 2.0",
        "e2e_request_latency_seconds_count 2.0",
        f"inter_token_latency_seconds_count {2.0 * count}",
        "client_retries_total 1.0",
    ):
        assert f"stagelight_{line}\n" in text, line
    assert "knows" not in text


async def test_pictures_are_timed_and_counted() -> None:
    """O101: one observation a request with pictures; image rows beside text."""
    server = a_server()
    async with server.client() as http:
        content = [picture(), picture()]
        await http.post(
            CHAT, json=server.ask() | {"messages": [{"role": "user", "content": content}]}
        )
        await http.post(CHAT, json=server.ask())
        text = (await http.get("/metrics")).text
    rows = sum(picture.tokens for picture in server.engine.seen[0].pictures)
    assert "stagelight_image_decode_seconds_count 1.0\n" in text
    assert f"stagelight_image_tokens_total {float(rows)}\n" in text


async def test_what_crosses_between_stages_is_counted_by_route() -> None:
    """Rules 24, 78: `overlay_publications_total{route}` and the copies of the boundaries."""
    server = a_server()
    told = {
        "overlay_publications_host_total": 2,
        "boundary_copies_peer_total": 5,
        "boundary_rows_peer_total": 55,
        "split_steps_total": 4,
    }
    server.health.heard(a_pong(counters=told))
    text = server.metrics.text().decode()
    for line in (
        'overlay_publications_total{route="host"} 2.0',
        'overlay_publications_total{route="peer"} 0.0',
        'boundary_copies_total{route="peer"} 5.0',
        'boundary_rows_total{route="peer"} 55.0',
        "split_steps_total 4.0",
    ):
        assert f"stagelight_{line}\n" in text


async def test_refusals_are_counted_by_reason() -> None:
    """O101: `admission_rejections_total{reason}`."""
    server = a_server(capacity=0)
    async with server.client() as http:
        await http.post(CHAT, json=server.ask())
        server.health.fault(a_fault())
        await http.post(CHAT, json=server.ask())
        text = (await http.get("/metrics")).text
    assert 'stagelight_admission_rejections_total{reason="overloaded"} 1.0' in text
    assert 'stagelight_admission_rejections_total{reason="gpu_fault"} 1.0' in text


@pytest.mark.parametrize("generation", [0, 2])
async def test_restarts_are_the_workers_that_came_before(generation: int) -> None:
    """O95, O101: the first worker has generation 0, and no restart is counted for it."""
    server = a_server()
    server.health.worker = WorkerView(4_121, generation, 0)
    text = server.metrics.text().decode()
    assert f'stagelight_worker_restarts_total{{explained="no"}} {float(generation)}\n' in text


async def test_the_workers_numbers_are_those_of_its_last_pong() -> None:
    """O101: pages, slots and counters."""
    server = a_server()
    server.health.heard(
        a_pong(
            running=3, waiting=2, pages_free=16, counters={"steps_total": 7, "bad_rows_total": 1}
        )
    )
    text = server.metrics.text().decode()
    for line in (
        "requests_running 3.0",
        "requests_waiting 2.0",
        "kv_cache_usage_ratio 0.75",
        "steps_total 7.0",
        "non_finite_rows_total 1.0",
    ):
        assert f"stagelight_{line}\n" in text, line


def test_a_worker_that_says_no_more_is_seen_to_age_stage_by_stage() -> None:
    """O101: an age is that of the scrape; only a stage that waits for its device has a wait."""
    now = 100.0
    health = Health("M", clock=lambda: now)
    stages = (
        StageReport(0, "cpu:0", "ok", 0.25, 0.3, 0.0),
        StageReport(1, "cpu:1", "ok", 0.5, 0.3, 1.5),
    )
    health.heard(a_pong(heartbeat_age_s=0.125, device_wait_s=1.5, stages=stages))
    now += 2.0
    text = Metrics(health, "test").text().decode()
    for line in (
        "scheduler_heartbeat_age_seconds 2.125",
        'last_step_age_seconds{stage="0"} 2.25',
        'last_step_age_seconds{stage="1"} 2.5',
        'device_wait_seconds{stage="0"} 0.0',
        'device_wait_seconds{stage="1"} 3.5',
    ):
        assert f"stagelight_{line}\n" in text, line
