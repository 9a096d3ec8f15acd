"""What the routes are given: settings, state, the door to the worker, prompts, metrics."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Final, Protocol

from starlette.requests import Request

from app.chat.prompt import Prompter
from app.config import ServerConfig
from app.gate import RECORD
from app.health import Asks, Health
from app.logs import RequestRecord
from app.metrics import Metrics
from engine.errors import RequestError
from engine.messages import Event, Generate, Inject, Loaded

NAMES_TOLD: Final = 5  # O24


class Client(Protocol):
    """The door to the worker, as the routes see it."""

    @property
    def in_flight(self) -> int:
        """Requests that were admitted and have not ended."""

    def submit(self, generate: Generate) -> AsyncGenerator[Event, None]:
        """The events of one request; closing the generator early aborts it."""


class FaultOrders(Protocol):
    """The supervisor, as the route for faults on order sees it (rule 120)."""

    async def inject(self, order: Inject) -> None:
        """Order one fault of the worker."""


@dataclass(frozen=True, slots=True)
class Services:
    """Made once at boot and never changed."""

    config: ServerConfig
    health: Health
    client: Client
    prompter: Prompter
    metrics: Metrics
    supervisor: FaultOrders | None = None

    def serving(self, asks: Asks) -> Loaded:
        """What the worker can do; raises the state's refusal instead where there is one (R96)."""
        refusal = self.health.refusal(asks)
        if refusal is not None:
            raise refusal
        loaded = self.health.loaded
        if loaded is None:
            raise RuntimeError(f"the state {self.health.state} takes requests without a model")
        return loaded

    def check_model(self, name: str, *, param: str | None = "model") -> None:
        """Whether this is a served name (O24).

        Args:
            name: of a model.
            param: the field that it came in; None for a path.

        Raises:
            RequestError: `model_not_found`.
        """
        served = self.config.served_names
        if name not in served:
            told = ", ".join(served[:NAMES_TOLD])
            raise RequestError(
                f"This server does not have this model; it serves {told}.",
                code="model_not_found",
                param=param,
            )


def services_of(request: Request) -> Services:
    """The services of the app that this request came to."""
    services: Services = request.app.state.services
    return services


def record_of(request: Request) -> RequestRecord:
    """The record of this request, for its log line and its counts."""
    record: RequestRecord = request.scope[RECORD]
    return record
