"""how the rows of one step are divided: answers first, then prompts, and nobody is starved.

step_tokens = one row for each answer + what prompts get, at most PROMPT_ROWS_BESIDE_ANSWERS
              of it while answers run: the next token of everybody waits for the prompt chunk
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.scheduler.request import Request, Running

PROMPT_ROWS_BESIDE_ANSWERS = 128
PROMPT_TURN_S = 0.05  # a prompt behind the oldest one gets rows at least so often (rule 80)


class Seat(NamedTuple):
    """A request in one occupation of a slot; another occupation is another `Running`."""

    request: Request
    running: Running


class Share(NamedTuple):
    """How many prompt rows a request gets."""

    request: Request
    running: Running
    rows: int


def ready(running: Sequence[Request]) -> tuple[list[Seat], list[Seat]]:
    """Requests that want a row of their answer, and those that want rows of their prompt."""
    answers: list[Seat] = []
    prompts: list[Seat] = []
    for request in running:
        place = request.phase
        if request.paused or not isinstance(place, Running):
            continue
        if place.in_prompt:
            prompts.append(Seat(request, place))
        elif request.unseen(place):
            answers.append(Seat(request, place))
    return answers, prompts


def turns(answers: list[Seat], step_tokens: int, prompts: int) -> list[Seat]:
    """The answers that get a row: all, or those whose turn is longest ago where there is no room.

    A quarter of a step that answers would fill stays with waiting prompts. Order is kept.
    """
    room = step_tokens - (step_tokens // 4 if prompts else 0)
    if len(answers) <= room:
        return answers
    chosen = {id(seat.running) for seat in sorted(answers, key=_by_turn)[:room]}
    return [seat for seat in answers if id(seat.running) in chosen]


def prompt_room(answers: int, step_tokens: int) -> int:
    """Rows that prompts get in a step beside so many answers."""
    left = step_tokens - answers
    return min(left, PROMPT_ROWS_BESIDE_ANSWERS) if answers else left


def prompt_shares(prompts: Sequence[Seat], room: int, now: float) -> list[Share]:
    """Who gets how many prompt rows: the oldest first, and a part for one that waits too long."""
    if not prompts or room < 1:
        return []
    order = [Share(*seat, room) for seat in prompts]
    late = _late(prompts, now)
    if late is not None:
        part = max(room // 4, 1)
        order.remove(Share(*late, room))
        order[0] = order[0]._replace(rows=room - min(late.running.next_prompt_rows, part))
        order.insert(1, Share(*late, part))
    shares = []
    for request, running, most in order:
        rows = min(running.next_prompt_rows, most, room)
        if rows > 0:
            shares.append(Share(request, running, rows))
            room -= rows
    return shares


def _late(prompts: Sequence[Seat], now: float) -> Seat | None:
    """Behind the oldest prompt, the one whose last turn is longest ago, when that is too long."""
    encoding = not prompts[0].running.pictures_ready
    others = [s for s in prompts[1:] if s.running.pictures_ready or not encoding]
    late = min(others, key=lambda seat: seat.running.turn_s, default=None)
    return late if late is not None and now - late.running.turn_s >= PROMPT_TURN_S else None


def _by_turn(seat: Seat) -> int:
    return seat.running.last_step
