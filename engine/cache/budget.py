"""bytes per token and per sequence from a ModelSpec; how many fit.

Two kinds of state: rows that grow with the text live in pages, states that do not live in slots.

    a token of a latent layer    latent row, index key, index gate, validity (one byte);
                                 one pooled key for P tokens
    a sequence of a KDA layer    the delta-rule state, and the inputs the convolution still needs

These are the only places where bytes are counted; the allocator takes exactly these (R2).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from engine.cache.pages import pages_for
from engine.config import EngineConfig
from engine.errors import ConfigError, ConfigRefused
from engine.spec import Kda, Latent, LayerSpec, ModelSpec

FLOAT_BYTES = 4
DEFAULT_SHARE = 0.5  # of the free memory, for caches, when no size is set
REUSED_PREFIXES = 64  # what the default bound of reuse holds: so many prefixes of ...
REUSED_TOKENS = 1_024  # ... so many tokens and one snapshot each


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """What the caches of a worker hold; made once at boot, read by allocator and admission alike.

    Units: context (C) and page_tokens in rows of one sequence; bytes for a stage list as given.
    """

    slots: int
    pages: int
    page_tokens: int
    context: int
    page_bytes: int
    slot_bytes: int
    snapshots: int = 0  # places for recurrent state behind reusable prefixes
    snapshot_tokens: int = 512  # rows from one snapshot of a long sequence to its next
    reuse_bytes: int = 0  # that pages and snapshots kept for reuse take at most; 0 keeps none

    @property
    def pool_tokens(self) -> int:
        """Rows that all sequences share."""
        return self.pages * self.page_tokens

    @property
    def pages_per_sequence(self) -> int:
        """Pages of a sequence that fills the context."""
        return pages_for(self.context, self.page_tokens)

    @property
    def bytes(self) -> int:
        """All that the caches take."""
        return self.pages * self.page_bytes + (self.slots + self.snapshots) * self.slot_bytes


def capacity(max_context: int, pool: int) -> int:
    """C: the rows one sequence may have, whole pools of `pool` tokens only (R1)."""
    pool = max(pool, 1)
    return max_context // pool * pool


def pool_of(spec: ModelSpec) -> int:
    """P: consecutive tokens that an indexer scores together; 1 where no layer has an indexer."""
    return math.lcm(*(m.indexer.pool for m in _latents(spec.layers)), 1)


def page_bytes(layers: Iterable[LayerSpec], page_tokens: int) -> int:
    """Bytes of one page over these layers."""
    floats = flags = 0
    for mixer in _latents(layers):
        index = mixer.indexer
        pools = page_tokens // max(index.pool, 1)
        floats += page_tokens * (mixer.rank + 2 * index.dim) + pools * index.dim
        flags += page_tokens
    return floats * FLOAT_BYTES + flags


def slot_bytes(layers: Iterable[LayerSpec]) -> int:
    """Bytes of one sequence's fixed-size states over these layers."""
    floats = 0
    for layer in layers:
        if isinstance(mixer := layer.mixer, Kda):
            floats += mixer.heads * mixer.dim**2 + (mixer.taps - 1) * 3 * mixer.inner
    return floats * FLOAT_BYTES


def plan_caches(spec: ModelSpec, config: EngineConfig, *, free_bytes: int) -> CachePlan:
    """How many slots and pages fit into the memory for caches.

    The bound is `config.memory_bytes`, or half of `free_bytes`. A context that nobody asked for is
    lowered to what one sequence can have; one that was asked for and does not fit is refused (R3).

    Raises:
        ConfigRefused: the context is below one pool, so a sequence could have no row.
        ConfigError: slots or one sequence of the asked context do not fit; names what does.
    """
    pool = pool_of(spec)
    asked = spec.context if config.max_context is None else config.max_context
    if asked > spec.context:
        raise ConfigError(
            f"--max-context is {asked} and the checkpoint ends at {spec.context}; "
            f"use {spec.context} or less."
        )
    context = capacity(asked, pool)
    if context < 2:
        raise ConfigRefused(
            f"max_context is {asked} and the indexer pools {pool} tokens, which leaves no whole "
            f"pool; use --max-context {max(pool, 2)} or more."
        )
    per_page = page_bytes(spec.layers, config.page_tokens)
    per_slot = slot_bytes(spec.layers)
    room = config.memory_bytes
    if room is None:
        room = int(free_bytes * DEFAULT_SHARE)
    left = room - config.max_sequences * per_slot
    reuse = _reuse_bytes(config, room, per_page, per_slot)
    whole = pages_for(context, config.page_tokens) * per_page  # one sequence comes before any reuse
    # Half of the bound at most is snapshots: a snapshot without its pages is of no use.
    snapshots = max(min(reuse, left - whole), 0) // 2 // per_slot if per_slot else 0
    left -= snapshots * per_slot
    most = config.max_sequences * pages_for(context, config.page_tokens)
    pages = min(most, max(left, 0) // per_page if per_page else most)
    fits = capacity(pages * config.page_tokens, pool)
    if fits < context:
        if config.max_context is not None or fits < 2:
            raise ConfigError(_too_big(config, context, fits, room, per_page, per_slot))
        context = fits
    return CachePlan(
        slots=config.max_sequences,
        pages=pages,
        page_tokens=config.page_tokens,
        context=context,
        page_bytes=per_page,
        slot_bytes=per_slot,
        # Without recurrent layers a snapshot is a mark and takes no memory.
        snapshots=snapshots if per_slot or not reuse else pages,
        reuse_bytes=reuse,
    )


def _reuse_bytes(config: EngineConfig, room: int, per_page: int, per_slot: int) -> int:
    """Bytes that reusable prefixes may take: as set, or some prefixes' worth, a quarter at most."""
    if not config.prefix_cache:
        return 0
    if config.prefix_cache_bytes is not None:
        return config.prefix_cache_bytes
    one = pages_for(REUSED_TOKENS, config.page_tokens) * per_page + per_slot
    return min(REUSED_PREFIXES * one, room // 4)


def _too_big(
    config: EngineConfig, context: int, fits: int, room: int, per_page: int, per_slot: int
) -> str:
    one = pages_for(context, config.page_tokens) * per_page
    sequences = (room - one) // per_slot if per_slot else config.max_sequences
    return (
        f"caches for {config.max_sequences} sequences and a context of {context} need "
        f"{config.max_sequences * per_slot + one} bytes and {room} are there; the largest "
        f"--max-context that fits is {fits}, the largest --max-sequences {max(sequences, 0)}."
    )


def _latents(layers: Iterable[LayerSpec]) -> Iterable[Latent]:
    return [layer.mixer for layer in layers if isinstance(layer.mixer, Latent)]
