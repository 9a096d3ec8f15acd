"""The layout is a contract: packages look down only, and CUDA has three doors."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAY_IMPORT = {
    "engine": {"engine"},
    "vision": {"vision", "engine"},
    "app": {"app", "vision", "engine"},
}
CUDA = {"cupy", "cupyx", "nvmath", "triton"}
CUDA_DOORS = ("engine/device/cuda.py", "engine/ops/cuda/", "engine/pipeline/nccl.py")
CUDA_OPENERS = ("app/worker.py", "app/keeper.py")
ENVIRONMENT_READER = "app/config.py"


def modules() -> list[Path]:
    return [path for package in MAY_IMPORT for path in sorted((ROOT / package).rglob("*.py"))]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports_of(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return set(names)


def roots_of(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports_of(path)}


def test_packages_only_look_down() -> None:
    for path in modules():
        allowed = MAY_IMPORT[name_of(path).split("/")[0]]
        wrong = roots_of(path) & (MAY_IMPORT.keys() - allowed)
        assert not wrong, f"{name_of(path)} imports {wrong}; it may import {allowed}"


def test_cuda_comes_in_through_its_doors_only() -> None:
    for path in modules():
        if not name_of(path).startswith(CUDA_DOORS):
            assert not roots_of(path) & CUDA, f"{name_of(path)} imports CUDA"


def test_only_worker_and_keeper_open_the_doors() -> None:
    doors = {door.rstrip("/").removesuffix(".py").replace("/", ".") for door in CUDA_DOORS}
    for path in modules():
        if name_of(path).startswith((*CUDA_DOORS, *CUDA_OPENERS)):
            continue
        opened = {
            n for n in imports_of(path) if any(n == d or n.startswith(f"{d}.") for d in doors)
        }
        assert not opened, f"{name_of(path)} opens {opened}"


def test_only_the_config_reads_the_environment() -> None:
    """Rule 12: flag, environment and file are read once; everybody else gets values."""
    for path in modules():
        if name_of(path) == ENVIRONMENT_READER:
            continue
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        read = [
            node.attr
            for node in nodes
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "os"
            and node.attr in ("environ", "getenv", "putenv")
        ]
        assert not read, f"{name_of(path)} uses os.{read}; take the value from app/config.py"


def test_the_http_process_loads_no_engine_and_no_cuda() -> None:
    """The server never initialises a device: not even the modules that could are loaded."""
    code = (
        "import app.cli, app.api, app.serve, sys; "
        "bad = [m for m in sys.modules if m in ('cupy', 'torch', 'engine.engine', 'triton') or "
        "m.startswith(('engine.models.', 'engine.ops.', 'engine.device.', 'engine.pipeline.', "
        "'engine.scheduler.', 'engine.cache.', 'engine.weights.', 'vision.towers.'))]; print(bad)"
    )
    told = subprocess.run(
        (sys.executable, "-c", code), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert told.stdout.strip() == "[]", told.stdout + told.stderr


def test_the_worker_loads_without_cuda_and_without_the_http_side() -> None:
    code = (
        "import app.worker, engine.engine, sys; "
        "print([m for m in ('cupy', 'torch', 'fastapi', 'uvicorn', 'jinja2') if m in sys.modules])"
    )
    told = subprocess.run(
        (sys.executable, "-c", code), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert told.stdout.strip() == "[]", told.stdout + told.stderr
