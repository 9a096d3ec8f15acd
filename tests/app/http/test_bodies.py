"""Bodies: content type, size, time and JSON, before any field is looked at (O11 to O14)."""

from __future__ import annotations

import threading
import time

import orjson
import pytest

from app import jsontext
from app.bodies import IN_THREAD_FROM
from app.longtext import PIECE, lift
from app.schemas.chat import ChatRequest, check_chat
from app.schemas.generation import FieldContext
from engine.errors import RequestError
from tests.app.http.test_errors import CHAT, error_of
from tests.fakes.connection import Connection
from tests.fakes.services import a_server, with_limits

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    "kind",
    [
        "application/json",
        "APPLICATION/JSON",
        "application/json; charset=utf-8",
        'application/json;charset="UTF-8"',
        "application/json ; charset=utf8",
    ],
)
async def test_json_in_utf8_is_taken_in_any_letter_case(kind: str) -> None:
    """O11, B-096."""
    server = a_server()
    async with server.client() as http:
        body = orjson.dumps(server.ask())
        answer = await http.post(CHAT, content=body, headers={"content-type": kind})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "kind",
    [
        None,
        "",
        "text/plain",
        "application/x-www-form-urlencoded",
        "application/json; charset=utf-16",
        "application/jsonp",
        "multipart/form-data; boundary=x",
    ],
)
async def test_every_other_content_type_is_415(kind: str | None) -> None:
    """O11, B-096: never 500."""
    server = a_server()
    headers = {} if kind is None else {"content-type": kind}
    async with server.client() as http:
        body = orjson.dumps(server.ask())
        answer = await http.post(CHAT, content=body, headers=headers)
    assert answer.status_code == 415
    assert error_of(answer)["code"] == "unsupported_media_type"


@pytest.mark.parametrize(("encoding", "status"), [("gzip", 415), ("identity", 200), ("br", 415)])
async def test_a_compressed_body_is_415_and_is_not_decoded(encoding: str, status: int) -> None:
    """O11, B-101: the message names the encoding."""
    server = a_server()
    async with server.client() as http:
        answer = await http.post(
            CHAT, content=orjson.dumps(server.ask()), headers=JSON | {"content-encoding": encoding}
        )
    assert answer.status_code == status
    if status == 415:
        assert encoding in error_of(answer)["message"]


async def test_a_body_of_exactly_the_limit_is_read_and_one_byte_more_is_413() -> None:
    """O12, B-100: by Content-Length."""
    server = a_server()
    body = orjson.dumps(server.ask())
    limited = a_server(limits=with_limits(body_bytes=len(body)))
    async with limited.client() as http:
        fits = await http.post(CHAT, content=body, headers=JSON)
        over = await http.post(CHAT, content=body + b" ", headers=JSON)
    assert fits.status_code == 200
    assert over.status_code == 413
    assert error_of(over)["code"] == "request_too_large"
    assert over.headers["connection"] == "close"


async def test_a_declared_size_over_the_limit_is_refused_before_the_body_is_read() -> None:
    """O12: as soon as the header is read."""
    server = a_server()
    connection = Connection(
        server.app, "POST", CHAT, content_type="application/json", content_length="999999999999"
    )
    await connection.end()  # no byte of the body was given
    assert connection.status == 413


async def test_a_chunked_body_is_413_when_its_count_passes_the_limit() -> None:
    """O12: without a Content-Length."""
    server = a_server(limits=with_limits(body_bytes=100))
    connection = Connection(server.app, "POST", CHAT, content_type="application/json")
    connection.body(b" " * 60, more=True)
    connection.body(b" " * 60, more=True)
    await connection.end()
    assert connection.status == 413


async def test_a_body_that_does_not_arrive_in_time_is_408_and_the_connection_is_closed() -> None:
    """O12, B-106: also one that still trickles in."""
    server = a_server(limits=with_limits(body_timeout_s=0.05))
    connection = Connection(server.app, "POST", CHAT, content_type="application/json")
    connection.body(b"{", more=True)
    await connection.end()
    assert connection.status == 408
    assert connection.headers["connection"] == "close"
    assert "retry-after" not in connection.headers
    assert orjson.loads(connection.data)["error"]["code"] == "request_timeout"


async def test_a_client_that_leaves_while_sending_gets_no_answer_and_counts_as_gone() -> None:
    """O85."""
    server = a_server()
    connection = Connection(server.app, "POST", CHAT, content_type="application/json")
    connection.body(b"{", more=True)
    connection.leave()
    await connection.end()
    assert connection.sent == []
    assert b"stagelight_requests_cancelled_total 1.0" in server.metrics.text()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"null",
        b'"x"',
        b'{"model":}',
        b"{'model':'M'}",
        b"{} trailing",
        bytes.fromhex("7b226d6f64656c223a22ff22"),
        b'{"model": "M", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b"[" * 20_000 + b"]" * 20_000,
        b'{"a":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        b'{"a":' + b"[" * 128 + b"]" * 128 + b"}",
        b'{"x": [1, {"a": 1e400}]}',
    ],
    ids=lambda raw: repr(raw[:24]),
)
async def test_what_is_no_json_object_is_400_at_once(raw: bytes) -> None:
    """O13, B-097 to B-099: within 1 s, with our own error shape."""
    server = a_server()
    began = time.monotonic()
    async with server.client() as http:
        answer = await http.post(CHAT, content=raw, headers=JSON)
    assert answer.status_code == 400
    assert error_of(answer)["code"] == "invalid_json"
    assert time.monotonic() - began < 1


async def test_depth_128_a_byte_order_mark_and_equal_keys_are_fine() -> None:
    """O13: the last of two equal keys counts."""
    server = a_server()
    body = orjson.dumps(server.ask())[:-1]
    deep = body + b',"foo":' + b"[" * 127 + b"]" * 127 + b"}"
    twice = b'{"model":"no-such",' + body[1:] + b"}"
    async with server.client() as http:
        for raw in (deep, b"\xef\xbb\xbf" + body + b"}", twice):
            answer = await http.post(CHAT, content=raw, headers=JSON)
            assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (b"NaN", "invalid_json"),
        (b"Infinity", "invalid_json"),
        (b"-Infinity", "invalid_json"),
        (b"1e400", "invalid_json"),
        (b"18446744073709551616", "invalid_value"),
        (b"-9223372036854775809", "invalid_value"),
        (b"1" * 5000, "invalid_value"),
    ],
)
@pytest.mark.parametrize("place", ["temperature", "presence_penalty", "top_p", "seed", "foo"])
async def test_a_number_that_cannot_be_held_is_400_with_its_place(
    number: bytes, code: str, place: str
) -> None:
    """O13, B-068: also in a field that nobody knows."""
    server = a_server()
    body = orjson.dumps(server.ask())[:-1] + b',"%s":%s}' % (place.encode(), number)
    async with server.client() as http:
        answer = await http.post(CHAT, content=body, headers=JSON)
    assert answer.status_code == 400
    error = error_of(answer)
    assert (error["code"], error["param"]) == (code, place)


def test_the_place_of_a_bad_number_is_found_deep_inside() -> None:
    """O27."""
    with pytest.raises(RequestError) as caught:
        jsontext.parse_object(b'{"tools": [{"a": 1}, {"b": {"c": [0, NaN]}}]}')
    assert caught.value.param == "tools[1].b.c[1]"


def test_the_largest_64_bit_integers_and_large_floats_are_kept() -> None:
    """O13."""
    text = b'{"a": 18446744073709551615, "b": -9223372036854775808, "c": 1e300, "d": 1e19}'
    assert jsontext.parse_object(text) == {"a": 2**64 - 1, "b": -(2**63), "c": 1e300, "d": 1e19}


async def test_a_large_body_is_read_and_checked_in_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """O14: the event loop goes on meanwhile; from 64 KiB on, so above 1 MiB too."""
    threads = []

    def parse(data: bytes, *, most_values: int) -> dict[str, object]:
        threads.append(threading.current_thread())
        return jsontext.parse_object(data, most_values=most_values)

    def check(request: ChatRequest, context: FieldContext) -> None:
        threads.append(threading.current_thread())
        check_chat(request, context)

    monkeypatch.setattr("app.bodies.parse_object", parse)
    monkeypatch.setattr("app.routes.chat.check_chat", check)
    server = a_server()
    async with server.client() as http:
        await http.post(CHAT, json=server.ask(foo="x" * IN_THREAD_FROM))
        await http.post(CHAT, json=server.ask())
    here = [thread is threading.main_thread() for thread in threads]
    assert here == [False, False, True, True]


async def test_more_values_than_the_limit_are_413_before_they_are_made() -> None:
    """O14: millions of small values would stop every other thread for seconds."""
    server = a_server(limits=with_limits(body_values=30_000))
    async with server.client() as http:
        fits = await http.post(CHAT, json=server.ask(foo=[[1, 2]] * 9_000))
        texts = await http.post(CHAT, json=server.ask(foo=["[,{" * 9] * 20_000))
        over = await http.post(CHAT, json=server.ask(foo=[[1, 2]] * 11_000))
    assert [fits.status_code, texts.status_code, over.status_code] == [200, 200, 413]
    error = error_of(over)
    assert (error["code"], "30000 values" in error["message"]) == ("request_too_large", True)


UNITS = {
    "plain": b"x",
    "comma": b",",
    "escape": rb"\\",
    "newline": rb"\n",
    "unicode": rb"\u00e9",
    "pair": rb"\ud83d\ude00",
    "two": "é".encode(),
    "three": "€".encode(),
    "four": "😊".encode(),
}


@pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS)
def test_a_long_string_is_the_same_wherever_its_pieces_end(unit: bytes) -> None:
    """O14: every border between two pieces falls everywhere inside a character."""
    for shift in range(len(unit)):
        inside = b"-" * shift + unit * (PIECE * 2 // len(unit))
        text = b'{"a": ["%b", {"b": 1, "%b": "short"}], "c": "%b"}' % (inside, inside, unit)
        assert len(lift(text, most_values=10).strings) == 2  # and none is read as a whole
        read, plain = jsontext.parse_object(bytearray(text)), orjson.loads(text)
        assert read == plain
        assert [*read["a"][1]] == [*plain["a"][1]]  # keys in their order


@pytest.mark.parametrize(
    "broken",
    [rb"\ud83d", rb"\ude00", rb"\ud83d\u0041", rb"\x", rb"\u12", b"\xff", b"\xe0\x80\x80", b"\n"],
    ids=repr,
)
@pytest.mark.parametrize("end", [b'"}', b"", b'" "}'])
def test_a_long_string_that_is_none_is_refused_as_a_short_one(broken: bytes, end: bytes) -> None:
    """O13."""
    for inside in (b"x" * PIECE + broken, broken + b"x" * PIECE):
        text = b'{"a": "' + inside + end
        with pytest.raises(RequestError) as caught:
            jsontext.parse_object(text)
        assert caught.value.code == "invalid_json"


def test_a_bad_number_beside_a_long_string_has_its_place() -> None:
    """O13, O27."""
    text = b'{"a": "' + b"x" * PIECE + b'", "b": [1, 1e400]}'
    with pytest.raises(RequestError) as caught:
        jsontext.parse_object(text)
    assert (caught.value.code, caught.value.param) == ("invalid_json", "b[1]")


async def test_a_get_with_a_body_and_a_query_is_answered_as_without() -> None:
    """R97."""
    server = a_server()
    async with server.client() as http:
        answer = await http.request("GET", "/health?verbose=1", content=b"{", headers=JSON)
    assert answer.status_code == 200
