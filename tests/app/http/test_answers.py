"""Answers: shapes, usage, streams, failures, clients that leave (O33 to O37, O78 to O87)."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import orjson
import pytest

from engine.messages import Event, Failed, Generate, RequestId, Token
from tests.app.http.test_errors import CHAT
from tests.fakes.connection import Connection
from tests.fakes.services import (
    LOADED,
    Script,
    Server,
    Wait,
    a_server,
    ids,
    picture,
    says,
    tokens,
)
from tests.fakes.sse import Stream, read_frames, read_stream

PLAIN = "/v1/completions"
END = LOADED.end_ids[0]
FAILED = Failed(request=RequestId("r"), code="internal_error", message="bad image rows")


async def both(server: Server, **fields: Any) -> tuple[dict[str, Any], Stream]:
    """The same chat whole and as a stream."""
    async with server.client() as http:
        whole = await http.post(CHAT, json=server.ask(**fields))
        options = {"stream": True, "stream_options": {"include_usage": True}}
        stream = await http.post(CHAT, json=server.ask(**fields, **options))
    assert whole.status_code == 200, whole.text
    assert whole.headers["content-type"] == "application/json"
    assert int(whole.headers["content-length"]) == len(whole.content)
    return whole.json(), read_stream(stream)


async def test_the_answer_has_every_field_of_the_contract() -> None:
    """Section 5, O33, O36: nothing missing, nothing null that must not be."""
    server = a_server(says("Red."))
    async with server.client() as http:
        body = (await http.post(CHAT, json=server.ask(metadata={"a": "b"}))).json()
        other = (await http.post("/v1/chat", json=server.ask())).json()
    prompt = len(server.engine.seen[0].prompt)
    assert body.pop("id").startswith("chatcmpl-")
    assert isinstance(body.pop("created"), int)
    assert body.pop("system_fingerprint").startswith("fp_")
    completion = len(ids("</think>Red."))
    assert body == {
        "object": "chat.completion",
        "model": "M",
        "service_tier": "default",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "Red.",
                    "refusal": None,
                    "annotations": [],
                },
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {
                "cached_tokens": 0,
                "image_tokens": 0,
                "text_tokens": prompt,
                "audio_tokens": 0,
            },
            "completion_tokens_details": {
                "reasoning_tokens": 1,
                "audio_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        },
        "metadata": {"a": "b"},
    }
    assert "metadata" not in other
    assert other["choices"][0]["message"]["content"] == "Red."


CASES: dict[str, tuple[Script, dict[str, Any], str, str, Any]] = {
    "end token": (says("Red."), {}, "Red.", "stop", None),
    "every end id": (tokens([*ids("</think>Hi"), LOADED.end_ids[1], *ids("junk")]), {}, "Hi",
                     "stop", None),
    "bound": (says("one, two, three"), {"max_tokens": 3}, "one,", "length", None),
    "end token is the last allowed": (tokens([*ids("</think>Hi"), END]), {"max_tokens": 3}, "Hi",
                                      "stop", None),
    "stop string": (says("one, two, three, four"), {"stop": ["three"]}, "one, two, ", "stop",
                    "three"),
    "stop string over tokens": (says("ABCDEFGHIJK"), {"stop": "DEFGHIJ"}, "ABC", "stop",
                                "DEFGHIJ"),
    "stop string at once": (says("STOP more"), {"stop": ["STOP"]}, "", "stop", "STOP"),
    "stop id": (tokens([*ids("</think>Hi"), 5, *ids("junk")]), {"stop_token_ids": [5]}, "Hi",
                "stop", 5),
    "nothing": (tokens([*ids("</think>"), END]), {}, "", "stop", None),
    "emoji": (says("Hi 😊! 👨‍👩‍👧 🇳🇴 é"), {}, "Hi 😊! 👨‍👩‍👧 🇳🇴 é", "stop", None),
}  # fmt: skip


@pytest.mark.parametrize(("script", "fields", "text", "reason", "stop"), CASES.values(), ids=CASES)
async def test_an_answer_ends_as_it_should_and_the_stream_says_the_same(
    script: Script, fields: dict[str, Any], text: str, reason: str, stop: Any
) -> None:
    """O35 to O37, O87, B-049 to B-058."""
    whole, stream = await both(a_server(script), **fields)
    (choice,) = whole["choices"]
    assert choice["message"]["content"] == text == stream.joined()
    assert (choice["finish_reason"], choice["stop_reason"]) == (reason, stop)
    assert stream.finish_reasons() == [reason]
    assert stream.chunks[-1]["choices"][0]["stop_reason"] == stop
    assert stream.usage == whole["usage"]
    assert stream.done


@pytest.mark.parametrize(
    ("setting", "names"),
    [("reasoning", {"reasoning"}), ("both", {"reasoning", "reasoning_content"}), ("none", set())],
)
async def test_a_setting_says_where_the_thinking_stands(setting: str, names: set[str]) -> None:
    """O34: it is counted wherever it is shown."""
    script = tokens([*ids("<think>Hm, a circle.</think>Red."), END])
    whole, stream = await both(a_server(script, reasoning_field=setting))
    message = whole["choices"][0]["message"]
    for name in ("reasoning", "reasoning_content"):
        told = "Hm, a circle." if name in names else ""
        assert stream.joined(name) == message.get(name, "") == told
        assert (name in message) == (name in names)
    assert (message["content"], stream.joined()) == ("Red.", "Red.")
    details = whole["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == len(ids("<think>Hm, a circle.</think>"))


async def test_thinking_is_apart_from_the_answer() -> None:
    """O34: its own field, before the content; the markers are nowhere."""
    script = tokens([*ids("<think>Hm, a circle.</think>Red."), END])
    whole, stream = await both(a_server(script))
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm, a circle.", "Red.")
    assert (stream.joined("reasoning_content"), stream.joined()) == ("Hm, a circle.", "Red.")
    details = whole["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == len(ids("<think>Hm, a circle.</think>"))


async def test_random_token_borders_give_stream_and_whole_the_same_answer() -> None:
    """Test plan 18.4, O87: 100 seeded answers of random ids, with and without a stop string."""
    vocabulary = [i for i in range(LOADED.vocab) if i < 964]
    for seed in range(100):
        chance = random.Random(seed)
        script = [*ids("</think>"), *chance.choices(vocabulary, k=chance.randint(0, 30)), END]
        stop = {"stop": [chance.choice("aetn .")]} if seed % 2 else {}
        whole, stream = await both(a_server(tokens(script)), **stop)
        choice = whole["choices"][0]
        assert stream.joined() == choice["message"]["content"]
        assert stream.finish_reasons() == [choice["finish_reason"]]
        assert stream.usage == whole["usage"]


async def test_usage_counts_image_rows_once() -> None:
    """O36: image_tokens + text_tokens = prompt_tokens."""
    server = a_server()
    content = [picture(), {"type": "text", "text": "What?"}]
    body = server.ask() | {"messages": [{"role": "user", "content": content}]}
    async with server.client() as http:
        usage = (await http.post(CHAT, json=body)).json()["usage"]
    details = usage["prompt_tokens_details"]
    assert details["image_tokens"] == sum(p.tokens for p in server.engine.seen[0].pictures) > 0
    assert details["image_tokens"] + details["text_tokens"] == usage["prompt_tokens"]
    assert usage["prompt_tokens"] == len(server.engine.seen[0].prompt)


async def test_reused_tokens_are_told_whatever_ends_the_answer() -> None:
    """O36: the first token tells them, so an answer that a stop string cut has them as well."""

    def reuses(ask: Generate) -> list[Event]:
        first, *others = ids("</think>one, two, three, four")
        rest: list[Event] = [Token(ask.request, id_) for id_ in others]
        return [Token(ask.request, first, cached_tokens=3), *rest]

    server = a_server(reuses)
    for fields in ({"stop": ["three"]}, {}):
        whole, stream = await both(server, **fields)
        assert stream.usage
        assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
        assert stream.usage["prompt_tokens_details"]["cached_tokens"] == 3
    async with server.client() as http:
        options = {"include_usage": True, "continuous_usage_stats": True}
        running = await http.post(CHAT, json=server.ask(stream=True, stream_options=options))
        metrics = (await http.get("/metrics")).text
    told = [
        c["usage"]["prompt_tokens_details"]["cached_tokens"] for c in read_stream(running).chunks
    ]
    assert set(told[1:]) == {3}
    assert "stagelight_cached_tokens_total 15.0" in metrics


async def test_the_salt_of_a_request_goes_to_the_engine() -> None:
    """O25, and it is no field without an effect."""
    server = a_server()
    async with server.client() as http:
        salted = await http.post(CHAT, json=server.ask(cache_salt="tenant 7"))
        await http.post(CHAT, json=server.ask())
    assert [ask.cache_salt for ask in server.engine.seen] == ["tenant 7", ""]
    assert "x-ignored-params" not in salted.headers


async def test_usage_is_in_a_stream_only_when_asked_for() -> None:
    """O83, B-057."""
    server = a_server()
    async with server.client() as http:
        plain = await http.post(CHAT, json=server.ask(stream=True))
        options = {"include_usage": True, "continuous_usage_stats": True}
        running = await http.post(CHAT, json=server.ask(stream=True, stream_options=options))
    assert b"usage" not in plain.content
    stream = read_stream(running)
    counts = [chunk["usage"]["completion_tokens"] for chunk in stream.chunks]
    assert counts == sorted(counts)
    assert stream.usage
    assert counts[-1] == stream.usage["completion_tokens"]


async def test_a_failure_after_the_head_is_one_event_and_the_end() -> None:
    """O84, B-059: no finish_reason, no [DONE], nothing in the text."""
    server = a_server(lambda _: [*ids("</think>The pict"), FAILED])
    async with server.client() as http:
        answer = await http.post(CHAT, json=server.ask(stream=True))
        plain = await http.post(PLAIN, json={"model": "M", "prompt": "x", "stream": True})
    for stream in (read_stream(answer), read_stream(plain)):
        assert stream.error == {
            "message": "bad image rows",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }
        assert stream.finish_reasons() == []
        assert not stream.done
    assert read_stream(answer).joined() == "The pict"


async def test_an_unexpected_exception_after_the_head_is_told_without_its_text() -> None:
    """O6, O84."""

    def breaks(_: object) -> Any:
        yield from ids("</think>Hello")
        raise ValueError("/secret/path")

    server = a_server(breaks)
    async with server.client() as http:
        answer = await http.post(CHAT, json=server.ask(stream=True))
    stream = read_stream(answer)
    assert stream.error
    assert stream.error["code"] == "internal_error"
    assert "secret" not in answer.text


def opened(server: Server, path: str = CHAT, **fields: Any) -> Connection:
    connection = Connection(server.app, "POST", path, content_type="application/json")
    connection.body(orjson.dumps(server.ask(**fields)))
    return connection


async def test_the_head_of_a_stream_waits_for_the_first_event() -> None:
    """O78: until then a failure has its own status."""
    gate = asyncio.Event()
    server = a_server(lambda _: [Wait(gate), *ids("</think>Hi"), END])
    connection = opened(server, stream=True)
    while not server.engine.seen:
        await asyncio.sleep(0)
    assert connection.sent == []
    gate.set()
    await connection.end()
    assert read_frames(connection.data).joined() == "Hi"


async def test_each_event_is_sent_when_it_comes() -> None:
    """O80: the client sees the first word while the engine makes the next."""
    gate = asyncio.Event()
    server = a_server(lambda _: [*ids("</think>Hello"), Wait(gate), *ids(" you"), END])
    connection = opened(server, stream=True)
    await connection.until(3)  # head, role, first word
    assert b'"Hello"' in connection.data
    assert b"[DONE]" not in connection.data
    gate.set()
    await connection.end()
    assert connection.sent[-1]["more_body"] is False


async def test_silence_is_filled_with_comments_and_then_errors_are_events() -> None:
    """O78, O79: the head goes out with the first comment."""
    gate = asyncio.Event()
    server = a_server(lambda _: [Wait(gate), FAILED], keep_alive_s=0.02)
    connection = opened(server, stream=True)
    await connection.until(4)
    assert connection.status == 200
    assert connection.data.startswith(b": keep-alive\n\n: keep-alive\n\n")
    gate.set()
    await connection.end()
    assert read_frames(connection.data).error
    assert connection.data.count(b"data: ") == 1


async def test_a_stream_without_silence_has_no_comments() -> None:
    """O79: every 15 s of silence, not every 15 s."""
    gates = [asyncio.Event() for _ in range(4)]
    words: list[Any] = [part for gate in gates for part in (Wait(gate), *ids("word "))]
    server = a_server(lambda _: [*ids("</think>"), *words, END], keep_alive_s=0.2)
    connection = opened(server, stream=True)
    for gate in gates:
        await asyncio.sleep(0.08)  # together longer than the limit, each shorter
        gate.set()
    await connection.end()
    assert b"keep-alive" not in connection.data


PHASES: dict[str, list[int]] = {
    "before the first token": [],
    "in the middle": ids("</think>Hello there"),
}


@pytest.mark.parametrize("emitted", PHASES.values(), ids=PHASES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", [CHAT, PLAIN])
async def test_a_client_that_leaves_ends_its_request_at_once(
    path: str, stream: bool, emitted: list[int]
) -> None:
    """O85, B-107: the engine is told, and it counts as cancelled, not as failed."""
    reached = asyncio.Event()

    def script(_: object) -> Any:
        yield from emitted
        reached.set()
        yield Wait(asyncio.Event())

    server = a_server(script)
    body = {"model": "M", "prompt": "x"} if path == PLAIN else server.ask()
    connection = Connection(server.app, "POST", path, content_type="application/json")
    connection.body(orjson.dumps(body | {"stream": stream}))
    await asyncio.wait_for(reached.wait(), 5)
    assert server.engine.in_flight == 1

    connection.leave()
    await connection.end()

    assert server.engine.in_flight == 0
    assert server.engine.aborted == [server.engine.seen[0].request]
    text = server.metrics.text()
    assert b"stagelight_requests_cancelled_total 1.0" in text
    assert b"stagelight_generation_tokens_total %.1f\n" % len(emitted) in text
    assert b"stagelight_requests_failed_total{" not in text
    assert not any(message.get("more_body") is False for message in connection.sent)


async def test_a_client_that_left_before_the_request_was_admitted_costs_nothing() -> None:
    """O85: while the prompt is made."""
    server = a_server()
    connection = opened(server, stream=True)
    connection.leave()
    await connection.end()
    assert server.engine.in_flight == 0
    assert len(server.engine.seen) == len(server.engine.aborted)


async def test_a_stop_string_aborts_what_the_engine_would_go_on_with() -> None:
    """O37: text after the stop is never made longer than a step."""
    server = a_server(says("one, two, three, four"))
    async with server.client() as http:
        await http.post(CHAT, json=server.ask(stop=["two"]))
    assert server.engine.aborted == [server.engine.seen[0].request]


async def test_eight_streams_at_a_time_do_not_mix() -> None:
    """O81: one id and one text a stream."""

    def script(ask: Any) -> Any:
        return [*ids("</think>" + str(ask.sampling.seed) * 20), END]

    server = a_server(script)
    async with server.client() as http:
        answers = await asyncio.gather(
            *(http.post(CHAT, json=server.ask(stream=True, seed=n)) for n in range(8))
        )
    streams = [read_stream(answer) for answer in answers]
    assert [stream.joined() for stream in streams] == [str(n) * 20 for n in range(8)]
    assert len({stream.chunks[0]["id"] for stream in streams}) == 8
