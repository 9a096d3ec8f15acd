"""The fence is exact or the boot is refused (rules 48, 49)."""

from __future__ import annotations

import dataclasses

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.pipeline.fence import cuts, stage_layers
from engine.spec import Dense, Kda, LayerSpec, ModelSpec
from tests.fakes.pipeline import SPEC


def test_the_given_cuts_are_taken() -> None:
    assert cuts(45, 3, (0, 15, 30, 45)) == (range(15), range(15, 30), range(30, 45))
    assert cuts(45, 3, (0, 1, 2, 45)) == (range(1), range(1, 2), range(2, 45))


@pytest.mark.parametrize(
    ("layers", "stages", "want"),
    [(8, 1, [0, 8]), (45, 2, [0, 22, 45]), (45, 4, [0, 11, 22, 33, 45]), (3, 3, [0, 1, 2, 3])],
)
def test_without_cuts_the_split_is_even(layers: int, stages: int, want: list[int]) -> None:
    found = cuts(layers, stages, None)

    assert [0, *(stage.stop for stage in found)] == want
    assert [stage.start for stage in found] == want[:-1]


@pytest.mark.parametrize(
    ("stages", "fence"),
    [
        (2, (0, 4)),
        (2, (0, 2, 4, 8)),
        (2, (0, 0, 8)),
        (2, (0, 9, 8)),
        (2, (1, 4, 8)),
        (2, (0, 4, 7)),
        (2, (0, 4, 9)),
        (0, None),
        (9, None),
    ],
)
def test_anything_else_is_refused(stages: int, fence: tuple[int, ...] | None) -> None:
    """Never "warn and run unsplit"."""
    with pytest.raises(ConfigError, match=r"--fence|--stages"):
        cuts(8, stages, fence)


def a_spec_of(layers: int) -> ModelSpec:
    layer = LayerSpec(mixer=Kda(heads=1, dim=1, taps=2, lower_bound=None), ffn=Dense(inner=1))
    return dataclasses.replace(SPEC, layers=(layer,) * layers)


def test_one_device_has_all_layers() -> None:
    config = EngineConfig(model="fake", devices=("cpu:0",))

    assert stage_layers(config, a_spec_of(8)) == (range(8),)


def test_each_device_has_its_layers() -> None:
    config = EngineConfig(model="fake", devices=("cpu:0", "cpu:1", "cpu:0"), fence=(0, 1, 7, 8))

    assert stage_layers(config, a_spec_of(8)) == (range(1), range(1, 7), range(7, 8))


def test_a_fence_that_ends_elsewhere_than_the_model_is_refused() -> None:
    """Rule 48: never "warn and run unsplit"; the legal end is named."""
    config = EngineConfig(model="fake", devices=("cpu:0", "cpu:1"), fence=(0, 4, 9))

    with pytest.raises(ConfigError, match=r"--fence 0,4,9 does not rise from 0 to 8"):
        stage_layers(config, a_spec_of(8))
