"""What a worker is told to do: one frozen record, checked when it is made."""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.errors import ConfigError

Transport = Literal["auto", "peer", "host"]
PublishMode = Literal["auto", "force", "off"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sent to the worker as JSON on its command line; the server makes it from its own settings."""

    model: str  # a folder in Hugging Face layout; already resolved
    devices: tuple[str, ...] = ("cpu:0",)
    fence: tuple[int, ...] | None = None  # layer cuts, 0 .. layers; None is the even split
    transport: Transport = "auto"  # how rows go from stage to stage (rule 68)
    overlay_publish: PublishMode = "auto"  # when image rows go to stage 0's device (rule 12)
    max_context: int | None = None  # None: the checkpoint's, lowered to what fits
    max_sequences: int = 64
    step_tokens: int = 1024  # rows of one engine step, prompts and answers together
    page_tokens: int = 64
    memory_bytes: int | None = None  # for caches; None: a share of what is free
    prefix_cache: bool = True  # whether rows of ended sequences are kept for reuse
    prefix_cache_bytes: int | None = None  # at most; None: a part of those above
    encoder_cache_bytes: int = 32 * 1024 * 1024  # of image rows kept for reuse; 0 keeps none
    dtype: Literal["float32"] = "float32"
    deterministic: bool = False  # one order for each sum of a row (D9)
    queue_limit: int = 256  # requests that may wait (O63)
    queue_timeout_s: float = 60.0
    canary_period_s: float = 5.0  # idle round trip on each stage (R81)
    beat_period_s: float = 1.0  # an idle loop wakes at least so often (rule 103)
    blas_threads: int = 1
    fault_injection: bool = False
    generation: int = 0  # how many workers this server started before this one

    def __post_init__(self) -> None:
        if self.page_tokens < 16 or self.page_tokens % 16:
            raise ConfigError(f"page_tokens is {self.page_tokens}; use a multiple of 16.")
        if self.max_sequences < 1:
            raise ConfigError(f"--max-sequences is {self.max_sequences}; use 1 or more.")
        if self.step_tokens < 16:
            raise ConfigError(f"--step-tokens is {self.step_tokens}; use 16 or more.")
        if not self.devices:
            raise ConfigError("--devices is empty; name at least one, e.g. cpu.")
