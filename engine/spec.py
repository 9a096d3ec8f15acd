"""What a model is, as data: `ModelSpec` and its parts; family files make it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    """The sparse indexer of a latent layer: scores pools of tokens, keeps the best (R17 to R24)."""

    heads: int
    dim: int
    top_tokens: int  # T: tokens the selection may hold, without the tail
    pool: int  # P: consecutive tokens a pool
    key_norm_eps: float = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention without positions; the cached row is the normed latent."""

    heads: int
    key_dim: int  # per head, before absorption; the softmax scale is key_dim ** -0.5
    value_dim: int
    query_rank: int
    rank: int  # width of the latent row
    indexer: Indexer


@dataclass(frozen=True, slots=True, kw_only=True)
class Kda:
    """Kimi delta attention: a recurrent mixer with a fixed-size state a sequence."""

    heads: int
    dim: int  # of keys and values alike
    taps: int  # of the short convolution
    lower_bound: float | None  # of the log decay; None selects the softplus gate

    @property
    def inner(self) -> int:
        return self.heads * self.dim


Mixer = Latent | Kda


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """Gated feed-forward; `limit` clamps the gate from above and up on both sides, before silu."""

    inner: int
    limit: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """Routed experts beside a shared one; sigmoid scores, biased choice, unbiased weights."""

    experts: int
    active: int
    inner: int
    shared_inner: int
    scale: float
    normalise: bool
    groups: int = 1
    top_groups: int = 1
    limit: float | None = None


Ffn = Dense | Moe


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer: a mixer, then a feed-forward part."""

    mixer: Mixer
    ffn: Ffn


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperConnections:
    """Manifold-constrained hyper-connections: `streams` residual rows a token instead of one."""

    streams: int
    eps: float
    rounds: int  # Sinkhorn iterations, all of them part of the function


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A text decoder as data, run by `engine/models/forward.py`."""

    family: str
    vocab: int  # rows of embedding and head
    usable_vocab: int  # ids above are padding rows and are never sampled
    hidden: int
    layers: tuple[LayerSpec, ...]
    draft: LayerSpec | None  # the multi-token-prediction layer, plain residual
    residual: HyperConnections | None  # None: one plain stream
    norm_eps: float
    context: int  # the checkpoint's own limit in tokens
    end_ids: tuple[int, ...]
    image_token: int | None
    vision_ids: tuple[int, ...]  # ids that only image or video parts may produce

    @property
    def streams(self) -> int:
        return self.residual.streams if self.residual else 1
