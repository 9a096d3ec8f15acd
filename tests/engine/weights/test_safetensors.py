"""A safetensors folder is read exactly, or refused in one line that names file and mend."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from engine.device.device import Array
from engine.errors import ModelError
from engine.weights.safetensors import INDEX, SINGLE, SafetensorsSource

FIXTURE = Path(__file__).parents[2] / "fixtures" / "glm5_next_tiny" / "fixtures.npz"
CODES = {
    "float32": "F32",
    "float64": "F64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "uint8": "U8",
}


def write(file: Path, tensors: dict[str, Array]) -> None:
    header, body = {}, b""
    for name, array in tensors.items():
        data = array.tobytes()
        header[name] = {
            "dtype": CODES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + body)


def sharded(folder: Path) -> None:
    weight_map = {"a": "one.safetensors", "b": "two.safetensors"}
    for name, shard in weight_map.items():
        write(folder / shard, {name: np.full((2, 3), ord(name), np.float32)})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_every_float_dtype_becomes_float32(tmp_path: Path, dtype: type) -> None:
    values: Array = np.array([[1.5, -2.25], [0.0, 1024.0], [-0.125, 3.0]]).astype(dtype)
    write(tmp_path / SINGLE, {"w": values})
    source = SafetensorsSource(tmp_path)
    assert source.shape("w") == (3, 2)
    got = source.read("w")
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, values.astype(np.float32))


def test_tensors_of_many_shards_are_found(tmp_path: Path) -> None:
    sharded(tmp_path)
    source = SafetensorsSource(tmp_path)
    assert sorted(source.names()) == ["a", "b"]
    assert "a" in source
    assert "c" not in source
    assert source.read("b")[0, 0] == ord("b")
    assert source.file("b").name == "two.safetensors"


def test_block_scaled_fp8_is_multiplied_out(tmp_path: Path) -> None:
    """glm 3.3: the scale of a block multiplies it, ragged edge blocks included."""
    with np.load(FIXTURE) as fixture:
        bits, scales = fixture["fp8.weight_bits"], fixture["fp8.weight_scale_inv"]
        row, total = fixture["fp8.dequant_row129"], fixture["fp8.dequant_sum"]
        table = fixture["fp8.e4m3_table"]
    weight = bits.view(ml_dtypes.float8_e4m3fn)
    write(tmp_path / SINGLE, {"w": weight, "w_scale_inv": scales})
    source = SafetensorsSource(tmp_path)
    got = source.read("w")
    np.testing.assert_array_equal(got[129], row)
    np.testing.assert_allclose(got.astype(np.float64).sum(), total[0], rtol=1e-6)
    assert list(source.names()) == ["w"]

    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).reshape(2, 128)
    write(tmp_path / SINGLE, {"w": codes, "w_scale_inv": np.ones((1, 1), np.float32)})
    np.testing.assert_array_equal(SafetensorsSource(tmp_path).read("w").ravel(), table)


def test_progress_counts_bytes_as_stored(tmp_path: Path) -> None:
    sharded(tmp_path)
    seen: list[tuple[int, int]] = []
    source = SafetensorsSource(tmp_path, progress=lambda done, total: seen.append((done, total)))
    for name in source.names():
        source.read(name)
    assert seen == [(24, 48), (48, 48)]
    assert source.total_bytes == 48


Damage = Callable[[Path], None]


def no_file(folder: Path) -> None:
    (folder / INDEX).unlink()


def missing_shard(folder: Path) -> None:
    (folder / "two.safetensors").unlink()


def cut(folder: Path) -> None:
    file = folder / "two.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def cut_header(folder: Path) -> None:
    (folder / "two.safetensors").write_bytes(b"\1\0")


def empty(folder: Path) -> None:
    (folder / "two.safetensors").write_bytes(b"")


def garbled_header(folder: Path) -> None:
    file = folder / "two.safetensors"
    data = bytearray(file.read_bytes())
    data[9] = 0xFF
    file.write_bytes(data)


def absent_tensor(folder: Path) -> None:
    write(folder / "two.safetensors", {"other": np.zeros(1, np.float32)})


def garbled_index(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": [1]}')


def cut_index(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map"')


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (no_file, INDEX),
        (missing_shard, "two.safetensors"),
        (cut, "two.safetensors"),
        (cut_header, "two.safetensors"),
        (empty, "two.safetensors"),
        (garbled_header, "two.safetensors"),
        (absent_tensor, "two.safetensors"),
        (garbled_index, INDEX),
        (cut_index, INDEX),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_damaged_folder_is_refused_in_one_line(
    tmp_path: Path, damage: Damage, named: str
) -> None:
    sharded(tmp_path)
    SafetensorsSource(tmp_path)
    damage(tmp_path)
    with pytest.raises(ModelError) as refused:
        SafetensorsSource(tmp_path)
    message = str(refused.value)
    assert named in message
    assert "Download the checkpoint again." in message
    assert "\n" not in message


def test_a_tensor_that_is_not_there_is_named(tmp_path: Path) -> None:
    sharded(tmp_path)
    source = SafetensorsSource(tmp_path)
    for ask in (source.read, source.shape):
        with pytest.raises(ModelError, match=r"no tensor model\.norm"):
            ask("model.norm")


def test_values_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    fp8 = np.zeros((4, 4), ml_dtypes.float8_e4m3fn)
    scales = np.zeros((3, 1), np.float32)
    write(
        tmp_path / SINGLE,
        {"bare": fp8, "wrong": fp8, "wrong_scale_inv": scales, "bytes": np.zeros(3, np.uint8)},
    )
    source = SafetensorsSource(tmp_path)
    for name, text in (("bare", "bare_scale_inv"), ("wrong", r"\(3, 1\)"), ("bytes", "U8")):
        with pytest.raises(ModelError, match=text):
            source.read(name)
