"""faults on order, for tests: there only with `--fault-injection on` (rule 120)"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from app.bodies import read_body
from app.services import services_of
from engine.errors import RequestError
from engine.messages import Inject

PATH = "/_test/fault"

router = APIRouter()


@router.post(PATH, include_in_schema=False)
async def fault(request: Request) -> Response:
    """Order one fault of the worker; it strikes once, where and when the order says."""
    services = services_of(request)
    order = await read_body(request, services.config.limits, _understood)
    if services.supervisor is None:
        raise RequestError("This server has no supervisor to order a fault from.")
    await services.supervisor.inject(order)
    return Response(b'{"ordered":true}', media_type="application/json")


def _understood(body: dict[str, Any]) -> Inject:
    try:
        return msgspec.convert(body | {"type": "Inject"}, Inject)
    except msgspec.ValidationError as error:
        raise RequestError(f"The order is not understood: {error}.") from None
