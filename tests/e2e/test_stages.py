"""A real server over two stages: pictures answered, faults of stage 1 named, both healed."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Serve, Served, eventually, polled, question

pytestmark = [pytest.mark.e2e]

TWO = ("--devices", "cpu:0,cpu:1", "--stages", "2", "--fence", "0,3,8")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for the faults that it survives."""
    folder: Path = tmp_path_factory.mktemp("stages")
    settings = {"restart-budget": 1_000, "restart-delays-s": [0], "canary-period-s": 1}
    with Served([*TWO, "--fault-injection", "on"], settings, folder) as server:
        server.ready()
        yield server
        server.signal(signal.SIGTERM)
        assert server.ended() == 0


def publications(server: Served) -> float:
    text = server.http.get("/metrics").text
    found = re.findall(r"^stagelight_overlay_publications_total\{.*\} ([\d.]+)$", text, re.M)
    return sum(map(float, found))


def test_a_picture_is_answered_over_two_stages(server: Served) -> None:
    """Rules 14, 24, 68, 110: published once, receipt and counter; each stage and route shown."""
    body = server.ready()
    assert [(s["stage"], s["device"], s["state"]) for s in body["engine"]["stages"]] == [
        (0, "cpu:0", "ok"),
        (1, "cpu:1", "ok"),
    ]
    assert body["transport"] == {"route": "peer", "integrity": "ok"}
    asked = question()
    # the self-test has published once; the next pong tells, perhaps after `ready`
    before = eventually(lambda: publications(server))

    assert server.ask(asked) == asked.answer

    eventually(lambda: publications(server) == before + 1)
    assert "image rows published from cpu:1 to cpu:0" in server.err
    assert "2 stages: layers 0 to 3 on cpu:0; layers 3 to 8 on cpu:1" in server.err


@pytest.mark.parametrize("where", ["step", "tower", "idle"])
def test_a_fault_of_stage_1_is_named_and_the_next_worker_answers_right(
    server: Served, where: str
) -> None:
    """R107, rule 102: on stage 1 only, in a request, in the tower, in an idle worker."""
    asked, before = question(), server.ready()["worker"]
    with polled(server, "/health") as poll:
        eventually(lambda: poll.of("/health"))
        server.order("sticky", where, stage=1, code=719)
        if where != "idle":
            refused = server.http.post("/v1/chat/completions", json=asked.body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "gpu_fault")
        eventually(lambda: poll.of("/health")[-1].status == 503)
        server.ready()

    told = poll.first("/health", 503).body
    assert (told["status"], told["stage"], told["device"], told["error_number"]) == (
        "faulted",
        1,
        "cpu:1",
        719,
    )
    assert server.worker()["generation"] == before["generation"] + 1
    assert server.ask(asked) == asked.answer


def test_pictures_are_off_where_rows_cannot_arrive(serve: Serve) -> None:
    """Rule 15: said at boot and in the model list, and a 400; text is answered."""
    server = serve(*TWO, "--overlay-publish", "off")
    server.ready()
    assert "image input is disabled" in server.err
    (card,) = server.http.get("/v1/models").json()["data"]
    assert card["modalities"]["input"] == ["text"]

    refused = server.http.post("/v1/chat/completions", json=question().body)

    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "image_input_disabled")
    body = {"model": "glimmer", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    assert server.http.post("/v1/chat/completions", json=body).status_code == 200


def test_a_fence_that_is_not_the_models_ends_the_boot(serve: Serve) -> None:
    """Rule 48: exit 2 with the legal cuts, in one line, before any weight was read."""
    server = serve("--devices", "cpu:0,cpu:1", "--fence", "0,3,9")

    assert server.ended() == 2
    assert server.err.count("\n") == 1
    assert "--fence 0,3,9 does not rise from 0 to 8" in server.err
