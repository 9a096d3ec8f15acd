"""A real server with --deterministic on: a seeded answer is the same text under load."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.conftest import Serve, Served, question

pytestmark = [pytest.mark.e2e]


def drawn(server: Served, body: dict[str, Any], seed: int) -> str:
    """The text of a long answer at temperature 1."""
    more = {"temperature": 1.0, "seed": seed, "max_tokens": 60, "ignore_eos": True}
    answer = server.http.post("/v1/chat/completions", json={**body, **more})
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def test_a_seeded_answer_is_the_same_text_alone_and_under_load(serve: Serve) -> None:
    """D9, O30: eight requests with pictures and without, each at first alone, then all at once."""
    server = serve("--deterministic", "on")
    server.ready()
    asked = question()
    assert server.ask(asked) == asked.answer
    hello = {"model": "glimmer", "messages": [{"role": "user", "content": "Hello"}]}
    bodies = [(asked.body if seed % 2 else hello, seed) for seed in range(8)]

    alone = [drawn(server, body, seed) for body, seed in bodies]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda given: drawn(server, *given), bodies))

    assert together == alone
    assert len(set(alone)) > 4  # seeds matter
