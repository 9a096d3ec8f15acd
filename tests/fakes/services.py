"""The server without a worker: real routes, prompts, states; an engine that says what it is told.

server = a_server(says("Hello."))
async with server.client() as http:
    answer = await http.post("/v1/chat/completions", json=server.ask())
"""

from __future__ import annotations

import asyncio
import base64
import functools
import io
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from PIL import Image

from app.api import build_app
from app.chat.defaults import Checkpoint, read_checkpoint
from app.chat.prompt import Prompter
from app.chat.template import ChatTemplate
from app.config import ApiKey, Limits, ServerConfig
from app.health import Asks, Health
from app.metrics import Metrics
from app.services import Services
from app.tokens import Tokenizer
from engine.config import EngineConfig
from engine.errors import Overloaded
from engine.messages import (
    Event,
    Failed,
    Fault,
    Finished,
    Generate,
    Inject,
    Loaded,
    PatchSpec,
    Pong,
    RequestId,
    StageReport,
    Token,
)

MODEL = "M"
GLIMMER = Path(__file__).parents[2] / "app" / "models" / "glimmer"
CONTEXT = 512
DEFAULT_LIMITS = Limits()
LOADED = Loaded(
    family="glm5_next",
    context=CONTEXT,
    max_sequences=4,
    pool_tokens=4096,
    vocab=1024,
    end_ids=(964, 971, 973),
    patches=PatchSpec(
        family="glm5_next",
        patch=8,
        merge=2,
        temporal=2,
        min_tokens=49,
        max_tokens=81,
        mean=(0.5, 0.5, 0.5),
        std=(0.25, 0.25, 0.25),
    ),
    image_token=998,
    vision_ids=(974, 975, 976, 977, 998, 999),
    devices=("cpu:0",),
)


@dataclass(frozen=True)
class Wait:
    """A place in a script where the engine waits until the test lets it go on."""

    event: asyncio.Event


Script = Callable[[Generate], Iterable[int | Event | Wait]]


@functools.cache
def _checkpoint(folder: Path) -> tuple[Checkpoint, Tokenizer, ChatTemplate]:
    checkpoint = read_checkpoint(folder)
    tokenizer = Tokenizer.open(folder, rows=checkpoint.rows)
    return checkpoint, tokenizer, ChatTemplate.open(folder, markers=tokenizer.markers)


def ids(text: str) -> list[int]:
    """The token ids of an answer's text; markers such as `</think>` count as such."""
    return _checkpoint(GLIMMER)[1].encode_marked(text)


def says(text: str) -> Script:
    """An engine that thinks nothing, says this, and ends by its end token."""
    return tokens([*ids("</think>" + text), LOADED.end_ids[0]])


def tokens(script: Sequence[int]) -> Script:
    """An engine that emits these ids; it ends as the real one does."""
    return lambda _: script


class ScriptedClient:
    """The door to a worker that follows a script; keeps the real one's promises.

    Attributes:
        seen: every request that was admitted, in order.
        aborted: those whose reader left before their end.
    """

    def __init__(self, script: Script, health: Health, capacity: int = 8) -> None:
        self.script = script
        self.seen: list[Generate] = []
        self.aborted: list[RequestId] = []
        self.capacity = capacity
        self._health = health
        self._in_flight = 0

    @property
    def in_flight(self) -> int:
        return self._in_flight

    async def submit(self, generate: Generate) -> AsyncGenerator[Event, None]:
        refusal = self._health.refusal(Asks.GENERATION)
        if refusal is not None:
            raise refusal
        if self._in_flight >= self.capacity:
            raise Overloaded("The queue is full.")
        self.seen.append(generate)
        self._in_flight += 1
        ended = False
        try:
            async for event in _played(generate, self.script):
                ended = not isinstance(event, Token)
                yield event
        finally:
            self._in_flight -= 1
            if not ended:
                self.aborted.append(generate.request)


async def _played(generate: Generate, script: Script) -> AsyncGenerator[Event, None]:
    count = 0
    for item in script(generate):
        await asyncio.sleep(0)
        match item:
            case Wait(event=event):
                await event.wait()
            case int():
                yield Token(request=generate.request, id=item)
                if item in generate.stop_ids and count >= generate.min_tokens:
                    yield Finished(request=generate.request, reason="stop", stop_id=item)
                    return
                count += 1
                if count == generate.max_tokens:
                    yield Finished(request=generate.request, reason="length")
                    return
            case Failed(code=code, message=message):
                yield Failed(request=generate.request, code=code, message=message)
                return
            case _:
                yield item
    yield Finished(request=generate.request, reason="length")


@dataclass
class Orders:
    """A supervisor that only remembers which faults were ordered."""

    orders: list[Inject] = field(default_factory=list)

    async def inject(self, order: Inject) -> None:
        self.orders.append(order)


@dataclass
class Server:
    """An app with its parts at hand."""

    app: FastAPI
    engine: ScriptedClient
    health: Health
    config: ServerConfig
    metrics: Metrics
    orders: Orders

    def client(self, key: str | None = None) -> httpx.AsyncClient:
        """An HTTP client whose requests go through the whole app."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app), base_url="http://server", headers=headers
        )

    def ask(self, text: str = "hi", /, **fields: Any) -> dict[str, Any]:
        """The body of a chat request."""
        return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


def a_server(
    script: Script | None = None,
    *,
    keys: Sequence[str] = (),
    limits: Limits = DEFAULT_LIMITS,
    ready: bool = True,
    capacity: int = 8,
    loaded: Loaded = LOADED,
    folder: Path = GLIMMER,
    **settings: Any,
) -> Server:
    """A server whose worker is a script; in state `ready` unless said otherwise."""
    config = ServerConfig(
        model="glimmer",
        model_folder=folder,
        served_model_name=MODEL,
        host="127.0.0.1",
        port=0,
        engine=EngineConfig(model=str(folder)),
        api_keys=tuple(ApiKey(f"key{n}", key) for n, key in enumerate(keys)),
        limits=limits,
        **settings,
    )
    health = Health(MODEL, build="test")
    engine = ScriptedClient(script or says("Hello."), health, capacity)
    metrics = Metrics(health, "test")
    orders = Orders()
    prompter = Prompter(*_checkpoint(folder), limits=limits, decode_workers=1, clamp=config.clamp)
    app = build_app(Services(config, health, engine, prompter, metrics, orders))
    server = Server(app, engine, health, config, metrics, orders)
    if ready:
        health.warming(loaded)
        health.ready()
    return server


def picture(width: int = 64, height: int = 64, colour: str = "red", **more: Any) -> dict[str, Any]:
    """A content part with a picture of one colour."""
    file = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(file, "png")
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}", **more}}


def with_limits(**changes: Any) -> Limits:
    return replace(DEFAULT_LIMITS, **changes)


def a_pong(**changes: Any) -> Pong:
    """What a healthy worker says of itself."""
    told: dict[str, Any] = {
        "n": 1,
        "fault": None,
        "heartbeat_age_s": 0.1,
        "progress_age_s": 0.2,
        "device_wait_s": 0.0,
        "tick_max_s": 0.01,
        "running": 0,
        "waiting": 0,
        "pages_free": 64,
        "pages_total": 64,
        "slots_free": 4,
        "slots_total": 4,
        "allocations": 10,
        "allocated_bytes": 1000,
        "stages": (StageReport(0, "cpu:0", "ok", 0.2, 0.3, 0.0),),
        **changes,
    }
    return Pong(**told)


def a_fault() -> Fault:
    return Fault("device context lost (700) in step", 700, "step", "cpu:0", 0)
