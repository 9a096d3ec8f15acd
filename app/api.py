"""build the FastAPI app: routes, middleware, documents; the lifespan is the caller's"""

from __future__ import annotations

import functools
from typing import Any

from fastapi import FastAPI

from app.gate import OPEN_PATHS, Gate, Keys
from app.identity import Identity
from app.openapi import document
from app.routes import chat, completions, docs, faults, health, models, tokens
from app.services import Services

__all__ = ["Services", "build_app"]


def build_app(services: Services) -> FastAPI:
    """The application, with every route of this server.

    `app.state.keys` are the accepted keys, to be replaced when their file is read again.
    """
    app = _Api()
    keys = Keys(services.config.api_keys)
    app.state.services = services
    app.state.keys = keys
    app.state.identity = Identity.of(services.config.engine)
    parts = [health, models, chat, completions, tokens, docs]
    if services.config.fault_injection:
        parts.append(faults)
    for part in parts:
        app.include_router(part.router)
    app.add_middleware(
        Gate,
        routes=[route for part in parts for route in part.router.routes],
        keys=keys,
        metrics=services.metrics,
        open_paths=OPEN_PATHS | ({"/metrics"} if services.config.metrics_open else set()),
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

    @functools.cache  # noqa: B019 - one app a process
    def openapi(self) -> dict[str, Any]:
        """The document of this contract (O5 to O92), made once."""
        identity: Identity = self.state.identity
        return document(self, identity.version)
