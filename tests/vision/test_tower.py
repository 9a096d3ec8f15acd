"""The tower gives the reference's rows, where the intake device can read them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from engine.device.host import HostDevice
from engine.device.orders import FaultBoard
from engine.errors import DeviceError, ModelError, NotResident, RequestFault, ShapeMismatch
from engine.messages import Inject, Picture
from engine.ops.reference.ops import ReferenceOps
from engine.spec import ModelSpec
from engine.weights.safetensors import SafetensorsSource
from vision.encoder import Encoder, load_encoder
from vision.overlay import lay_out
from vision.positions import rotary_tables
from vision.preprocess import cut, pixel_values, plan_grid
from vision.towers import glm5_next
from vision.vit import Rotary, block, downsample, merge

FIXTURE = Path(__file__).parents[1] / "fixtures" / "glm5_next_tiny"
CONFIG: dict[str, Any] = json.loads((FIXTURE / "config.json").read_text())
VISION = glm5_next.PREFIX

Floats = npt.NDArray[np.float32]


class Without:
    """A source that lacks some tensors, or holds one in another shape."""

    def __init__(self, whole: SafetensorsSource, lacks: Callable[[str], bool]) -> None:
        self._whole = whole
        self._lacks = lacks
        self.total_bytes = whole.total_bytes
        self.cut = ""

    def names(self) -> Iterable[str]:
        return [name for name in self._whole.names() if not self._lacks(name)]

    def __contains__(self, name: str) -> bool:
        return name in self._whole and not self._lacks(name)

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self._whole.shape(name)
        return (shape[0] - 1, *shape[1:]) if name == self.cut else shape

    def read(self, name: str) -> Floats:
        return self._whole.read(name)


class CountingTower:
    """Rows of ones, and how often it was asked for them."""

    width = 64
    looked = 0

    def rows(self, pixels: Floats, _grid: tuple[int, int, int]) -> Floats:
        self.looked += 1
        pixels[:] = 1.0
        return pixels.reshape(-1)[: len(pixels) // 4 * 64].reshape(-1, 64)


@pytest.fixture(scope="module")
def arrays() -> dict[str, npt.NDArray[Any]]:
    with np.load(FIXTURE / "fixtures.npz") as file:
        return {name: file[name] for name in file if name.startswith(("image", "vision"))}


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return ModelSpec(
        family="glm5_next", vocab=272, usable_vocab=266, hidden=64, layers=(), draft=None,
        residual=None, norm_eps=0.02, context=4096, end_ids=(230,), image_token=264,
        vision_ids=(264,),
    )  # fmt: skip


@pytest.fixture(scope="module")
def source() -> SafetensorsSource:
    return SafetensorsSource(FIXTURE)


@pytest.fixture
def device() -> HostDevice:
    return HostDevice("cpu:0", 0, 0)


@pytest.fixture
def encoder(source: SafetensorsSource, spec: ModelSpec, device: HostDevice) -> Encoder:
    return an_encoder(source, spec, device)


def an_encoder(source: SafetensorsSource, spec: ModelSpec, device: HostDevice) -> Encoder:
    made = load_encoder(FIXTURE, CONFIG, source, spec, ReferenceOps(device), device)
    assert made is not None
    return made


def pictures_of(encoder: Encoder, arrays: dict[str, npt.NDArray[Any]]) -> list[Picture]:
    """The fixture's two pictures, behind three tokens of text and two between them."""
    made = []
    position = 3
    for name in ("image.raw0", "image.raw1"):
        height, width, _ = arrays[name].shape
        grid = plan_grid(height, width, encoder.patches)
        patches = cut(arrays[name], encoder.patches, grid)
        made.append(Picture(patches.tobytes(), grid.thw, position, grid.tokens, name))
        position += grid.tokens + 2
    return made


def assert_close(got: Floats, want: Floats) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)


def test_every_step_of_the_tower_is_the_references(
    source: SafetensorsSource, device: HostDevice, arrays: dict[str, npt.NDArray[Any]]
) -> None:
    """`vision.*`: patch embed, blocks, post norm, downsample, merged (T27 to T32)."""
    tower = glm5_next.read_spec(CONFIG)
    ops = ReferenceOps(device)
    w = glm5_next.load_weights(source, tower, ops, device)
    grids = arrays["image.grid_thw"].tolist()
    # One frame of (channel, temporal, py, px): the kernel's temporal halves are summed.
    whole = arrays["image.pixel_values"].reshape(128, 3, 2, 16)
    assert np.array_equal(whole[:, :, 0], whole[:, :, 1])
    tables = [rotary_tables(h, v, 2, tower.head, tower.theta) for _, h, v in grids]
    rotary = Rotary(
        np.concatenate([cos for cos, _ in tables]), np.concatenate([sin for _, sin in tables])
    )

    x = ops.linear(np.ascontiguousarray(whole[:, :, 0]).reshape(128, 48), w.patch_embed)
    assert_close(x, arrays["vision.patch_embed"])
    for number, layer in enumerate(w.blocks):
        x = block(
            x, layer, rotary, tuple(h * v for _, h, v in grids), heads=tower.heads, eps=tower.eps,
            block_eps=tower.block_eps, limit=tower.limit, ops=ops,
        )  # fmt: skip
        assert_close(x, arrays[f"vision.block{number}"])
    x = ops.rms_norm(x, w.post_norm, tower.eps)
    assert_close(x, arrays["vision.post_layernorm"])
    x = downsample(x, w.downsample, tower.merge**2, ops)
    assert_close(x, arrays["vision.downsample"])
    assert_close(merge(x, w.merger, tower.limit, ops), arrays["vision.merged"])


def test_pictures_become_the_references_rows_at_their_positions(
    encoder: Encoder, device: HostDevice, arrays: dict[str, npt.NDArray[Any]]
) -> None:
    """`vision.merged`, from 8-bit patches; spans in prompt order (rule 2); resident (rule 3)."""
    overlay = encoder.build(pictures_of(encoder, arrays))

    assert_close(overlay.rows, arrays["vision.merged"])
    assert [tuple(span) for span in overlay.spans] == [(3, 0, 12), (17, 12, 20)]
    assert overlay.residency == device.residency


def test_a_tower_in_the_wrong_order_is_seen(
    encoder: Encoder, arrays: dict[str, npt.NDArray[Any]]
) -> None:
    """T32: raster order of patches moves the rows far beyond the tolerance."""
    picture = pictures_of(encoder, arrays)[1]
    patches = np.frombuffer(picture.patches, np.uint8).reshape(4, 2, 5, 2, -1)
    raster = msgspec.structs.replace(picture, patches=patches.swapaxes(1, 2).tobytes())
    rows = [encoder.build([p]).rows for p in (picture, raster)]

    assert np.abs(rows[0] - rows[1]).max() > 0.01


def test_the_same_picture_twice_is_looked_at_once_and_bound_twice(
    encoder: Encoder, device: HostDevice, arrays: dict[str, npt.NDArray[Any]]
) -> None:
    """B-044, rule 2: two spans, one set of rows."""
    picture = pictures_of(encoder, arrays)[0]
    again = msgspec.structs.replace(picture, position=30)
    tower = CountingTower()

    overlay = Encoder(encoder.patches, tower, 64, ReferenceOps(device), device).build(
        [picture, again]
    )

    assert tower.looked == 1
    assert [tuple(span) for span in overlay.spans] == [(3, 0, 12), (30, 0, 12)]
    assert len(overlay.rows) == 12


def test_a_pictures_rows_do_not_depend_on_its_company(
    encoder: Encoder, arrays: dict[str, npt.NDArray[Any]]
) -> None:
    """D9: bit for bit."""
    first, second = pictures_of(encoder, arrays)
    together = encoder.build([first, second]).rows

    assert np.array_equal(together[:12], encoder.build([first]).rows)
    assert np.array_equal(together[12:], encoder.build([second]).rows)


def test_one_pictures_rows_are_used_where_the_tower_left_them(
    encoder: Encoder, device: HostDevice, arrays: dict[str, npt.NDArray[Any]]
) -> None:
    """Rule 13: with equal residency nothing is copied."""
    ops = ReferenceOps(device)
    picture = pictures_of(encoder, arrays)[0]
    seen = device.upload(np.ones((12, 64), np.float32))

    overlay = lay_out({picture.digest: seen}, [picture], device, 64, ops)

    assert overlay.rows is seen


def test_rows_of_another_context_are_refused(
    arrays: dict[str, npt.NDArray[Any]], encoder: Encoder, device: HostDevice
) -> None:
    """Rules 3 to 5: also a second context on the same device."""
    other = HostDevice("cpu:0", 0, 0)
    picture = pictures_of(encoder, arrays)[0]
    seen = other.upload(np.ones((12, 64), np.float32))

    with pytest.raises(NotResident):
        lay_out({picture.digest: seen}, [picture], device, 64, ReferenceOps(device))


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_end_the_request(
    odd: float, arrays: dict[str, npt.NDArray[Any]], encoder: Encoder, device: HostDevice
) -> None:
    """Rule 23."""
    picture = pictures_of(encoder, arrays)[0]
    rows = np.ones((12, 64), np.float32)
    rows[11, 63] = odd

    with pytest.raises(RequestFault, match="not finite"):
        lay_out({picture.digest: device.upload(rows)}, [picture], device, 64, ReferenceOps(device))


def test_a_nan_on_order_in_the_tower_is_found(
    source: SafetensorsSource, spec: ModelSpec, arrays: dict[str, npt.NDArray[Any]]
) -> None:
    """Rules 23 and 120: the one request ends, the next one is served."""
    board = FaultBoard()
    encoder = an_encoder(source, spec, HostDevice("cpu:0", 0, 0, board))
    pictures = pictures_of(encoder, arrays)
    board.order(Inject("nan_image", "tower"))

    with board.during("tower"):
        with pytest.raises(RequestFault, match="not finite"):
            encoder.build(pictures)
        assert_close(encoder.build(pictures).rows, arrays["vision.merged"])


def test_a_device_error_in_the_tower_is_not_judged_here(
    source: SafetensorsSource, spec: ModelSpec, arrays: dict[str, npt.NDArray[Any]]
) -> None:
    """R76: it leaves as it came."""
    board = FaultBoard()
    encoder = an_encoder(source, spec, HostDevice("cpu:0", 0, 0, board))
    pictures = pictures_of(encoder, arrays)
    board.order(Inject("sticky", "tower", code=700))

    with board.during("tower"), pytest.raises(DeviceError) as failed:
        encoder.build(pictures)
    assert failed.value.code == 700


def test_nothing_stays_allocated_behind_an_overlay(
    encoder: Encoder, device: HostDevice, arrays: dict[str, npt.NDArray[Any]]
) -> None:
    """Rule 61: dropping the overlay gives back all that its pictures took."""
    before = device.allocations

    encoder.build(pictures_of(encoder, arrays))

    assert device.allocations == before


def test_bytes_that_do_not_fit_their_grid_are_refused(
    encoder: Encoder, arrays: dict[str, npt.NDArray[Any]]
) -> None:
    """Our own fault, and this request's alone; nothing was launched."""
    picture = pictures_of(encoder, arrays)[0]
    for bad in (
        msgspec.structs.replace(picture, patches=picture.patches[:-1]),
        msgspec.structs.replace(picture, grid=(1, 8, 8)),
        msgspec.structs.replace(picture, tokens=11),
    ):
        with pytest.raises(ShapeMismatch):
            encoder.build([bad])
    with pytest.raises(ShapeMismatch):
        encoder.build([])


def test_a_checkpoint_without_vision_tensors_is_text_only(
    source: SafetensorsSource, spec: ModelSpec, device: HostDevice
) -> None:
    """Rule 36: no error."""
    text = Without(source, lambda name: name.startswith(VISION))

    assert load_encoder(FIXTURE, CONFIG, text, spec, ReferenceOps(device), device) is None


@pytest.mark.parametrize("name", sorted(glm5_next.tensor_shapes(glm5_next.read_spec(CONFIG))))
def test_one_missing_vision_tensor_ends_the_boot(
    name: str, source: SafetensorsSource, spec: ModelSpec, device: HostDevice
) -> None:
    """Rule 36: never silently text-only; the line names the tensor."""
    broken = Without(source, lambda other: other == VISION + name)

    with pytest.raises(ModelError, match=VISION + name):
        load_encoder(FIXTURE, CONFIG, broken, spec, ReferenceOps(device), device)


def test_a_malformed_vision_tensor_ends_the_boot(
    source: SafetensorsSource, spec: ModelSpec, device: HostDevice
) -> None:
    """Rule 36."""
    broken = Without(source, lambda _: False)
    broken.cut = VISION + "downsample.weight"

    with pytest.raises(ModelError, match="downsample"):
        load_encoder(FIXTURE, CONFIG, broken, spec, ReferenceOps(device), device)


def test_a_tower_of_another_width_ends_the_boot(
    source: SafetensorsSource, spec: ModelSpec, device: HostDevice
) -> None:
    """Rule 36: a width mismatch would copy plausible garbage."""
    wide = replace(spec, hidden=128)

    with pytest.raises(ModelError, match="out_hidden_size is 64"):
        load_encoder(FIXTURE, CONFIG, source, wide, ReferenceOps(device), device)


@pytest.mark.parametrize(
    ("field", "value", "line"),
    [
        ("merge_size", 4, "merge_size is 4"),
        ("patch_expand_factor", 2, "patch_expand_factor"),
        ("resample", 2, "resample"),
        ("image_mean", [0.5], "image_mean|ValueError"),
        ("max_image_tokens", 1, "max_image_tokens is 9 to 1"),
        ("min_image_tokens", None, "min_image_tokens|TypeError"),
    ],
)
def test_preprocessor_settings_that_cannot_be_met_end_the_boot(
    field: str,
    value: object,
    line: str,
    tmp_path: Path,
    source: SafetensorsSource,
    spec: ModelSpec,
    device: HostDevice,
) -> None:
    """Rule 36: a picture cut otherwise gives plausible nonsense."""
    settings = json.loads((FIXTURE / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings | {field: value}))

    with pytest.raises(ModelError, match=line):
        load_encoder(tmp_path, CONFIG, source, spec, ReferenceOps(device), device)


def test_a_missing_preprocessor_config_ends_the_boot_by_name(
    tmp_path: Path, source: SafetensorsSource, spec: ModelSpec, device: HostDevice
) -> None:
    """One line naming the file; the processor's own file will do."""
    with pytest.raises(ModelError, match=r"preprocessor_config\.json is missing"):
        load_encoder(tmp_path, CONFIG, source, spec, ReferenceOps(device), device)

    shutil.copy(FIXTURE / "processor_config.json", tmp_path)
    assert load_encoder(tmp_path, CONFIG, source, spec, ReferenceOps(device), device)


def test_pixel_values_and_the_towers_input_are_the_same_numbers(
    encoder: Encoder, arrays: dict[str, npt.NDArray[Any]]
) -> None:
    """The wire carries one 8-bit frame; what the reference sees follows from it exactly."""
    made = [
        pixel_values(np.frombuffer(picture.patches, np.uint8).reshape(-1, 48), encoder.patches)
        for picture in pictures_of(encoder, arrays)
    ]
    assert np.array_equal(np.concatenate(made), arrays["image.pixel_values"])
