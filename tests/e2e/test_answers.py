"""A real server tells the truth about pictures: the recorded answers, by HTTP and by client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.e2e.conftest import (
    SAMPLES,
    Served,
    eventually,
    long_answer,
    question,
)

pytestmark = [pytest.mark.e2e]

GONE_S = 1.0  # a client that left has given everything back after so long (O85)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served([], {}, tmp_path_factory.mktemp("answers")) as served:
        served.ready()
        yield served


def test_every_recorded_answer_and_its_prompt_tokens_come_back(server: Served) -> None:
    """Given each picture and question of samples.json, greedy, the text is the reference's."""
    samples = json.loads((SAMPLES / "samples.json").read_text())["samples"]
    asked = [(n, q) for n, sample in enumerate(samples) for q in range(len(sample["questions"]))]
    assert len(asked) == 27
    for number, which in asked:
        want = samples[number]["questions"][which]
        answer = server.http.post("/v1/chat/completions", json=question(number, which).body).json()
        message = answer["choices"][0]["message"]
        assert message["content"] == want["answer"], want["question"]
        assert answer["usage"]["prompt_tokens"] == want["prompt_tokens"], want["question"]
        assert "reasoning_content" not in message


def test_the_official_client_chats_streams_sees_and_lists(server: Served) -> None:
    """The openai client, unchanged: a chat, a stream, a picture as data URL, the model list."""
    asked = question()
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["glimmer"]
        assert client.models.retrieve("glimmer").id == "glimmer"
        whole = client.chat.completions.create(**asked.body)
        pieces = list(client.chat.completions.create(**asked.body, stream=True))

    assert whole.choices[0].message.content == asked.answer
    assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == asked.answer
    assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "stop"


def held(server: Served) -> tuple[float, float, float]:
    """Running requests, share of pages in use, free slots, as `/metrics` tells them."""
    text = server.http.get("/metrics").text
    found = dict(re.findall(r"^stagelight_(\w+) ([\d.e+-]+)$", text, re.M))
    names = ("requests_running", "kv_cache_usage_ratio", "slots_free")
    running, used, free = (float(found[name]) for name in names)
    return running, used, free


def test_a_client_that_leaves_in_mid_stream_gives_pages_and_slot_back(server: Served) -> None:
    """O85: the metrics say so within a second."""
    # a pong from before the self-test knows of no slots yet
    before = eventually(lambda: (now := held(server))[0] == 0 and now[2] > 0 and now)
    with server.stream(long_answer(4_000)) as events:
        for _ in range(20):
            next(events)
        _, used, free = eventually(lambda: (now := held(server))[0] == 1 and now)
        assert used > before[1]
        assert free == before[2] - 1

    eventually(lambda: held(server) == before, seconds=GONE_S)
