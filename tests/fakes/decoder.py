"""A text decoder driven by hand: sequences, pages and steps, no scheduler and no server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from engine.cache.budget import capacity
from engine.device.device import Array, Device
from engine.device.host import HostDevice
from engine.models.batch import Batch
from engine.models.forward import enter, final_hidden, leave, run_layers
from engine.models.overlay import Overlay
from engine.models.registry import LoadedModel, load_model
from engine.models.state import make_states
from engine.ops.reference.ops import ReferenceOps
from engine.ops.spec import Ops, Rows


def a_device() -> HostDevice:
    return HostDevice("cpu:0", 0, 0, None)


def rows_of(
    segments: Sequence[tuple[int, int]],
    *,
    slots: Sequence[int] | None = None,
    table: Array | None = None,
    fresh: Sequence[bool] | None = None,
    page_tokens: int = 16,
) -> Rows:
    """Geometry of sequences (context, length), each in its own pages, one row each first."""
    lengths = [length for _, length in segments]
    pages = max(-(-(context + length) // page_tokens) for context, length in segments)
    if table is None:
        table = np.arange(len(segments) * pages).reshape(len(segments), pages)
    return Rows(
        starts=np.cumsum([0, *lengths]).astype(np.int32),
        context=np.array([context for context, _ in segments], np.int32),
        slots=np.array(slots if slots is not None else range(len(segments)), np.int32),
        table=table.astype(np.int32),
        fresh=np.array(fresh if fresh is not None else [False] * len(segments), bool),
        decode=next((i for i, length in enumerate(lengths) if length != 1), len(lengths)),
        page_tokens=page_tokens,
    )


class Decoder:
    """One model, one device, some slots with pages scattered over the pool."""

    def __init__(
        self,
        folder: Path,
        *,
        slots: int = 1,
        context: int = 4096,
        page_tokens: int = 64,
        backend: Callable[[Device], Ops] = ReferenceOps,
    ) -> None:
        self.device = a_device()
        self.ops = backend(self.device)
        self.model: LoadedModel = load_model(
            folder, self.ops, self.device, lambda _done, _total: None
        )
        self.spec = self.model.spec
        per_slot = -(-context // page_tokens)
        self.states = make_states(
            self.spec,
            range(len(self.spec.layers)),
            self.device,
            slots=slots,
            pages=slots * per_slot,
            page_tokens=page_tokens,
            capacity=capacity(context, 4),
        )
        # A slot's pages do not lie side by side, so a mistake in the page table shows.
        self.table = np.arange(slots * per_slot, dtype=np.int32).reshape(per_slot, slots).T
        self.page_tokens = page_tokens
        self.length = [0] * slots
        self._fresh = [False] * slots

    def begin(self, slot: int) -> None:
        for state in self.states:
            state.begin(slot)
        self.length[slot] = 0
        self._fresh[slot] = True

    def batch(
        self, work: Sequence[tuple[int, Sequence[int]]], overlay: Overlay | None = None
    ) -> Batch:
        """Work is (slot, tokens), sequences of one token first."""
        slots = [slot for slot, _ in work]
        rows = rows_of(
            [(self.length[slot], len(tokens)) for slot, tokens in work],
            slots=slots,
            table=self.table[slots],
            fresh=[self._fresh[slot] for slot in slots],
            page_tokens=self.page_tokens,
        )
        window = None
        if overlay is not None:
            window = overlay.window(self.length[slots[0]], len(work[0][1]))
        return Batch(
            ids=np.concatenate([np.asarray(tokens, np.int32) for _, tokens in work]),
            rows=rows,
            outputs=rows.starts[1:] - 1,
            overlays=() if window is None else ((0, window),),
        )

    def residual(self, batch: Batch, layers: int | None = None) -> Array:
        """The residual behind the first `layers` layers; all of them, unless said."""
        count = len(self.spec.layers) if layers is None else layers
        x = enter(batch, self.model.weights, self.spec, self.ops)
        x = run_layers(
            x,
            batch,
            range(count),
            self.model.weights,
            self.states[:count],
            self.spec,
            self.ops,
        )
        for segment in batch.rows.segments:
            self.length[segment.slot] += segment.length
            self._fresh[segment.slot] = False
        return x

    def step(
        self, work: Sequence[tuple[int, Sequence[int]]], overlay: Overlay | None = None
    ) -> Array:
        """Logits of each sequence's last row, (sequences, vocab)."""
        batch = self.batch(work, overlay)
        x = self.residual(batch)
        return leave(x, batch, self.model.weights, self.spec, self.ops)

    def final(self, x: Array) -> Array:
        return final_hidden(x, self.model.weights, self.spec, self.ops)

    def prefill(
        self,
        slot: int,
        tokens: Sequence[int],
        chunks: Sequence[int] | int,
        overlay: Overlay | None = None,
    ) -> Array:
        """Logits of the last row of a prompt, cut into chunks (the last size repeats)."""
        sizes = [chunks] if isinstance(chunks, int) else list(chunks)
        at, turn = 0, 0
        logits = np.empty((1, self.spec.vocab), np.float32)
        while at < len(tokens):
            size = sizes[min(turn, len(sizes) - 1)]
            logits = self.step([(slot, tokens[at : at + size])], overlay)
            at, turn = at + size, turn + 1
        return logits

    def greedy(
        self,
        slot: int,
        prompt: Sequence[int],
        count: int,
        *,
        chunks: Sequence[int] | int = 256,
        overlay: Overlay | None = None,
    ) -> tuple[list[int], list[Array]]:
        """`count` tokens behind a prompt and the logits that gave them; the slot begins anew."""
        self.begin(slot)
        rows = [self.prefill(slot, prompt, chunks, overlay)[0]]
        ids = [int(rows[0].argmax())]
        while len(ids) < count:
            rows.append(self.step([(slot, ids[-1:])])[0])
            ids.append(int(rows[-1].argmax()))
        return ids, rows
