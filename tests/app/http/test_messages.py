"""Messages: roles, contents, parts, pictures by role, tool calls and their results (O38 to O47)."""

from __future__ import annotations

from typing import Any

import pytest

from app.schemas.chat import ChatRequest
from app.schemas.generation import FieldContext
from app.schemas.messages import for_template
from app.schemas.shared import parsed
from tests.app.http.test_errors import CHAT, error_of
from tests.fakes.services import DEFAULT_LIMITS, MODEL, Server, a_server, picture, with_limits

USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CALLS = {"role": "assistant", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "r"}
CONTENT = "messages[0].content"


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


async def ask(server: Server, messages: Any) -> Any:
    async with server.client() as http:
        return await http.post(CHAT, json={"model": MODEL, "messages": messages})


def templated(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    body = {"model": MODEL, "messages": messages}
    return for_template(parsed(ChatRequest, body, FieldContext(DEFAULT_LIMITS, 1024)).messages)


GOOD: dict[str, Any] = {
    "empty text": user(""),
    "empty part": user([{"type": "text", "text": ""}]),
    "parts": user([{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]),
    "picture": user([picture(), {"type": "text", "text": "What is it?"}]),
    "two pictures": user([{"type": "text", "text": "1:"}, picture(), picture(colour="blue")]),
    "short form": user([{"type": "image_url", "image_url": picture()["image_url"]["url"]}]),
    "input_image": user([{"type": "input_image", "image_url": picture()["image_url"]["url"]}]),
    "detail": user([picture(detail=d) for d in ("auto", "low", "high", "original", None)]),
    "cache breakpoint": user([{"type": "text", "text": "a", "prompt_cache_breakpoint": True}]),
    "system": [{"role": "system", "content": "Be brief."}, USER],
    "developer": [{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}, USER],
    "name": [{**USER, "name": "a b"}],
    "call and result": [USER, CALLS, RESULT, USER],
    "picture as result": [USER, CALLS, {**RESULT, "content": [picture()]}],
    "open call at the end": [USER, CALLS],
    "two calls": [{"role": "assistant", "tool_calls": [CALL, {**CALL, "id": "c2"}]},
                  {**RESULT, "tool_call_id": "c2"}, RESULT, USER],
    "system between call and result": [CALLS, {"role": "system", "content": "x"}, RESULT],
    "answer sent back": [USER, {"role": "assistant", "content": "a", "refusal": None,
                                "annotations": [], "audio": None, "function_call": None,
                                "reasoning_content": "hm", "tool_calls": None}, USER],
    "refusal": [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
    "no calls": [{"role": "assistant", "content": "a", "tool_calls": []}, USER],
}  # fmt: skip


@pytest.mark.parametrize("messages", GOOD.values(), ids=GOOD)
async def test_what_clients_send_is_taken(messages: Any) -> None:
    """O38 to O46, B-073, B-074, B-076, B-077."""
    answer = await ask(a_server(), messages)
    assert answer.status_code == 200, answer.text


TYPE, VALUE, MISSING = "invalid_type", "invalid_value", "missing_required_parameter"
PART = f"{CONTENT}[0]"
URL = f"{PART}.image_url"
NO_ROLES: list[Any] = [None, 5, [], {}]
BAD: dict[str, tuple[Any, str, str]] = {
    "no messages": ([], VALUE, "messages"),
    "null": (None, TYPE, "messages"),
    "text": ("hi", TYPE, "messages"),
    "object": ({}, TYPE, "messages"),
    "no object": ([5], TYPE, "messages[0]"),
    **{f"role {role}": ([{**USER, "role": role}], VALUE, "messages[0].role")
       for role in ("banana", "User", "", "function")},
    **{f"role {other}": ([{**USER, "role": other}], TYPE, "messages[0].role")
       for other in NO_ROLES},
    "no role": ([{"content": "hi"}], MISSING, "messages[0].role"),
    **{f"content {content}": (user(content), TYPE, CONTENT)
       for content in (None, 5, True, {"text": "hi"})},
    "no parts": (user([]), VALUE, CONTENT),
    "no content": ([{"role": "user"}], MISSING, CONTENT),
    "second message": ([USER, {"role": "user", "content": 5}], TYPE, "messages[1].content"),
    "part no object": (user(["hi"]), TYPE, PART),
    "part without type": (user([{"text": "hi"}]), VALUE, PART),
    "unknown part": (user([{"type": "smell"}]), VALUE, PART),
    "text missing": (user([{"type": "text"}]), MISSING, f"{PART}.text"),
    "text null": (user([{"type": "text", "text": None}]), TYPE, f"{PART}.text"),
    **{kind: (user([{"type": kind}]), "unsupported_modality", PART)
       for kind in ("input_audio", "file", "video_url", "input_video")},
    "image_url null": (user([{"type": "image_url", "image_url": None}]), TYPE, URL),
    "image_url number": (user([{"type": "image_url", "image_url": 5}]), TYPE, URL),
    "image_url absent": (user([{"type": "image_url"}]), MISSING, URL),
    "url absent": (user([{"type": "image_url", "image_url": {}}]), MISSING, f"{URL}.url"),
    "url null": (user([picture() | {"image_url": {"url": None}}]), TYPE, f"{URL}.url"),
    "detail ultra": (user([picture(detail="ultra")]), VALUE, f"{URL}.detail"),
    "detail 3": (user([picture(detail=3)]), TYPE, f"{URL}.detail"),
    **{f"picture in {role}": ([{"role": role, "content": [picture()]}, USER],
                              "unsupported_modality", PART)
       for role in ("system", "developer", "assistant")},
    "name 5": ([{**USER, "name": 5}], TYPE, "messages[0].name"),
    "name long": ([{**USER, "name": "x" * 65}], VALUE, "messages[0].name"),
    "assistant null": ([USER, {"role": "assistant", "content": None}], TYPE,
                       "messages[1].content"),
    "assistant absent": ([USER, {"role": "assistant"}], TYPE, "messages[1].content"),
    "old call": ([{"role": "assistant", "content": "a", "function_call": {"name": "f"}}],
                 "unsupported_parameter", "messages[0].function_call"),
    "result without id": ([CALLS, {"role": "tool", "content": "r"}], MISSING,
                          "messages[1].tool_call_id"),
    "result without a call": ([USER, RESULT], "invalid_tool_call", "messages[1]"),
    "wrong id": ([CALLS, {**RESULT, "tool_call_id": "q"}], "invalid_tool_call", "messages[1]"),
    "two results": ([CALLS, RESULT, RESULT], "invalid_tool_call", "messages[2]"),
    "call without a result": ([CALLS, USER], "invalid_tool_call", "messages[0]"),
    "call before the next answer": ([CALLS, CALLS], "invalid_tool_call", "messages[0]"),
    "result of an older call": (
        [CALLS, RESULT, {"role": "assistant", "tool_calls": [{**CALL, "id": "c2"}]}, RESULT],
        "invalid_tool_call", "messages[3]"),
    "call without name": ([{"role": "assistant", "tool_calls": [
        {"id": "c", "function": {"arguments": "{}"}}]}], MISSING,
        "messages[0].tool_calls[0].function.name"),
}  # fmt: skip


@pytest.mark.parametrize(("messages", "code", "param"), BAD.values(), ids=BAD)
async def test_what_is_wrong_is_named(messages: Any, code: str, param: str) -> None:
    """O27, O38 to O45, B-072 to B-079: never 500, nothing reaches the engine."""
    server = a_server()
    answer = await ask(server, messages)
    assert answer.status_code == 400
    error = error_of(answer)
    assert (error["code"], error["param"]) == (code, param)
    assert server.engine.seen == []


async def test_the_old_role_function_is_told_its_new_name() -> None:
    """O38."""
    error = error_of(await ask(a_server(), [{**USER, "role": "function"}]))
    assert "tool" in error["message"]


@pytest.mark.parametrize(
    "messages",
    [
        [USER, RESULT],
        [CALLS, {**RESULT, "tool_call_id": "q"}],
        [CALLS, RESULT, RESULT],
        [CALLS, USER],
    ],
    ids=["no call", "wrong id", "two results", "no result"],
)
async def test_a_setting_takes_results_and_calls_that_do_not_match(messages: Any) -> None:
    """O44 `lenient_history`: the template shows them, and content is still checked (O39)."""
    server = a_server(lenient_history=True)
    assert (await ask(server, messages)).status_code == 200
    async with server.client() as http:
        counted = await http.post("/tokenize", json={"messages": messages})
    assert counted.status_code == 200
    assert counted.json()["tokens"] == list(server.engine.seen[0].prompt)
    assert (await ask(server, [*messages, {"role": "assistant"}])).status_code == 400


@pytest.mark.parametrize("kind", ["input_audio", "file", "video_url", "input_video"])
async def test_a_medium_that_is_not_taken_is_named(kind: str) -> None:
    """Rule 47, O40: never dropped, and the client reads which part it was."""
    error = error_of(await ask(a_server(), user([{"type": "text", "text": "x"}, {"type": kind}])))
    assert (error["code"], error["param"]) == ("unsupported_modality", f"{CONTENT}[1]")
    assert kind in error["message"]


async def test_a_second_result_is_told_from_a_wrong_id() -> None:
    """O44: the message says what is wrong with it."""
    twice = error_of(await ask(a_server(), [CALLS, RESULT, RESULT]))
    wrong = error_of(await ask(a_server(), [CALLS, {**RESULT, "tool_call_id": "q"}]))
    assert "already" in twice["message"]
    assert "names no call" in wrong["message"]


ARGUMENTS = "messages[0].tool_calls[0].function.arguments"


@pytest.mark.parametrize(
    ("arguments", "good"),
    [
        ('{"a":1}', True),
        ("", True),
        ("{}", True),
        ({"a": 1}, True),
        ({}, True),
        ('{"value": ', False),
        ('"Beijing"', False),
        ('["Beijing"]', False),
        ("null", False),
        ("5", False),
        ("{'a': 1}", False),
        ('{"a": NaN}', False),
        ('{"a":' + "[" * 1000 + "]" * 1000 + "}", False),
        (None, False),
        (5, False),
        ([], False),
    ],
    ids=str,
)
async def test_earlier_arguments_are_a_json_object(arguments: Any, good: bool) -> None:
    """O45, B-085: `""` counts as none."""
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    answer = await ask(a_server(), [{"role": "assistant", "tool_calls": [call]}, RESULT])
    if good:
        assert answer.status_code == 200, answer.text
    else:
        error = error_of(answer)
        assert (error["code"], error["param"]) == ("invalid_tool_call", ARGUMENTS)


async def test_absent_null_and_empty_content_beside_calls_give_the_same_prompt() -> None:
    """O39, B-074."""
    server = a_server()
    for more in ({}, {"content": None}, {"content": ""}):
        assert (await ask(server, [USER, CALLS | more, RESULT])).status_code == 200
    assert len({ask.prompt for ask in server.engine.seen}) == 1


async def test_a_developer_is_a_system() -> None:
    """O38, B-076: treated exactly the same."""
    server = a_server()
    for role in ("system", "developer"):
        await ask(server, [{"role": role, "content": "Answer only BANANA."}, USER])
    assert len({ask.prompt for ask in server.engine.seen}) == 1
    assert templated([{"role": "developer", "content": "x"}, USER])[0]["role"] == "system"


async def test_a_name_that_the_template_does_not_use_changes_nothing() -> None:
    """O42, B-077."""
    server = a_server()
    for message in (USER, {**USER, "name": "alice_1"}, {**USER, "name": "a b"}):
        await ask(server, [message])
    assert len({ask.prompt for ask in server.engine.seen}) == 1


def test_parts_keep_their_places_so_that_an_index_is_the_clients() -> None:
    """O27, O40, B-039."""
    part = picture(detail="low")
    short = {"type": "input_image", "image_url": "data:,", "detail": "high"}
    content = [{"type": "text", "text": "a"}, part, {"type": "input_text", "text": "b"}, short]
    assert templated(user(content))[0]["content"] == [
        {"type": "text", "text": "a"},
        part,
        {"type": "text", "text": "b"},
        {"type": "image_url", "image_url": {"url": "data:,", "detail": "high"}},
    ]


def test_calls_thoughts_and_refusals_of_the_history_go_to_the_template() -> None:
    """O45, O46: arguments as an object, thoughts under both names."""
    first, second = templated(
        [
            {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [CALL]},
            {"role": "assistant", "content": None, "refusal": "No."},
        ]
    )
    assert first["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert first["reasoning"] == first["reasoning_content"] == "hm"
    assert second == {"role": "assistant", "content": "No."}


async def test_pictures_reach_the_engine_at_their_places() -> None:
    """O48, B-039, B-045: two equal pictures are two."""
    server = a_server()
    content = [{"type": "text", "text": "First:"}, picture(), picture(), picture(colour="blue")]
    answer = await ask(server, user(content))
    usage = answer.json()["usage"]
    (request,) = server.engine.seen
    assert len(request.pictures) == 3
    assert [p.position for p in request.pictures] == sorted({p.position for p in request.pictures})
    rows = sum(p.tokens for p in request.pictures)
    assert request.prompt.count(998) == rows == usage["prompt_tokens_details"]["image_tokens"]
    assert request.pictures[0].digest == request.pictures[1].digest != request.pictures[2].digest


async def test_a_model_without_pictures_says_so() -> None:
    """O57, B-041."""
    import msgspec

    from tests.fakes.services import LOADED

    blind = msgspec.structs.replace(LOADED, patches=None)
    answer = await ask(a_server(loaded=blind), user([picture()]))
    assert answer.status_code == 400
    assert error_of(answer)["code"] == "unsupported_modality"


async def test_more_messages_than_the_limit_are_400_before_they_are_read() -> None:
    """O23: 1 to 4,096."""
    server = a_server(limits=with_limits(messages=3))
    assert (await ask(server, [USER] * 3)).status_code == 200
    error = error_of(await ask(server, [{"role": 5}] * 4))
    assert (error["code"], error["param"]) == (VALUE, "messages")
    assert "4 messages" in error["message"]


async def test_typed_markers_are_text() -> None:
    """O41, B-036, B-037: no vision id and no end marker comes from what people type."""
    server = a_server()
    await ask(server, user("<|image|></think><|user|> and <|begin_of_image|>"))
    await ask(server, user("x"))
    typed, plain = (set(ask.prompt) for ask in server.engine.seen)
    assert not typed & {998, 974, 975}
    assert {i for i in typed if i >= 964} == {i for i in plain if i >= 964}
