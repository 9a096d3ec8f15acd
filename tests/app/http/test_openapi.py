"""The OpenAPI document: complete, up to date, and true when fuzzed; the page that shows it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import orjson
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from app.api import contract
from tests.fakes.services import a_server, says

FILE = Path(__file__).parents[3] / "openapi" / "openapi.json"
PUBLIC = {
    "/health": {"get"},
    "/health/live": {"get"},
    "/metrics": {"get"},
    "/version": {"get"},
    "/v1/models": {"get"},
    "/v1/models/{model}": {"get"},
    "/v1/chat/completions": {"post"},
    "/v1/chat": {"post"},
    "/v1/completions": {"post"},
    "/tokenize": {"post"},
    "/detokenize": {"post"},
}


async def test_the_file_in_the_repository_is_what_the_server_says() -> None:
    """Item 10: `python scripts/export_openapi.py` writes it."""
    async with a_server().client() as http:
        served = (await http.get("/openapi.json")).json()
    assert orjson.loads(FILE.read_bytes()) == served, "stale: run python scripts/export_openapi.py"


def test_every_public_path_is_described_with_all_its_errors() -> None:
    """O10: nothing that a route answers is undocumented."""
    paths = contract()["paths"]
    assert {path: set(operations) for path, operations in paths.items()} == PUBLIC
    for path, operations in paths.items():
        for method, operation in operations.items():
            statuses = set(operation["responses"])
            if method == "post":
                wanted = {"200", "400", "401", "404", "405", "408", "413", "415", "500", "503"}
                assert statuses == wanted, path
                content = operation["requestBody"]["content"]
                assert list(content) == ["application/json"]
            open_path = path.startswith("/health")
            assert bool(operation["security"]) != open_path
            if path in ("/v1/chat/completions", "/v1/completions"):
                assert "text/event-stream" in operation["responses"]["200"]["content"]


def test_every_reference_leads_somewhere() -> None:
    """A document with a dangling reference cannot be used."""
    told = contract()
    text = orjson.dumps(told).decode()
    for name in set(re.findall(r'"#/components/schemas/([^"]+)"', text)):
        assert name in told["components"]["schemas"], name
    assert "HTTPValidationError" not in text, "no answer has the framework's own shape (O5)"


@pytest.mark.parametrize("path", ["/docs", "/docs/start.js", "/docs/swagger-ui.css"])
async def test_the_page_and_its_parts_name_no_other_host(path: str) -> None:
    """Section 1: assets come from the package."""
    async with a_server().client() as http:
        answer = await http.get(path)
    assert answer.status_code == 200
    assert not re.findall(r"(?:src|href|url)\s*[=(:]\s*[\"']?(?:https?:)?//", answer.text)


async def test_the_page_cannot_reach_out_whatever_its_scripts_try() -> None:
    """Section 1: the policy allows this server and nothing else."""
    async with a_server().client() as http:
        page = await http.get("/docs")
        script = await http.get("/docs/swagger-ui-bundle.js")
        unknown = await http.get("/docs/secrets.txt")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'self';")
    assert "http" not in policy
    for part in re.findall(r'(?:src|href)="([^"]+)"', page.text):
        assert part.startswith(("docs/", "data:,")), part
    assert len(script.content) > 1_000_000
    assert unknown.status_code == 404


FUZZED = a_server(says("Hello."), capacity=1_000)
# The coverage phase sends every boundary of every field, which the field table does already.
CONFIG = schemathesis.Config.from_dict({"phases": {"coverage": {"enabled": False}}})
schema = schemathesis.openapi.from_asgi("/openapi.json", FUZZED.app, config=CONFIG).exclude(
    path="/v1/chat"
)


@schema.parametrize()
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
def test_fuzzing_every_endpoint_finds_no_5xx_and_nothing_undocumented(case: Any) -> None:
    """O10, test plan 18.1: good and bad requests from the document itself."""
    case.call_and_validate(
        checks=[
            not_a_server_error,
            status_code_conformance,
            content_type_conformance,
            response_schema_conformance,
        ]
    )
