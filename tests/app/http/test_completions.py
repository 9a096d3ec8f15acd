"""Plain completions, tokens, models and versions (O88, O90 to O92)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest

from tests.app.http.test_errors import CHAT, error_of
from tests.fakes.services import CONTEXT, GLIMMER, LOADED, a_server, ids, picture, says, tokens
from tests.fakes.sse import read_stream

PLAIN = "/v1/completions"
END = LOADED.end_ids[0]


async def complete(server: Any, **fields: Any) -> Any:
    async with server.client() as http:
        return await http.post(PLAIN, json={"model": "M", **fields})


async def test_a_completion_has_every_field_of_the_contract() -> None:
    """O88: the hosted default is 16 tokens."""
    answer = await complete(a_server(tokens(ids("a" * 99))), prompt="hi")
    body = answer.json()
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    (choice,) = body["choices"]
    assert set(choice) == {"index", "text", "logprobs", "finish_reason", "stop_reason"}
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(("left", "count"), [(1, 1), (15, 15), (17, 16)])
async def test_the_hosted_default_gives_way_to_the_context(left: int, count: int) -> None:
    """R70, R71: a prompt of `max_model_len - 1` is served, and who asked for nothing gets less."""
    server = a_server(tokens(ids("a" * 99)))
    answer = await complete(server, prompt=[1] * (CONTEXT - left))
    assert answer.json()["usage"]["completion_tokens"] == count
    assert (await complete(server, prompt=[1] * CONTEXT)).status_code == 400
    asked = await complete(server, prompt=[1] * (CONTEXT - left), max_tokens=left + 1)
    assert error_of(asked)["param"] == "max_tokens"


@pytest.mark.parametrize(
    ("prompt", "count"),
    [
        ("hi", 1),
        (["a", "b", "c"], 3),
        ([1, 2, 3], 1),
        ([[1, 2], [3]], 2),
        ([[1.0, 2], [3.0]], 2),
        (["x"] * 64, 64),
        (" ", 1),
    ],
    ids=["text", "texts", "ids", "lists of ids", "whole numbers", "64", "blank"],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_each_prompt_gets_the_choice_of_its_index(
    prompt: Any, count: int, stream: bool
) -> None:
    """O88."""

    def script(ask: Any) -> Any:
        name = ask.request.rpartition(".")[2] if count > 1 else "0"
        return [*ids(f"I am {name}"), END]

    server = a_server(script, capacity=64)
    answer = await complete(server, prompt=prompt, stream=stream)
    if stream:
        read = read_stream(answer)
        texts = [read.text(index) for index in range(count)]
        assert read.finish_reasons() == ["stop"] * count
        assert read.done
    else:
        choices = answer.json()["choices"]
        assert [choice["index"] for choice in choices] == list(range(count))
        texts = [choice["text"] for choice in choices]
        assert answer.json()["usage"]["prompt_tokens"] == sum(
            len(ask.prompt) for ask in server.engine.seen
        )
    assert texts == [f"I am {index}" for index in range(count)]


BAD = {
    "empty": ("", "invalid_value"),
    "no prompts": ([], "invalid_value"),
    "65 prompts": (["x"] * 65, "invalid_value"),
    "number": (5, "invalid_type"),
    "object": ({}, "invalid_type"),
    "mixed": (["a", 1], "invalid_type"),
    "ids and texts": ([[1], "a"], "invalid_type"),
    "empty ids": ([[]], "invalid_type"),
    "booleans": ([True], "invalid_type"),
    "fractions": ([1.5], "invalid_type"),
    "beyond the vocabulary": ([1024], "invalid_value"),
    "negative": ([[-1]], "invalid_value"),
    "placeholder": ([998], "invalid_value"),
    "typed placeholder": ("<|image|>", "invalid_value"),
}


@pytest.mark.parametrize(("prompt", "code"), BAD.values(), ids=BAD)
async def test_a_prompt_that_cannot_be_taken_is_400(prompt: Any, code: str) -> None:
    """O88: an empty one is 400 because this family has no start token."""
    server = a_server()
    answer = await complete(server, prompt=prompt)
    assert answer.status_code == 400
    error = error_of(answer)
    assert (error["code"], error["param"]) == (code, "prompt")
    assert server.engine.seen == []


async def test_markers_in_a_raw_prompt_count_as_such() -> None:
    """O88: the caller writes the template."""
    server = a_server()
    await complete(server, prompt="<|user|>hi<|assistant|>")
    assert {971, 972} <= set(server.engine.seen[0].prompt)


async def test_the_start_token_is_added_unless_the_caller_has_written_it(tmp_path: Path) -> None:
    """O88: `add_special_tokens`, default true; an empty text is taken where there is one."""
    shutil.copytree(GLIMMER, tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors"))
    path = tmp_path / "m" / "tokenizer.json"
    told = orjson.loads(path.read_bytes())
    told["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "[gMASK]", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"[gMASK]": {"id": "[gMASK]", "ids": [966], "tokens": ["[gMASK]"]}},
    }
    path.write_bytes(orjson.dumps(told))
    server = a_server(folder=tmp_path / "m")
    for fields in ({}, {"add_special_tokens": False}):
        assert (await complete(server, prompt="hi", **fields)).status_code == 200
    assert (await complete(server, prompt="")).status_code == 200
    with_start, without, empty = (ask.prompt for ask in server.engine.seen)
    assert with_start == (966, *without)
    assert empty == (966,)


async def test_one_prompt_that_fails_fails_the_request_and_ends_the_others() -> None:
    """O31, O88."""
    server = a_server(capacity=1)
    answer = await complete(server, prompt=["a", "b"])
    assert answer.status_code == 503
    assert error_of(answer)["code"] == "overloaded"
    assert server.engine.in_flight == 0


async def test_a_stream_of_several_prompts_has_usage_once() -> None:
    """O83, O88."""
    server = a_server(says("ok"))
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = await complete(server, prompt=["a", "b"], stream=True, stream_options=options)
    stream = read_stream(answer)
    assert stream.usage
    assert stream.usage["completion_tokens"] == 2 * len(ids("</think>ok"))
    assert stream.usage["prompt_tokens"] == 2


async def test_tokenize_counts_what_the_chat_costs() -> None:
    """O60, O91: image rows included."""
    server = a_server()
    messages = [{"role": "user", "content": [picture(), {"type": "text", "text": "What?"}]}]
    async with server.client() as http:
        told = (await http.post("/tokenize", json={"messages": messages})).json()
        chat = (await http.post(CHAT, json={"model": "M", "messages": messages})).json()
    assert told["count"] == len(told["tokens"]) == chat["usage"]["prompt_tokens"]
    assert told["tokens"] == list(server.engine.seen[0].prompt)
    assert (told["max_model_len"], told["token_strs"]) == (CONTEXT, None)


async def test_a_text_goes_to_tokens_and_back() -> None:
    """O91."""
    text = "Hello 😊 <|user|> there"
    async with a_server().client() as http:
        told = (
            await http.post("/tokenize", json={"prompt": text, "return_token_strs": True})
        ).json()
        back = (await http.post("/detokenize", json={"tokens": told["tokens"]})).json()
    assert back == {"prompt": text}
    assert len(told["token_strs"]) == told["count"]
    assert "<|user|>" in told["token_strs"]


@pytest.mark.parametrize(
    ("path", "body", "code", "param"),
    [
        ("/tokenize", {}, "missing_required_parameter", "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]},
         "invalid_value", "messages"),
        ("/tokenize", {"prompt": 5}, "invalid_type", "prompt"),
        ("/tokenize", {"messages": []}, "invalid_value", "messages"),
        ("/tokenize", {"prompt": "x", "model": "no"}, "model_not_found", "model"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "tools": [{}]},
         "unsupported_parameter", "tools"),
        ("/tokenize", {"prompt": "x", "return_token_strs": 1}, "invalid_type",
         "return_token_strs"),
        ("/detokenize", {}, "missing_required_parameter", "tokens"),
        ("/detokenize", {"tokens": [1024]}, "invalid_value", "tokens"),
        ("/detokenize", {"tokens": [-1]}, "invalid_value", "tokens"),
        ("/detokenize", {"tokens": ["1"]}, "invalid_type", "tokens[0]"),
        ("/detokenize", {"tokens": "1"}, "invalid_type", "tokens"),
    ],
)  # fmt: skip
async def test_wrong_token_requests_are_named(
    path: str, body: dict[str, Any], code: str, param: str
) -> None:
    """O91."""
    async with a_server().client() as http:
        error = error_of(await http.post(path, json=body))
    assert (error["code"], error["param"]) == (code, param)


async def test_the_model_card_tells_what_is_enforced() -> None:
    """O90: limits, defaults and abilities are those of this server."""
    server = a_server()
    async with server.client() as http:
        listed = (await http.get("/v1/models")).json()
        card = (await http.get("/v1/models/M")).json()
    assert listed == {"object": "list", "data": [card]}
    assert (card["id"], card["object"], card["max_model_len"]) == ("M", "model", CONTEXT)
    assert isinstance(card["created"], int)
    assert card["owned_by"]
    assert card["modalities"] == {"input": ["text", "image"], "output": ["text"]}
    assert card["capabilities"]["image_urls"] == "data"
    assert card["limits"]["images"] == 16
    assert card["limits"]["n"] == 1
    assert "/" not in card["root"]


async def test_a_model_answers_to_its_aliases_by_the_name_that_was_asked_for() -> None:
    """O24, O90: up to five names are told to who asks for another."""
    aliases = ("gpt-4o", "M", *(f"m{n}" for n in range(5)))
    server = a_server(model_aliases=aliases)
    async with server.client() as http:
        answer = await http.post(CHAT, json=server.ask() | {"model": "gpt-4o"})
        listed = (await http.get("/v1/models")).json()["data"]
        one = (await http.get("/v1/models/m4")).json()
        wrong = await http.post(CHAT, json=server.ask() | {"model": "gpt-4o "})
    assert answer.json()["model"] == "gpt-4o"
    assert [card["id"] for card in listed] == ["M", "gpt-4o", "m0", "m1", "m2", "m3", "m4"]
    assert one == listed[-1]
    assert wrong.status_code == 404
    error = error_of(wrong)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert error["message"].endswith("it serves M, gpt-4o, m0, m1, m2.")


async def test_the_model_list_does_not_offer_pictures_that_cannot_arrive() -> None:
    """Rule 15."""
    off = msgspec.structs.replace(LOADED, patches=None, pictures_off="made on cpu:1")
    async with a_server(loaded=off).client() as http:
        (card,) = (await http.get("/v1/models")).json()["data"]
    assert card["modalities"]["input"] == ["text"]
    assert card["capabilities"]["image_urls"] == "none"
    assert card["limits"]["images"] == 0


@pytest.mark.parametrize("path", ["org/name", "org%2Fname"])
async def test_ids_with_a_slash_work_encoded_or_not(path: str) -> None:
    """O90."""
    from dataclasses import replace

    from app.api import Services, build_app

    server = a_server()
    old: Services = server.app.state.services
    config = replace(old.config, served_model_name="org/name")
    server.app = build_app(replace(old, config=config))
    async with server.client() as http:
        assert (await http.get(f"/v1/models/{path}")).json()["id"] == "org/name"
        assert error_of(await http.get("/v1/models/M"))["code"] == "model_not_found"


async def test_the_version_tells_no_path_and_no_host() -> None:
    """O92."""
    async with a_server().client() as http:
        body = (await http.get("/version")).json()
    assert set(body) == {"version", "build", "python", "cupy", "cuda_runtime", "driver", "gpus"}
    assert body["build"].startswith(body["version"] + "+")
    assert not any("/" in str(value) for value in body.values())
