"""read the state from memory and answer; never wait, never touch a device"""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from app.documented import documented
from app.metrics import CONTENT_TYPE
from app.schemas.models import Alive, HealthBody
from app.services import services_of

router = APIRouter(default_response_class=Response, tags=["state"])


@router.get("/health", responses=documented(HealthBody, also=(503,)))
async def health(request: Request) -> Response:
    """Would a request sent now be served? 200 or 503, and why (R96)."""
    return _answer(*services_of(request).health.ready_body())


@router.get("/health/live", responses=documented(Alive) | {503: documented(HealthBody)[200]})
async def live(request: Request) -> Response:
    """Is a restart from outside the remedy? 503 then, 200 otherwise (R94)."""
    return _answer(*services_of(request).health.live_body())


@router.get("/metrics", responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """Counters, gauges and histograms in the Prometheus text form; 200 in every state."""
    return Response(services_of(request).metrics.text(), headers={"content-type": CONTENT_TYPE})


def _answer(status: int, body: dict[str, Any]) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")
