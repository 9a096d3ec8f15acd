"""GLM-5-Next: HF config -> ModelSpec, weight names."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from engine.cache.indexer import check_geometry
from engine.errors import ConfigRefused, ModelError
from engine.models.ffn import DenseWeights, FfnWeights, MoeWeights
from engine.models.forward import DraftWeights, LayerWeights, MixerWeights, ModelWeights
from engine.models.hf import Fields, end_ids, usable_vocab
from engine.models.kda import KdaWeights
from engine.models.mla import LatentWeights
from engine.models.streams import Site
from engine.ops.spec import Ops
from engine.spec import (
    Dense,
    Ffn,
    HyperConnections,
    Indexer,
    Kda,
    Latent,
    LayerSpec,
    ModelSpec,
    Moe,
)
from engine.weights.load import Binder

LATENT_KINDS = {"deepseek_sparse_attention", "full_attention", "indexed_attention"}
SAFE_LOWER_BOUND = -5.0  # of the log decay, where the config leaves it open (glm5_next.md 1.3)
VISION_IDS = (
    "image_token_id",
    "video_token_id",
    "image_start_token_id",
    "image_end_token_id",
    "video_start_token_id",
    "video_end_token_id",
)


# -- config -> spec --------------------------------------------------------------------------------


def describe(config: Fields, folder: Path) -> ModelSpec:
    """The text decoder as data (glm5_next.md 1.3). Raises `ModelError`, `ConfigRefused`."""
    text = config.inner("text_config") or config
    count = text.integer("num_hidden_layers")
    kinds = text.names("layer_types") or tuple(
        "full_attention" if i % 4 == 3 else "linear_attention" for i in range(count)
    )
    ffn_kinds = text.names("mlp_layer_types") or tuple(
        "dense" if i < 3 else "sparse" for i in range(count)
    )
    for field, values in (("layer_types", kinds), ("mlp_layer_types", ffn_kinds)):
        if len(values) != count:
            raise ModelError(
                f"{text.where}: {field} names {len(values)} layers, num_hidden_layers is {count}."
            )
    latent, kda = _latent(text), _kda(text)
    _every_indexer_is_full(text, kinds)
    ffns: dict[str, Ffn] = {"dense": _dense(text), "sparse": _moe(text)}
    vocab = text.integer("vocab_size")
    ids = {name: config.values.get(name) for name in VISION_IDS}
    image = ids["image_token_id"]
    return ModelSpec(
        family="glm5_next",
        vocab=vocab,
        usable_vocab=usable_vocab(folder, vocab),
        hidden=text.integer("hidden_size"),
        layers=tuple(
            LayerSpec(
                mixer=latent if kind in LATENT_KINDS else _known_kda(text, kind, kda),
                ffn=ffns[_known_ffn(text, ffn)],
            )
            for kind, ffn in zip(kinds, ffn_kinds, strict=True)
        ),
        draft=LayerSpec(mixer=latent, ffn=ffns["sparse"])
        if text.integer("num_nextn_predict_layers", 0)
        else None,
        residual=_residual(text),
        norm_eps=text.number("rms_norm_eps"),
        context=text.integer("max_position_embeddings"),
        end_ids=end_ids(folder, text),
        image_token=image if isinstance(image, int) and "vision_config" in config else None,
        vision_ids=tuple(value for value in ids.values() if isinstance(value, int)),
    )


def _latent(text: Fields) -> Latent:
    if text.integer("qk_rope_head_dim", 0) > 0:
        raise ConfigRefused(
            f"{text.where}: qk_rope_head_dim is {text.values['qk_rope_head_dim']}; "
            "latent attention with rotary parts is not served."
        )
    if "q_lora_rank" not in text:
        raise ConfigRefused(f"{text.where}: q_lora_rank is null; the indexer reads that low rank.")
    heads = text.integer("num_attention_heads")
    if text.integer("num_key_value_heads", heads) != heads:
        raise ConfigRefused(
            f"{text.where}: num_key_value_heads is {text.values['num_key_value_heads']}, but "
            f"num_attention_heads is {heads}; latent attention needs them equal."
        )
    for field, wanted in (
        ("attention_bias", False),
        ("index_kpool_compress", True),
        ("index_kpool_always_select_tail", True),
    ):
        if text.flag(field, default=wanted) is not wanted:
            raise ConfigRefused(f"{text.where}: {field} is {not wanted}; only {wanted} is served.")
    latent = Latent(
        heads=heads,
        key_dim=text.integer("qk_nope_head_dim"),
        value_dim=text.integer("v_head_dim"),
        query_rank=text.integer("q_lora_rank"),
        rank=text.integer("kv_lora_rank"),
        indexer=Indexer(
            heads=text.integer("index_n_heads"),
            dim=text.integer("index_head_dim"),
            top_tokens=text.integer("index_topk"),
            pool=text.integer("index_kpool"),
        ),
    )
    check_geometry(latent)
    return latent


def _every_indexer_is_full(text: Fields, kinds: tuple[str, ...]) -> None:
    """A shared indexer would take its selection through layers that drop it (glm5_next.md 6.4)."""
    types = text.names("indexer_types")
    if types is None:
        pattern = text.values.get("index_topk_pattern")
        offset = text.integer("index_skip_topk_offset", 2)
        every = text.integer("index_topk_freq", 1)
        full = {"F": True, "S": False}
        kept = [max(i - offset + 1, 0) % every == 0 for i in range(len(kinds))]
        if isinstance(pattern, str):
            kept = [full.get(letter, False) for letter in pattern]
        types = tuple("full" if value else "shared" for value in kept)
    for number, (kind, indexer) in enumerate(zip(kinds, types, strict=False)):
        if kind in LATENT_KINDS and indexer != "full":
            raise ConfigRefused(
                f"{text.where}: indexer_types says {indexer!r} for layer {number}; "
                "only indexers of their own ('full') are served."
            )


def _kda(text: Fields) -> Kda:
    inner = text.inner("linear_attn_config")
    if inner is None:
        bound = text.number("linear_lower_bound") if "linear_lower_bound" in text else None
        return Kda(
            heads=text.integer("linear_num_heads"),
            dim=text.integer("linear_head_dim"),
            taps=text.integer("linear_conv_kernel_dim"),
            lower_bound=bound,
        )
    bound = inner.number("gate_lower_bound") if "gate_lower_bound" in inner else None
    if bound is None and inner.flag("safe_gate", default=True):
        bound = SAFE_LOWER_BOUND
    return Kda(
        heads=inner.integer("num_heads"),
        dim=inner.integer("head_dim"),
        taps=inner.integer("short_conv_kernel_size"),
        lower_bound=bound,
    )


def _known_kda(text: Fields, kind: str, kda: Kda) -> Kda:
    if kind != "linear_attention":
        raise ModelError(
            f"{text.where}: layer_types has {kind!r}, which this family does not know."
        )
    return kda


def _known_ffn(text: Fields, kind: str) -> str:
    if kind not in ("dense", "sparse"):
        raise ModelError(f"{text.where}: mlp_layer_types has {kind!r}; known are dense and sparse.")
    return kind


def _limit(text: Fields) -> float | None:
    if text.values.get("hidden_act", "silu") != "silu":
        raise ConfigRefused(f"{text.where}: hidden_act is {text.values['hidden_act']!r}, not silu.")
    return text.number("swiglu_limit") if "swiglu_limit" in text else None


def _dense(text: Fields) -> Dense:
    return Dense(inner=text.integer("intermediate_size"), limit=_limit(text))


def _moe(text: Fields) -> Moe:
    for field, wanted in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if text.values.get(field, wanted) != wanted:
            raise ConfigRefused(
                f"{text.where}: {field} is {text.values[field]!r}; only {wanted} is served."
            )
    inner = text.integer("moe_intermediate_size")
    experts, active = text.integer("n_routed_experts"), text.integer("num_experts_per_tok")
    groups = text.integer("n_group", 1)
    if not 0 < active <= experts or groups < 1 or experts % groups:
        raise ConfigRefused(
            f"{text.where}: num_experts_per_tok {active} or n_group {groups} does not fit "
            f"n_routed_experts {experts}."
        )
    return Moe(
        experts=experts,
        active=active,
        inner=inner,
        shared_inner=inner * text.integer("n_shared_experts"),
        scale=text.number("routed_scaling_factor"),
        normalise=text.flag("norm_topk_prob", default=True),
        groups=groups,
        top_groups=text.integer("topk_group", 1),
        limit=_limit(text),
    )


def _residual(text: Fields) -> HyperConnections | None:
    if not text.flag("mhc", default=True):
        return None
    return HyperConnections(
        streams=text.integer("hc_mult"),
        eps=text.number("hc_eps"),
        rounds=text.integer("hc_sinkhorn_iters"),
    )


# -- tensors -> weights ----------------------------------------------------------------------------


def bind(binder: Binder, spec: ModelSpec, ops: Ops, layers: range) -> ModelWeights:
    """A stage's part of the tree, by the names of glm5_next.md 3.1. Raises `ModelError`."""
    root = "model.language_model."
    hidden, count = spec.hidden, len(spec.layers)
    first, last = layers.start == 0, layers.stop == count
    return ModelWeights(
        embed=binder.vector(f"{root}embed_tokens.weight", spec.vocab, hidden) if first else None,
        layers={
            number: _layer(binder, f"{root}layers.{number}.", spec.layers[number], spec, ops)
            for number in layers
        },
        norm=binder.vector(f"{root}norm.weight", hidden) if last else None,
        head=binder.dense("lm_head.weight", spec.vocab, hidden) if last else None,
        draft=_draft(binder, f"{root}layers.{count}.", spec.draft, spec, ops)
        if last and spec.draft
        else None,
    )


def _layer(binder: Binder, at: str, layer: LayerSpec, spec: ModelSpec, ops: Ops) -> LayerWeights:
    return LayerWeights(
        mixer_site=_site(binder, at, "input_layernorm", "hc_attn", spec, ops),
        mixer=_mixer(binder, f"{at}self_attn.", layer, spec, ops),
        ffn_site=_site(binder, at, "post_attention_layernorm", "hc_ffn", spec, ops),
        ffn=_ffn(binder, f"{at}mlp.", layer.ffn, spec, ops),
    )


def _site(binder: Binder, at: str, norm: str, hyper: str, spec: ModelSpec, ops: Ops) -> Site:
    weight = binder.host(f"{at}{norm}.weight", spec.hidden)
    if spec.residual is None:
        return Site(binder.place(weight), None)
    n = spec.residual.streams
    outs = 2 * n + n * n
    packed = ops.pack_hyper(
        binder.host(f"{at}{hyper}_fn", outs, n * spec.hidden),
        binder.host(f"{at}{hyper}_base", outs),
        binder.host(f"{at}{hyper}_scale", 3),
        weight,
    )
    return Site(binder.place(weight), packed)


def _mixer(binder: Binder, at: str, layer: LayerSpec, spec: ModelSpec, ops: Ops) -> MixerWeights:
    match layer.mixer:
        case Kda() as kda:
            return _kda_weights(binder, at, kda, spec.hidden, ops)
        case Latent() as latent:
            return _latent_weights(binder, at, latent, spec.hidden, ops)


def _kda_weights(binder: Binder, at: str, kda: Kda, hidden: int, ops: Ops) -> KdaWeights:
    inner, rank = kda.inner, kda.dim
    parts = [(f"{at}{name}_proj.weight", inner) for name in "qkv"]
    parts += [(f"{at}f_a_proj.weight", rank), (f"{at}g_a_proj.weight", rank)]
    gates = binder.stacked([f"{at}f_b_proj.weight", f"{at}g_b_proj.weight"], (inner, rank))
    kernels = binder.stacked([f"{at}{name}_conv1d.weight" for name in "qkv"], (inner, 1, kda.taps))
    return KdaWeights(
        inputs=binder.fused([*parts, (f"{at}b_proj.weight", kda.heads)], hidden),
        gates=ops.pack_heads(gates.transpose(0, 2, 1)),
        kernel=binder.place(kernels.reshape(3 * inner, kda.taps).T),
        rate=binder.place(np.exp(binder.host(f"{at}A_log", kda.heads)).repeat(kda.dim)),
        dt_bias=binder.vector(f"{at}dt_bias", inner),
        norm=binder.vector(f"{at}o_norm.weight", kda.dim),
        out=binder.dense(f"{at}o_proj.weight", hidden, inner),
        rank=rank,
    )


def _latent_weights(
    binder: Binder, at: str, latent: Latent, hidden: int, ops: Ops
) -> LatentWeights:
    index, rank = latent.indexer, latent.rank
    indexer = f"{at}indexer."
    head_weights = binder.host(f"{indexer}weights_proj.weight", index.heads, hidden)
    inputs = binder.joined(
        [
            (f"{at}q_a_proj.weight", latent.query_rank),
            (f"{at}kv_a_proj_with_mqa.weight", rank),
            (f"{indexer}wk.weight", index.dim),
            (f"{indexer}index_kpool_compress_gate", index.dim),
        ],
        hidden,
    )
    both = latent.key_dim + latent.value_dim
    key_value = binder.host(f"{at}kv_b_proj.weight", latent.heads * both, rank)
    key_value = key_value.reshape(latent.heads, both, rank)
    queries = [
        (f"{at}q_b_proj.weight", latent.heads * latent.key_dim),
        (f"{indexer}wq_b.weight", index.heads * index.dim),
    ]
    if f"{indexer}k_norm.bias" not in binder.source:
        raise ConfigRefused(f"{indexer}k_norm.bias is missing; the index key norm needs it (R24).")
    return LatentWeights(
        inputs=ops.pack(np.concatenate([inputs, head_weights * index.heads**-0.5])),
        queries=binder.fused(queries, latent.query_rank),
        keys=ops.pack_heads(key_value[:, : latent.key_dim]),
        values=ops.pack_heads(key_value[:, latent.key_dim :].transpose(0, 2, 1)),
        out=binder.dense(f"{at}o_proj.weight", hidden, latent.heads * latent.value_dim),
        query_norm=binder.vector(f"{at}q_a_layernorm.weight", latent.query_rank),
        latent_norm=binder.vector(f"{at}kv_a_layernorm.weight", rank),
        key_norm=binder.vector(f"{indexer}k_norm.weight", index.dim),
        key_bias=binder.vector(f"{indexer}k_norm.bias", index.dim),
        ape=binder.vector(f"{indexer}index_kpool_compress_ape", index.pool, index.dim),
    )


def _ffn(binder: Binder, at: str, ffn: Ffn, spec: ModelSpec, ops: Ops) -> FfnWeights:
    hidden = spec.hidden

    def gate_up(part: str, inner: int) -> list[tuple[str, int]]:
        return [(f"{part}gate_proj.weight", inner), (f"{part}up_proj.weight", inner)]

    match ffn:
        case Dense(inner=inner):
            return DenseWeights(
                gate_up=binder.fused(gate_up(at, inner), hidden),
                down=binder.dense(f"{at}down_proj.weight", hidden, inner),
            )
        case Moe(inner=inner, experts=experts):
            packed = np.empty((experts, 2 * inner, hidden), np.float32)
            for expert in range(experts):
                packed[expert] = binder.joined(gate_up(f"{at}experts.{expert}.", inner), hidden)
            downs = [f"{at}experts.{expert}.down_proj.weight" for expert in range(experts)]
            shared = f"{at}shared_experts."
            return MoeWeights(
                router=binder.dense(f"{at}gate.weight", experts, hidden),
                bias=binder.vector(f"{at}gate.e_score_correction_bias", experts),
                experts=ops.pack_experts(
                    packed,
                    binder.stacked(downs, (hidden, inner)),
                    binder.joined(gate_up(shared, ffn.shared_inner), hidden),
                    binder.host(f"{shared}down_proj.weight", hidden, ffn.shared_inner),
                ),
            )


def _draft(binder: Binder, at: str, layer: LayerSpec, spec: ModelSpec, ops: Ops) -> DraftWeights:
    hidden = spec.hidden
    both = binder.host(f"{at}eh_proj.weight", hidden, 2 * hidden)  # embedding first (T34)
    return DraftWeights(
        embed_norm=binder.vector(f"{at}enorm.weight", hidden),
        hidden_norm=binder.vector(f"{at}hnorm.weight", hidden),
        embed_in=ops.pack(both[:, :hidden]),
        hidden_in=ops.pack(both[:, hidden:]),
        layer=LayerWeights(
            mixer_site=Site(binder.vector(f"{at}input_layernorm.weight", hidden), None),
            mixer=_mixer(binder, f"{at}self_attn.", layer, spec, ops),
            ffn_site=Site(binder.vector(f"{at}post_attention_layernorm.weight", hidden), None),
            ffn=_ffn(binder, f"{at}mlp.", layer.ffn, spec, ops),
        ),
        norm=binder.vector(f"{at}shared_head.norm.weight", hidden),
    )
