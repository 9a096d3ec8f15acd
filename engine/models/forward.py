"""embed, for each layer: mix then FFN, norm, logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.device.device import Array
from engine.models import kda, mla, streams
from engine.models.batch import Batch
from engine.models.ffn import FfnWeights, feed_forward
from engine.models.overlay import splice
from engine.models.state import KdaState, LatentState, LayerState
from engine.models.streams import Site
from engine.ops.spec import Ops, Packed, Rows
from engine.spec import Kda, Latent, LayerSpec, ModelSpec

MixerWeights = kda.KdaWeights | mla.LatentWeights


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer: two blocks, each behind its site on the residual."""

    mixer_site: Site
    mixer: MixerWeights
    ffn_site: Site
    ffn: FfnWeights


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """The multi-token-prediction layer (glm5_next.md 8.1); embedding and head are the trunk's.

    Shapes: embed_norm, hidden_norm, norm (hidden,) · embed_in, hidden_in (hidden, hidden): the two
            halves of its input projection
    """

    embed_norm: Array
    hidden_norm: Array
    embed_in: Packed
    hidden_in: Packed
    layer: LayerWeights
    norm: Array


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """The text decoder, or what one stage of it holds (rule 51).

    Shapes: embed, head (vocab, hidden) · norm (hidden,)
    """

    embed: Array | None  # of the first stage
    layers: Mapping[int, LayerWeights]  # by layer number
    norm: Array | None  # this and what follows: of the last stage
    head: Packed | None
    draft: DraftWeights | None


def enter(batch: Batch, weights: ModelWeights, spec: ModelSpec, ops: Ops) -> Array:
    """Embedding rows with image rows laid over them, as residual.

    Shapes: result (rows, streams + 1, hidden), or (rows, hidden) without hyper-connections
    Raises: NotResident, ShapeMismatch when a window does not fit this batch
    """
    if weights.embed is None:
        raise AssertionError("only the first stage looks tokens up.")
    x = ops.take_rows(weights.embed, batch.ids)
    ends = {part.first: part.first + part.length for part in batch.rows.segments}
    for first, window in batch.overlays:
        splice(x[first : ends[first]], window, ops.device, ops)
    return streams.expand(x, spec, ops)


def run_layers(
    x: Array,
    batch: Batch,
    layers: range,
    weights: ModelWeights,
    states: Sequence[LayerState],
    spec: ModelSpec,
    ops: Ops,
) -> Array:
    """The residual through layers [start, stop) of the model.

    Args:
        x: of `enter`, or of the stage before.
        batch: its geometry.
        layers: which; `states` are theirs, in order.
        weights: of at least these layers.
        states: changed in place.
        spec: the model.
        ops: the backend.
    """
    for number, state in zip(layers, states, strict=True):
        layer, w = spec.layers[number], weights.layers[number]
        h, mixing = streams.read(x, w.mixer_site, spec, ops)
        x = streams.write(x, mix(h, batch.rows, w.mixer, state, layer, spec, ops), mixing, ops)
        h, mixing = streams.read(x, w.ffn_site, spec, ops)
        x = streams.write(x, feed_forward(h, w.ffn, layer.ffn, ops), mixing, ops)
    return x


def mix(
    h: Array,
    rows: Rows,
    w: MixerWeights,
    state: LayerState,
    layer: LayerSpec,
    spec: ModelSpec,
    ops: Ops,
) -> Array:
    """The mixer of a layer, whichever it is. Shapes: h, result (rows, hidden)."""
    match layer.mixer, w, state:
        case Kda() as part, kda.KdaWeights(), KdaState():
            return kda.mix(h, rows, w, state, part, spec.norm_eps, ops)
        case Latent() as part, mla.LatentWeights(), LatentState():
            return mla.mix(h, rows, w, state, part, spec.norm_eps, ops)[0]
    raise AssertionError(
        f"{type(w).__name__} and {type(state).__name__} are no layer of this kind."
    )


def leave(x: Array, batch: Batch, weights: ModelWeights, spec: ModelSpec, ops: Ops) -> Array:
    """Logits (outs, vocab) of the rows that `batch.outputs` names."""
    wanted = ops.take_rows(x, batch.outputs)
    return ops.linear(final_hidden(wanted, weights, spec, ops), weights.head)


def final_hidden(x: Array, weights: ModelWeights, spec: ModelSpec, ops: Ops) -> Array:
    """What the head and the draft layer read: streams collapsed, final norm. (rows, hidden)."""
    if weights.norm is None:
        raise AssertionError("only the last stage has the final norm.")
    return ops.rms_norm(streams.collapse(x, spec, ops), weights.norm, spec.norm_eps)
