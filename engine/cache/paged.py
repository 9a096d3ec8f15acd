"""K/V and latents, in pages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.device.device import Array, Device
from engine.errors import ServerError

Shape = tuple[tuple[int, ...], npt.DTypeLike]


def allocate_all(device: Device, shapes: Sequence[Shape]) -> list[Array]:
    """Several buffers or none (R4): what was had is given back before the error goes on."""
    had: list[Array] = []
    try:
        for shape, dtype in shapes:
            had.append(device.empty(shape, dtype))
    except ServerError:
        free_all(device, had)
        raise
    return had


def free_all(device: Device, arrays: Sequence[Array]) -> None:
    """Give every buffer back; failures are reported together at the end (R60)."""
    failures: list[Exception] = []
    for array in arrays:
        try:
            device.free(array)
        except ServerError as error:
            failures.append(error)
    if failures:
        raise ExceptionGroup(f"{len(failures)} of {len(arrays)} buffers", failures)


class PagedRows:
    """One row a token, in pages that sequences take from a common pool.

    Shapes: pages (pages, page_tokens, width) f32; its contents are undefined until written
    """

    def __init__(self, device: Device, *, pages: int, page_tokens: int, width: int) -> None:
        (self.pages,) = allocate_all(device, [((pages, page_tokens, width), np.float32)])
        self._device = device

    def free(self) -> None:
        """Give the memory back; a second call does nothing."""
        self._device.free(self.pages)
