"""The worker process: wire engine and vision, run the loop, answer pings with progress.

    python -m app.worker CONFIG_JSON WORK_ADDRESS CONTROL_ADDRESS

Started by the server with the number of BLAS threads in its environment, before NumPy is imported,
and ended by it. The one place where all parts are put together.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

from app.control import Vitals
from app.life import Machine, Progress, main
from engine.cache.budget import plan_caches
from engine.config import EngineConfig
from engine.device.faults import Judge, Latch
from engine.device.host import HostDevice
from engine.device.orders import FaultBoard
from engine.engine import Engine
from engine.errors import ConfigError, ConfigRefused, ModelError
from engine.messages import Loaded, PatchSpec, Picture
from engine.models.overlay import Overlay
from engine.models.registry import load_model
from engine.ops.reference.ops import ReferenceOps
from engine.pipeline.fence import stage_layers
from engine.pipeline.pipeline import Pipeline
from engine.pipeline.stage import Stage
from vision.encoder import Encoder, load_encoder

_CGROUP = Path("/sys/fs/cgroup")


class WatchedEncoder:
    """The encoder as the engine calls it: orders for the tower strike here, and its time counts."""

    def __init__(self, encoder: Encoder, board: FaultBoard, vitals: Vitals) -> None:
        self._encoder = encoder
        self._board = board
        self._counters = vitals.counters
        for part in ("count", "sum"):
            self._counters[f"vision_encode_seconds_{part}"] = 0.0

    @property
    def patches(self) -> PatchSpec:
        return self._encoder.patches

    def build(self, pictures: Sequence[Picture]) -> Overlay:
        """As `Encoder.build`."""
        began = monotonic()
        with self._board.during("tower"):
            overlay = self._encoder.build(pictures)
        self._counters["vision_encode_seconds_count"] += 1
        self._counters["vision_encode_seconds_sum"] += monotonic() - began
        return overlay


def build(
    config: EngineConfig, board: FaultBoard, latch: Latch, vitals: Vitals, progress: Progress
) -> Machine:
    """Load the model and put the parts together.

    Raises:
        ModelError: the checkpoint is broken or unknown.
        ConfigError: a setting that this model or machine cannot have.
    """
    device = _device(config, board if config.fault_injection else None)
    ops = ReferenceOps(device)
    folder = Path(config.model)
    try:
        model = load_model(folder, ops, device, progress)
    except ConfigRefused as refused:  # the checkpoint's geometry, which no flag of ours can mend
        raise ModelError(_of(folder, str(refused))) from refused
    spec = model.spec
    encoder = load_encoder(folder, model.config, model.source, spec, ops, device)
    caches = plan_caches(spec, config, free_bytes=free_memory())
    stages = [
        Stage(layers, device=device, ops=ops, spec=spec, weights=model.weights, caches=caches)
        for layers in stage_layers(config, spec)
    ]
    judge = Judge([device], latch)
    builder = WatchedEncoder(encoder, board, vitals) if encoder else None
    loaded = Loaded(
        family=spec.family,
        context=caches.context,
        max_sequences=caches.slots,
        pool_tokens=caches.pool_tokens,
        vocab=spec.usable_vocab,
        end_ids=spec.end_ids,
        patches=encoder.patches if encoder else None,
        image_token=spec.image_token,
        vision_ids=spec.vision_ids,
        devices=config.devices,
        weight_bytes=model.source.total_bytes,
    )
    engine = Engine(config, spec, Pipeline(stages), builder, judge)
    return Machine(engine, judge, loaded)


def _of(folder: Path, reason: str) -> str:
    return reason if str(folder) in reason else f"{folder}: {reason}"


def free_memory() -> int:
    """Bytes that this process may still take: of the machine, or of its control group if less."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line[:13] == "MemAvailable:")
    except (OSError, StopIteration):  # not Linux: half of what is built in
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):  # no control group, or one without a limit
        return free
    return min(free, max(0, limit - used))


def _device(config: EngineConfig, faults: FaultBoard | None) -> HostDevice:
    name = config.devices[0]
    kind, _, ordinal = name.partition(":")
    if kind != "cpu" or not (ordinal or "0").isdigit():
        raise ConfigError(f"--devices {name} is not available in this version; use cpu.")
    return HostDevice(name, int(ordinal or "0"), config.generation, faults)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:], build))
