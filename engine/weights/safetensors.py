"""a TensorSource over *.safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from engine.errors import ModelError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SCALE = "_scale_inv"  # a matrix is block-scaled FP8 iff its companion of this name exists
MEND = "Download the checkpoint again."

DTYPES: Mapping[str, npt.DTypeLike] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies: bytes [first, end) of its file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    first: int
    end: int


class SafetensorsSource:
    """The tensors of a folder, one file or many; headers are checked when it is made.

    Args:
        folder: of the checkpoint.
        block: rows and columns that share one FP8 scale.
        progress: told (bytes read, bytes in all) behind each tensor.

    Raises:
        ModelError: no file, a shard that is missing, cut or damaged, or an index that lies.
    """

    def __init__(
        self,
        folder: Path,
        *,
        block: tuple[int, int] = (128, 128),
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._block = block
        self._progress = progress
        self._read = 0
        self._entries: dict[str, Entry] = {}
        self._maps: dict[Path, npt.NDArray[np.uint8]] = {}
        for file, wanted in _files(folder).items():
            entries = _entries(file)
            if missing := sorted(set(wanted) - set(entries)):
                raise ModelError(
                    f"{file}: {INDEX} promises {missing[0]} here, and it is absent. {MEND}"
                )
            self._entries |= entries

    def names(self) -> Iterable[str]:
        """Every tensor's name, FP8 scales left out."""
        return [name for name in self._entries if not self._is_scale(name)]

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape without reading the data. Raises `ModelError` when there is no such tensor."""
        return self._entry(name).shape

    def file(self, name: str) -> Path:
        """The file that holds a tensor, for messages."""
        return self._entry(name).file

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor as float32, block-scaled FP8 multiplied out (glm5_next.md 3.3).

        Raises: ModelError when it is absent, of an unknown dtype, or FP8 without scales.
        """
        entry = self._entry(name)
        values = self._values(entry)
        if name + SCALE in self._entries:
            values *= self._scales(name, entry)
        elif entry.dtype.startswith("F8"):
            raise ModelError(f"{entry.file}: {name} is {entry.dtype}, but {name}{SCALE} is absent.")
        return values

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(entry.end - entry.first for entry in self._entries.values())

    def _entry(self, name: str) -> Entry:
        try:
            return self._entries[name]
        except KeyError:
            files = sorted({str(entry.file) for entry in self._entries.values()})
            where = files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more files"
            raise ModelError(
                f"{where}: there is no tensor {name}. Use a complete checkpoint of this family."
            ) from None

    def _is_scale(self, name: str) -> bool:
        return name.endswith(SCALE) and name.removesuffix(SCALE) in self._entries

    def _values(self, entry: Entry) -> npt.NDArray[np.float32]:
        if entry.dtype not in DTYPES:
            raise ModelError(
                f"{entry.file}: a tensor has dtype {entry.dtype}; known are {', '.join(DTYPES)}."
            )
        if entry.file not in self._maps:
            self._maps[entry.file] = np.memmap(entry.file, np.uint8, mode="r")
        raw = self._maps[entry.file][entry.first : entry.end]
        values = raw.view(DTYPES[entry.dtype]).astype(np.float32).reshape(entry.shape)
        self._read += entry.end - entry.first
        if self._progress is not None:
            self._progress(min(self._read, self.total_bytes), self.total_bytes)
        return np.asarray(values)

    def _scales(self, name: str, entry: Entry) -> npt.NDArray[np.float32]:
        """One factor an element: the block scales, spread over ragged edge blocks too."""
        scales = self._entry(name + SCALE)
        rows, columns = self._block
        want = tuple(-(-size // step) for size, step in zip(entry.shape, self._block, strict=False))
        if len(entry.shape) != 2 or scales.shape != want:
            raise ModelError(
                f"{scales.file}: {name}{SCALE} has shape {scales.shape}; blocks of "
                f"{rows} x {columns} over {entry.shape} need {want}."
            )
        spread = self._values(scales).repeat(rows, axis=0).repeat(columns, axis=1)
        return spread[: entry.shape[0], : entry.shape[1]]


def _files(folder: Path) -> dict[Path, list[str]]:
    """Each weight file and the tensors that the index promises in it."""
    index = folder / INDEX
    if not index.is_file():
        single = folder / SINGLE
        if not single.is_file():
            raise ModelError(f"{folder}: neither {SINGLE} nor {INDEX} is there. {MEND}")
        return {single: []}
    try:
        weight_map: dict[str, Any] = json.loads(index.read_bytes())["weight_map"]
        files: dict[Path, list[str]] = {}
        for name, shard in weight_map.items():
            files.setdefault(folder / shard, []).append(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: not a weight index ({error}). {MEND}") from error
    if missing := [file for file in files if not file.is_file()]:
        raise ModelError(f"{missing[0]}: this shard of {index.name} is missing. {MEND}")
    return files


def _entries(file: Path) -> dict[str, Entry]:
    """What a file's header says, once the library has found header and length in order."""
    try:
        with safe_open(file, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file}: damaged or cut short ({error}). {MEND}") from error
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    start = 8 + length
    return {
        name: Entry(
            file=file,
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            first=start + entry["data_offsets"][0],
            end=start + entry["data_offsets"][1],
        )
        for name, entry in header.items()
    }
