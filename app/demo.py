"""Start a server, ask it about the bundled picture, stream the answer, show /health, stop."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from rich.console import Console
from rich.text import Text

from app.config import BUILT_IN, DEFAULT_MODEL
from app.local_server import LocalServer, ServerFailed

SAMPLES = BUILT_IN[DEFAULT_MODEL] / "samples"
PICTURE_COLUMNS = 44  # two of its pixels above one another are one character of the terminal


class Question(NamedTuple):
    """A bundled picture, what is asked about it, and what the model is known to answer."""

    picture: Path
    text: str
    answer: str


def bundled_question() -> Question:
    """The first of the default model's samples."""
    sample = json.loads((SAMPLES / "samples.json").read_text(encoding="utf-8"))["samples"][0]
    asked = sample["questions"][0]
    return Question(SAMPLES / sample["file"], asked["question"], asked["answer"])


@dataclass(slots=True)
class Reply:
    """An answer while it comes; times in seconds of the monotonic clock."""

    asked_s: float
    first_s: float = 0.0
    ended_s: float = 0.0
    text: str = ""
    prompt_tokens: int = 0
    answer_tokens: int = 0

    @property
    def is_whole(self) -> bool:
        return bool(self.text) and self.ended_s > 0


def pieces(url: str, question: Question, reply: Reply) -> Iterator[str]:
    """Ask over HTTP and give each piece of text as it comes; `reply` is filled in.

    Raises:
        ServerFailed: the server refused, or the stream held an error.
    """
    kind = {".png": "png", ".jpg": "jpeg"}[question.picture.suffix]
    data = base64.b64encode(question.picture.read_bytes()).decode()
    picture = {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{data}"}}
    body = {
        "model": DEFAULT_MODEL,
        "messages": [
            {"role": "user", "content": [picture, {"type": "text", "text": question.text}]}
        ],
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as stream:
        if stream.status_code != 200:
            raise ServerFailed(f"the server answered {stream.status_code}: {stream.read()!r}")
        for line in stream.iter_lines():
            event = line.removeprefix("data: ")
            if event == line:
                continue  # a blank line or a comment
            if event == "[DONE]":
                reply.ended_s = time.monotonic()
                return
            chunk = json.loads(event)
            if "error" in chunk:
                raise ServerFailed(f"the stream ended with an error: {chunk['error']}")
            if usage := chunk.get("usage"):
                reply.prompt_tokens = usage["prompt_tokens"]
                reply.answer_tokens = usage["completion_tokens"]
            for choice in chunk["choices"]:
                if text := choice["delta"].get("content"):
                    reply.first_s = reply.first_s or time.monotonic()
                    reply.text += text
                    yield text


def demonstrate() -> int:
    """The command; 0 only if the answer came and the server ended well.

    Raises:
        ServerFailed: the server did not start, refused, or broke off.
    """
    console = Console(highlight=False, soft_wrap=True)
    question = bundled_question()
    console.print(f"Stagelight serves {DEFAULT_MODEL}, a tiny trained model, on this CPU.\n")
    with LocalServer() as server:
        with console.status("starting the server"):
            server.wait_until_ready()
        console.print(f"[dim]ready   [/]after {server.ready_s:.2f} s at {server.url}")
        _show_picture(console, question.picture)
        console.print(f"[dim]you     [/]{question.text}")
        console.print(f"[dim]{DEFAULT_MODEL:8}[/]", end="")
        reply = Reply(time.monotonic())
        for text in pieces(server.url, question, reply):
            console.print(text, end="", markup=False)
        console.print()
        _show_times(console, reply)
        if reply.is_whole and reply.text != question.answer:
            console.print(f"[yellow]expected[/] {question.answer}")
        status, body = server.health()
        console.print(f"[dim]health  [/]{status} {json.dumps(body)}", markup=True)
        code = server.stop()
    console.print(f"[dim]stopped [/]with exit code {code}\n")
    if not reply.is_whole:
        raise ServerFailed("no whole answer came.")
    if code != 0:
        raise ServerFailed(f"the answer came, but the server ended with code {code}.")
    console.print("Next: stagelight serve, and ask it yourself as README.md shows.")
    return 0


def _show_times(console: Console, reply: Reply) -> None:
    first_ms = (reply.first_s - reply.asked_s) * 1e3
    rate = reply.answer_tokens / (reply.ended_s - reply.first_s) if reply.is_whole else 0.0
    console.print(
        f"[dim]times   [/]first text after {first_ms:.0f} ms, {reply.answer_tokens} tokens at "
        f"{rate:.0f} a second; the prompt has {reply.prompt_tokens} tokens, picture included"
    )


def _show_picture(console: Console, path: Path) -> None:
    console.print(f"[dim]picture [/]{path}")
    if not console.is_terminal:
        return
    from PIL import Image

    with Image.open(path) as opened:
        rows = 2 * round(PICTURE_COLUMNS * opened.height / opened.width / 2)
        small = opened.convert("RGB").resize((PICTURE_COLUMNS, rows))
    pixels: Any = small.load()
    for y in range(0, rows, 2):
        line = Text("        ")
        for x in range(PICTURE_COLUMNS):
            upper, lower = ("#{:02x}{:02x}{:02x}".format(*pixels[x, y + n]) for n in (0, 1))
            line.append("▀", style=f"{upper} on {lower}")
        console.print(line)
