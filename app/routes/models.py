"""list what this server serves"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from app.chat.reasoning import ReasoningMarkers
from app.documented import ANSWERS_GET, documented
from app.health import Asks
from app.identity import Identity, version_body
from app.schemas.models import ModelCard, ModelList, Version
from app.services import Services, services_of
from engine.messages import Loaded

router = APIRouter(default_response_class=Response, tags=["models"])


@router.get("/v1/models", responses=documented(ModelList, ANSWERS_GET))
async def models(request: Request) -> Response:
    """All served models; only in states that serve (O90)."""
    services = services_of(request)
    loaded = services.serving(Asks.MODELS)
    identity = request.app.state.identity
    cards = [_card(services, identity, loaded, name) for name in services.config.served_names]
    return _answer({"object": "list", "data": cards})


@router.get("/v1/models/{model:path}", responses=documented(ModelCard, ANSWERS_GET))
async def model(request: Request, model: str) -> Response:
    """One served model; ids with a slash work, encoded or not."""
    services = services_of(request)
    loaded = services.serving(Asks.MODELS)
    services.check_model(model, param=None)
    return _answer(_card(services, request.app.state.identity, loaded, model))


@router.get("/version", responses=documented(Version, ANSWERS_GET))
async def version(request: Request) -> Response:
    """What runs here; no path and no host name (O92)."""
    return _answer(version_body(request.app.state.identity))


def _card(services: Services, identity: Identity, loaded: Loaded, name: str) -> dict[str, Any]:
    limits = services.config.limits
    sees = loaded.patches is not None
    return {
        "id": name,
        "object": "model",
        "created": identity.created,
        "owned_by": "stagelight",
        "max_model_len": loaded.context,
        "modalities": {"input": ["text", "image"] if sees else ["text"], "output": ["text"]},
        "capabilities": {
            "tools": False,
            "structured_output": False,
            "reasoning": _thinks(services),
            "logprobs": False,
            "image_urls": "data" if sees else "none",
        },
        "limits": {
            "images": limits.images if sees else 0,
            "image_bytes": limits.image_bytes,
            "pixels": limits.pixels,
            "n": 1,
            "stop": limits.stop_strings,
            "top_logprobs": 0,
        },
        "defaults": asdict(services.prompter.defaults),
        "root": identity.checkpoint,
    }


def _thinks(services: Services) -> bool:
    return ReasoningMarkers.of(services.prompter.tokenizer.markers) is not None


def _answer(body: dict[str, Any]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
