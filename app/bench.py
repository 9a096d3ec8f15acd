"""The load client for any OpenAI-compatible URL: several processes, times, JSON."""

from __future__ import annotations

import asyncio
import base64
import math
import multiprocessing
import statistics
import sys
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec

from app.bench_client import Answer, Sample
from engine.errors import ConfigError, ServerError

REQUEST_LIMIT_S = 600.0
START_LIMIT_S = 60.0
DECODE_WINDOW_S = 0.5  # a shorter time in which all streams decode gives no rate
QUESTION = "What is in the picture?"
SENTENCE = " The small red circle is at the top and the large blue star is on the left."
PIECES = (" red", " the", ".", " a", "7", "!", ",", "z")
MEDIA = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".gif": "gif", ".webp": "webp"}


class BenchError(ServerError):
    """The measured server did not do what the measurement needs; names the answer it gave."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of the server; with pictures and no prompt length the question is short."""

    url: str
    model: str | None = None  # None: the first that the server lists
    streams: int = 16  # requests at the same time, over all clients
    requests: int = 64
    clients: int = 2  # processes
    prompt_tokens: int | None = None
    answer_tokens: int = 128
    images: tuple[Path, ...] = ()  # one a request, in turn
    same_beginning: bool = False  # prompts differ in their last tokens only, not from the first on
    warm_up: int = 1  # requests before the first that counts, one after the other
    key: str | None = None


def _request(load: Load, body: bytes) -> bytes:
    place = urlsplit(load.url)
    key = f"Authorization: Bearer {load.key}\r\n" if load.key else ""
    head = (
        f"POST {place.path.rstrip('/')}/v1/chat/completions HTTP/1.1\r\nHost: {place.netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n{key}\r\n"
    )
    return head.encode() + body


async def _stream(load: Load, waiting: deque[bytes]) -> list[Sample]:
    """Send what waits, one request after the other, over one connection while it lasts."""
    place = urlsplit(load.url)
    port = place.port or (443 if place.scheme == "https" else 80)
    answer, samples = Answer(), list[Sample]()
    try:
        while waiting:
            body = waiting.popleft()
            if not answer.is_open:
                _, answer = await asyncio.get_running_loop().create_connection(
                    Answer, place.hostname or "", port, ssl=place.scheme == "https" or None
                )
            async with asyncio.timeout(REQUEST_LIMIT_S):
                samples.append(await answer.ask(_request(load, body)))
    finally:
        answer.close()
    return samples


async def _streams(load: Load, bodies: Sequence[bytes], count: int) -> list[Sample]:
    waiting = deque(bodies)
    parts = await asyncio.gather(*(_stream(load, waiting) for _ in range(count)))
    return [sample for part in parts for sample in part]


def _client(
    load: Load, bodies: Sequence[bytes], count: int, gate: Barrier, results: Connection
) -> None:
    """The main of one client process: wait for the others, send its share, report."""
    gate.wait(START_LIMIT_S)
    results.send_bytes(msgspec.json.encode(asyncio.run(_streams(load, bodies, count))))


def _run_clients(load: Load, bodies: Sequence[bytes]) -> list[Sample]:
    clients = min(load.clients, load.streams, len(bodies))
    spawn = multiprocessing.get_context("spawn")
    gate = spawn.Barrier(clients)
    running = []
    for n in range(clients):
        streams = load.streams // clients + (n < load.streams % clients)
        mine, theirs = spawn.Pipe(duplex=False)
        process = spawn.Process(
            target=_client, args=(load, bodies[n::clients], streams, gate, theirs), daemon=True
        )
        process.start()
        theirs.close()
        running.append((process, mine))
    samples: list[Sample] = []
    for process, mine in running:
        try:
            samples += msgspec.json.decode(mine.recv_bytes(), type=list[Sample])
        except EOFError:
            raise BenchError(
                f"a client process of the load ended early; is {load.url} up?"
            ) from None
        finally:
            process.join(5)
    return samples


class Server:
    """The measured server, for the few questions before the load."""

    def __init__(self, load: Load) -> None:
        headers = {"Authorization": f"Bearer {load.key}"} if load.key else {}
        self._http = httpx.Client(base_url=load.url.rstrip("/"), headers=headers, timeout=120)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *failure: object) -> None:
        self._http.close()

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """One JSON answer. Raises `BenchError` for any status but 200."""
        try:
            reply = self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise BenchError(f"{self._http.base_url}{path} does not answer: {error}") from error
        if reply.status_code != 200:
            raise BenchError(f"{path} answered {reply.status_code}: {reply.text[:300]}")
        return reply.json()

    def first_model(self) -> str:
        return str(self.ask("GET", "/v1/models")["data"][0]["id"])

    def prompt_tokens(self, model: str, text: str) -> int:
        """Tokens of a one-message prompt: asked of `/tokenize`, else paid for with one token."""
        messages = [{"role": "user", "content": text}]
        body = {"model": model, "messages": messages}
        try:
            return int(
                self.ask("POST", "/tokenize", {**body, "add_generation_prompt": True})["count"]
            )
        except (BenchError, KeyError):
            answer = self.ask("POST", "/v1/chat/completions", {**body, "max_tokens": 1})
            return int(answer["usage"]["prompt_tokens"])


def exact_prompt(count: Callable[[str], int], tokens: int, lead: str) -> str:
    """A text that starts with `lead` and makes a prompt of exactly so many tokens.

    Raises:
        ConfigError: the chat template alone is longer, or no piece of text fits the last tokens.
    """
    text, have = lead, count(lead)
    if have > tokens:
        raise ConfigError(f"the shortest prompt has {have} tokens, not {tokens}; ask for more.")
    each = (count(lead + SENTENCE * 8) - have) / 8
    for sentences in range(int((tokens - have) / each) + 1, -1, -1):
        text = lead + SENTENCE * sentences
        have = count(text)
        if have <= tokens:
            break
    while have < tokens:
        sizes = ((count(text + piece), text + piece) for piece in PIECES)
        have, text = next(((n, t) for n, t in sizes if have < n <= tokens), (-1, ""))
        if have < 0:
            raise ConfigError(f"no text of exactly {tokens} prompt tokens found; ask for one more.")
    return text


def bodies(load: Load, model: str, count: Callable[[str], int]) -> list[bytes]:
    """Every request, the warm-up first; prompts of an exact length differ in one number each.

    It stands in front, so that no cache of prompt beginnings can answer, or at the very end.
    """
    total = load.warm_up + load.requests
    pictures = [_data_url(path) for path in load.images]
    exact = load.prompt_tokens or (None if pictures else 100)
    before = after = ""
    if exact and load.same_beginning:
        before = exact_prompt(lambda text: count(f"{text} 1000"), exact, "Once more.") + " "
    elif exact:
        after = exact_prompt(count, exact, "1000").removeprefix("1000")
    made = []
    for n in range(total):
        text = f"{before}{1000 + n % 9000}{after}" if exact else QUESTION
        content: Any = text
        if pictures:
            picture = {"type": "image_url", "image_url": {"url": pictures[n % len(pictures)]}}
            content = [picture, {"type": "text", "text": text}]
        body = {
            "model": model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": load.answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        made.append(msgspec.json.encode(body))
    return made


def _data_url(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--image {path}: {error.strerror}; name a picture file.") from error
    media = MEDIA.get(path.suffix.lower(), "png")
    return f"data:image/{media};base64,{base64.b64encode(data).decode()}"


def measure(load: Load) -> dict[str, Any]:
    """Run the load and give `model`, `load` and `result` as in `benchmarks/schema.json`.

    Raises:
        BenchError: the server is not there, or every request failed.
    """
    with Server(load) as server:
        model = load.model or server.first_model()
        made = bodies(load, model, lambda text: server.prompt_tokens(model, text))
    asyncio.run(_streams(load, made[: load.warm_up], 1))
    samples = _run_clients(load, made[load.warm_up :])
    return {
        "model": model,
        "load": {
            "url": load.url,
            "clients": load.clients,
            "streams": load.streams,
            "requests": load.requests,
            "prompt_tokens": round(statistics.median(s.prompt_tokens for s in samples)),
            "answer_tokens": load.answer_tokens,
            "images": 1 if load.images else 0,
            "warm_up": load.warm_up,
        },
        "result": {**summary(samples), "decode_tokens_per_s": together(samples, load.streams)},
    }


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    """Percentiles in ms and rates in tokens a second, over the requests that did not fail.

    `stream_tokens_per_s` counts the tokens after the second, from the first text to the end: the
    first text may stand for two tokens, when a hidden marker came before it.
    """
    good = [s for s in samples if not s.failure]
    failures = [s.failure for s in samples if s.failure]
    if not good:
        raise BenchError(f"all {len(samples)} requests failed; the first: {failures[0]}")
    wall_s = max(s.ended_s for s in good) - min(s.started_s for s in good)
    answered = sum(s.answer_tokens for s in good)
    rates = [(s.answer_tokens - 2) / (s.ended_s - s.first_s) for s in good if s.answer_tokens > 2]
    return {
        "ttft_ms": percentiles([(s.first_s - s.started_s) * 1e3 for s in good]),
        "itl_ms": percentiles([gap * 1e3 for s in good for gap in s.gaps_s]),
        "e2e_ms": percentiles([(s.ended_s - s.started_s) * 1e3 for s in good]),
        "tokens_per_s": round(answered / wall_s, 1),
        "stream_tokens_per_s": percentiles(rates),
        "answer_tokens": answered,
        "wall_s": round(wall_s, 3),
        "requests": len(samples),
        "failed": len(failures),
        "first_failure": failures[0] if failures else None,
    }


def together(samples: Sequence[Sample], streams: int) -> float | None:
    """Tokens a second of all streams while all of them decode: no prompt is worked on then.

    None when so many never did for half a second in all.
    """
    good = [s for s in samples if not s.failure and s.gaps_s]
    edges = sorted(edge for s in good for edge in ((s.first_s, 1), (s.first_s + sum(s.gaps_s), -1)))
    windows = []
    running = 0
    for (at, step), (until, _) in pairwise(edges):
        running += step
        if running >= streams:
            windows.append((at, until))
    seconds = sum(until - at for at, until in windows)
    if seconds < DECODE_WINDOW_S:
        return None
    tokens = 0.0
    for s in good:
        share = s.answer_tokens / (len(s.gaps_s) + 1)  # a piece of text may hold several tokens
        arrivals = list(accumulate(s.gaps_s, initial=s.first_s))[1:]
        tokens += share * sum(any(at < t <= until for at, until in windows) for t in arrivals)
    return round(tokens / seconds, 1)


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Nearest-rank percentiles, so each is a value that was measured; None without any."""
    if not values:
        return None
    ranked = sorted(values)

    def at(share: float) -> float:
        return round(ranked[math.ceil(share * len(ranked)) - 1], 3)

    return {"p50": at(0.50), "p95": at(0.95), "p99": at(0.99), "max": round(ranked[-1], 3)}


def measure_and_print(load: Load, out: Path | None) -> int:
    """The command: JSON on stdout and in a file; 1 when a request failed."""
    report = measure(load)
    text = msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n"
    if out is not None:
        out.write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    return 1 if report["result"]["failed"] else 0
