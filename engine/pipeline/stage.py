"""layers [i, j) on one device: receive, forward, send."""

from __future__ import annotations

from engine.cache.budget import CachePlan
from engine.device.device import Array, Device
from engine.errors import NotResident, RequestFault
from engine.models.batch import Batch
from engine.models.forward import ModelWeights, enter, leave, run_layers
from engine.models.state import make_states
from engine.ops.spec import Ops
from engine.spec import ModelSpec


class Stage:
    """Owner of its layers' caches, and the one who runs them.

    The first stage looks tokens up, the last one makes logits; one stage alone does both.

    Args:
        layers: of this stage, out of all of `spec.layers`.
        weights: of these layers, on this device (rule 51).
        caches: slots, pages and the capacity C, the same on every stage (R104).
    """

    def __init__(
        self,
        layers: range,
        *,
        device: Device,
        ops: Ops,
        spec: ModelSpec,
        weights: ModelWeights,
        caches: CachePlan,
    ) -> None:
        self.layers = layers
        self.device = device
        self.ops = ops
        self.spec = spec
        self.caches = caches
        self.wrote = False  # whether the last call may have changed a sequence's state
        self._weights = weights
        self._first = layers.start == 0
        self._last = layers.stop == len(spec.layers)
        self._states = make_states(
            spec,
            layers,
            device,
            slots=caches.slots,
            pages=caches.pages,
            page_tokens=caches.page_tokens,
            capacity=caches.context,
            snapshots=caches.snapshots,
        )

    def run(self, x: Array | None, batch: Batch, fresh: list[int]) -> Array:
        """Hidden rows in, hidden rows out; the last stage makes logits of the rows that draw.

        Shapes: x (rows, hidden), or with its residual streams · logits (outs, vocab)

        Args:
            x: rows of the stage before; None on the first, which starts from the batch's ids.
            batch: the step's arrays; image rows are for the first stage only (rule 25).
            fresh: slots whose sequence starts with this step.

        Raises: NotResident for rows of another context, which are never relabelled (R105).
        """
        self.wrote = False
        if self._first:
            x = enter(batch, self._weights, self.spec, self.ops)
        elif x is None or batch.overlays:
            raise RequestFault(
                f"the stage of layers {self.layers.start} to {self.layers.stop} takes rows of the "
                "stage before it, and no image rows."
            )
        else:
            self._require_resident(x)
        self.wrote = True
        for slot in fresh:
            for state in self._states:
                state.begin(slot)
        x = run_layers(x, batch, self.layers, self._weights, self._states, self.spec, self.ops)
        if self._last and len(batch.outputs):
            return leave(x, batch, self._weights, self.spec, self.ops)
        return x

    def _require_resident(self, x: Array) -> None:
        home = self.device.locate(x)
        if home != self.device.residency:
            raise NotResident(
                f"rows live in {home}, but {self.device.name} reads {self.device.residency}; "
                "send them through the boundary."
            )

    def resume(self, slot: int, rows: int, snapshot: int) -> None:
        """Let a slot's sequence stand behind rows that were computed before (R25)."""
        for state in self._states:
            state.resume(slot, rows, snapshot)

    def keep(self, slot: int, snapshot: int) -> None:
        """Copy what a slot's sequence cannot share in pages, for `resume`."""
        for state in self._states:
            state.keep(slot, snapshot)

    def release(self, slot: int) -> None:
        """Forget the slot's sequence; host bookkeeping only (R67)."""
        for state in self._states:
            state.release(slot)
