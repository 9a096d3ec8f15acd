"""How a load is shown: a bar for people at a terminal, rare lines for a log, nothing when quick."""

from __future__ import annotations

import io

from app.progress import LoadProgress
from engine.messages import Loading


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(out: io.StringIO, seconds: int) -> list[str]:
    """What is written while a load of so many seconds tells each second how far it is."""
    now = [0.0]
    progress = LoadProgress(out, "big", clock=lambda: now[0])
    for second in range(seconds + 1):
        now[0] = float(second)
        progress(Loading("weights", second * 10_000_000, seconds * 10_000_000))
    progress.close()
    return out.getvalue().splitlines()


def test_a_quick_load_says_nothing() -> None:
    assert shown(io.StringIO(), 1) == []


def test_a_long_load_writes_a_plain_line_each_five_seconds() -> None:
    assert shown(io.StringIO(), 12) == [
        "loading big: 50 of 120 MB, 41 %",
        "loading big: 100 of 120 MB, 83 %",
    ]


def test_a_terminal_gets_a_bar_that_is_taken_away() -> None:
    lines = shown(Terminal(), 3)
    assert "big" in "".join(lines)
    assert not any(line.startswith("loading big:") for line in lines)


def test_a_load_that_does_not_know_its_size_draws_nothing() -> None:
    out = io.StringIO()
    LoadProgress(out, "big")(Loading("weights"))
    assert out.getvalue() == ""
