"""the draft head: one more layer over the last hidden row."""

from __future__ import annotations

from dataclasses import dataclass

from engine.device.device import Array
from engine.models import mla
from engine.models.ffn import feed_forward
from engine.models.forward import ModelWeights
from engine.models.state import LatentState
from engine.ops.spec import Ops, Rows
from engine.spec import Latent, ModelSpec


@dataclass(frozen=True, slots=True)
class Drafted:
    """A pass of the draft layer.

    Shapes: hidden (rows, hidden), already normed: the `hidden` of a chained step
            logits (rows, vocab), of the token two behind each row
    """

    hidden: Array
    logits: Array
    sight: mla.Sight


def draft(
    next_ids: Array,
    hidden: Array,
    rows: Rows,
    weights: ModelWeights,
    state: LatentState,
    spec: ModelSpec,
    ops: Ops,
    sight: mla.Sight | None = None,
) -> Drafted:
    """One pass of the draft layer (glm5_next.md 8.1, 8.2): a plain residual block.

    Shapes: next_ids (rows,) i32, the token behind each row · hidden (rows, hidden): the trunk's
            final norm output, or the previous pass's `Drafted.hidden` in a chain

    Args:
        next_ids: see shapes.
        hidden: see shapes.
        rows: geometry in the draft layer's own cache.
        weights: with `draft`.
        state: of the draft layer.
        spec: with `draft`.
        ops: the backend.
        sight: of the round's first pass, reused unchanged (8.3); None runs the layer's own indexer.
    """
    w, layer = weights.draft, spec.draft
    if w is None or layer is None or not isinstance(w.layer.mixer, mla.LatentWeights):
        raise AssertionError("this model has no draft layer.")
    assert weights.embed is not None
    assert isinstance(layer.mixer, Latent)
    eps = spec.norm_eps
    embedded = ops.rms_norm(ops.take_rows(weights.embed, next_ids), w.embed_norm, eps)
    before = ops.rms_norm(hidden, w.hidden_norm, eps)
    x = ops.add(ops.linear(embedded, w.embed_in), ops.linear(before, w.hidden_in))
    h = ops.rms_norm(x, w.layer.mixer_site.norm, eps)
    y, seen = mla.mix(h, rows, w.layer.mixer, state, layer.mixer, eps, ops, sight)
    x = ops.add(x, y)
    h = ops.rms_norm(x, w.layer.ffn_site.norm, eps)
    x = ops.add(x, feed_forward(h, w.layer.ffn, layer.ffn, ops))
    out = ops.rms_norm(x, w.norm, eps)
    return Drafted(out, ops.linear(out, weights.head), seen)
