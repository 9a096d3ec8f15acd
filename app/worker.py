"""The worker process: wire engine and vision, run the loop, answer pings with progress.

    python -m app.worker CONFIG_JSON WORK_ADDRESS CONTROL_ADDRESS

Started by the server with the number of BLAS threads in its environment, before NumPy is imported,
and ended by it. The one place where all parts are put together.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from itertools import pairwise
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
from engine.messages import Carried, Loaded, PatchSpec, Picture
from engine.models.overlay import Overlay
from engine.models.registry import LoadedModel, Placement, describe, load_stages
from engine.models.streams import payload_width
from engine.ops.exact.ops import ExactOps
from engine.ops.reference.ops import ReferenceOps
from engine.ops.spec import Ops
from engine.pipeline.boundary import Boundary
from engine.pipeline.fence import stage_layers
from engine.pipeline.pipeline import Pipeline
from engine.pipeline.stage import Stage
from engine.pipeline.transport import Link, choose
from vision.encoder import Encoder, load_encoder
from vision.overlay import Delivery, Publisher, resolve

log = logging.getLogger("app.worker")  # its own name is `__main__`
_CGROUP = Path("/sys/fs/cgroup")


class WatchedEncoder:
    """The encoder as the engine calls it: orders for the tower strike here, and its time counts."""

    def __init__(self, encoder: Encoder, board: FaultBoard, vitals: Vitals) -> None:
        self._encoder = encoder
        self._board = board
        self._counters = vitals.counters
        for part in ("count", "sum"):
            self._counters[f"vision_encode_seconds_{part}"] = 0.0
        self._count_kept()

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
        self._count_kept()
        return overlay

    def _count_kept(self) -> None:
        self._counters["encoder_cache_queries_total"] = self._encoder.kept.queries
        self._counters["encoder_cache_hits_total"] = self._encoder.kept.hits


def build(
    config: EngineConfig, board: FaultBoard, latch: Latch, vitals: Vitals, progress: Progress
) -> Machine:
    """Load the model and put the parts together.

    Raises:
        ModelError: the checkpoint is broken or unknown.
        ConfigError: a setting that this model or machine cannot have.
    """
    folder = Path(config.model)
    try:
        spec = describe(folder)
    except ConfigRefused as refused:  # the checkpoint's geometry, which no flag of ours can mend
        raise ModelError(_of(folder, str(refused))) from refused
    layers = stage_layers(config, spec)  # what cannot work is refused before weights are read
    devices = _devices(config, board if config.fault_injection else None)
    backends = [choose_ops(config, device) for device in devices]  # one each, also on one device
    links = [
        choose(one, other, config.transport, rows=config.step_tokens, width=payload_width(spec))
        for one, other in pairwise(devices)
    ]
    placements = [Placement(part, ops) for part, ops in zip(layers, backends, strict=True)]
    models = load_stages(folder, placements, progress)
    encoder, pictures_off = _vision(config, models[-1], backends, vitals)
    caches = plan_caches(spec, config, free_bytes=free_memory())
    stages = [
        Stage(part, device=ops.device, ops=ops, spec=spec, weights=m.weights, caches=caches)
        for part, ops, m in zip(layers, backends, models, strict=True)
    ]
    boundaries = [Boundary(link, spec, rows=config.step_tokens) for link in links]
    for device in devices:
        device.synchronize()  # weights and zeroed caches are there before the first walk (rule 55)
    judge = Judge(devices, latch)
    builder = WatchedEncoder(encoder, board, vitals) if encoder else None
    loaded = Loaded(
        family=spec.family,
        context=caches.context,
        max_sequences=caches.slots,
        pool_tokens=caches.pool_tokens,
        vocab=spec.usable_vocab,
        end_ids=spec.end_ids,
        patches=encoder.patches if encoder else None,
        pictures_off=pictures_off,
        image_token=spec.image_token,
        vision_ids=spec.vision_ids,
        devices=config.devices,
        weight_bytes=models[0].source.total_bytes,
    )
    if links:
        vitals.transport = Carried(
            route=",".join(dict.fromkeys(link.route for link in links)), integrity="ok"
        )
        _say_the_split(layers, devices, links)
    pipeline = Pipeline(stages, boundaries, vitals.counters)
    return Machine(Engine(config, spec, pipeline, builder, judge), judge, loaded)


def _vision(
    config: EngineConfig, model: LoadedModel, backends: Sequence[Ops], vitals: Vitals
) -> tuple[Encoder | None, str | None]:
    """The tower, on the last stage's device (D10), and why there is none where one could be."""
    ops, spec, folder = backends[-1], model.spec, Path(config.model)
    tower, intake = ops.device, backends[0].device
    delivery = resolve(config.overlay_publish, tower.residency, intake.residency)
    if delivery is Delivery.DISABLED and spec.image_token is not None:
        why = (
            f"image input is disabled: image rows are made on {tower.name}, tokens are looked up "
            f"on {intake.name}, and --overlay-publish is off; use auto."
        )
        log.warning("%s", why)
        return None, why
    publisher = None
    if delivery is Delivery.PUBLISH and spec.image_token is not None:
        link = choose(tower, intake, config.transport, rows=config.step_tokens, width=spec.hidden)
        publisher = Publisher(link, config.overlay_publish, vitals.counters)
    encoder = load_encoder(
        folder,
        model.config,
        model.source,
        spec,
        ops,
        tower,
        publisher=publisher,
        kept_bytes=config.encoder_cache_bytes,
    )
    return encoder, None


def _say_the_split(
    layers: Sequence[range], devices: Sequence[HostDevice], links: Sequence[Link]
) -> None:
    parts = [
        f"layers {part.start} to {part.stop} on {device.name}"
        for part, device in zip(layers, devices, strict=True)
    ]
    routes = ", ".join(f"{link.route} ({link.probes} probes passed)" for link in links)
    log.info("%d stages: %s; rows cross by %s; serial walk", len(parts), "; ".join(parts), routes)


def _of(folder: Path, reason: str) -> str:
    return reason if str(folder) in reason else f"{folder}: {reason}"


def choose_ops(config: EngineConfig, device: HostDevice) -> Ops:
    """The implementation that a stage computes with: the same for all, chosen here and once."""
    return ExactOps(device) if config.deterministic else ReferenceOps(device)


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


def _devices(config: EngineConfig, faults: FaultBoard | None) -> list[HostDevice]:
    """The stages' devices; a device that is named twice has one context (rule 4)."""
    known: dict[str, HostDevice] = {}
    for name in config.devices:
        if name not in known:
            known[name] = _device(name, config, faults)
        elif faults is not None:
            faults.enrol(known[name])  # a board counts stages, not devices
    return [known[name] for name in config.devices]


def _device(name: str, config: EngineConfig, faults: FaultBoard | None) -> HostDevice:
    kind, _, ordinal = name.partition(":")
    if kind != "cpu" or not (ordinal or "0").isdigit():
        raise ConfigError(f"--devices {name} is not available in this version; use cpu.")
    return HostDevice(name, int(ordinal or "0"), config.generation, faults)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:], build))
