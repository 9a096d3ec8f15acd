"""What each route may answer, for the OpenAPI document: nothing it answers is undocumented."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel

from app.schemas.shared import ErrorBody, Strict

Responses = dict[int | str, dict[str, Any]]

ANSWERS_GET: Final = (401, 404, 405, 500, 503)
ANSWERS_POST: Final = (400, 401, 404, 405, 408, 413, 415, 500, 503)

_MEANING: Final = {
    400: "The request asks for something that is wrong or not supported; `param` says where.",
    401: "The key is absent or not known.",
    404: "There is no such path or model.",
    405: "The path has other methods; `Allow` lists them.",
    408: "The body did not arrive in time.",
    413: "The body is larger than the limit.",
    415: "The body is not plain JSON in UTF-8.",
    500: "This request failed by our fault; it is not worth a retry.",
    503: "Not now: `Retry-After` says when.",
}
_RETRY: Final = {
    name: {"schema": {"type": "string"}, "description": f"{unit} until a retry makes sense"}
    for name, unit in (("Retry-After", "seconds"), ("retry-after-ms", "milliseconds"))
}


def documented(
    answer: type[BaseModel],
    errors: tuple[int, ...] = (),
    *,
    also: tuple[int, ...] = (),
    chunk: type[BaseModel] | None = None,
) -> Responses:
    """The `responses` of a route.

    Schemas are referred to by name (`app.openapi` adds them): the framework would make a serialiser
    of each at start, for answers that this server writes itself.

    Args:
        answer: the body of a 200.
        errors: the statuses with an error object.
        also: further statuses with the body of the 200.
        chunk: what the events of a stream hold, where there is one.
    """
    content = _json(answer)
    if chunk is not None:
        schema = {"type": "string", "description": f"`data:` lines, each a {chunk.__name__}"}
        content["text/event-stream"] = {"schema": schema}
    good = {"description": "The answer.", "content": content}
    told: Responses = dict.fromkeys((200, *also), good)
    for status in errors:
        told[status] = {"description": _MEANING[status], "content": _json(ErrorBody)}
        if status == 503:
            told[status]["headers"] = _RETRY
    return told


def takes(body: type[Strict]) -> dict[str, Any]:
    """The `openapi_extra` of a route that reads its JSON body itself, in the order of O1."""
    return {"requestBody": {"required": True, "content": _json(body)}}


def _json(model: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
