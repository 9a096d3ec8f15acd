"""Every row of the error table that concerns these routes, through the real router (O5 to O10)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import orjson
import pytest

from app.errors import (
    STATUS,
    AnswerFailed,
    FieldErrors,
    StateRefused,
    answer_of,
    error_object,
    shown,
)
from engine.errors import OutOfMemory, RequestError, RequestFault
from engine.messages import Failed, RequestId
from tests.fakes.services import LOADED, a_fault, a_server, ids, picture, with_limits

CHAT = "/v1/chat/completions"


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error object of an answer, with all that O5, O6 and O17 demand of every one."""
    assert not answer.is_success
    assert answer.headers["content-type"] == "application/json"
    assert len(answer.content) < 2048
    assert answer.headers["x-request-id"]
    assert int(answer.headers["openai-processing-ms"]) >= 0
    body = answer.json()
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["code"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    return error


@dataclass
class Row:
    """One way to get one error."""

    code: str
    status: int
    path: str = CHAT
    method: str = "POST"
    fields: dict[str, Any] = field(default_factory=dict)
    content: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    param: str | None = None
    server: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.code}-{self.param or self.path}"


def messages(*content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(content)}]}


def url_of(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


CUT = picture()["image_url"]["url"][:90]


PICTURES_OFF = msgspec.structs.replace(
    LOADED, patches=None, pictures_off="made on cpu:1, looked up on cpu:0"
)
PART = "messages[0].content[0]"
CALLS = {
    "messages": [
        {"role": "assistant", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": "5"}}
        ]}
    ]
}  # fmt: skip
ROWS = [
    Row("invalid_json", 400, content=b"{"),
    Row("invalid_json", 400, content=b'{"temperature": NaN}', param="temperature"),
    Row("missing_required_parameter", 400, content=b'{"model": "M"}', param="messages"),
    Row("invalid_type", 400, fields={"max_tokens": "10"}, param="max_tokens"),
    Row("invalid_value", 400, fields={"temperature": 2.5}, param="temperature"),
    Row("unsupported_parameter", 400, fields={"n": 2}, param="n"),
    Row("unsupported_modality", 400, fields=messages({"type": "input_audio"}), param=PART),
    Row("context_length_exceeded", 400, fields={"max_tokens": 10_000}, param="max_tokens"),
    Row("invalid_tool_call", 400, fields=CALLS,
        param="messages[0].tool_calls[0].function.arguments"),
    Row("invalid_image_url", 400, fields=messages(url_of("file:///etc/passwd")), param=PART),
    Row("invalid_image", 400, fields=messages(url_of(CUT)), param=PART),
    Row("unsupported_image_format", 400, param=PART,
        fields=messages(url_of("data:image/png;base64,SGVsbG8gd29ybGQ="))),
    Row("image_too_large", 400, fields=messages(picture()), param=PART,
        server={"limits": with_limits(pixels=100)}),
    Row("image_aspect_ratio", 400, param=PART, server={"limits": with_limits(aspect=200)},
        fields=messages(picture(402, 2))),
    Row("too_many_images", 400, fields=messages(*[picture()] * 17),
        param="messages[0].content[16]"),
    Row("image_url_not_allowed", 400, fields=messages(url_of("http://127.0.0.1/a.png")),
        param=PART),
    Row("image_input_disabled", 400, fields=messages(picture()), param=PART,
        server={"loaded": PICTURES_OFF}),
    Row("missing_api_key", 401, server={"keys": ["k"]}),
    Row("invalid_api_key", 401, server={"keys": ["k"]}, headers={"x-api-key": "q"}),
    Row("model_not_found", 404, fields={"model": "no-such"}, param="model"),
    Row("model_not_found", 404, path="/v1/models/no-such", method="GET"),
    Row("not_found", 404, path="/v2/chat"),
    Row("endpoint_not_supported", 404, path="/v1/embeddings"),
    Row("method_not_allowed", 405, method="DELETE"),
    Row("request_too_large", 413, server={"limits": with_limits(body_bytes=10)}),
    Row("unsupported_media_type", 415, headers={"content-type": "text/plain"}),
    Row("unsupported_media_type", 415, headers={"content-encoding": "gzip"}),
]  # fmt: skip

# Rows of O8 that these routes cannot give: their parts come later, or other tests give them.
ELSEWHERE = {
    "invalid_json_schema": "no structured output: response_format is refused as unsupported",
    "invalid_grammar": "as above",
    "invalid_tool_schema": "no tools: they are refused as unsupported",
    "image_download_failed": "no pictures by URL",
    "deadline_exceeded": "no deadline header",
    "rate_limit_exceeded": "no rate limits",
    "template_error": "test_messages.py",
    "request_timeout": "test_bodies.py",
    "internal_error": "below",
    "overloaded": "below",
    "model_not_loaded": "test_states.py",
    "model_not_ready": "test_states.py",
    "recovering": "test_states.py",
    "engine_stalled": "test_states.py",
    "shutting_down": "test_states.py",
    "gpu_fault": "test_states.py",
    "part_unavailable": "a part that is off is the vision tower's: not built",
}


@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_each_row_of_the_table_has_its_status_type_code_and_place(
    row: Row, stream: bool
) -> None:
    """O8; the same with `stream: true` (O7); the next request is answered."""
    server = a_server(**row.server)
    body = row.content or orjson.dumps({**server.ask(), "stream": stream, **row.fields})
    headers = {"content-type": "application/json", **row.headers}
    async with server.client() as http:
        answer = await http.request(row.method, row.path, content=body, headers=headers)

    error = error_of(answer)
    assert (answer.status_code, error["code"], error["param"]) == (row.status, row.code, row.param)
    wanted = "authentication_error" if row.status == 401 else "invalid_request_error"
    assert error["type"] == wanted
    assert answer.headers["x-should-retry"] == "false"
    assert answer.headers.get("www-authenticate") == ("Bearer" if row.status == 401 else None)
    assert "retry-after" not in answer.headers
    assert server.engine.seen == [], "a refused request reached the engine (O28)"


def test_every_code_of_the_table_is_tested_or_says_where() -> None:
    """O8: a new code needs a row."""
    assert {row.code for row in ROWS} | ELSEWHERE.keys() == STATUS.keys()
    assert not {row.code for row in ROWS} & ELSEWHERE.keys()
    assert all(STATUS[row.code] == row.status for row in ROWS)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_full_queue_is_503_with_retry_headers(stream: bool) -> None:
    """O8, O9, O63: capacity is never 429."""
    server = a_server(capacity=0)
    async with server.client() as http:
        answer = await http.post(CHAT, json=server.ask(stream=stream))

    error = error_of(answer)
    assert (answer.status_code, error["type"], error["code"]) == (503, "server_error", "overloaded")
    assert answer.headers["retry-after"] == "5"
    assert answer.headers["retry-after-ms"] == "5000"
    assert "x-should-retry" not in answer.headers


FAILURES = [
    ("internal_error", 500, {"x-should-retry": "false"}),
    ("overloaded", 503, {"retry-after": "5"}),
    ("gpu_fault", 503, {"retry-after": "2"}),
    ("engine_stalled", 503, {"retry-after": "2"}),
    ("shutting_down", 503, {"retry-after": "2"}),
]


@pytest.mark.parametrize(("code", "status", "headers"), FAILURES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_request_that_fails_before_its_first_token_has_the_status_of_its_code(
    code: str, status: int, headers: dict[str, str], stream: bool
) -> None:
    """O8, O78, R101: also for a stream, because its head waits for the first event."""
    failed = Failed(request=RequestId("r"), code=code, message="The step failed.")
    server = a_server(lambda _: [failed])
    async with server.client() as http:
        answer = await http.post(CHAT, json=server.ask(stream=stream))

    error = error_of(answer)
    assert (answer.status_code, error["type"], error["code"]) == (status, "server_error", code)
    assert headers.items() <= dict(answer.headers).items()


async def test_a_request_that_fails_later_is_an_error_too() -> None:
    """O35: without streaming nothing of the unfinished answer is shown."""
    script: list[Any] = [
        *ids("</think>Hello"),
        Failed(RequestId("r"), "internal_error", "non-finite logits"),
    ]
    server = a_server(lambda _: script)
    async with server.client() as http:
        answer = await http.post(CHAT, json=server.ask())

    assert answer.status_code == 500
    assert "non-finite logits" in error_of(answer)["message"]


class Broken(Exception):
    """Something that nobody expected."""


async def test_an_exception_that_nobody_expected_is_500_and_tells_nothing() -> None:
    """O5, O6: no text of the exception, no path, no stack."""

    def breaks(_: object) -> list[int]:
        raise Broken("/secret/path says: device 7 exploded")

    server = a_server(breaks)
    async with server.client() as http:
        answer = await http.post(CHAT, json=server.ask())
        after = await http.get("/health")

    error = error_of(answer)
    assert (answer.status_code, error["code"]) == (500, "internal_error")
    assert "secret" not in answer.text
    assert "exploded" not in answer.text
    assert after.status_code == 200


async def test_4000_bad_parts_and_a_5_mb_string_give_a_small_body() -> None:
    """O6, B-102, test plan 18.13: at most 5 problems, the first decides, values are cut."""
    server = a_server()
    async with server.client() as http:
        many = await http.post(CHAT, json=server.ask() | messages(*[{"type": 5}] * 4000))
        long = await http.post(CHAT, json=server.ask(temperature="x" * 5_000_000))
        name = await http.post(CHAT, json=server.ask(model="\x00" * 5_000_000))
        key = await http.post(CHAT, json=server.ask(metadata={"k" * 1_000_000: 5}))

    error = error_of(many)
    assert error["param"] == "messages[0].content[0]"
    assert len(re.findall(r"messages\[0\]\.content\[\d+\]", error["message"])) == 5
    assert "3995 more" in error["message"]
    assert "x" * 90 in error_of(long)["message"]
    assert "x" * 101 not in long.text
    assert error_of(name)["code"] == "model_not_found"
    assert error_of(key)["code"] == "invalid_type"


async def test_health_is_small_and_no_error_object_whatever_happens() -> None:
    """O5, O95: health bodies are objects of their own."""
    server = a_server()
    server.health.fault(a_fault())
    async with server.client() as http:
        answer = await http.get("/health")
    assert answer.status_code == 503
    assert "error" not in answer.json()
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize("seconds", [-3, 0.2, 2, 59.1, 10_000])
def test_retry_after_is_whole_seconds_from_1_to_60(seconds: float) -> None:
    """O9: above 120 s the official clients give up at once."""
    headers = answer_of(StateRefused("recovering", seconds)).headers

    assert 1 <= int(headers["retry-after"]) <= 60
    assert int(headers["retry-after-ms"]) == 1000 * int(headers["retry-after"])


def test_exceptions_have_one_meaning_each() -> None:
    """O8, O10: the table of types."""
    told = {
        RequestError("x", code="template_error", param="messages"): (400, "template_error"),
        RequestError("x", code="no_such_code"): (400, "invalid_value"),
        RequestError("x", code="overloaded"): (400, "invalid_value"),
        OutOfMemory("x"): (503, "overloaded"),
        RequestFault("x"): (500, "internal_error"),
        AnswerFailed("gpu_fault", "x"): (503, "gpu_fault"),
        AnswerFailed("invalid_value", "x"): (500, "internal_error"),
        ValueError("x"): (500, "internal_error"),
    }
    for error, (status, code) in told.items():
        answer = answer_of(error)
        assert (answer.status, answer.code) == (status, code), repr(error)


def test_a_message_of_any_size_and_content_fits() -> None:
    """O6: escapes make it longer, and lone surrogates cannot be written."""
    for text in ("\x01" * 5000, "😊" * 5000, "\udc80" * 10, '"\\' * 3000, ""):
        body = error_object("invalid_value", text, param=text)
        assert len(body) < 2048
        assert orjson.loads(body)["error"]["message"]


def test_values_are_shown_as_short_json() -> None:
    """O6: up to 100 characters, control characters escaped, containers by size."""
    assert shown("a\nb") == '"a\\nb"'
    assert shown(True) == "true"
    assert shown([1, 2]) == "a list of 2"
    assert shown({"a": 1}) == "an object"
    for value in ("x" * 1000, "\x00" * 99, '"' * 99, 10**300, 1e300):
        assert len(shown(value)) <= 100


def test_the_first_problem_decides_code_and_place() -> None:
    """O6."""
    problems = [RequestError(f"p{n}", code="invalid_type", param=f"f{n}") for n in range(9)]
    error = FieldErrors(problems)
    assert (error.code, error.param) == ("invalid_type", "f0")
    assert str(error) == "p0 p1 p2 p3 p4 (and 4 more)"
