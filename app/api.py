"""build the FastAPI app: routes, middleware, documents; the lifespan is the caller's"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, FastAPI

from app.gate import OPEN_PATHS, Gate, Keys
from app.identity import Identity
from app.openapi import document
from app.routes import chat, completions, docs, faults, health, models, tokens
from app.services import Services

__all__ = ["ROUTERS", "Services", "build_app", "contract"]

ROUTERS: Sequence[APIRouter] = (
    health.router,
    models.router,
    chat.router,
    completions.router,
    tokens.router,
    docs.router,
)


def build_app(services: Services) -> FastAPI:
    """The application, with every route of this server.

    `app.state.keys` are the accepted keys, to be replaced when their file is read again.
    """
    app = _Api()
    keys = Keys(services.config.api_keys)
    app.state.services = services
    app.state.keys = keys
    app.state.identity = Identity.of(services.config.engine)
    routers = [*ROUTERS, faults.router] if services.config.fault_injection else ROUTERS
    for router in routers:
        app.include_router(router)
    app.add_middleware(
        Gate,
        routes=[route for router in routers for route in router.routes],
        keys=keys,
        metrics=services.metrics,
        open_paths=OPEN_PATHS | ({"/metrics"} if services.config.metrics_open else set()),
        root_path=services.config.root_path,
        unversioned_paths=services.config.unversioned_paths,
    )
    return app


class _Api(FastAPI):
    """FastAPI without what this server does itself: redirects, documents, telemetry."""

    def __init__(self) -> None:
        super().__init__(
            title="Stagelight",
            redirect_slashes=False,
            openapi_url=None,
            docs_url=None,
            redoc_url=None,
        )

    def openapi(self) -> dict[str, Any]:
        """The document of this contract, made once."""
        return contract()


@functools.cache
def contract() -> dict[str, Any]:
    """The OpenAPI document of every public route."""
    return document([route for router in ROUTERS for route in router.routes])
