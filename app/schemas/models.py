"""Models, versions, and the bodies of the health paths, as the OpenAPI document tells them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from app.schemas.shared import Answer


class Modalities(Answer):
    """What goes in and what comes out."""

    input: list[Literal["text", "image"]]
    output: list[Literal["text"]]


class Capabilities(Answer):
    """What a request may ask for."""

    tools: bool
    structured_output: bool
    reasoning: bool
    logprobs: bool
    image_urls: Literal["none", "data", "data+http"]


class ModelLimits(Answer):
    """How much of it."""

    images: int
    image_bytes: int
    pixels: int
    n: int
    stop: int
    top_logprobs: int


class Defaults(Answer):
    """What holds where a request says nothing (O29)."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float


class ModelCard(Answer):
    """A served model (O90)."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    modalities: Modalities
    capabilities: Capabilities
    limits: ModelLimits
    defaults: Defaults
    root: str


class ModelList(Answer):
    """All served models."""

    object: Literal["list"]
    data: list[ModelCard]


class Gpu(Answer):
    """One graphics card."""

    name: str
    memory_bytes: int


class Version(Answer):
    """What runs here (O92); null where there is no such part."""

    version: str
    build: str
    python: str
    cupy: str | None
    cuda_runtime: str | None
    driver: str | None
    gpus: list[Gpu]


class Alive(Answer):
    """The process works."""

    status: Literal["alive"]


class HealthBody(BaseModel):
    """The state of the server (O95); states add fields of their own."""

    model_config = ConfigDict(extra="allow", defer_build=True)

    status: str
    ready: bool
    live: bool
    reasons: list[dict[str, Any]]
    model: str
    max_model_len: int | None
    uptime_s: float
    boot_id: str
    build: str
    worker: dict[str, Any]
    engine: dict[str, Any] | None
    transport: dict[str, Any]
    device_probe: dict[str, Any] | None
