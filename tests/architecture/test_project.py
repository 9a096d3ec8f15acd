"""What stands beside the code agrees with it: README, CI, settings page, benchmark results."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jsonschema_rs
import pytest

from benchmarks.serve import NAMES, Provenance, line, write

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "benchmarks" / "schema.json").read_text(encoding="utf-8"))
SET_UP = (
    "pip install -e . && stagelight demo",
    "pip install -e '.[test]' && pytest",
    "uv run stagelight demo",
    "uv run --extra test pytest",
)


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("command", SET_UP)
def test_ci_runs_the_commands_of_the_readme(command: str) -> None:
    assert command in text("README.md")
    assert command in text(".ci/run")


def test_the_settings_page_is_up_to_date() -> None:
    told = subprocess.run(
        (sys.executable, "scripts/settings_page.py", "--check"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stdout + told.stderr


def test_the_version_stands_in_the_changelog() -> None:
    version = tomllib.loads(text("pyproject.toml"))["project"]["version"]
    assert f"## [{version}]" in text("CHANGELOG.md")


def test_decisions_have_their_parts() -> None:
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    assert len(pages) >= 3
    for page in pages:
        told = page.read_text(encoding="utf-8")
        assert re.match(rf"# {page.name[:4]}\. \w", told), page.name
        for part in ("Status:", "Context:", "Decision:", "Consequences:", "Checked by:"):
            assert part in told, f"{page.name} has no {part}"


def test_every_runtime_dependency_stands_on_the_dependency_page() -> None:
    project = tomllib.loads(text("pyproject.toml"))["project"]
    page = text("docs/decisions/0005-dependencies.md")
    for wanted in project["dependencies"]:
        name = re.split(r"[\[>=<]", wanted)[0]
        assert f"| {name} |" in page, f"{name} is not on the page of dependencies"


# Benchmarks


@pytest.mark.parametrize(
    "path", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=lambda path: path.name
)
def test_a_recorded_result_is_as_the_schema_says(path: Path) -> None:
    record = json.loads(path.read_text(encoding="utf-8"))

    jsonschema_rs.validate(SCHEMA, record)

    assert path.name.startswith(f"{record['started_at'][:10]}-{record['commit']}-")
    assert path.stem.endswith(record["bench"].replace("/", "-"))
    assert record["bench"].removeprefix("serve/") in NAMES


def a_record() -> dict[str, object]:
    measured = {
        "load": {
            "clients": 1,
            "streams": 1,
            "requests": 2,
            "prompt_tokens": 100,
            "answer_tokens": 128,
            "images": 0,
        },
        "result": {"tokens_per_s": 10.0, "requests": 2, "failed": 0},
        "goal": {
            "what": "tokens_per_s",
            "at_least": 12.0,
            "at_most": None,
            "measured": 10.0,
            "reached": False,
        },
        "load_before": 0.5,
        "started_at": "2026-03-02T10:00:00Z",
    }
    server = {"name": "stagelight", "flags": []}
    return Provenance("glimmer", ours=True).around("one-stream", measured, server)


def test_a_new_result_is_as_the_schema_says_and_says_what_was_missed(tmp_path: Path) -> None:
    record = a_record()

    path = write(record, tmp_path)

    jsonschema_rs.validate(SCHEMA, json.loads(path.read_text(encoding="utf-8")))
    assert path.name.startswith("2026-03-02-")
    assert "NOT REACHED" in line(record)


def test_the_schema_refuses_a_result_without_provenance() -> None:
    record = a_record()
    del record["commit"]
    with pytest.raises(jsonschema_rs.ValidationError):
        jsonschema_rs.validate(SCHEMA, record)
