"""placeholders of pictures in a prompt: one for each image row, counted (rules 34 and 35)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.chat.media import CutPicture, PlannedPicture
from engine.errors import RequestFault
from engine.messages import Loaded, Picture


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A prompt before its pixels: `places` are the first placeholders of the planned pictures."""

    tokens: list[int]
    planned: Sequence[PlannedPicture] = ()
    places: Sequence[int] = ()
    param: str = "messages"

    @property
    def image_tokens(self) -> int:
        return sum(picture.tokens for picture in self.planned)


def expanded(marked: Sequence[int], planned: Sequence[PlannedPicture], loaded: Loaded) -> Draft:
    """Repeat each placeholder once per image row.

    Raises:
        RequestFault: the prompt has not the vision ids that the pictures ask for. Nobody can type
            one, so that is a fault of ours or of the template (rules 34 and 35).
    """
    for id_ in vision_ids(loaded):
        count = marked.count(id_)
        if count != len(planned) and (id_ == loaded.image_token or count):
            raise RequestFault(
                f"The prompt has {count} times the vision id {id_} for {len(planned)} pictures."
            )
    pictures = iter(planned)
    tokens: list[int] = []
    places: list[int] = []
    for id_ in marked:
        if id_ == loaded.image_token:
            places.append(len(tokens))
            tokens += [id_] * next(pictures).tokens
        else:
            tokens.append(id_)
    return Draft(tokens=tokens, planned=planned, places=places)


def placed(pictures: Sequence[CutPicture], draft: Draft) -> tuple[Picture, ...]:
    """Cut pictures at their places. Raises `RequestFault` when a run is not as long as planned."""
    for picture, planned in zip(pictures, draft.planned, strict=True):
        if picture.tokens != planned.tokens:
            raise RequestFault(
                f"{planned.param}: {planned.tokens} rows were planned and {picture.tokens} came."
            )
    return tuple(p.at(place) for p, place in zip(pictures, draft.places, strict=True))


def vision_ids(loaded: Loaded) -> frozenset[int]:
    """Every id that only a picture part may bring into a prompt."""
    placeholder = () if loaded.image_token is None else (loaded.image_token,)
    return frozenset((*loaded.vision_ids, *placeholder))
