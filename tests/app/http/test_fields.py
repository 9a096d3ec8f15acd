"""The field tables: lowest, highest, beyond, wrong type, null, absent, each with place and code.

Test plan 18.5 and 18.6 over O21 to O26 and O88, through the real router.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from app.schemas.chat import ChatRequest
from app.schemas.completions import CompletionRequest
from engine.messages import Generate
from tests.app.http.test_errors import CHAT, error_of
from tests.fakes.services import CONTEXT, LOADED, MODEL, a_server

TYPE, VALUE, NO = "invalid_type", "invalid_value", "unsupported_parameter"
JUNK: dict[str, list[Any]] = {
    "integer": ["10", True, 1.5, [], {}],
    "number": ["1", True, [], {}],
    "boolean": ["true", 0, 1, [], {}],
    "string": [5, True, [], {}],
    "object": ["x", 5, True, []],
    "list": ["x", 5, True, {}],
    "any": [],
}


@dataclass(frozen=True)
class Field:
    """One row of the tables.

    Args:
        good: values that are honoured, or that ask for nothing.
        bad: right type, wrong value.
        refused: right, but the part is not built.
        ignored: taken and listed.
    """

    name: str
    kind: str
    good: tuple[Any, ...] = ()
    bad: tuple[Any, ...] = ()
    refused: tuple[Any, ...] = ()
    ignored: tuple[Any, ...] = ()
    with_stream: bool = False


MIN64, MAX64 = -(2**63), 2**63 - 1
SHARED = [
    Field("temperature", "number", (0, 0.0, 1e-9, 2, 2.0), (-0.1, 2.0001, 1e300)),
    Field("top_p", "number", (0, 1, 0.5), (-0.1, 1.1)),
    Field("top_k", "integer", (-1, 0, 1, 16.0, 2**64 - 1, 1e300), (-2,)),
    Field("min_p", "number", (0, 1), (-0.01, 1.01)),
    Field("min_tokens", "integer", (0, 1, 2.0), (-1, 10_000)),
    Field("ignore_eos", "boolean", (True, False)),
    Field("seed", "integer", (MIN64, MAX64, 0, 16.0), (MAX64 + 1, 1e19)),
    Field("stop", "any", ("x", ["x"], ["x"] * 4, [], "s" * 256), ("", ["a", ""], ["x"] * 5,
          "s" * 257)),
    Field("stop_token_ids", "list", ([], [0, 1023], [1] * 64), ([-1], [1024], [1] * 65)),
    Field("stream", "boolean", (True, False)),
    Field("stream_options", "object", ({}, {"include_usage": True}, {"include_usage": None},
          {"continuous_usage_stats": True}), with_stream=True),
    Field("request_id", "string", ("abc", "x" * 128), ("", "a b", "x" * 129)),
    Field("user", "string", (), ("x" * 513,), ignored=("", "x", "x" * 512)),
    Field("safety_identifier", "string", (), ("x" * 513,), ignored=("x",)),
    Field("prompt_cache_key", "string", (), ("x" * 513,), ignored=("x",)),
    Field("prompt_cache_options", "object", ignored=({}, {"a": 1})),
    Field("prompt_cache_retention", "string", ignored=("24h",)),
    Field("metadata", "object", ({},), ({str(n): "" for n in range(17)}, {"k" * 65: ""},
          {"k": "v" * 513}), ignored=({"k" * 64: "v" * 512}, {str(n): "" for n in range(16)})),
    Field("store", "boolean", (False,), ignored=(True,)),
    Field("service_tier", "string", ("auto", "default"), ("gold", ""),
          ignored=("flex", "scale", "priority", "fast")),
    Field("priority", "integer", (0,), (-101, 101), ignored=(-100, 100)),
    Field("cache_salt", "string", ("x", "x" * 256), ("", "x" * 257)),
    Field("n", "integer", (1, 1.0), (0, -1, 9), (2, 8)),
    Field("presence_penalty", "number", (0, 0.0), (-2.1, 2.1), (-2, 2)),
    Field("frequency_penalty", "number", (0, 0.0), (-2.1, 2.1), (-2, 2)),
    Field("repetition_penalty", "number", (1, 1.0), (0, -1, 10.1), (0.1, 10)),
    Field("logit_bias", "object", ({},), ({"1024": 1}, {"-1": 5}, {"abc": 1}, {"5": 101},
          {"5": -101}, {"5": None}, {"5": True}, {"5": "1"}, {"٣": 1}),
          ({"0": -100, "1023": 100},)),
    Field("response_format", "object", ({"type": "text"},), ({}, {"type": "json"}),
          ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "a"}})),
    Field("include_stop_str_in_output", "boolean", (False,), refused=(True,)),
    Field("skip_special_tokens", "boolean", (True,), refused=(False,)),
    Field("return_token_ids", "boolean", (False,), refused=(True,)),
    Field("bad_words", "list", ([],), refused=(["x"],)),
    Field("allowed_token_ids", "list", (), ([],), ([1],)),
    Field("truncate_prompt_tokens", "integer", (), (0,), (1,)),
    Field("structured_outputs", "any", refused=({"json": {}}, {})),
    *(Field(f"guided_{kind}", "any", refused=("x",)) for kind in ("json", "regex", "choice",
      "grammar")),
]  # fmt: skip
BOUND = ((1, 16.0, CONTEXT - 11), (0, -1, -186, 10**8))
TOOL = {"type": "function", "function": {"name": "f"}}
CHAT_ONLY = [
    Field("max_tokens", "integer", *BOUND),
    Field("max_completion_tokens", "integer", *BOUND),
    Field("prediction", "object", ignored=({"type": "content", "content": "x"},
          {"type": "content", "content": [{"type": "text", "text": "x"}]})),
    Field("verbosity", "string", (), ("loud",), ignored=("low", "medium", "high")),
    Field("documents", "list", ignored=([], [{"text": "x"}])),
    Field("logprobs", "boolean", (False,), refused=(True,)),
    Field("top_logprobs", "integer", (), (-1, 21, 0, 20)),
    Field("modalities", "list", (["text"],), ([], ["smell"]), (["text", "audio"],)),
    Field("tools", "list", (), ([],), ([TOOL],)),
    Field("tool_choice", "any", ("none", "auto"), ("always", {}), ("required", TOOL)),
    Field("parallel_tool_calls", "boolean", (True,), refused=(False,)),
    Field("reasoning_effort", "string", (), ("huge",), ("none", "minimal", "low", "max")),
    Field("include_reasoning", "boolean", (True,), refused=(False,)),
    Field("thinking_token_budget", "integer", (), (-1,), (0, 5)),
    Field("chat_template_kwargs", "object", ({},), refused=({"a": 1},)),
    Field("chat_template", "string", (), (), ("{{ x }}",)),
    Field("add_generation_prompt", "boolean", (True,), refused=(False,)),
    Field("continue_final_message", "boolean", (False,), refused=(True,)),
    Field("mm_processor_kwargs", "object", ({},), refused=({"min_pixels": 1},)),
    *(Field(name, "any", refused=({}, "x", [])) for name in ("audio", "web_search_options",
      "moderation", "functions", "function_call")),
]  # fmt: skip
PLAIN_ONLY = [
    Field("max_tokens", "integer", (1, 16.0), (0, -1, 10**8)),
    Field("add_special_tokens", "boolean", (True, False)),
    Field("echo", "boolean", (False,), refused=(True,)),
    Field("logprobs", "integer", (), (-1, 21), (0, 20)),
    Field("best_of", "integer", (1,), (0,), (2,)),
    Field("suffix", "string", ("",), refused=("x",)),
    *(
        Field(name, "any", refused=(5, {}, "x"))
        for name in (
            "max_completion_tokens",
            "tools",
            "tool_choice",
            "functions",
            "function_call",
            "top_logprobs",
            "thinking_token_budget",
        )
    ),
]
REQUIRED = {"model", "messages", "prompt"}
ROUTES: dict[str, tuple[dict[str, Any], list[Field], Any]] = {
    CHAT: (
        {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]},
        SHARED + CHAT_ONLY,
        ChatRequest,
    ),
    "/v1/completions": ({"model": MODEL, "prompt": "hi"}, SHARED + PLAIN_ONLY, CompletionRequest),
}
EVERY = [(path, field) for path, (_, fields, _) in ROUTES.items() for field in fields]
NAMES = [f"{path}-{field.name}" for path, field in EVERY]


@pytest.mark.parametrize("path", ROUTES)
def test_every_known_field_has_a_row(path: str) -> None:
    """Test plan 18.5: a new field fails here until it is in the table."""
    _, fields, model = ROUTES[path]
    assert {field.name for field in fields} | REQUIRED == set(model.model_fields) | REQUIRED


@pytest.mark.parametrize(("path", "field"), EVERY, ids=NAMES)
async def test_a_field_is_honoured_listed_or_refused_by_name(path: str, field: Field) -> None:
    """O21 to O25: every value of the row, null and absent; `param` is the field."""
    base = ROUTES[path][0]
    cases: list[tuple[Any, str | None, bool]]
    cases = [(value, None, False) for value in (*field.good, None)]
    cases += [(value, None, True) for value in field.ignored]
    cases += [(value, VALUE, False) for value in field.bad]
    cases += [(value, NO, False) for value in field.refused]
    cases += [(value, TYPE, False) for value in JUNK[field.kind]]
    server = a_server()
    async with server.client() as http:
        for value, code, listed in cases:
            stream = {"stream": True} if field.with_stream else {}
            answer = await http.post(path, json={**base, **stream, field.name: value})
            if code is None:
                assert answer.status_code == 200, (value, answer.text)
                header = answer.headers.get("x-ignored-params")
                assert header == (field.name if listed else None), value
                continue
            error = error_of(answer)
            wanted = (400, "context_length_exceeded" if value == 10**8 else code)
            assert (answer.status_code, error["code"]) == wanted, (value, error)
            assert str(error["param"]).split(".")[0].split("[")[0] == field.name, value


@pytest.mark.parametrize("path", ROUTES)
async def test_absent_and_null_mean_the_same(path: str) -> None:
    """O21, B-065: the bound is the rest of the context, or 16 for plain completions."""
    base, fields, _ = ROUTES[path]
    server = a_server()
    async with server.client() as http:
        await http.post(path, json=base)
        await http.post(path, json=base | {field.name: None for field in fields})
    absent, null = (_without_chance(ask) for ask in server.engine.seen)
    assert absent == null
    assert absent.max_tokens == (CONTEXT - len(absent.prompt) if path == CHAT else 16)


def _without_chance(ask: Generate) -> Any:
    import msgspec

    sampling = msgspec.structs.replace(ask.sampling, seed=0)
    return msgspec.structs.replace(ask, sampling=sampling, request="")


async def test_what_is_honoured_reaches_the_engine() -> None:
    """O23, O25: each sampling field of the request is in the `Generate`."""
    server = a_server()
    fields = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "seed": -5,
        "max_tokens": 7,
        "min_tokens": 3,
        "stop_token_ids": [5, 6],
    }
    async with server.client() as http:
        await http.post(CHAT, json=server.ask(**fields))
        await http.post(CHAT, json=server.ask(top_k=-1, ignore_eos=True, max_completion_tokens=9))
        await http.post(CHAT, json=server.ask(top_k=1e300))
    first, second, third = server.engine.seen
    assert (first.sampling.temperature, first.sampling.top_p, first.sampling.top_k) == (
        0.7,
        0.9,
        40,
    )
    assert (first.sampling.min_p, first.sampling.seed) == (0.05, -5)
    assert (first.max_tokens, first.min_tokens) == (7, 3)
    assert set(first.stop_ids) == {*LOADED.end_ids, 5, 6}
    assert second.sampling.top_k == 0
    assert second.stop_ids == ()
    assert second.max_tokens == 9
    assert 1024 <= third.sampling.top_k < 2**31, "the engine keeps it in 32 bits"


async def test_defaults_are_those_of_the_checkpoint_and_the_seed_is_fresh() -> None:
    """O29, O30: `do_sample: false` is temperature 0."""
    server = a_server()
    async with server.client() as http:
        await http.post(CHAT, json=server.ask())
        await http.post(CHAT, json=server.ask())
        shown = (await http.get("/v1/models")).json()["data"][0]["defaults"]
    first, second = server.engine.seen
    assert first.sampling.temperature == shown["temperature"] == 0.0
    assert first.sampling.seed != second.sampling.seed


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {}, "stream": False}, "stream_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ],
)
async def test_two_fields_that_do_not_fit_together_are_400(
    fields: dict[str, Any], param: str
) -> None:
    """O23, O25."""
    server = a_server()
    async with server.client() as http:
        error = error_of(await http.post(CHAT, json=server.ask(**fields)))
    assert error["param"] == param


async def test_equal_bounds_are_fine() -> None:
    """O23."""
    server = a_server()
    async with server.client() as http:
        answer = await http.post(CHAT, json=server.ask(max_tokens=5, max_completion_tokens=5))
    assert answer.status_code == 200
    assert server.engine.seen[0].max_tokens == 5


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("model", "status", "code"),
    [
        ("M", 200, None),
        ("", 404, "model_not_found"),
        ("no-such", 404, "model_not_found"),
        ("M ", 404, "model_not_found"),
        ("m", 404, "model_not_found"),
        (5, 400, "invalid_type"),
        (None, 400, "invalid_type"),
        ("absent", 400, "missing_required_parameter"),
    ],
)
async def test_the_model_is_the_served_name(
    path: str, model: Any, status: int, code: str | None
) -> None:
    """O24, B-071: the message names what is served; the answer's model is the name asked for."""
    body = ROUTES[path][0] | {"model": model}
    if model == "absent":
        del body["model"]
    async with a_server().client() as http:
        answer = await http.post(path, json=body)
    assert answer.status_code == status
    if code is None:
        assert answer.json()["model"] == "M"
    else:
        error = error_of(answer)
        assert (error["code"], error["param"]) == (code, "model")
        assert status == 400 or "M" in error["message"]


async def test_unknown_fields_are_listed_within_limits() -> None:
    """O22: plain names only, at most 10 of them and 512 bytes; null is absent."""
    server = a_server()
    strange = {"a\nb": 1, "x-y": 1, "ü": 1, "nothing": None, "Temperature": 5}
    async with server.client() as http:
        some = await http.post(CHAT, json=server.ask(**strange))
        many = await http.post(CHAT, json=server.ask(**{f"f{n}": n for n in range(50)}))
        long = await http.post(CHAT, json=server.ask(**{f"{n}" + "x" * 100: 1 for n in range(9)}))
        refused = await http.post(CHAT, json=server.ask(foo=1, max_tokens=CONTEXT))
    assert some.headers["x-ignored-params"] == "x-y, Temperature"
    assert len(many.headers["x-ignored-params"].split(", ")) == 10
    assert len(long.headers["x-ignored-params"]) <= 512
    assert refused.status_code == 400
    assert "x-ignored-params" not in refused.headers


@pytest.mark.parametrize("stream", [False, True])
async def test_ignored_fields_are_told_in_a_stream_too(stream: bool) -> None:
    """O22."""
    server = a_server()
    async with server.client() as http:
        answer = await http.post(CHAT, json=server.ask(stream=stream, user="u", foo=1))
    assert answer.headers["x-ignored-params"] == "user, foo"


async def test_a_bound_that_does_not_fit_is_400_with_the_three_numbers() -> None:
    """O62, B-066, B-067: the exact fit is taken."""
    server = a_server()
    async with server.client() as http:
        await http.post(CHAT, json=server.ask())
        prompt = len(server.engine.seen[0].prompt)
        fits = await http.post(CHAT, json=server.ask(max_tokens=CONTEXT - prompt))
        over = await http.post(CHAT, json=server.ask(max_tokens=CONTEXT - prompt + 1))
        long = await http.post(CHAT, json=server.ask("word " * 10 * CONTEXT))
    assert fits.status_code == 200
    error = error_of(over)
    assert (over.status_code, error["code"]) == (400, "context_length_exceeded")
    for number in (CONTEXT, prompt, CONTEXT - prompt + 1):
        assert re_number(number, error["message"])
    assert error_of(long)["code"] == "context_length_exceeded"
    assert len(server.engine.seen) == 2


async def test_clamp_cuts_the_bound_and_says_so() -> None:
    """O62: the setting."""
    server = a_server(clamp=True)
    async with server.client() as http:
        answer = await http.post(CHAT, json=server.ask(max_completion_tokens=100_000))
    used = server.engine.seen[0].max_tokens
    assert used == CONTEXT - len(server.engine.seen[0].prompt)
    assert answer.headers["x-ignored-params"] == f"max_completion_tokens={used}"


def re_number(number: int, text: str) -> bool:
    return str(number) in text.replace(",", "")
