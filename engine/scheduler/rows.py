"""what a sequence does in a step, as `Work`: one row of an answer, or a chunk of its prompt."""

from __future__ import annotations

from engine.cache.pages import SnapshotId
from engine.scheduler.plan import Draw, Work
from engine.scheduler.request import Request, Running


def answer_row(request: Request, running: Running, save: SnapshotId | None) -> Work:
    """One row: the token that the slot drew last, wherever that is now."""
    start = running.computed - 1
    running.promised += 1
    return Work(
        request=request.id,
        slot=running.slot,
        start=start,
        count=1,
        tokens=None,
        pages=running.pages,
        draw=_draw(request, start + 1),
        save=save,
    )


def prompt_rows(
    request: Request,
    running: Running,
    rows: int,
    load: SnapshotId | None,
    save: SnapshotId | None,
) -> Work:
    """A chunk of known tokens; the last chunk draws the next one."""
    end = running.computed
    start = end - rows
    last = end == running.prefix
    running.promised += last
    return Work(
        request=request.id,
        slot=running.slot,
        start=start,
        count=rows,
        tokens=tuple(request.tokens[start:end]),
        pages=running.pages,
        draw=_draw(request, end) if last else None,
        fresh=start == 0,
        load=load,
        save=save,
    )


def _draw(request: Request, position: int) -> Draw:
    ask = request.ask
    early = position - request.prompt_tokens < ask.min_tokens
    return Draw(
        sampling=ask.sampling,
        choice=ask.choice,
        position=position,
        banned=ask.stop_ids if early else (),
    )
