"""A worker process as the server holds it, where its end does not come."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import Process
from pathlib import Path
from typing import cast

import pytest

from app.link import Link
from app.process import WorkerProcess, WorkerStuck


class Immortal:
    """A process that is stuck in its driver: no signal ends it."""

    pid = 4_711
    stdin = None
    kills = 0

    async def wait(self) -> int:
        await asyncio.Event().wait()
        return 0

    def kill(self) -> None:
        self.kills += 1


async def test_a_process_that_survives_its_kill_is_told(tmp_path: Path) -> None:
    """R85: so that no second one is started beside it."""
    links = [Link(f"ipc://{tmp_path}/{name}", lambda _: None) for name in ("control", "work")]
    immortal = Immortal()
    process = WorkerProcess(cast(Process, immortal), 0, *links)
    process.kill()
    with pytest.raises(WorkerStuck, match="4711"):
        await process.reaped(limit_s=0.05)
    assert immortal.kills == 1
    process.close()
    process.gone.cancel()
