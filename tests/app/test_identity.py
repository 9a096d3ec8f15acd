"""`system_fingerprint` changes with what changes numbers, and with nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from app.config import BUILT_IN
from app.identity import Identity
from engine.config import EngineConfig


def fingerprint(**more: Any) -> str:
    return Identity.of(EngineConfig(model=str(BUILT_IN["glimmer"]), **more)).fingerprint


@pytest.mark.parametrize("numerics", [{"deterministic": True}, {"blas_threads": 2}], ids=str)
def test_a_numerics_setting_changes_the_fingerprint(numerics: dict[str, Any]) -> None:
    """O30."""
    assert fingerprint(**numerics) != fingerprint()


@pytest.mark.parametrize("other", [{"queue_limit": 3}, {"generation": 4}], ids=str)
def test_another_setting_or_worker_keeps_the_fingerprint(other: dict[str, Any]) -> None:
    assert fingerprint(**other) == fingerprint()
