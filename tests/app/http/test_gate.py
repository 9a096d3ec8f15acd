"""Paths, methods, keys, request ids and the headers of every answer (O1 to O3, O15 to O18)."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from app.config import ApiKey
from app.gate import Gate
from tests.app.http.test_errors import CHAT, error_of
from tests.fakes.connection import Connection
from tests.fakes.services import Server, a_server

KEY = "k-123"
OPEN = {"/health", "/health/live"}
GUARDED = {
    "/metrics",
    "/v1/models",
    "/v1/models/{model:path}",
    "/version",
    "/v1/chat/completions",
    "/v1/chat",
    "/v1/completions",
    "/tokenize",
    "/detokenize",
    "/openapi.json",
    "/docs",
    "/docs/{name}",
    "/_test/fault",
}


def routes_of(server: Server) -> list[APIRoute]:
    """The router's own list."""
    gate: Any = server.app.user_middleware[0]
    assert gate.cls is Gate
    found = gate.kwargs["routes"]
    return [route for route in found if isinstance(route, APIRoute)]


def url(route: APIRoute) -> str:
    return re.sub(r"\{.*?\}", "x", route.path)


async def test_every_route_needs_the_key_but_the_health_paths() -> None:
    """O15, test plan 18.8: a new route fails here until it is listed."""
    server = a_server(keys=[KEY], fault_injection=True)
    assert {route.path for route in routes_of(server)} == OPEN | GUARDED
    async with server.client() as http:
        for route in routes_of(server):
            for method in route.methods or ():
                answer = await http.request(method, url(route))
                if route.path in OPEN:
                    assert answer.status_code == 200, route.path
                else:
                    assert answer.status_code == 401, route.path
                    assert error_of(answer)["code"] == "missing_api_key"
                    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": "Bearer k-123"}, 200),
        ({"authorization": "bearer k-123"}, 200),
        ({"authorization": "BEARER   k-123"}, 200),
        ({"authorization": "Bearer k-456"}, 200),
        ({"x-api-key": "k-123"}, 200),
        ({"x-api-key": "k-123", "authorization": "Bearer None"}, 200),
        ({}, 401),
        ({"authorization": "Bearer k-12"}, 401),
        ({"authorization": "Bearer k-1234"}, 401),
        ({"authorization": "Bearer None"}, 401),
        ({"authorization": "Bearer "}, 401),
        ({"authorization": "Bearer"}, 401),
        ({"authorization": "Basic azox"}, 401),
        ({"authorization": "k-123"}, 401),
        ({"authorization": b"Bearer \xc3\xbc"}, 401),
        ({"authorization": b"Bearer \xff\xfe"}, 401),
        ({"x-api-key": ""}, 401),
    ],
)
async def test_a_key_is_compared_as_a_whole(headers: dict[str, Any], status: int) -> None:
    """O15, B-104: the scheme in any letter case, one or more blanks; never 500."""
    server = a_server(keys=[KEY, "k-456"])
    async with server.client() as http:
        answer = await http.get("/v1/models", headers=headers)
    assert answer.status_code == status
    if status == 401:
        code = "invalid_api_key" if headers else "missing_api_key"
        assert error_of(answer)["code"] == code


async def test_without_a_configured_key_the_header_is_ignored() -> None:
    """O15."""
    async with a_server().client(key="anything") as http:
        assert (await http.get("/v1/models")).status_code == 200


async def test_metrics_can_be_opened_by_a_setting() -> None:
    """O15, D7."""
    async with a_server(keys=[KEY], metrics_open=True).client() as http:
        assert (await http.get("/metrics")).status_code == 200
        assert (await http.get("/version")).status_code == 401


async def test_keys_can_be_replaced_while_the_server_runs() -> None:
    """O15: the file is read again on SIGHUP."""
    server = a_server(keys=[KEY])
    server.app.state.keys.replace([ApiKey("new", "k-new")])
    async with server.client() as http:
        old = await http.get("/version", headers={"x-api-key": KEY})
        new = await http.get("/version", headers={"x-api-key": "k-new"})
    assert (old.status_code, new.status_code) == (401, 200)


async def test_a_setting_puts_all_but_the_health_paths_below_a_root() -> None:
    """O4: and the document and its page work there, with a key as everywhere."""
    server = a_server(keys=[KEY], root_path="/llm/api")
    async with server.client(KEY) as http:
        for path in ("/llm/api/v1/models", "/llm/api/metrics", "/llm/api/docs", "/health"):
            assert (await http.get(path)).status_code == 200, path
        for path in ("/v1/models", "/llm/api", "/llm/apiv1/models", "/llm/api/health", "/metrics"):
            answer = await http.get(path)
            assert answer.status_code == 404, path
            assert path in error_of(answer)["message"]
        told = (await http.get("/llm/api/openapi.json")).json()
        wrong = await http.get("/llm/api/v1/chat/completions")
        other = await http.post("/llm/api/v1/embeddings", json={})
    assert told["servers"] == [{"url": "/llm/api"}]
    assert wrong.status_code == 405
    assert error_of(other)["code"] == "endpoint_not_supported"
    async with server.client() as http:
        assert (await http.get("/llm/api/v1/models")).status_code == 401


async def test_a_setting_takes_the_paths_without_their_v1_too() -> None:
    """O4: off by default."""
    server = a_server(unversioned_paths=True)
    async with server.client() as http:
        assert (await http.get("/models")).status_code == 200
        assert (await http.get("/models/M")).json()["id"] == "M"
        assert (await http.post("/chat/completions", json=server.ask())).status_code == 200
        text = await http.post("/completions", json={"model": "M", "prompt": "hi"})
        assert text.status_code == 200
        assert (await http.get("/v1/models")).status_code == 200
        for path in ("/models/", "/modelsx", "/embeddings"):
            assert (await http.get(path)).status_code == 404
    async with a_server().client() as http:
        assert (await http.get("/models")).status_code == 404


UNKNOWN = ["/", "/v1", "/v1/", "/v1/model", "/health/", "/healthz", "/v1/models/", "/metrics/"]
UNKNOWN += [
    "/v1/chat/",
    "//health",
    "/v1/MODELS",
    "/docs/",
    "/%00",
    "/%ff",
    "/v1/chat%2Fcompletions/",
]


@pytest.mark.parametrize("path", UNKNOWN)
@pytest.mark.parametrize("key", [None, KEY])
async def test_an_unknown_path_is_404_with_or_without_a_key_and_never_a_redirect(
    path: str, key: str | None
) -> None:
    """O1, O2: clients drop or repeat bodies on a redirect."""
    server = a_server(keys=[KEY])
    async with server.client(key) as http:
        for method in ("GET", "POST", "HEAD"):
            answer = await http.request(method, path)
            assert answer.status_code == 404, (method, answer.text)
            if method != "HEAD":
                assert error_of(answer)["code"] == "not_found"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/embeddings",
        "/v1/files",
        "/v1/files/file-1/content",
        "/v1/audio/transcriptions",
        "/v1/images/generations",
        "/v1/moderations",
        "/v1/batches",
        "/v1/conversations",
        "/v1/decisions",
        "/v1/responses",
        "/v1/chat/completions/chatcmpl-1",
    ],
)
async def test_a_known_endpoint_that_is_not_served_says_so(path: str) -> None:
    """O3: never 501, which clients would retry."""
    async with a_server().client() as http:
        answer = await http.post(path, json={})
    assert answer.status_code == 404
    assert error_of(answer)["code"] == "endpoint_not_supported"


async def test_a_wrong_method_is_405_with_the_right_ones_and_without_a_key() -> None:
    """O1: path and method come before the key; OPTIONS too, while CORS is off (O16)."""
    server = a_server(keys=[KEY], fault_injection=True)
    async with server.client() as http:
        for route in routes_of(server):
            right = {"GET", "HEAD"} if "GET" in (route.methods or ()) else {"POST"}
            for method in {"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"} - right:
                answer = await http.request(method, url(route))
                assert answer.status_code == 405, (method, route.path)
                assert set(answer.headers["allow"].split(", ")) == right
                assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_a_path_is_shown_without_its_control_characters(method: str) -> None:
    """O6: as JSON text, so that who prints the message prints no escape sequence."""
    async with a_server().client() as http:
        answer = await http.request(method, "/v1/models/a%1b%5b31m%00%0ab")
    assert not any(ord(character) < 32 for character in error_of(answer)["message"])


@pytest.mark.parametrize("path", ["/health", "/health/live", "/v1/models", "/metrics", "/docs"])
async def test_head_has_the_head_of_get_and_no_body(path: str) -> None:
    """O1, R97."""
    async with a_server().client() as http:
        head, get = await http.head(path), await http.get(path)
    assert head.status_code == get.status_code == 200
    assert head.content == b""
    assert head.headers["content-type"] == get.headers["content-type"]
    assert int(head.headers["content-length"]) > 0


async def test_head_sends_no_byte_of_a_body() -> None:
    """O1: seen from the wire, where a client library cannot hide it."""
    connection = Connection(a_server().app, "HEAD", "/health")
    connection.body(b"")
    await connection.end()
    assert connection.status == 200
    assert connection.data == b""
    assert int(connection.headers["content-length"]) > 0


@pytest.mark.parametrize("given", ["abc", "A-Z_0.9", "x" * 128])
async def test_a_request_id_of_the_client_is_taken(given: str) -> None:
    """O17."""
    async with a_server().client() as http:
        answer = await http.get("/health", headers={"x-request-id": given})
    assert answer.headers["x-request-id"] == given


@pytest.mark.parametrize("given", [None, "", "a b", "x" * 129, "ü".encode(), "a\tb", "a/b"])
async def test_any_other_request_id_is_replaced(given: str | bytes | None) -> None:
    """O17: it goes into log lines."""
    headers: Any = {} if given is None else {"x-request-id": given}
    async with a_server().client() as http:
        answer = await http.get("/health", headers=headers)
    assert re.fullmatch(r"req_[0-9a-f]{32}", answer.headers["x-request-id"])


@pytest.mark.parametrize("given", ["9" * 5_000, "-1", "1.5", "\u00b2", ""])
async def test_a_retry_count_that_is_none_is_left_out(given: str) -> None:
    """O10, O100: what stands in a header of the log never fails a request."""
    headers: Any = {"x-stainless-retry-count": given.encode()}
    async with a_server().client() as http:
        assert (await http.get("/v1/models", headers=headers)).status_code == 200


async def test_the_field_request_id_names_the_request_where_no_header_does() -> None:
    """O25."""
    server = a_server()
    async with server.client() as http:
        by_field = await http.post(CHAT, json=server.ask(request_id="f-1"))
        by_header = await http.post(
            CHAT, json=server.ask(request_id="f-2"), headers={"x-request-id": "h-1"}
        )
    assert by_field.headers["x-request-id"] == "f-1"
    assert by_header.headers["x-request-id"] == "h-1"
    assert [ask.request for ask in server.engine.seen] == ["f-1", "h-1"]


async def test_every_answer_has_an_id_and_its_time_and_no_server_header() -> None:
    """O17, O18."""
    server = a_server(keys=[KEY])
    async with server.client() as http:
        answers: list[httpx.Response] = [
            await http.get("/health"),
            await http.get("/nope"),
            await http.get("/version"),
            await http.delete("/health"),
            await http.post(CHAT, json=server.ask(), headers={"x-api-key": KEY}),
            await http.post(CHAT, json={}, headers={"x-api-key": KEY}),
            await http.post(CHAT, json=server.ask(stream=True), headers={"x-api-key": KEY}),
        ]
    assert [a.status_code for a in answers] == [200, 404, 401, 405, 200, 400, 200]
    for answer in answers:
        assert answer.headers["x-request-id"]
        assert answer.headers["openai-processing-ms"].isdigit()
        assert "server" not in answer.headers
    assert len({answer.headers["x-request-id"] for answer in answers}) == len(answers)


async def test_the_order_of_checks_is_path_method_key_state_type_size_json_fields() -> None:
    """O1: each request below is wrong in all later ways too."""
    wrong = {"content-type": "text/plain", "content-length": "999999999999"}
    server = a_server(keys=[KEY], ready=False)
    key = {"x-api-key": KEY}
    steps = []
    async with server.client() as http:

        async def code(method: str, path: str, headers: dict[str, str], body: bytes) -> None:
            answer = await http.request(method, path, content=body, headers=headers)
            steps.append(error_of(answer)["code"])

        await code("PUT", "/v1/nope", wrong, b"{")
        await code("PUT", CHAT, wrong, b"{")
        await code("POST", CHAT, wrong, b"{")
        await code("POST", CHAT, wrong | key, b"{")
        server.health.warming(server.health.loaded or _loaded())
        server.health.ready()
        await code("POST", CHAT, wrong | key, b"{")
        await code("POST", CHAT, wrong | key | {"content-type": "application/json"}, b"{")
        await code("POST", CHAT, key | {"content-type": "application/json"}, b"{")
        await code("POST", CHAT, key | {"content-type": "application/json"}, b"{}")
    assert steps == [
        "not_found",
        "method_not_allowed",
        "missing_api_key",
        "model_not_loaded",
        "unsupported_media_type",
        "request_too_large",
        "invalid_json",
        "missing_required_parameter",
    ]


def _loaded() -> Any:
    from tests.fakes.services import LOADED

    return LOADED


async def test_faults_can_be_ordered_only_when_fault_injection_is_on() -> None:
    """Rule 120."""
    order = {"fault": "sticky", "where": "step", "code": 700}
    off, on = a_server(), a_server(fault_injection=True)
    async with off.client() as http:
        assert (await http.post("/_test/fault", json=order)).status_code == 404
    async with on.client() as http:
        taken = await http.post("/_test/fault", json=order)
        wrong = await http.post("/_test/fault", json={"fault": "earthquake"})
    assert taken.status_code == 200
    assert [(o.fault, o.where, o.code) for o in on.orders.orders] == [("sticky", "step", 700)]
    assert wrong.status_code == 400
    assert error_of(wrong)["code"] == "invalid_value"
