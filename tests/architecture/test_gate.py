"""A GPU job that ran without a GPU is red, and `.ci/run` is a script that a shell can read."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import gpu_count

ROOT = Path(__file__).parents[2]
MARKED = """\
import pytest

@pytest.mark.{marker}
def test_on_a_card():
    pass
"""


@pytest.mark.parametrize(("marker", "wanted"), [("gpu", 1), ("multi_gpu", 2)])
@pytest.mark.parametrize("promised", [True, False], ids=["promised", "not promised"])
def test_a_promise_of_a_gpu_is_kept_or_the_run_is_red(
    tmp_path: Path, marker: str, wanted: int, *, promised: bool
) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_card.py").write_text(MARKED.format(marker=marker), encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    flags = ["--require-gpu"] if promised else []

    told = subprocess.run(
        (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *flags, str(tmp_path)),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )

    if gpu_count() >= wanted:
        assert "1 passed" in told.stdout
    elif promised:
        assert told.returncode == 1
        assert f"promised {wanted} GPU(s) and found" in told.stdout
    else:
        assert "1 skipped" in told.stdout


def test_the_gate_is_a_script_that_ends_with_the_tests() -> None:
    script = ROOT / ".ci" / "run"

    subprocess.run(("bash", "-n", str(script)), check=True)

    last = script.read_text(encoding="utf-8").strip().splitlines()[-1]
    assert "&& pytest" in last
