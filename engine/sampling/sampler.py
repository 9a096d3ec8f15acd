"""logits -> tokens and logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.device.device import Array
from engine.messages import Sampling
from engine.ops.spec import Ops
from engine.spec import ModelSpec

_SEED_BITS = (1 << 64) - 1  # a signed seed is drawn from as its 64 bits


class Sampler:
    """Keeps each slot's sampling settings as columns, so that a step only picks rows of them.

    Ids that only image or video parts may produce are never drawn (rule 30), nor are padding ids.
    """

    def __init__(self, spec: ModelSpec, ops: Ops, *, slots: int) -> None:
        self._ops = ops
        self._usable = spec.usable_vocab
        never = set(spec.vision_ids)
        if spec.image_token is not None:
            never.add(spec.image_token)
        self._never = tuple(sorted(i for i in never if i < spec.usable_vocab))
        self._held: list[tuple[Sampling, int] | None] = [None] * slots
        self._temperature = np.zeros(slots, np.float32)
        self._top_p = np.ones(slots, np.float32)
        self._top_k = np.zeros(slots, np.int32)
        self._min_p = np.zeros(slots, np.float32)
        self._seeds = np.zeros(slots, np.uint64)
        self._counters = np.zeros((slots, 2), np.uint32)  # choice, position
        self._slots = b""  # whose columns these are: decode steps name the same slots for long
        self._columns: dict[str, npt.NDArray[Any]] = {}
        self._bans: dict[int, tuple[tuple[int, int], ...]] = {}  # rows -> pairs, for `_never`

    def set(self, slot: int, sampling: Sampling, choice: int) -> None:
        """Note how tokens of this slot are drawn; nothing happens when it is known already."""
        held = self._held[slot]
        if held is not None and held[0] is sampling and held[1] == choice:
            return
        self._held[slot] = (sampling, choice)
        self._slots = b""
        self._temperature[slot] = sampling.temperature
        self._top_p[slot] = sampling.top_p
        self._top_k[slot] = max(sampling.top_k, 0)
        self._min_p[slot] = sampling.min_p
        self._seeds[slot] = sampling.seed & _SEED_BITS
        self._counters[slot, 0] = choice

    def draw(
        self,
        logits: Array,
        slots: npt.NDArray[np.intp],
        positions: Sequence[int],
        banned: Sequence[tuple[int, ...]],
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """One token a row; ids (rows,) i32, -1 for a row that is not finite; logprobs (rows,) f32.

        Shapes: logits (rows, vocab), may be changed · slots (rows,), all noted with `set`
                positions: index of the drawn token in prompt + answer · banned: ids for each row
        """
        key = slots.tobytes()
        if key != self._slots:
            self._slots = key
            self._columns = {
                "temperature": self._temperature[slots],
                "top_p": self._top_p[slots],
                "top_k": self._top_k[slots],
                "min_p": self._min_p[slots],
                "seeds": self._seeds[slots],
                "counters": self._counters[slots],
            }
        self._columns["counters"][:, 1] = positions
        return self._ops.sample(
            logits, **self._columns, banned=self._pairs(banned), usable=self._usable
        )

    def _pairs(self, banned: Sequence[tuple[int, ...]]) -> tuple[tuple[int, int], ...]:
        rows = len(banned)
        pairs = self._bans.get(rows)
        if pairs is None:
            pairs = tuple((row, i) for row in range(rows) for i in self._never)
            self._bans[rows] = pairs
        if any(banned):
            pairs += tuple(
                (row, i) for row, ids in enumerate(banned) for i in ids if i < self._usable
            )
        return pairs
