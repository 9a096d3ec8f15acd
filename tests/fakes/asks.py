"""Requests for tests, with everything but the point of the test filled in."""

from __future__ import annotations

import random

from engine.messages import Generate, Picture, RequestId, Sampling
from tests.fakes.pipeline import IMAGE


def an_ask(
    name: str = "a",
    *,
    prompt: int | tuple[int, ...] = 8,
    max_tokens: int = 8,
    seed: int = 0,
    min_tokens: int = 0,
    stop_ids: tuple[int, ...] = (),
    emitted: tuple[int, ...] = (),
    pictures: tuple[Picture, ...] = (),
    cache_salt: str = "",
) -> Generate:
    """A request; a number as prompt stands for so many plain ids of its own."""
    if isinstance(prompt, int):
        prompt = plain_ids(name, prompt)
    return Generate(
        request=RequestId(name),
        prompt=prompt,
        pictures=pictures,
        sampling=Sampling(seed=seed),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_ids=stop_ids,
        emitted=emitted,
        cache_salt=cache_salt,
    )


def an_ask_with_pictures(name: str, *sizes: int, text: int = 4, max_tokens: int = 4) -> Generate:
    """Text, a picture of so many rows, text, a picture, ..., text."""
    ids = list(plain_ids(name, text))
    pictures = []
    for tokens in sizes:
        pictures.append(a_picture(len(ids), tokens))
        ids += [IMAGE] * tokens
        ids += plain_ids(name + "+", text)
    return an_ask(name, prompt=tuple(ids), pictures=tuple(pictures), max_tokens=max_tokens)


def a_picture(position: int, tokens: int) -> Picture:
    return Picture(
        patches=bytes(12 * tokens),
        grid=(1, 1, tokens),
        position=position,
        tokens=tokens,
        digest="d",
    )


def plain_ids(name: str, count: int) -> tuple[int, ...]:
    """Ids that are neither stop ids nor placeholders, the same for the same name."""
    draw = random.Random(name)
    return tuple(draw.randrange(3, IMAGE) for _ in range(count))
