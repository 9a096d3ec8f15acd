"""model_type -> family, written out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from engine.device.device import Device
from engine.errors import ModelError
from engine.models.families import glm5_next
from engine.models.forward import ModelWeights
from engine.models.hf import Fields, read_json
from engine.ops.spec import Ops
from engine.spec import ModelSpec
from engine.weights.load import Binder
from engine.weights.safetensors import SafetensorsSource
from engine.weights.source import TensorSource


class Family(Protocol):
    """What a family file gives: a checkpoint's config as data, and its tensors by name."""

    def describe(self, config: Fields, folder: Path) -> ModelSpec:
        """The model as data. Raises `ModelError`, `ConfigRefused`."""

    def bind(self, binder: Binder, spec: ModelSpec, ops: Ops, layers: range) -> ModelWeights:
        """What a stage of these layers holds (rule 51). Raises `ModelError`."""


FAMILIES: Mapping[str, Family] = {
    "glm5_next": glm5_next,
    "glm5_next_text": glm5_next,
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A checkpoint in memory; the tower's tensors are still in `source`."""

    spec: ModelSpec
    weights: ModelWeights
    source: TensorSource
    config: Mapping[str, Any]  # config.json


@dataclass(frozen=True, slots=True)
class Placement:
    """Which layers go where: to the device that `ops` computes on."""

    layers: range
    ops: Ops


def describe(folder: Path) -> ModelSpec:
    """What a checkpoint is, without its weights.

    Raises:
        ModelError: no readable config.json, an unknown model_type, a missing or mistyped field.
        ConfigRefused: a geometry that cannot work (R7), by field.
    """
    config = _config(folder)
    return _family(folder, config).describe(config, folder)


def load_model(
    folder: Path, ops: Ops, device: Device, progress: Callable[[int, int], None]
) -> LoadedModel:
    """Read a checkpoint and place its text decoder, all of it on one device.

    Args:
        folder: in Hugging Face layout.
        ops: packs the weights.
        device: where they go; the one that `ops` computes on.
        progress: told (bytes read, bytes in all), also by later reads from `source`.

    Raises:
        ModelError: as `describe`, or tensors that are missing, misshapen or damaged.
        ConfigRefused: as `describe`.
    """
    if ops.device is not device:
        raise AssertionError(f"ops compute on {ops.device.name}, not on {device.name}.")
    everything = range(len(describe(folder).layers))
    return load_stages(folder, [Placement(everything, ops)], progress)[0]


def load_stages(
    folder: Path, placements: Sequence[Placement], progress: Callable[[int, int], None]
) -> list[LoadedModel]:
    """Read a checkpoint once and place each stage's part of it; the source is the same in all.

    Args:
        folder: in Hugging Face layout.
        placements: of the stages, in order; together all layers.
        progress: told (bytes read, bytes in all), also by later reads from the source.

    Raises:
        ModelError: as `describe`, or tensors that are missing, misshapen or damaged.
        ConfigRefused: as `describe`.
    """
    config = _config(folder)
    family = _family(folder, config)
    spec = family.describe(config, folder)
    quantised = config.inner("quantization_config")
    block = (quantised.integers("weight_block_size") if quantised else None) or (128, 128)
    source = SafetensorsSource(folder, block=(block[0], block[-1]), progress=progress)
    return [
        LoadedModel(
            spec,
            family.bind(Binder(source, part.ops), spec, part.ops, part.layers),
            source,
            config.values,
        )
        for part in placements
    ]


def _config(folder: Path) -> Fields:
    file = folder / "config.json"
    return Fields(read_json(file), str(file))


def _family(folder: Path, config: Fields) -> Family:
    kind = config.values.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise ModelError(
            f"{folder / 'config.json'}: model_type {kind!r} is not served; "
            f"known are {', '.join(sorted(FAMILIES))}."
        )
    return family
