"""Say what this machine has: versions, devices, memory; loads no model."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

PACKAGES = (
    "numpy",
    "fastapi",
    "uvicorn",
    "pyzmq",
    "msgspec",
    "tokenizers",
    "safetensors",
    "pillow",
    "jinja2",
)
GIB = 1024**3


def examine(form: Literal["text", "json"]) -> int:
    """Print the findings; 0, since whatever is found the CPU can serve."""
    found = findings()
    if form == "json":
        import msgspec

        text = msgspec.json.format(msgspec.json.encode(found), indent=2).decode()
        sys.stdout.write(text + "\n")
    else:
        _show(found)
    return 0


def findings() -> dict[str, Any]:
    """Everything that `doctor` knows, as JSON types; sizes in bytes."""
    return {
        "stagelight": version_of("stagelight"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: version_of(name) for name in PACKAGES},
        "blas": _blas(),
        "devices": [{"name": "cpu:0", "what": processor(), "cores": os.cpu_count()}],
        "cards": _cards(),
        "memory": memory(),
    }


def version_of(package: str) -> str | None:
    """The installed version; None where the package is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def processor() -> str:
    """The processor's name as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def memory() -> dict[str, int | None]:
    """Bytes in all, and bytes that a new process can have; None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {"total": None, "available": None}
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return {"total": sizes.get("MemTotal"), "available": sizes.get("MemAvailable")}


def _blas() -> str | None:
    import numpy as np

    built: Any = np.show_config(mode="dicts")
    blas = built.get("Build Dependencies", {}).get("blas", {})
    return f"{blas.get('name')} {blas.get('version')}" if blas else None


def _cards() -> list[dict[str, Any]]:
    """The cards that the driver reports; empty without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
        driver = pynvml.nvmlSystemGetDriverVersion()
        return [
            {
                "name": f"cuda:{n}",
                "what": pynvml.nvmlDeviceGetName(handle),
                "memory": pynvml.nvmlDeviceGetMemoryInfo(handle).total,
                "driver": driver,
            }
            for n, handle in enumerate(handles)
        ]
    finally:
        pynvml.nvmlShutdown()


def _show(found: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    packages = found["packages"]
    rows = [
        ("stagelight", found["stagelight"] or "not installed (running from its folder)"),
        ("python", f"{found['python']} on {found['system']}"),
        ("packages", ", ".join(f"{name} {packages[name] or 'missing'}" for name in packages)),
        ("matrix library", found["blas"] or "unknown"),
        *((d["name"], f"{d['what']}, {d['cores']} cores") for d in found["devices"]),
        *(
            (c["name"], f"{c['what']}, {c['memory'] / GIB:.0f} GiB; not used by this version")
            for c in found["cards"]
        ),
        ("memory", _memory_line(found["memory"])),
    ]
    for name, text in rows:
        console.print(f"[dim]{name:15}[/]{text}")


def _memory_line(sizes: dict[str, int | None]) -> str:
    total, available = sizes["total"], sizes["available"]
    if total is None or available is None:
        return "unknown on this system"
    return f"{available / GIB:.1f} GiB available of {total / GIB:.1f} GiB"
