"""Model type -> tower; the pictures of a request -> an Overlay."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.device.device import Array, Device
from engine.errors import ModelError, ShapeMismatch
from engine.messages import PatchSpec, Picture
from engine.models.overlay import Overlay
from engine.ops.spec import Ops
from engine.spec import ModelSpec
from engine.weights.source import TensorSource
from vision.kept import KeptRows
from vision.overlay import Publisher, lay_out
from vision.preprocess import CHANNELS, normalised
from vision.towers import glm5_next
from vision.vit import Tower


class Encoder:
    """The tower of a loaded checkpoint; an `OverlayBuilder`.

    Pictures go through the tower one at a time: a picture's rows never depend on its company (D9).

    Args:
        patches: how pictures are cut.
        tower: looks at them.
        hidden: width of a row.
        ops: the backend of the tower's device.
        device: the tower's.
        publisher: brings rows to stage 0's device; None when it reads them where they are.
        kept_bytes: of rows that are kept for the same pictures again.
    """

    def __init__(
        self,
        patches: PatchSpec,
        tower: Tower,
        hidden: int,
        ops: Ops,
        device: Device,
        publisher: Publisher | None = None,
        kept_bytes: int = 0,
    ) -> None:
        self.patches = patches
        self.kept = KeptRows(kept_bytes)
        self._tower = tower
        self._hidden = hidden
        self._ops = ops
        self._device = device
        self._publisher = publisher

    def build(self, pictures: Sequence[Picture]) -> Overlay:
        """Rows for every picture of one request, where stage 0 can read them.

        Raises:
            RequestFault: no picture, bytes that do not fit their grid, or rows that are not finite.
            DeviceError: a device call failed; what that means is judged elsewhere.
        """
        if not pictures:
            raise ShapeMismatch("an overlay needs at least one picture.")
        seen: dict[str, Array] = {}
        for picture in pictures:
            if picture.digest not in seen:  # the same picture twice is looked at once
                rows = self.kept.find(picture.digest)
                seen[picture.digest] = self._look(picture) if rows is None else rows
        overlay = lay_out(seen, pictures, self._device, self._hidden, self._ops)
        for digest, rows in seen.items():  # only now are they known to be finite
            self.kept.keep(digest, rows)
        return self._publisher.publish(overlay) if self._publisher else overlay

    def _look(self, picture: Picture) -> Array:
        spec = self.patches
        frames, tall, wide = picture.grid
        count, width = frames * tall * wide, CHANNELS * spec.patch**2
        if len(picture.patches) != count * width or tall % spec.merge or wide % spec.merge:
            raise ShapeMismatch(
                f"a picture of {len(picture.patches)} bytes cannot be a grid of {picture.grid} "
                f"patches of {width} bytes."
            )
        patches = np.frombuffer(picture.patches, np.uint8).reshape(count, width)
        pixels = self._device.upload(normalised(patches, spec))
        return self._tower.rows(pixels, picture.grid)


def load_encoder(
    folder: Path,
    config: Mapping[str, Any],
    source: TensorSource,
    spec: ModelSpec,
    ops: Ops,
    device: Device,
    publisher: Publisher | None = None,
    kept_bytes: int = 0,
) -> Encoder | None:
    """The vision side of a checkpoint; None when it has no vision tensor at all (rule 36).

    Args:
        folder: of the checkpoint.
        config: its config.json.
        source: its tensors.
        spec: the text model.
        ops: the backend of the tower's device.
        device: the tower's; that of the last stage by default (D10).
        publisher: as `Encoder` takes it.
        kept_bytes: as `Encoder` takes it.

    Raises:
        ModelError: a tensor is missing or malformed while others are there, the tower's width is
            not the trunk's, or the preprocessor's settings are absent or not ours.
    """
    if not any(name.startswith(glm5_next.PREFIX) for name in source.names()):
        return None
    family = config.get("model_type")
    if family != "glm5_next":
        raise ModelError(
            f"config.json: model_type {family!r} has vision tensors but no tower here; serve a "
            "glm5_next checkpoint."
        )
    tower = glm5_next.read_spec(config)
    if tower.width != spec.hidden:
        raise ModelError(
            f"config.json: vision_config.out_hidden_size is {tower.width}, but the text model is "
            f"{spec.hidden} wide; image rows would not fit. Use the config.json of this checkpoint."
        )
    if spec.image_token is None:
        raise ModelError(
            "config.json has no image_token_id, but the checkpoint has vision tensors; use the "
            "config.json of this checkpoint."
        )
    for name, shape in glm5_next.tensor_shapes(tower).items():
        full = glm5_next.PREFIX + name
        if full not in source:
            raise ModelError(f"{folder}: tensor {full} is missing; download the checkpoint again.")
        if source.shape(full) != shape:
            raise ModelError(
                f"{folder}: tensor {full} has shape {source.shape(full)}, config.json asks for "
                f"{shape}; download the checkpoint again."
            )
    patches = read_patch_spec(folder, tower.patch, tower.merge, tower.temporal)
    weights = glm5_next.load_weights(source, tower, ops, device)
    eyes = glm5_next.Glm5NextTower(tower, weights, ops, device)
    return Encoder(patches, eyes, spec.hidden, ops, device, publisher, kept_bytes)


def read_patch_spec(folder: Path, patch: int, merge: int, temporal: int) -> PatchSpec:
    """How pictures are cut, from preprocessor_config.json (or the part of processor_config.json).

    Raises:
        ModelError: naming the file and the field that is absent or asks for something else.
    """
    name = "preprocessor_config.json"
    path = folder / name
    if not path.is_file():
        name = "processor_config.json"
        path = folder / name
    try:
        read = json.loads(path.read_text())
        settings = read.get("image_processor", read)
        spec = PatchSpec(
            family="glm5_next",
            patch=int(settings["patch_size"]),
            merge=int(settings["merge_size"]),
            temporal=int(settings["temporal_patch_size"]),
            min_tokens=int(settings["min_image_tokens"]),
            max_tokens=int(settings["max_image_tokens"]),
            mean=_three(settings["image_mean"]),
            std=_three(settings["image_std"]),
            rescale=float(settings.get("rescale_factor", 1.0 / 255.0)),
        )
    except FileNotFoundError as absent:
        raise ModelError(
            f"{folder / 'preprocessor_config.json'} is missing; without it pictures cannot be cut."
        ) from absent
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as bad:
        raise ModelError(
            f"{path} cannot be used: {type(bad).__name__} {bad}. Use the checkpoint's own."
        ) from bad
    asked = {"patch_size": patch, "merge_size": merge, "temporal_patch_size": temporal}
    wants = {"patch_expand_factor": 1, "resample": 3, "do_rescale": True, "do_normalize": True}
    for field, want in (asked | wants).items():
        if settings.get(field, want) != want:
            raise ModelError(f"{path}: {field} is {settings[field]}, but must be {want}.")
    if not 1 <= spec.min_tokens <= spec.max_tokens or 0.0 in spec.std:
        raise ModelError(
            f"{path}: min_image_tokens to max_image_tokens is {spec.min_tokens} to "
            f"{spec.max_tokens} and image_std {spec.std}; use the checkpoint's own."
        )
    return spec


def _three(values: Sequence[float]) -> tuple[float, float, float]:
    red, green, blue = values
    return float(red), float(green), float(blue)
