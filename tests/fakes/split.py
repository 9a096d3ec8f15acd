"""A decoder cut into stages on simulated devices, driven by hand as the one-stage one is."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from engine.cache.budget import CachePlan, capacity
from engine.config import PublishMode
from engine.config import Transport as Wanted
from engine.device.device import Array
from engine.device.host import HostDevice
from engine.models.overlay import Overlay
from engine.models.registry import Placement, describe, load_stages
from engine.models.streams import payload_width
from engine.ops.reference.ops import ReferenceOps
from engine.pipeline.boundary import Boundary
from engine.pipeline.fence import cuts
from engine.pipeline.pipeline import Pipeline
from engine.pipeline.stage import Stage
from engine.pipeline.transport import choose
from tests.fakes.decoder import Decoder
from vision.encoder import Encoder, load_encoder
from vision.overlay import Delivery, Publisher, resolve


class SplitDecoder(Decoder):
    """One model in as many stages as there are devices."""

    def __init__(
        self,
        folder: Path,
        fence: tuple[int, ...],
        *,
        transport: Wanted = "auto",
        publish: PublishMode = "auto",
        slots: int = 1,
        context: int = 512,
        page_tokens: int = 64,
        devices: Sequence[HostDevice] | None = None,
    ) -> None:
        count = len(fence) - 1
        self.devices = list(devices or [HostDevice(f"cpu:{n}", n, 0) for n in range(count)])
        self.counters: dict[str, float] = {}
        self.spec = spec = describe(folder)
        layers = cuts(len(spec.layers), count, fence)
        backends = [ReferenceOps(device) for device in self.devices]
        models = load_stages(
            folder,
            [Placement(part, ops) for part, ops in zip(layers, backends, strict=True)],
            lambda _done, _total: None,
        )
        self.device, self.ops, self.model = self.devices[0], backends[0], models[0]
        per_slot = -(-context // page_tokens)
        caches = CachePlan(
            slots=slots,
            pages=slots * per_slot,
            page_tokens=page_tokens,
            context=capacity(context, 4),
            page_bytes=0,
            slot_bytes=0,
        )
        self.stages = [
            Stage(part, device=ops.device, ops=ops, spec=spec, weights=m.weights, caches=caches)
            for part, ops, m in zip(layers, backends, models, strict=True)
        ]
        self.links = [
            choose(one, other, transport, rows=context, width=payload_width(spec))
            for one, other in pairwise(self.devices)
        ]
        self.pipeline = Pipeline(
            self.stages,
            [Boundary(link, spec, rows=context) for link in self.links],
            self.counters,
        )
        self.encoder = self._an_encoder(folder, publish, transport)
        self.table = _scattered(slots, per_slot)
        self.page_tokens = page_tokens
        self.length = [0] * slots
        self._fresh = [False] * slots

    def _an_encoder(self, folder: Path, publish: PublishMode, transport: Wanted) -> Encoder | None:
        tower, model = self.devices[-1], self.model
        publisher = None
        if resolve(publish, tower.residency, self.device.residency) is Delivery.PUBLISH:
            link = choose(tower, self.device, transport, rows=64, width=self.spec.hidden)
            publisher = Publisher(link, publish, self.counters)
        ops = self.stages[-1].ops
        return load_encoder(
            folder, model.config, model.source, self.spec, ops, tower, publisher=publisher
        )

    @property
    def publications(self) -> float:
        """Overlays brought to stage 0, by whichever route."""
        found = [n for name, n in self.counters.items() if name.startswith("overlay_publications")]
        return sum(found)

    def begin(self, slot: int) -> None:
        self.pipeline.release(slot)
        self.length[slot] = 0
        self._fresh[slot] = True

    def step(
        self, work: Sequence[tuple[int, Sequence[int]]], overlay: Overlay | None = None
    ) -> Array:
        """Logits of each sequence's last row, (sequences, vocab)."""
        batch = self.batch(work, overlay)
        logits = self.pipeline.walk(batch, [slot for slot, _ in work if self._fresh[slot]])
        for slot, tokens in work:
            self.length[slot] += len(tokens)
            self._fresh[slot] = False
        return logits


def _scattered(slots: int, per_slot: int) -> Array:
    return np.arange(slots * per_slot, dtype=np.int32).reshape(per_slot, slots).T
