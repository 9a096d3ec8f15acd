"""What a reader relies on: each module says its one job, packages are empty, modules stay small."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("app", "engine", "vision")
LARGEST_MODULE = 420
NAMED = re.compile(
    r"(?<![\w/.-])(?:app|engine|vision|tests|docs|scripts|benchmarks|openapi)/[\w./-]*"
)


def modules(*packages: str) -> list[Path]:
    found = [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    return [path for path in found if path.name != "__init__.py"]


def test_every_module_says_its_job_in_one_line() -> None:
    for path in modules(*PACKAGES, "tests", "benchmarks", "scripts"):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")), clean=True) or ""
        first, _, rest = text.partition("\n")
        name = path.relative_to(ROOT)
        assert first, f"{name} has no docstring: say its one job in its first line"
        assert not rest.strip() or rest.startswith("\n"), f"{name}: one line, then a blank one"


def test_packages_are_empty() -> None:
    """A package that re-exports loads everything for everyone."""
    for package in (*PACKAGES, "tests"):
        for path in (ROOT / package).rglob("__init__.py"):
            assert path.read_text(encoding="utf-8").strip() == "", f"{path} has to be empty"


def test_every_folder_with_modules_is_a_package() -> None:
    for folder in {path.parent for path in modules(*PACKAGES)}:
        assert (folder / "__init__.py").exists(), f"{folder} has no __init__.py: no wheel has it"


def test_no_module_is_larger_than_one_job() -> None:
    sizes = {
        path: len(path.read_text(encoding="utf-8").splitlines()) for path in modules(*PACKAGES)
    }
    large = {str(path.relative_to(ROOT)): n for path, n in sizes.items() if n > LARGEST_MODULE}
    assert not large, f"above {LARGEST_MODULE} lines: {large}; split them by noun"


def test_no_module_is_a_drawer() -> None:
    drawers = {"utils", "util", "helpers", "common", "misc"}
    assert not [path for path in modules(*PACKAGES) if path.stem in drawers]


def test_the_map_shows_every_module() -> None:
    told = subprocess.run(
        (sys.executable, "scripts/map.py"), cwd=ROOT, capture_output=True, text=True, check=True
    )
    for path in modules(*PACKAGES):
        assert path.name in told.stdout


@pytest.mark.parametrize(
    "path",
    sorted(ROOT.glob("docs/**/*.md")) + sorted(ROOT.glob("*.md")),
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_paths_that_a_document_names_exist(path: Path) -> None:
    """A page that names a file which moved is worse than no page."""
    for name in NAMED.findall(path.read_text(encoding="utf-8")):
        assert (ROOT / name.rstrip(".")).exists(), f"{path.name} names {name}, which is not there"
