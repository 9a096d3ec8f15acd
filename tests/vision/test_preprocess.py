"""A picture's layout follows from its size alone; its patches are the reference's, bit for bit."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import RequestError
from engine.messages import PatchSpec
from tests.vision.pictures import png
from vision.images import decode, read_header
from vision.preprocess import cut, normalised, pixel_values, plan_grid

ROOT = Path(__file__).parents[2]
FIXTURE = ROOT / "tests" / "fixtures" / "glm5_next_tiny"
GLIMMER = ROOT / "app" / "models" / "glimmer"
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
RELEASED = PatchSpec("glm5_next", 14, 2, 2, 16, 8000, MEAN, STD)
TINY = PatchSpec("glm5_next", 4, 2, 2, 9, 20, MEAN, STD)
GLIMMERS = PatchSpec("glm5_next", 8, 2, 2, 49, 81, MEAN, STD)

sides = st.integers(1, 6000)


@pytest.fixture(scope="module")
def arrays() -> dict[str, npt.NDArray[np.generic]]:
    with np.load(FIXTURE / "fixtures.npz") as file:
        return {name: file[name] for name in file if name.startswith(("image", "resize"))}


def test_the_released_layouts_are_the_references(arrays: dict[str, npt.NDArray[np.int64]]) -> None:
    """`resize.released_cases`: canvas, content, patches and tokens of 21 sizes."""
    cases = arrays["resize.released_cases"].tolist()
    assert len(cases) == 21
    for height, width, *want in cases:
        grid = plan_grid(height, width, RELEASED)
        tall, wide = grid.rows * 14, grid.columns * 14
        content = (grid.content_height, grid.content_width)
        assert [tall, wide, *content, grid.rows, grid.columns, grid.tokens] == want


def test_pixel_values_are_the_references_bit_for_bit(
    arrays: dict[str, npt.NDArray[np.generic]],
) -> None:
    """`image.pixel_values`: one enlarged picture, one shrunk and padded (T31, T32)."""
    made, grids = [], []
    for name in ("image.raw0", "image.raw1"):
        raw = arrays[name].astype(np.uint8)
        height, width, _ = raw.shape
        grid = plan_grid(height, width, TINY)
        made.append(pixel_values(cut(raw, TINY, grid), TINY))
        grids.append(list(grid.thw))

    assert grids == arrays["image.grid_thw"].tolist()
    assert np.array_equal(np.concatenate(made), arrays["image.pixel_values"])


def test_normalising_by_table_rounds_where_the_reference_rounds() -> None:
    """float64 product with 1/255, to float32, then minus mean over std in float32."""
    patches = np.tile(np.arange(256, dtype=np.uint8), (1, 3))
    spec = PatchSpec("glm5_next", 16, 2, 2, 1, 1, MEAN, STD)

    got = normalised(patches, spec).reshape(3, 256)

    for channel in range(3):
        level = (np.arange(256) * (1 / 255)).astype(np.float32)
        want = (level - np.float32(MEAN[channel])) / np.float32(STD[channel])
        assert np.array_equal(got[channel], want)


@pytest.mark.parametrize("number", range(8))
def test_the_sample_pictures_cost_the_recorded_tokens(number: int) -> None:
    """glimmer's samples.json: 49 to 81 image tokens, from the header alone (rule 31, O60)."""
    samples = json.loads((GLIMMER / "samples" / "samples.json").read_text())["samples"]
    sample = samples[number]
    header = read_header((GLIMMER / "samples" / sample["file"]).read_bytes())

    assert [header.width, header.height] == sample["size"]
    assert plan_grid(header.height, header.width, GLIMMERS).tokens == sample["image_tokens"]


@given(height=sides, width=sides, spec=st.sampled_from([RELEASED, TINY, GLIMMERS]))
@settings(max_examples=400, deadline=None)
def test_low_detail_never_costs_more_than_high(height: int, width: int, spec: PatchSpec) -> None:
    """O55: and `auto`, `high`, `original` and absence are the family's usual budget."""
    low, high = (plan_grid(height, width, spec, detail) for detail in ("low", "high"))

    assert 1 <= low.tokens <= high.tokens <= spec.max_tokens
    assert low.tokens <= spec.min_tokens
    for same in ("auto", "original", None):
        assert plan_grid(height, width, spec, same) == high
    for grid in (low, high):
        assert grid.tokens * spec.merge**2 == grid.rows * grid.columns
        assert 1 <= grid.content_height <= grid.rows * spec.patch
        assert 1 <= grid.content_width <= grid.columns * spec.patch


@given(side=st.integers(1, 60), spec=st.sampled_from([RELEASED, TINY, GLIMMERS]))
def test_low_detail_of_a_small_picture_is_still_a_picture(side: int, spec: PatchSpec) -> None:
    """O50, O55: it is scaled up to the smallest budget, not down to one token."""
    assert plan_grid(side, side, spec, "low").tokens == math.isqrt(spec.min_tokens) ** 2


def test_another_detail_is_refused() -> None:
    """O55, B-043."""
    with pytest.raises(RequestError, match="detail") as refused:
        plan_grid(10, 10, TINY, "ultra")
    assert refused.value.code == "invalid_value"


def test_patches_lie_block_by_block_and_padding_is_black_before_normalising() -> None:
    """T31, T32: 2 x 2 blocks in raster order; content at the top left of a canvas of zeros."""
    rgb = np.full((64, 60, 3), 200, np.uint8)
    rgb[:8, 8:16] = 50
    grid = plan_grid(64, 60, GLIMMERS)
    spec = PatchSpec("glm5_next", 8, 2, 2, 1, 81, MEAN, STD)
    grid = plan_grid(64, 60, spec)

    patches = cut(rgb, spec, grid).reshape(-1, 3, 8, 8)

    assert (grid.rows, grid.columns) == (8, 8)
    assert [int(patch.max()) for patch in patches[:6]] == [200, 50, 200, 200, 200, 200]
    right = patches[3 * 4 + 1]  # block row 0, block column 3; upper right patch
    assert (right[..., :4] == 200).all()
    assert (right[..., 4:] == 0).all()


def test_two_pictures_that_differ_in_one_pixel_have_different_patches() -> None:
    """B-047."""
    flat = np.full((56, 56, 3), 128, np.uint8)
    other = flat.copy()
    other[55, 55] = (255, 0, 0)
    grid = plan_grid(56, 56, GLIMMERS)

    data = png(other)
    seen = decode(data, read_header(data))

    assert not np.array_equal(cut(flat, GLIMMERS, grid), cut(seen, GLIMMERS, grid))
