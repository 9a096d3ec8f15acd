"""Who answers: version and build of this program, fingerprint of checkpoint and settings.

A build is told by the text of the program itself, so that two installations of one version differ
in name when they differ in code. A checkpoint is told by its small files whole and by samples of
its large ones: a hundred gigabytes are not read twice for a name.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from engine.config import EngineConfig

PACKAGES: Final = ("app", "engine", "vision")
_SAMPLES: Final = 16
_SAMPLE_BYTES: Final = 64 * 1024
_SOURCES: Final = frozenset({".py", ".cu"})


@dataclass(frozen=True, slots=True)
class Identity:
    """What answers carry so that two of them can be told to come from the same server."""

    version: str
    build: str  # version + digest of the program
    checkpoint: str  # digest, the `root` of /v1/models
    fingerprint: str  # `system_fingerprint`: build, checkpoint and numerics
    created: int  # seconds: when this server process began to serve the model

    @classmethod
    def of(cls, engine: EngineConfig) -> Identity:
        """Read the program and the checkpoint; some milliseconds, once at boot."""
        checkpoint = _digest_of_checkpoint(Path(engine.model))
        numerics = (engine.dtype, len(engine.devices), engine.fence, engine.step_tokens)
        told = f"{build_id()} {checkpoint} {numerics} {engine.blas_threads} {engine.deterministic}"
        return cls(
            version=version_id(),
            build=build_id(),
            checkpoint=checkpoint,
            fingerprint=f"fp_{hashlib.sha256(told.encode()).hexdigest()[:12]}",
            created=int(time.time()),
        )


def version_id() -> str:
    """The installed version; `0` when this program runs from its folder, not installed."""
    try:
        return version("stagelight")
    except PackageNotFoundError:
        return "0"


@functools.cache
def build_id() -> str:
    """`0.1.0+a1b2c3d4`: the version and a digest of the program's text."""
    digest = hashlib.sha256()
    root = Path(__file__).parent.parent
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*")):
            if path.suffix in _SOURCES:
                digest.update(path.relative_to(root).as_posix().encode() + b"\0")
                digest.update(path.read_bytes())
    return f"{version_id()}+{digest.hexdigest()[:8]}"


def version_body(identity: Identity) -> dict[str, Any]:
    """The body of /version (O92). This version computes on the CPU: no card, no driver."""
    return {
        "version": identity.version,
        "build": identity.build,
        "python": platform.python_version(),
        "cupy": None,
        "cuda_runtime": None,
        "driver": None,
        "gpus": [],
    }


def _digest_of_checkpoint(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\0".encode())
        step = max(_SAMPLE_BYTES, size // _SAMPLES)
        with path.open("rb") as file:
            for offset in range(0, size, step):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]
