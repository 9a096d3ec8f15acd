"""What every test shares: a GPU job that ran without a GPU is red, never green by skipping."""

from __future__ import annotations

import importlib.util

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-gpu", action="store_true", help="fail when there is no GPU")


def gpu_count() -> int:
    """CUDA devices of this machine; 0 where CuPy is not installed or finds no driver."""
    if importlib.util.find_spec("cupy") is None:
        return 0
    import cupy

    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


def pytest_runtest_setup(item: pytest.Item) -> None:
    wanted = 2 if item.get_closest_marker("multi_gpu") else 1
    if not (item.get_closest_marker("gpu") or item.get_closest_marker("multi_gpu")):
        return
    found = gpu_count()
    if found >= wanted:
        return
    if item.config.getoption("--require-gpu"):
        pytest.fail(f"this run promised {wanted} GPU(s) and found {found}", pytrace=False)
    pytest.skip(f"needs {wanted} GPU(s)")
