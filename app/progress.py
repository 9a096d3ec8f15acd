"""How far a load is: a bar on a terminal, a plain line now and then otherwise."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Final, Protocol, TextIO

from engine.messages import Loading

PATIENCE_S: Final = 1.0  # a load that is over sooner needs no display
LINE_EVERY_S: Final = 5.0
_MB: Final = 1_000_000


class Bar(Protocol):
    """What is used of a progress bar."""

    def show(self, done: int, total: int) -> None: ...
    def close(self) -> None: ...


class LoadProgress:
    """Told each step of a load; shows it on a stream.

    Args:
        out: usually standard error.
        name: of the model.
        clock: monotonic seconds; tests give their own.
    """

    def __init__(self, out: TextIO, name: str, clock: Callable[[], float] = monotonic) -> None:
        self._out = out
        self._name = name
        self._clock = clock
        self._began = clock()
        self._told_at = self._began
        self._bar: Bar | None = None

    def __call__(self, notice: Loading) -> None:
        """One step; the last one (all bytes are in) takes the bar away."""
        done, total, now = notice.bytes_done, notice.bytes_total, self._clock()
        if not total or now - self._began < PATIENCE_S:
            return
        if self._out.isatty():
            self._bar = self._bar or _RichBar(self._out, self._name)
            self._bar.show(done, total)
            if done >= total:
                self.close()
        elif done < total and now - self._told_at >= LINE_EVERY_S:
            self._told_at = now
            percent = 100 * done // total
            self._out.write(
                f"loading {self._name}: {done // _MB} of {total // _MB} MB, {percent} %\n"
            )
            self._out.flush()

    def close(self) -> None:
        """Take the bar away; nothing happens when there is none."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class _RichBar:
    def __init__(self, out: TextIO, name: str) -> None:
        from rich.console import Console  # only a load that takes long on a terminal pays for it
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

        self._progress = Progress(
            "loading {task.description}",
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=Console(file=out),
            transient=True,
        )
        self._task = self._progress.add_task(name, total=None)
        self._progress.start()

    def show(self, done: int, total: int) -> None:
        self._progress.update(self._task, completed=done, total=total)

    def close(self) -> None:
        self._progress.stop()
