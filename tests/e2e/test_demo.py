"""What a newcomer types first: the demo, and the README's lines as printed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.demo import bundled_question
from app.local_server import LocalServer, ServerFailed

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.e2e


def blocks(language: str) -> list[str]:
    """Code blocks of the README in one language, in order."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with LocalServer() as running:
        running.wait_until_ready()
        yield running


def run(command: tuple[str, ...], cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=False, timeout=120
    )


def test_the_demo_shows_the_right_answer_times_and_health(tmp_path: Path) -> None:
    """From any folder, also one that has an `app` of its own."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__init__.py").write_text("raise SystemExit('the wrong app')\n")
    start = f"import sys; sys.path[0] = {str(ROOT)!r}; from app.cli import main; main(['demo'])"

    told = run((sys.executable, "-c", start), cwd=tmp_path)

    assert told.returncode == 0, told.stdout + told.stderr
    assert bundled_question().answer in told.stdout
    assert "\x1b" not in told.stdout  # plain lines where there is no terminal
    assert re.search(r"^ready +after \d+\.\d+ s", told.stdout, re.MULTILINE)
    assert re.search(r"^times +first text after \d+ ms, \d+ tokens", told.stdout, re.MULTILINE)
    health = re.search(r"^health +200 (\{.*\})$", told.stdout, re.MULTILINE)
    assert health
    assert json.loads(health[1])["status"] == "ready"


def test_a_server_that_cannot_start_is_told_with_its_last_words() -> None:
    with (
        LocalServer("/nowhere") as broken,
        pytest.raises(ServerFailed, match=r"code 1 before it was ready.*/nowhere is"),
    ):
        broken.wait_until_ready()


def curls() -> list[str]:
    return [block for block in blocks("sh") if "curl " in block]


@pytest.mark.parametrize(
    ("number", "words"), [(0, "Glimmer"), (1, "a small pink heart at the top")]
)
def test_the_curl_lines_of_the_readme_work_as_printed(
    server: LocalServer, number: int, words: str
) -> None:
    script = curls()[number].replace("http://127.0.0.1:8000", server.url)

    told = run(("bash", "-ec", script))

    assert told.returncode == 0, told.stderr
    assert words in json.loads(told.stdout)["choices"][0]["message"]["content"]


def test_every_curl_line_of_the_readme_is_tried() -> None:
    assert len(curls()) == 2


def test_the_client_program_of_the_readme_reads_the_sign(server: LocalServer) -> None:
    (program,) = blocks("python")

    told = run((sys.executable, "-c", program.replace("http://127.0.0.1:8000", server.url)))

    assert told.returncode == 0, told.stderr
    assert told.stdout.strip() == "48215"
