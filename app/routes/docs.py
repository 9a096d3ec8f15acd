"""the OpenAPI document, and a page that shows it without asking any other host"""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import Final

import orjson
from fastapi import APIRouter, Request, Response

from app.errors import TransportRefused
from app.services import services_of

router = APIRouter()

_STATIC: Final = Path(__file__).parent.parent / "static"
_FILES: Final = {
    "swagger-ui.css": ("swagger-ui/swagger-ui.css", "text/css; charset=utf-8"),
    "swagger-ui-bundle.js": ("swagger-ui/swagger-ui-bundle.js", "text/javascript; charset=utf-8"),
    "start.js": ("start.js", "text/javascript; charset=utf-8"),
}
# the page itself cannot reach out, whatever its scripts try
_POLICY: Final = (
    "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@router.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> Response:
    """This contract as an OpenAPI document."""
    told = await asyncio.to_thread(request.app.openapi)  # the first time takes 0.1 s
    if root := services_of(request).config.root_path:
        told = {**told, "servers": [{"url": root}]}
    return Response(orjson.dumps(told), media_type="application/json")


@router.get("/docs", include_in_schema=False)
async def page() -> Response:
    """The document as a page."""
    headers = {"content-type": "text/html; charset=utf-8", "content-security-policy": _POLICY}
    return Response(_read("docs.html"), headers=headers)


@router.get("/docs/{name}", include_in_schema=False)
async def asset(name: str) -> Response:
    """A script or a style sheet of the page."""
    if name not in _FILES:
        raise TransportRefused("not_found", "The page has no such part.")
    path, kind = _FILES[name]
    return Response(_read(path), headers={"content-type": kind})


@functools.cache
def _read(path: str) -> bytes:
    return (_STATIC / path).read_bytes()
