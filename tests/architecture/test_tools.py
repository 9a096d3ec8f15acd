"""Lint, format, types and import contracts are tests, so `pytest` is the whole of the gate."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> None:
    told = subprocess.run(
        (sys.executable, *arguments), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, (
        f"{' '.join(arguments)}\n{told.stdout[-6000:]}{told.stderr[-2000:]}"
    )


def test_lint() -> None:
    run("-m", "ruff", "check", ".")


def test_format() -> None:
    run("-m", "ruff", "format", "--check", ".")


@pytest.mark.slow
def test_types() -> None:
    run("-m", "mypy")


def test_import_contracts() -> None:
    run("-c", "from importlinter.cli import lint_imports_command as c; c()")
