"""What is charged is what is taken, and what does not fit is refused with what does (R1 to R3)."""

from __future__ import annotations

import pytest

from engine.cache.budget import (
    CachePlan,
    capacity,
    page_bytes,
    plan_caches,
    pool_of,
    slot_bytes,
)
from engine.cache.pages import pages_for
from engine.config import EngineConfig
from engine.device.host import HostDevice
from engine.errors import ConfigError, ConfigRefused
from engine.models.state import make_states
from engine.spec import Dense, Indexer, Kda, Latent, LayerSpec, ModelSpec

KDA = LayerSpec(mixer=Kda(heads=6, dim=32, taps=4, lower_bound=-5.0), ffn=Dense(inner=64))
LATENT = LayerSpec(
    mixer=Latent(
        heads=4,
        key_dim=48,
        value_dim=48,
        query_rank=96,
        rank=64,
        indexer=Indexer(heads=4, dim=32, top_tokens=256, pool=4),
    ),
    ffn=Dense(inner=64),
)


def a_spec(*layers: LayerSpec, context: int = 8_192) -> ModelSpec:
    return ModelSpec(
        family="test",
        vocab=100,
        usable_vocab=100,
        hidden=8,
        layers=layers,
        draft=None,
        residual=None,
        norm_eps=1e-5,
        context=context,
        end_ids=(),
        image_token=None,
        vision_ids=(),
    )


def a_config(
    *,
    memory_bytes: int | None = None,
    max_context: int | None = None,
    max_sequences: int = 4,
    page_tokens: int = 64,
    prefix_cache: bool = False,
    prefix_cache_bytes: int | None = None,
) -> EngineConfig:
    return EngineConfig(
        model="test",
        memory_bytes=memory_bytes,
        max_context=max_context,
        max_sequences=max_sequences,
        page_tokens=page_tokens,
        prefix_cache=prefix_cache,
        prefix_cache_bytes=prefix_cache_bytes,
    )


@pytest.mark.parametrize(
    ("context", "pool", "rows"),
    [(16_386, 4, 16_384), (4_099, 4, 4_096), (1_001, 8, 1_000), (131_072, 4, 131_072), (7, 0, 7)],
)
def test_capacity_is_whole_pools(context: int, pool: int, rows: int) -> None:
    """R1."""
    assert capacity(context, pool) == rows


def test_the_pool_is_that_of_the_indexers() -> None:
    assert pool_of(a_spec(KDA, LATENT)) == 4
    assert pool_of(a_spec(KDA)) == 1


@pytest.mark.parametrize("page_tokens", [16, 64, 256])
@pytest.mark.parametrize(
    "layers", [(KDA,), (LATENT,), (KDA, KDA, KDA, LATENT) * 2], ids=["kda", "latent", "both"]
)
@pytest.mark.parametrize("sequences", [1, 3])
def test_what_is_charged_is_what_the_allocator_takes(
    layers: tuple[LayerSpec, ...], page_tokens: int, sequences: int
) -> None:
    """R2: to the byte."""
    spec = a_spec(*layers, context=1_024)
    config = a_config(
        max_sequences=sequences,
        page_tokens=page_tokens,
        memory_bytes=1 << 30,
        prefix_cache=True,
    )
    plan = plan_caches(spec, config, free_bytes=0)
    device = HostDevice("cpu:0", 0, 0)

    states = make_states(
        spec,
        range(len(layers)),
        device,
        slots=plan.slots,
        pages=plan.pages,
        page_tokens=plan.page_tokens,
        capacity=plan.context,
        snapshots=plan.snapshots,
    )

    assert device.allocations[1] == plan.bytes
    for state in states:
        state.free()
    assert device.allocations == (0, 0)


def test_one_token_of_the_indexer_is_as_the_contract_says() -> None:
    """Keys, gates and validity: 4 * D bytes a value kind in f32, and one byte."""
    wide = Latent(
        heads=1,
        key_dim=1,
        value_dim=1,
        query_rank=1,
        rank=0,
        indexer=Indexer(heads=32, dim=128, top_tokens=2_048, pool=4),
    )
    bare = page_bytes([LayerSpec(mixer=wide, ffn=Dense(inner=1))], 64)

    assert bare == 64 * (2 * 128 * 4 + 1) + 16 * 128 * 4


def test_a_stage_is_charged_for_its_own_layers_only() -> None:
    """R3: pipeline stages divide the bytes by ownership."""
    layers = (KDA, LATENT, KDA, LATENT)

    assert page_bytes(layers[:1], 64) == 0
    assert page_bytes(layers[:2], 64) + page_bytes(layers[2:], 64) == page_bytes(layers, 64)
    assert slot_bytes(layers[:3]) == 2 * slot_bytes(layers[:1])


def test_pages_fill_the_memory_and_no_more_than_every_sequence_can_use() -> None:
    spec = a_spec(KDA, LATENT, context=1_024)
    per_page, per_slot = page_bytes(spec.layers, 64), slot_bytes(spec.layers)

    tight = plan_caches(spec, a_config(memory_bytes=4 * per_slot + 20 * per_page + 1), free_bytes=0)
    wide = plan_caches(spec, a_config(memory_bytes=1 << 34), free_bytes=0)

    assert (tight.pages, tight.context) == (20, 1_024)
    assert wide.pages == 4 * 16


def test_without_a_setting_half_of_the_free_memory_is_for_caches() -> None:
    spec = a_spec(LATENT, context=1 << 20)

    plan = plan_caches(spec, a_config(), free_bytes=100_000_000)

    assert plan.bytes <= 50_000_000 < plan.bytes + plan.page_bytes


def test_a_context_that_nobody_asked_for_is_lowered_to_what_fits() -> None:
    """O62: C is lowered at boot, so no prompt fits C and not the pool."""
    spec = a_spec(LATENT)
    plan = plan_caches(spec, a_config(memory_bytes=10 * page_bytes(spec.layers, 64)), free_bytes=0)

    assert plan.context == 640 == plan.pool_tokens


def test_a_context_that_was_asked_for_and_does_not_fit_is_refused_with_what_does() -> None:
    """R3."""
    spec = a_spec(LATENT)
    config = a_config(memory_bytes=10 * page_bytes(spec.layers, 64), max_context=1_000)

    with pytest.raises(ConfigError, match=r"--max-context that fits is 640"):
        plan_caches(spec, config, free_bytes=0)


def test_too_many_sequences_are_refused_with_what_fits() -> None:
    """R3."""
    spec = a_spec(KDA, LATENT, context=1_024)
    one_sequence = 16 * page_bytes(spec.layers, 64)
    config = a_config(
        memory_bytes=one_sequence + 3 * slot_bytes(spec.layers), max_context=1_024, max_sequences=4
    )

    with pytest.raises(ConfigError, match=r"the largest --max-sequences 3\."):
        plan_caches(spec, config, free_bytes=0)


def test_a_context_below_one_pool_is_refused() -> None:
    """R1."""
    with pytest.raises(ConfigRefused, match="pools 4 tokens"):
        plan_caches(a_spec(LATENT), a_config(max_context=3), free_bytes=1 << 30)


def test_a_context_above_the_checkpoints_is_refused() -> None:
    with pytest.raises(ConfigError, match="the checkpoint ends at 8192"):
        plan_caches(a_spec(LATENT), a_config(max_context=8_193), free_bytes=1 << 30)


def test_a_model_without_paged_rows_has_pages_all_the_same() -> None:
    """Admission counts in pages, whatever they weigh."""
    plan = plan_caches(a_spec(KDA, context=256), a_config(), free_bytes=1 << 30)

    assert plan == CachePlan(
        slots=4,
        pages=16,
        page_tokens=64,
        context=256,
        page_bytes=0,
        slot_bytes=slot_bytes([KDA]),
    )


def test_reuse_is_bounded_and_half_of_it_at_most_is_snapshots() -> None:
    spec = a_spec(KDA, LATENT, context=1_024)
    config = a_config(memory_bytes=1 << 26, prefix_cache=True, prefix_cache_bytes=1 << 20)
    plan = plan_caches(spec, config, free_bytes=0)

    assert plan.reuse_bytes == 1 << 20
    assert plan.snapshots == (1 << 19) // plan.slot_bytes > 0
    assert plan.bytes <= 1 << 26


def test_reuse_takes_no_memory_that_one_sequence_needs() -> None:
    """R3: what can be had without reuse can be had with it."""
    spec = a_spec(KDA, LATENT, context=1_024)
    plain = plan_caches(spec, a_config(memory_bytes=1 << 30), free_bytes=0)
    tight = 4 * plain.slot_bytes + pages_for(1_024, 64) * plain.page_bytes

    plan = plan_caches(
        spec, a_config(memory_bytes=tight, max_context=1_024, prefix_cache=True), free_bytes=0
    )

    assert plan.context == 1_024
    assert plan.snapshots == 0
    assert plan.bytes <= tight
