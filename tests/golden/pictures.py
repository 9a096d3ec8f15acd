"""Pictures of a golden prompt, cut and placed as the server does it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from engine.messages import PatchSpec, Picture
from engine.models.overlay import Overlay
from tests.fakes.decoder import Decoder
from vision.encoder import Encoder, load_encoder
from vision.images import decode, read_header
from vision.preprocess import cut, plan_grid


def an_encoder(folder: Path, decoder: Decoder) -> Encoder:
    model = decoder.model
    encoder = load_encoder(
        folder, model.config, model.source, model.spec, decoder.ops, decoder.device
    )
    assert encoder is not None
    return encoder


def read(file: Path) -> Image.Image:
    data = file.read_bytes()
    return Image.fromarray(decode(data, read_header(data)))


def overlay_of(
    prompt: Sequence[int], pictures: Sequence[Image.Image], image_token: int, encoder: Encoder
) -> Overlay:
    """Each picture over the next run of placeholders in the prompt."""
    placed, at = [], 0
    for number, picture in enumerate(pictures):
        patches: PatchSpec = encoder.patches
        grid = plan_grid(picture.height, picture.width, patches)
        at = prompt.index(image_token, at)
        data = cut(picture, patches, grid).tobytes()
        placed.append(Picture(data, grid.thw, at, grid.tokens, str(number)))
        at += grid.tokens
    return encoder.build(placed)
