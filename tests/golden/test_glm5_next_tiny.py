"""The tiny GLM-5-Next checkpoint agrees with the reference library's float32 arrays (glm 15)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from engine.device.device import Array
from engine.errors import ShapeMismatch
from engine.models import kda, mla, mtp, streams
from engine.models.ffn import MoeWeights
from engine.models.forward import enter
from engine.models.overlay import Overlay
from engine.models.state import KdaState, LatentState, make_state
from engine.ops import exact, reference
from engine.ops.exact.ops import ExactOps
from engine.ops.reference.ops import ReferenceOps
from engine.spec import Kda, Latent, Moe
from tests.fakes.decoder import Decoder, rows_of
from tests.golden.pictures import an_encoder, overlay_of

FOLDER = Path(__file__).parents[1] / "fixtures" / "glm5_next_tiny"
STREAMS = 5e-4  # streams and logits; ids and selections are exact
INNER = 1e-4  # what a module computes inside
KDA_LAYER, DSA_LAYER = 1, 2
PAGE = 16


@pytest.fixture(scope="module")
def fixture() -> dict[str, Array]:
    with np.load(FOLDER / "fixtures.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="module", params=[ReferenceOps, ExactOps])
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return Decoder(FOLDER, slots=8, context=256, page_tokens=PAGE, backend=request.param)


@pytest.fixture(scope="module")
def prompt(fixture: dict[str, Array]) -> list[int]:
    ids: list[int] = fixture["text.input_ids"].tolist()
    return ids


def close(got: Array, want: Array, atol: float) -> None:
    np.testing.assert_allclose(got, want, atol=atol, rtol=0)


def prefilled(decoder: Decoder, prompt: list[int], layers: int) -> Array:
    """The residual behind some layers, the prompt being in slot 0."""
    decoder.begin(0)
    return decoder.residual(decoder.batch([(0, prompt)]), layers)


# -- the whole model -------------------------------------------------------------------------------


def test_embeddings_agree(decoder: Decoder, fixture: dict[str, Array], prompt: list[int]) -> None:
    decoder.begin(0)
    x = enter(decoder.batch([(0, prompt)]), decoder.model.weights, decoder.spec, decoder.ops)
    for stream in range(4):
        np.testing.assert_array_equal(x[:, stream], fixture["text.embeds"])


@pytest.mark.parametrize("layer", range(6))
def test_streams_behind_each_layer_agree(
    decoder: Decoder, fixture: dict[str, Array], prompt: list[int], layer: int
) -> None:
    x = prefilled(decoder, prompt, layer + 1)
    close(x[:, :4], fixture[f"text.layer{layer}.streams_out"], STREAMS)


def test_final_hidden_and_logits_of_all_rows_agree(
    decoder: Decoder, fixture: dict[str, Array], prompt: list[int]
) -> None:
    z = decoder.final(prefilled(decoder, prompt, 6))
    close(z, fixture["text.final_hidden"], STREAMS)
    close(decoder.ops.linear(z, decoder.model.weights.head), fixture["text.logits"], STREAMS)


@pytest.mark.parametrize("chunks", [1, 5, 7, [13, 17, 13], 16, 64], ids=str)
def test_chunk_size_is_invisible(
    decoder: Decoder, fixture: dict[str, Array], prompt: list[int], chunks: list[int] | int
) -> None:
    """R30, glm 13: the same ids whatever the chunks, decode across pool boundaries included."""
    ids, logits = decoder.greedy(3, prompt, 12, chunks=chunks)
    assert ids == fixture["text.greedy_tokens"].tolist()
    close(logits[0], fixture["text.logits"][-1], STREAMS)
    close(np.array(logits[1:]), fixture["text.decode_logits"], STREAMS)


@pytest.mark.parametrize("cut", range(20, 28))
def test_a_chunk_may_end_anywhere_in_a_pool(
    decoder: Decoder, fixture: dict[str, Array], prompt: list[int], cut: int
) -> None:
    decoder.begin(1)
    logits = decoder.prefill(1, prompt, [cut, 64])
    close(logits[0], fixture["text.logits"][-1], STREAMS)


def test_sequences_in_a_batch_give_what_they_give_alone(
    decoder: Decoder, prompt: list[int]
) -> None:
    """Eight prompts of different lengths, dense and pruned contexts beside each other."""
    prompts = [prompt[: 5 + 5 * i] for i in range(7)] + [prompt + prompt]
    alone = [decoder.greedy(i, prompts[i], 10)[0] for i in range(8)]

    for slot in range(8):
        decoder.begin(slot)
    order = [3, 0, 7, 1, 6, 2, 5, 4]
    logits = decoder.step([(slot, prompts[slot]) for slot in order])
    ids = {slot: [int(row.argmax())] for slot, row in zip(order, logits, strict=True)}
    for _ in range(9):
        logits = decoder.step([(slot, ids[slot][-1:]) for slot in order])
        for slot, row in zip(order, logits, strict=True):
            ids[slot].append(int(row.argmax()))

    assert [ids[slot] for slot in range(8)] == alone


def test_answers_go_on_beside_a_prompt(
    decoder: Decoder, fixture: dict[str, Array], prompt: list[int]
) -> None:
    """One step with decode rows first and prompt chunks behind them."""
    want = fixture["text.greedy_tokens"].tolist()
    decoder.begin(0)
    ids = [int(decoder.prefill(0, prompt, 64)[0].argmax())]
    decoder.begin(5)
    for at in range(0, 43, 10):
        logits = decoder.step([(0, ids[-1:]), (5, prompt[at : at + 10])])
        ids.append(int(logits[0].argmax()))
    assert ids == want[:6]
    close(logits[1], fixture["text.logits"][-1], STREAMS)


def test_a_used_slot_starts_from_nothing(decoder: Decoder, prompt: list[int]) -> None:
    """R64: the same prompt behind a long unrelated one gives the same bytes."""
    first = decoder.greedy(2, prompt, 4)[1]
    decoder.greedy(2, list(range(200)), 4)
    again = decoder.greedy(2, prompt, 4)[1]
    np.testing.assert_array_equal(np.array(first), np.array(again))


def test_poisoned_caches_change_nothing(prompt: list[int]) -> None:
    """R5, R17: buffers full of NaN at allocation give byte-identical answers."""
    clean = Decoder(FOLDER, slots=2, context=64, page_tokens=PAGE)
    poisoned = Decoder(FOLDER, slots=2, context=64, page_tokens=PAGE)
    for state in clean.states:
        fill(state, 0.0)
    for state in poisoned.states:
        fill(state, np.nan)
    answers = []
    for decoder in (clean, poisoned):
        for slot in range(2):
            decoder.begin(slot)
        rows = [decoder.step([(0, prompt[:5]), (1, prompt[:40])])]
        rows += [decoder.step([(0, [token]), (1, [token])]) for token in prompt[:16]]
        answers.append(np.array(rows))
    np.testing.assert_array_equal(answers[0], answers[1])


def fill(state: KdaState | LatentState, value: float) -> None:
    if isinstance(state, KdaState):
        state.memory[:] = value
        state.window[:] = value
        return
    for array in (state.latents.pages, state.index.keys, state.index.gates, state.index.pooled):
        array[:] = value
    state.index.valid[:] = 0xFF if np.isnan(value) else 0


def test_a_prompt_with_two_pictures_agrees(decoder: Decoder, fixture: dict[str, Array]) -> None:
    """glm 9.1: image rows lie over their placeholders; a drawn image token is a plain id."""
    prompt = fixture["mm.input_ids"].tolist()
    image = decoder.spec.image_token
    assert image is not None
    raw = [Image.fromarray(fixture[f"image.raw{number}"]) for number in range(2)]
    overlay = overlay_of(prompt, raw, image, an_encoder(FOLDER, decoder))

    decoder.begin(0)
    z = decoder.final(decoder.residual(decoder.batch([(0, prompt)], overlay)))
    close(z, fixture["mm.final_hidden"], STREAMS)
    logits = decoder.ops.linear(z[-4:], decoder.model.weights.head)
    close(logits, fixture["mm.logits_last4"], STREAMS)
    for chunks in (64, 7):
        ids, rows = decoder.greedy(0, prompt, 12, chunks=chunks, overlay=overlay)
        assert ids == fixture["mm.greedy_tokens"].tolist()
        close(np.array(rows[1:]), fixture["mm.decode_logits"], STREAMS)


def test_image_rows_stay_inside_their_own_sequence(
    decoder: Decoder, fixture: dict[str, Array], prompt: list[int]
) -> None:
    """A picture's window is laid over the rows of its call, wherever that starts in the batch."""
    rows = fixture["vision.merged"][:2]
    overlay = Overlay.of(decoder.device.upload(rows), [(1, 0, 2)], decoder.device, 64)
    for slot in range(3):
        decoder.begin(slot)
    batch = decoder.batch([(0, prompt[:1]), (1, prompt[:4]), (2, prompt[:3])])
    embeds = fixture["text.embeds"]

    laid = dataclasses.replace(batch, overlays=((1, overlay),))
    x = enter(laid, decoder.model.weights, decoder.spec, decoder.ops)[:, 0]
    np.testing.assert_array_equal(x[2:4], rows)
    np.testing.assert_array_equal(np.delete(x, [2, 3], 0), embeds[[0, 0, 3, 0, 1, 2]])

    late = Overlay.of(decoder.device.upload(rows), [(3, 0, 2)], decoder.device, 64)
    with pytest.raises(ShapeMismatch, match="ends at row 5"):
        enter(
            dataclasses.replace(batch, overlays=((1, late),)),
            decoder.model.weights,
            decoder.spec,
            decoder.ops,
        )


# -- inside the layers -----------------------------------------------------------------------------


def test_the_kda_layer_agrees_step_by_step(
    decoder: Decoder, fixture: dict[str, Array], prompt: list[int]
) -> None:
    decoder.begin(0)
    batch = decoder.batch([(0, prompt)])
    x = decoder.residual(batch, KDA_LAYER)
    layer = decoder.model.weights.layers[KDA_LAYER]
    spec = decoder.spec.layers[KDA_LAYER].mixer
    w, state, ops = layer.mixer, decoder.states[KDA_LAYER], decoder.ops
    assert isinstance(spec, Kda)
    assert isinstance(w, kda.KdaWeights)
    assert isinstance(state, KdaState)
    h = site_agrees(decoder, x, layer.mixer_site, fixture, "kda.hc_attn", "kda.attn_in")

    count, inner = len(h), spec.inner
    projected = ops.linear(h, w.inputs)
    low = projected[:, 3 * inner : -spec.heads].reshape(count, 2, w.rank)
    gates = ops.head_linear(low, w.gates)
    window = state.window.copy()
    qkv = ops.short_conv(projected[:, : 3 * inner], w.kernel, window, batch.rows)
    close(qkv, fixture["kda.qkv_conv_silu"], INNER)
    g, beta = ops.kda_gates(
        gates[:, 0], projected[:, -spec.heads :], w.rate, w.dt_bias, spec.lower_bound
    )
    close(g, fixture["kda.g"], INNER)
    close(beta, fixture["kda.beta"], INNER)
    memory = state.memory.copy()
    core = ops.kda(qkv.reshape(count, 3, spec.heads, spec.dim), g, beta, memory, batch.rows)
    close(core, fixture["kda.core_out"], INNER)
    close(gates[:, 1].reshape(core.shape), fixture["kda.gate"], INNER)
    out = ops.kda_out(core, gates[:, 1], w.norm, decoder.spec.norm_eps)
    close(out.reshape(core.shape), fixture["kda.gated_norm_out"], INNER)

    y = kda.mix(h, batch.rows, w, state, spec, decoder.spec.norm_eps, ops)
    close(y, fixture["kda.attn_out"], INNER)
    feed_forward_agrees(decoder, x, y, KDA_LAYER, fixture, "kda")


def test_the_dsa_layer_agrees_step_by_step(
    decoder: Decoder, fixture: dict[str, Array], prompt: list[int]
) -> None:
    decoder.begin(0)
    batch = decoder.batch([(0, prompt)])
    x = decoder.residual(batch, DSA_LAYER)
    layer = decoder.model.weights.layers[DSA_LAYER]
    spec = decoder.spec.layers[DSA_LAYER].mixer
    w, state, ops = layer.mixer, decoder.states[DSA_LAYER], decoder.ops
    assert isinstance(spec, Latent)
    assert isinstance(w, mla.LatentWeights)
    assert isinstance(state, LatentState)
    h = site_agrees(decoder, x, layer.mixer_site, fixture, "dsa.hc_attn", "dsa.attn_in")

    y, sight = mla.mix(h, batch.rows, w, state, spec, decoder.spec.norm_eps, ops)
    close(y, fixture["dsa.attn_out"], INNER)
    assert sight.selected is not None
    for got, want in zip(sight.selected, fixture["dsa.idx.selected"], strict=True):
        assert {p for p in got.tolist() if p >= 0} == {p for p in want.tolist() if p >= 0}

    index = spec.indexer
    projected = ops.linear(h, w.inputs)
    low = ops.rms_norm(projected[:, : spec.query_rank], w.query_norm, decoder.spec.norm_eps)
    close(low, fixture["dsa.q_resid"], INNER)
    rows = written(decoder, state, 43)
    close(rows["latents"], fixture["dsa.latent"], INNER)
    close(rows["keys"], fixture["dsa.idx.k_normed"], INNER)
    close(rows["gates"], fixture["dsa.idx.gate"], INNER)
    queries = ops.linear(low, w.queries)[:, spec.heads * spec.key_dim :]
    queries = queries.reshape(43, index.heads, index.dim)
    close(queries, fixture["dsa.idx.q"], INNER)
    pooled = state.index.pooled[decoder.table[0]].reshape(-1, index.dim)[:10]
    close(pooled, fixture["dsa.idx.pool_keys"], INNER)
    inside = exact.attention if isinstance(ops, ExactOps) else reference.indexer
    scores = inside.pool_scores(queries, projected[:, -index.heads :], pooled)
    close(scores, fixture["dsa.idx.scores"], INNER)
    absorbed = ops.head_linear(
        ops.linear(low, w.queries)[:, : spec.heads * spec.key_dim].reshape(43, spec.heads, -1),
        w.keys,
    )
    seen = ops.latent_attention(
        absorbed, state.latents.pages, sight.selected, batch.rows, scale=spec.key_dim**-0.5
    )
    heads = ops.head_linear(seen, w.values).reshape(43, -1)
    close(heads, fixture["dsa.attn_heads"], INNER)
    feed_forward_agrees(decoder, x, y, DSA_LAYER, fixture, "dsa")


def test_some_queries_do_not_attend_to_themselves(decoder: Decoder, prompt: list[int]) -> None:
    """T18: at the end of a pool the query's own pool has to win its place by score."""
    decoder.begin(0)
    batch = decoder.batch([(0, prompt)])
    x = decoder.residual(batch, DSA_LAYER)
    layer = decoder.model.weights.layers[DSA_LAYER]
    spec, state = decoder.spec.layers[DSA_LAYER].mixer, decoder.states[DSA_LAYER]
    assert isinstance(spec, Latent)
    assert isinstance(layer.mixer, mla.LatentWeights)
    assert isinstance(state, LatentState)
    h, _ = streams.read(x, layer.mixer_site, decoder.spec, decoder.ops)
    _, sight = mla.mix(h, batch.rows, layer.mixer, state, spec, decoder.spec.norm_eps, decoder.ops)
    assert sight.selected is not None
    selected = sight.selected
    assert [t for t in range(43) if t not in selected[t].tolist()] == [23, 27, 35]


def site_agrees(
    decoder: Decoder,
    x: Array,
    site: streams.Site,
    fixture: dict[str, Array],
    tag: str,
    block_in: str,
) -> Array:
    """One hyper-connection site; returns the normed block input."""
    residual = decoder.spec.residual
    assert residual is not None
    assert site.hyper is not None
    inside = exact if isinstance(decoder.ops, ExactOps) else reference
    pre, mix = inside.pointwise.hyper_coefficients(
        x,
        site.hyper,
        norm_eps=decoder.spec.norm_eps,
        eps=residual.eps,
        rounds=residual.rounds,
    )
    close(mix[:, :, 4], fixture[f"{tag}.post"], INNER)
    close(mix[:, :, :4].transpose(0, 2, 1), fixture[f"{tag}.comb"], INNER)
    if f"{tag}.collapsed" in fixture:
        close(np.einsum("ti,tih->th", pre, x[:, :4]), fixture[f"{tag}.collapsed"], INNER)
    h, _ = streams.read(x, site, decoder.spec, decoder.ops)
    close(h, fixture[block_in], INNER)
    return h


def feed_forward_agrees(
    decoder: Decoder, x: Array, y: Array, number: int, fixture: dict[str, Array], tag: str
) -> None:
    layer, ops = decoder.model.weights.layers[number], decoder.ops
    spec, w = decoder.spec.layers[number].ffn, layer.ffn
    assert isinstance(spec, Moe)
    assert isinstance(w, MoeWeights)
    _, mixing = streams.read(x, layer.mixer_site, decoder.spec, ops)
    x = streams.write(x, y, mixing, ops)
    h = site_agrees(decoder, x, layer.ffn_site, fixture, f"{tag}.hc_ffn", f"{tag}.mlp_in")
    logits = ops.linear(h, w.router)
    close(logits, fixture[f"{tag}.router.logits"], INNER)
    settings: dict[str, Any] = {
        "active": spec.active,
        "scale": spec.scale,
        "normalise": spec.normalise,
        "groups": spec.groups,
        "top_groups": spec.top_groups,
    }
    chosen, weights = ops.route(logits, w.bias, **settings)
    order = np.argsort(chosen, axis=1)
    np.testing.assert_array_equal(
        np.take_along_axis(chosen, order, 1), fixture[f"{tag}.router.experts_sorted"]
    )
    close(np.take_along_axis(weights, order, 1), fixture[f"{tag}.router.weights_sorted"], INNER)
    both = ops.experts(h, chosen, weights, w.experts, spec.limit)
    shared = ops.experts(h, chosen, np.zeros_like(weights), w.experts, spec.limit)
    close(both - shared, fixture[f"{tag}.routed_out"], INNER)
    close(both, fixture[f"{tag}.mlp_out"], INNER)


# -- caches ----------------------------------------------------------------------------------------


def written(decoder: Decoder, state: LatentState, count: int) -> dict[str, Array]:
    """The rows of slot 0, out of its pages."""
    arrays = {
        "latents": state.latents.pages,
        "keys": state.index.keys,
        "gates": state.index.gates,
        "valid": state.index.valid[:, :, None],
    }
    pages = decoder.table[0]
    return {
        name: array[pages].reshape(-1, array.shape[2])[:count] for name, array in arrays.items()
    }


@pytest.mark.parametrize("chunks", [64, 7, 1])
def test_caches_hold_what_the_reference_holds(
    decoder: Decoder, fixture: dict[str, Array], prompt: list[int], chunks: int
) -> None:
    decoder.begin(0)
    decoder.prefill(0, prompt, chunks)
    for number, state in enumerate(decoder.states):
        if isinstance(state, KdaState):
            close(state.window[0].T, fixture[f"cache.layer{number}.kda_conv"], STREAMS)
            close(state.memory[0], fixture[f"cache.layer{number}.kda_state"], STREAMS)
        else:
            rows = written(decoder, state, 43)
            close(rows["latents"], fixture[f"cache.layer{number}.mla_latent"], STREAMS)
            packed = np.concatenate([rows["keys"], rows["gates"], rows["valid"]], axis=1)
            close(packed, fixture[f"cache.layer{number}.idx_k_gate_valid"], STREAMS)
            assert len(state.cursor(0)) == 43
            assert state.cursor(0).pooled == 10


# -- the draft layer -------------------------------------------------------------------------------


@pytest.fixture
def draft_state(decoder: Decoder) -> LatentState:
    assert decoder.spec.draft is not None
    state = make_state(
        decoder.spec.draft, 6, decoder.device, slots=1, pages=4, page_tokens=PAGE, capacity=64
    )
    assert isinstance(state, LatentState)
    state.begin(0)
    return state


def test_drafts_of_all_rows_agree(
    decoder: Decoder, fixture: dict[str, Array], draft_state: LatentState
) -> None:
    drafted = mtp.draft(
        fixture["mtp.next_ids"],
        fixture["text.final_hidden"],
        rows_of([(0, 43)], page_tokens=PAGE),
        decoder.model.weights,
        draft_state,
        decoder.spec,
        decoder.ops,
    )
    close(drafted.hidden, fixture["mtp.hidden"], STREAMS)
    close(drafted.logits, fixture["mtp.logits"], STREAMS)


@pytest.mark.parametrize("mode", ["recompute", "shared"])
def test_a_chain_of_drafts_agrees(
    decoder: Decoder, fixture: dict[str, Array], draft_state: LatentState, mode: str
) -> None:
    """glm 8.2 and 8.3: the layer's own normed output goes round; the selection may be shared."""
    weights, spec, ops = decoder.model.weights, decoder.spec, decoder.ops
    table = np.arange(4)[None]
    drafted = mtp.draft(
        fixture["mtp.next_ids"],
        fixture["text.final_hidden"],
        rows_of([(0, 43)], table=table, page_tokens=PAGE),
        weights,
        draft_state,
        spec,
        ops,
    )
    sight = mla.last_sight(drafted.sight) if mode == "shared" else None
    tokens, logits = [int(drafted.logits[-1].argmax())], [drafted.logits[-1]]
    for step in range(2):
        drafted = mtp.draft(
            np.array(tokens[-1:]),
            drafted.hidden[-1:],
            rows_of([(43 + step, 1)], table=table, page_tokens=PAGE),
            weights,
            draft_state,
            spec,
            ops,
            sight,
        )
        tokens.append(int(drafted.logits[-1].argmax()))
        logits.append(drafted.logits[-1])
    assert tokens == fixture[f"mtp.draft_{mode}.tokens"].tolist()
    close(np.array(logits), fixture[f"mtp.draft_{mode}.logits"], STREAMS)


def test_a_shared_selection_below_the_dense_limit_excludes_the_drafts(
    decoder: Decoder, fixture: dict[str, Array], draft_state: LatentState
) -> None:
    """glm 8.3: it is everything up to the last verified row, and no drafted row."""
    weights, spec, ops = decoder.model.weights, decoder.spec, decoder.ops
    table = np.arange(4)[None]
    hidden = fixture["text.final_hidden"][:6]
    drafted = mtp.draft(
        fixture["mtp.next_ids"][:6],
        hidden,
        rows_of([(0, 6)], table=table, page_tokens=PAGE),
        weights,
        draft_state,
        spec,
        ops,
    )
    sight = mla.last_sight(drafted.sight)
    assert sight.selected is None
    shared: list[Array] = []
    own: list[Array] = []
    for into, how in ((shared, sight), (own, None)):
        for filler in (1, 2):  # the first drafted row differs
            draft_state.cursor(0).rewind_to(6)
            for position, token in ((6, filler), (7, 9)):
                drafted = mtp.draft(
                    np.array([token]),
                    hidden[:1],
                    rows_of([(position, 1)], table=table, page_tokens=PAGE),
                    weights,
                    draft_state,
                    spec,
                    ops,
                    how,
                )
            into.append(drafted.logits)
    np.testing.assert_array_equal(shared[0], shared[1])
    assert np.abs(own[0] - own[1]).max() > 1e-3
