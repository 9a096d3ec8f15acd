"""From the bound port to the exit code: a real server process, its worker, and signals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from app.config import BUILT_IN, plain_environment
from tests.e2e.conftest import (
    COMMAND,
    PATIENCE_S,
    Serve,
    eventually,
    gone,
    long_answer,
    polled,
    question,
)

pytestmark = [pytest.mark.e2e]


def test_the_ready_line_is_one_line_with_the_url(serve: Serve) -> None:
    """R98: printed after the self-test, on standard output, and nothing else is."""
    server = serve()
    asked = question()
    server.ready()
    [line] = eventually(lambda: server.out.splitlines())
    assert line == f"Stagelight serves glimmer at {server.url}"
    assert server.ask(asked) == asked.answer


def test_a_killed_worker_is_replaced_while_the_server_stays(serve: Serve) -> None:
    """R88, R92, O95: 503 within 2 s, 200 again without a restart, and the next answer is right."""
    server = serve()
    before, asked = server.ready(), question()
    with polled(server, "/health", "/health/live") as poll:
        eventually(lambda: poll.of("/health"))
        killed = time.monotonic()
        os.kill(before["worker"]["pid"], signal.SIGKILL)
        eventually(lambda: server.health()[0] == 503)
        after = server.ready()
        eventually(lambda: poll.of("/health")[-1].status == 200)
    assert poll.first("/health", 503).at - killed < 2.0
    body = poll.first("/health/live", 503).body
    assert (body["status"], body["reason"], body["error_number"]) == ("faulted", "worker_died", -9)
    assert poll.states() == ["ready", "faulted", "recovering", "ready"]
    assert (before["worker"]["generation"], after["worker"]["generation"]) == (0, 1)
    assert after["worker"]["restarts_in_window"] == 1
    assert after["boot_id"] == before["boot_id"]
    assert server.ask(asked) == asked.answer


def test_a_stop_lets_a_running_stream_finish(serve: Serve) -> None:
    """Rule 113, O98, R98: exit 0, the whole stream, new requests refused, every probe answered."""
    server = serve()
    server.ready()
    worker = server.worker()["pid"]
    with server.stream(long_answer(300)) as events:
        first = next(events)
        server.signal(signal.SIGTERM)
        eventually(lambda: server.state() == "draining")
        assert server.http.get("/health/live").status_code == 200
        refused = server.http.post("/v1/chat/completions", json=question().body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        heard = [first, *events]
    assert heard[-1] == "[DONE]"
    assert json.loads(heard[-2])["usage"]["completion_tokens"] == 300
    assert server.ended() == 0
    assert gone(worker)


def test_a_stop_waits_for_the_drain_limit_and_no_longer(serve: Serve) -> None:
    """O98: what still runs then gets one error event `shutting_down`; exit 0."""
    server = serve("--drain-s", "1")
    server.ready()
    with server.stream(long_answer(8_000)) as events:
        next(events)
        server.signal(signal.SIGTERM)
        began = time.monotonic()
        last = list(events)[-1]
    assert json.loads(last)["error"]["code"] == "shutting_down"
    assert server.ended() == 0
    assert 0.9 < time.monotonic() - began < 10


def test_a_second_signal_ends_at_once(serve: Serve) -> None:
    """O98: and no child is left."""
    server = serve()
    server.ready()
    worker = server.worker()["pid"]
    with server.stream(long_answer(8_000)) as events:
        next(events)
        server.signal(signal.SIGINT)
        eventually(lambda: server.state() == "draining")
        server.signal(signal.SIGTERM)
        began = time.monotonic()
        assert server.ended() == 0
        assert time.monotonic() - began < 5
        assert json.loads(list(events)[-1])["error"]["code"] == "shutting_down"
    assert gone(worker)
    assert "faulted" not in server.err, "a worker that we ended is no fault"


def test_a_worker_does_not_outlive_a_killed_server(serve: Serve) -> None:
    """Rule 113: however the server ended."""
    server = serve()
    server.ready()
    worker = server.worker()["pid"]
    server.signal(signal.SIGKILL)
    server.ended()
    eventually(lambda: gone(worker), 5)


def test_a_port_in_use_ends_the_boot_with_one_line(tmp_path: Path) -> None:
    """O96, O97: within 3 s, before any weight is read, code 1."""
    del tmp_path
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        ended = subprocess.run(
            [*COMMAND, "--port", port],
            env=plain_environment(),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    assert ended.returncode == 1
    assert ended.stdout == ""
    [line] = ended.stderr.splitlines()
    assert port in line
    assert "--port" in line


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("model.safetensors", "model.safetensors"),
        ("tokenizer.json", "tokenizer.json"),
        ("chat_template.jinja", "template"),
    ],
)
def test_a_broken_checkpoint_ends_the_boot_with_one_line(
    serve: Serve, tmp_path: Path, file: str, words: str
) -> None:
    """Rule 97, O97: exit 1, naming the file; the worker's and the server's half alike."""
    folder = tmp_path / "model"
    shutil.copytree(BUILT_IN["glimmer"], folder, ignore=shutil.ignore_patterns("samples"))
    if file == "model.safetensors":
        whole = (folder / file).read_bytes()
        (folder / file).write_bytes(whole[: len(whole) // 2])
    else:
        (folder / file).unlink()
    server = serve(model=str(folder))
    assert server.ended() == 1
    [line] = [line for line in server.err.splitlines() if line.startswith("stagelight: ")]
    assert words in line
    assert "Traceback" not in server.err
    assert server.out == ""


def test_a_setting_that_the_model_cannot_have_ends_the_boot_with_2(serve: Serve) -> None:
    """O97: said by the worker, which alone knows the model."""
    server = serve("--max-context", "1000000")
    assert server.ended() == 2
    assert "--max-context" in server.err.splitlines()[-1]


def test_the_key_file_is_read_again_on_a_signal(serve: Serve, tmp_path: Path) -> None:
    """O15: SIGHUP; a broken file changes nothing."""
    file = tmp_path / "keys"
    file.write_text("one:first-key\n")
    server = serve("--host", "127.0.0.1", "--api-key-file", str(file))
    server.ready()

    def status(key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return server.http.get("/v1/models", headers=headers).status_code

    assert (status("first-key"), status("second-key")) == (200, 401)
    file.write_text("two:second-key\n")
    server.signal(signal.SIGHUP)
    eventually(lambda: status("second-key") == 200)
    assert status("first-key") == 401
    file.write_text("\n")
    server.signal(signal.SIGHUP)
    eventually(lambda: "the old keys stay" in server.err)
    assert status("second-key") == 200


def test_the_listener_is_there_before_the_model(serve: Serve) -> None:
    """R98, O96: from the first moment an answer of the table, never a 200 before the self-test."""
    server = serve()

    def first_answer() -> httpx.Response | None:
        try:
            return httpx.get(f"{server.url}/health", timeout=PATIENCE_S)
        except httpx.ConnectError:
            return None

    first = eventually(first_answer)
    assert first.json()["status"] in {"loading", "warming", "ready"}
    assert first.status_code == (200 if first.json()["status"] == "ready" else 503)
    server.ready()
