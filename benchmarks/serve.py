"""Serving benchmarks over HTTP: profiles and provenance around the load client of `app/bench.py`.

    python -m benchmarks.serve --profile one-stream            our server, started and stopped here
    python -m benchmarks.serve --profile one-stream --url URL --name vLLM-0.24    a peer, by its URL
    python -m benchmarks.serve --profile all                   every profile, one file each

Each profile writes one JSON file as `benchmarks/schema.json` says into `benchmarks/results/`.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer
from PIL import Image

from app.bench import Load, measure, percentiles
from app.config import BUILT_IN, DEFAULT_MODEL, find_model
from app.doctor import processor
from app.local_server import LocalServer

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
PICTURE = BUILT_IN[DEFAULT_MODEL] / "samples" / "6.png"  # 640 x 480
MIB = 1024 * 1024
READY_STARTS = 7
LONGER = 3_000
PREFIX = 2_010  # tokens; all but about the last ten are the same
SOONER = 5.0  # times that a known prefix brings the first token sooner
COST_RATIO = 1.4  # a prompt token may cost so much more in a 3,000-token prompt than in a 300-token


@dataclass(frozen=True, slots=True)
class Goal:
    """What the project asks: a figure of the result, found by its path, and its bound."""

    path: tuple[str, ...]
    at_least: float | None = None
    at_most: float | None = None

    def judge(self, result: dict[str, Any]) -> dict[str, Any]:
        value: Any = result
        for part in self.path:
            value = value[part]
        low, high = self.at_least, self.at_most
        return {
            "what": ".".join(self.path),
            "at_least": low,
            "at_most": high,
            "measured": value,
            "reached": (low is None or value >= low) and (high is None or value <= high),
        }


@dataclass(frozen=True, slots=True)
class Profile:
    """One load, and what the project asks of it on two CPU cores with the default model."""

    name: str
    streams: int
    requests: int
    goal: Goal | None
    clients: int = 1
    prompt_tokens: int | None = None
    answer_tokens: int = 128
    pictures: bool = False
    same_beginning: bool = False
    warm_up: int = 1

    def load(self, url: str, model: str | None, images: Sequence[Path]) -> Load:
        return Load(
            url=url,
            model=model,
            streams=self.streams,
            requests=self.requests,
            clients=self.clients,
            prompt_tokens=self.prompt_tokens,
            answer_tokens=self.answer_tokens,
            images=tuple(images) if self.pictures else (),
            same_beginning=self.same_beginning,
            warm_up=self.warm_up,
        )


PROFILES = (
    Profile(
        "one-stream", 1, 10, Goal(("stream_tokens_per_s", "p50"), at_least=250), prompt_tokens=100
    ),
    Profile(
        "16-streams",
        16,
        96,
        Goal(("tokens_per_s",), at_least=1200),
        clients=2,
        prompt_tokens=100,
    ),
    Profile(
        "picture", 1, 20, Goal(("ttft_ms", "p50"), at_most=100), answer_tokens=8, pictures=True
    ),
    Profile(
        "prompt-300",
        1,
        20,
        Goal(("ttft_ms", "p50"), at_most=80),
        prompt_tokens=300,
        answer_tokens=8,
    ),
    Profile("prompt-3000", 1, 10, None, prompt_tokens=LONGER, answer_tokens=8),
    Profile("16-pictures", 16, 48, None, clients=2, answer_tokens=64, pictures=True, warm_up=2),
)
# These need processes of our own, so they cannot be asked of a peer by its URL.
OWN_PROFILES = ("ready", "memory", "prompt-cost", "prefix")
NAMES = (*(p.name for p in PROFILES), *OWN_PROFILES)


def picture_files(folder: Path, count: int) -> list[Path]:
    """JPEGs of one picture that differ in one corner pixel block, so that no cache can answer."""
    with Image.open(PICTURE) as opened:
        pixels = np.asarray(opened.convert("RGB")).copy()
    paths = []
    for n in range(count):
        pixels[:8, :8] = 8 * n % 256
        paths.append(folder / f"{n}.jpg")
        Image.fromarray(pixels).save(paths[-1], quality=90)
    return paths


def resident_mib(pid: int) -> float:
    """Memory of one process that is in RAM now."""
    told = subprocess.run(
        ("ps", "-o", "rss=", "-p", str(pid)), capture_output=True, text=True, check=True
    )
    return round(int(told.stdout) * 1024 / MIB, 1)


class Provenance:
    """Where a figure comes from: commit, machine, model, command."""

    def __init__(self, model: str, *, ours: bool) -> None:
        folder = find_model(model) if ours else None
        self.model = {
            "name": model,
            "weights_sha256": _weights_sha256(folder) if folder else None,
            "packing": "float32" if ours else None,
        }
        self.commit = _git("rev-parse", "--short", "HEAD") or "unknown"
        # New result files do not make a tree dirty: they are what the runs leave behind.
        changed = _git("status", "--porcelain", "--", ".", ":!benchmarks/results")
        self.dirty = bool(changed)
        self.device = processor()

    def around(
        self, bench: str, measured: dict[str, Any], server: dict[str, Any]
    ) -> dict[str, Any]:
        """The whole record of one run."""
        return {
            "bench": f"serve/{bench}",
            "commit": self.commit,
            "dirty": self.dirty,
            "device": self.device,
            "devices": 1,
            "driver": None,
            "cuda": None,
            "machine": {
                "cores": os.cpu_count() or 1,
                "system": platform.platform(),
                "python": platform.python_version(),
                "numpy": np.__version__,
                "load_before": measured["load_before"],
            },
            "model": self.model,
            "server": server,
            "load": measured["load"],
            "result": measured["result"],
            "limit": None,
            "goal": measured["goal"],
            "command": f"python -m benchmarks.serve {shlex.join(sys.argv[1:])}",
            "started_at": measured["started_at"],
        }


def _weights_sha256(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _git(*arguments: str) -> str:
    told = subprocess.run(
        ("git", *arguments), cwd=ROOT, capture_output=True, text=True, check=False
    )
    return told.stdout.strip() if told.returncode == 0 else ""


def _timed(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    started_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    load_before = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    return {"goal": None, **run(), "started_at": started_at, "load_before": load_before}


def run_profile(profile: Profile, url: str, model: str | None) -> dict[str, Any]:
    """Measure one profile on a server that is up."""
    with tempfile.TemporaryDirectory() as folder:
        count = profile.requests + profile.warm_up
        images = picture_files(Path(folder), count) if profile.pictures else []
        return measure(profile.load(url, model, images))


def run_judged(profile: Profile, url: str, model: str | None) -> dict[str, Any]:
    """The same, and whether it is what the project asks."""
    report = run_profile(profile, url, model)
    return {**report, "goal": profile.goal.judge(report["result"]) if profile.goal else None}


def run_ours(profile: Profile, model: str, flags: Sequence[str]) -> dict[str, Any]:
    """Measure one profile on a server of our own, fresh for it."""
    with LocalServer(model, flags) as server:
        server.wait_until_ready()
        return run_judged(profile, server.url, None)


def run_ready(model: str, flags: Sequence[str]) -> dict[str, Any]:
    """Seconds from the start of `serve` to the first 200 of /health, over several starts."""
    times = []
    for _ in range(READY_STARTS):
        with LocalServer(model, flags) as server:
            server.wait_until_ready()
            times.append(server.ready_s)
    result = {"ready_s": percentiles(times), "requests": READY_STARTS, "failed": 0}
    return {
        "load": _no_load(),
        "result": result,
        "goal": Goal(("ready_s", "p50"), at_most=1.5).judge(result),
    }


def run_memory(model: str, flags: Sequence[str]) -> dict[str, Any]:
    """Resident memory of server and worker after 16 streams, pictures and a long prompt."""
    loads = [p for p in PROFILES if p.name in ("16-streams", "16-pictures", "prompt-3000")]
    with LocalServer(model, flags) as server:
        server.wait_until_ready()
        before = _resident(server)
        reports = [run_profile(profile, server.url, None) for profile in loads]
        after = _resident(server)
    result = {
        "memory_mib": after,
        "memory_mib_when_ready": before,
        "requests": sum(report["result"]["requests"] for report in reports),
        "failed": sum(report["result"]["failed"] for report in reports),
    }
    return {
        "load": reports[-1]["load"],
        "result": result,
        "goal": Goal(("memory_mib", "total"), at_most=450).judge(result),
    }


def _resident(server: LocalServer) -> dict[str, float]:
    worker = server.health()[1]["worker"]["pid"]
    parts = {"server": resident_mib(server.pid), "worker": resident_mib(worker)}
    return {**parts, "total": round(sum(parts.values()), 1)}


def run_prompt_cost(model: str, flags: Sequence[str]) -> dict[str, Any]:
    """What a token of a 3,000-token prompt costs beside one of a 300-token prompt, in one run."""
    by_name = {profile.name: profile for profile in PROFILES}
    with LocalServer(model, flags) as server:
        server.wait_until_ready()
        short = run_profile(by_name["prompt-300"], server.url, None)
        long = run_profile(by_name["prompt-3000"], server.url, None)
    each = [r["result"]["ttft_ms"]["p50"] / r["load"]["prompt_tokens"] for r in (short, long)]
    result = {
        **long["result"],
        "ms_per_prompt_token": {"short": round(each[0], 4), "long": round(each[1], 4)},
        "cost_ratio": round(each[1] / each[0], 3),
    }
    return {
        "load": long["load"],
        "result": result,
        "goal": Goal(("cost_ratio",), at_most=COST_RATIO).judge(result),
    }


def run_prefix(model: str, flags: Sequence[str]) -> dict[str, Any]:
    """How much sooner the first token comes when all but a prompt's end was there before."""
    new = Profile("new", 1, 8, None, prompt_tokens=PREFIX, answer_tokens=8)
    known = Profile(
        "known", 1, 20, None, prompt_tokens=PREFIX, answer_tokens=8, same_beginning=True
    )
    with LocalServer(model, flags) as server:
        server.wait_until_ready()
        first, again = (run_profile(profile, server.url, None) for profile in (new, known))
    times = {name: r["result"]["ttft_ms"] for name, r in (("new", first), ("known", again))}
    result = {
        **again["result"],
        "ttft_ms_of_new_prefix": times["new"],
        "times_sooner": round(times["new"]["p50"] / times["known"]["p50"], 2),
    }
    return {
        "load": again["load"],
        "result": result,
        "goal": Goal(("times_sooner",), at_least=SOONER).judge(result),
    }


def _no_load() -> dict[str, int]:
    names = ("clients", "streams", "requests", "prompt_tokens", "answer_tokens", "images")
    return dict.fromkeys(names, 0)


def write(record: dict[str, Any], folder: Path) -> Path:
    """One file a run: `<date>-<commit>-<device>-<bench>.json`."""
    device = "".join(c if c.isalnum() else "-" for c in record["device"].lower()).strip("-")
    day = record["started_at"][:10]
    bench = record["bench"].replace("/", "-")
    name = record["server"]["name"]
    peer = "" if name == "stagelight" else f"-{name.lower()}"
    path = folder / f"{day}-{record['commit']}-{device}{peer}-{bench}.json"
    folder.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(record), indent=2).decode()
    path.write_text(text + "\n", encoding="utf-8")
    return path


def line(record: dict[str, Any]) -> str:
    """One line for people."""
    result, goal = record["result"], record["goal"]
    figures = {
        "first token ms": (result.get("ttft_ms") or {}).get("p50"),
        "tokens/s": result.get("tokens_per_s"),
        "tokens/s while all decode": result.get("decode_tokens_per_s"),
        "tokens/s a stream": (result.get("stream_tokens_per_s") or {}).get("p50"),
        "ready s": (result.get("ready_s") or {}).get("p50"),
        "MiB": (result.get("memory_mib") or {}).get("total"),
        "cost ratio": result.get("cost_ratio"),
        "times sooner": result.get("times_sooner"),
        "failed": result.get("failed") or None,
    }
    said = ", ".join(f"{name} {value}" for name, value in figures.items() if value is not None)
    verdict = "" if goal is None else (" (reached)" if goal["reached"] else " (NOT REACHED)")
    bound = "" if goal is None else f"; asked {goal['what']} {_bound(goal)}{verdict}"
    return f"{record['bench']:20} {said}{bound}"


def _bound(goal: dict[str, Any]) -> str:
    low, high = goal["at_least"], goal["at_most"]
    return f">= {low:g}" if low is not None else f"<= {high:g}"


def main(
    profile: Annotated[str, typer.Option(help=f"all, or one of {', '.join(NAMES)}.")],
    url: Annotated[
        str | None, typer.Option(help="A server that is up; else one is started.")
    ] = None,
    name: Annotated[str, typer.Option(help="The server's name in the result.")] = "stagelight",
    model: Annotated[str | None, typer.Option(help="Model to serve, or to ask for.")] = None,
    flag: Annotated[
        list[str] | None, typer.Option(help="A flag of `serve`, e.g. =--port=1.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
) -> None:
    """Run one profile or all; ends with 1 when a request failed."""
    if profile not in (*NAMES, "all"):
        raise typer.BadParameter(f"{profile} is no profile; use all or {', '.join(NAMES)}.")
    flags = flag or []
    served = model or DEFAULT_MODEL
    provenance = Provenance(served, ours=url is None)
    own = {
        "ready": run_ready,
        "memory": run_memory,
        "prompt-cost": run_prompt_cost,
        "prefix": run_prefix,
    }
    names = NAMES if profile == "all" else (profile,)
    failed = 0
    for wanted in names:
        if wanted in own and url is not None:
            print(f"{wanted}: left out, a server by its URL cannot be asked that")
            continue
        if wanted in own:
            run = partial(own[wanted], served, flags)
        else:
            chosen = next(p for p in PROFILES if p.name == wanted)
            run = (
                partial(run_judged, chosen, url, model)
                if url is not None
                else partial(run_ours, chosen, served, flags)
            )
        measured = _timed(run)
        record = provenance.around(wanted, measured, {"name": name, "flags": flags})
        print(line(record))
        print(f"  {write(record, out)}")
        failed += record["result"].get("failed", 0)
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
