"""The command: exit codes, one line for every failure, and nothing heavy before it is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from app.cli import run
from app.settings import FLAGS


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["serve", "--prot", "1"], 2, "--port"),
        (["serve", "--port", "x"], 2, "from 0 to 65535"),
        (["serve", "--port"], 2, "--port"),
        (["serve", "--stages", "2"], 2, "e.g. cpu:0,cpu:1"),
        (["serve", "--transport", "warp"], 2, "auto, peer or host"),
        (["serve", "--devices", "cuda:0"], 2, "CUDA"),
        (["serve", "--config", "/nowhere.toml"], 2, "/nowhere.toml"),
        (["serve", "org/name"], 2, "hub"),
        (["serve", "glimmer", "again"], 2, "again"),
        (["serve", "/nowhere"], 1, "/nowhere"),
        (["serv"], 2, "serve"),
        (["--nope"], 2, "--nope"),
        (["bench", "--streams", "0"], 2, "--streams"),
        (["bench", "--url", "http://127.0.0.1:9"], 1, "does not answer"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_failure_is_one_line_on_stderr_and_a_code(
    arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """O97: 2 for usage and settings, 1 for a bad model; nothing on stdout."""
    assert run(arguments) == code

    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("stagelight: ")
    assert words in err


def test_help_shows_every_flag_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    """D12: `serve --help` prints the flags, from the one table."""
    assert run(["serve", "--help"]) == 0

    shown = capsys.readouterr().out
    words = " ".join(shown.replace("│", " ").split())
    for setting in FLAGS:
        assert f"--{setting.name} " in words
    assert "--config " in words
    assert "glimmer" in words


def test_without_a_command_the_commands_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("serve", "demo", "doctor", "bench"))


def test_nothing_heavy_is_imported_before_a_command_is_known() -> None:
    """`serve` starts its worker first of all: what the command imports before it delays it."""
    heavy = ("numpy", "fastapi", "pydantic", "httpx", "rich", "PIL", "zmq", "asyncio", "uvicorn")
    code = (
        "import sys, app.cli, app.config; app.config.load_settings(environ={}); "
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    told = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


def test_python_m_app_is_the_same_command() -> None:
    told = subprocess.run(
        (sys.executable, "-m", "app", "serve", "--port", "x"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (told.returncode, told.stdout) == (2, "")
    assert "--port is 'x'" in told.stderr


def test_doctor_tells_versions_devices_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert found["packages"]["numpy"]
    assert found["devices"][0]["name"] == "cpu:0"
    assert found["devices"][0]["cores"] >= 1
    if Path("/proc/meminfo").exists():
        assert found["memory"]["total"] > found["memory"]["available"] > 0


def test_doctor_speaks_in_plain_lines_when_piped(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor"]) == 0

    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert {line.split()[0] for line in shown.splitlines()} >= {"python", "cpu:0", "memory"}
