"""TensorSource: names, shape, read one tensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt


class TensorSource(Protocol):
    """The tensors of a checkpoint by name, whatever the file format."""

    def names(self) -> Iterable[str]:
        """Every tensor's name."""

    def __contains__(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape, without reading the data. Raises `ModelError` when it is absent."""

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor as float32, block-scaled FP8 dequantised. Raises `ModelError`."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors as stored."""
