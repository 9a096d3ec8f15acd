"""The OpenAPI document: what the routes tell of themselves, and the bodies that they read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.routing import BaseRoute

from app.schemas.chat import ChatChunk, ChatCompletion, ChatRequest
from app.schemas.completions import Completion, CompletionChunk, CompletionRequest
from app.schemas.models import Alive, HealthBody, ModelCard, ModelList, Version
from app.schemas.shared import ErrorBody
from app.schemas.tokens import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest

CONTRACT: Final = "1"  # of this contract; the program's version is under /version
_BODIES: Final[Sequence[type[BaseModel]]] = (
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
)
_ANSWERS: Final[Sequence[type[BaseModel]]] = (
    ChatCompletion,
    ChatChunk,
    Completion,
    CompletionChunk,
    Tokenized,
    Detokenized,
    ModelCard,
    ModelList,
    Version,
    Alive,
    HealthBody,
    ErrorBody,
)
_OPEN: Final = ("/health", "/health/live")
_ABOUT: Final = (
    "OpenAI-compatible inference for multimodal language models. Every answer carries "
    '`x-request-id`; every error is `{"error": {message, type, param, code}}`.'
)


def document(routes: Sequence[BaseRoute]) -> dict[str, Any]:
    """The whole document; the same for the same program, whatever model it serves."""
    told = get_openapi(
        title="Stagelight", version=CONTRACT, description=_ABOUT, routes=list(routes)
    )
    told["components"] = {
        "schemas": _schemas(_BODIES, "validation") | _schemas(_ANSWERS, "serialization"),
        "securitySchemes": {
            "bearer": {"type": "http", "scheme": "bearer"},
            "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        },
    }
    for path, operations in told["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # the framework's own, never answered here
            # an empty choice stands first: without a configured key none is needed
            operation["security"] = [] if path in _OPEN else [{}, {"bearer": []}, {"apiKey": []}]
    return told


def _schemas(models: Sequence[type[BaseModel]], mode: Any) -> dict[str, Any]:
    _, definitions = models_json_schema(
        [(model, mode) for model in models], ref_template="#/components/schemas/{model}"
    )
    found: dict[str, Any] = definitions["$defs"]
    return found
