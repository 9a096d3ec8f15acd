"""the residual between blocks: one stream, or hyper-connections."""

from __future__ import annotations

from dataclasses import dataclass

from engine.device.device import Array
from engine.ops.spec import Ops, Packed
from engine.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Site:
    """The place before one block: the block's input norm, and how streams are read and mixed.

    Shapes: norm (hidden,) · hyper: of `Ops.pack_hyper`, or None for one plain stream
    """

    norm: Array
    hyper: Packed | None


def expand(x: Array, spec: ModelSpec, ops: Ops) -> Array:
    """Embedding rows (rows, hidden) as residual: the same, or (rows, streams + 1, hidden)."""
    return ops.hyper_expand(x, spec.residual.streams) if spec.residual else x


def read(x: Array, site: Site, spec: ModelSpec, ops: Ops) -> tuple[Array, Array | None]:
    """The normed input (rows, hidden) of a block, and what `write` needs to know about it."""
    if spec.residual is None or site.hyper is None:
        return ops.rms_norm(x, site.norm, spec.norm_eps), None
    residual = spec.residual
    return ops.hyper_in(
        x, site.hyper, norm_eps=spec.norm_eps, eps=residual.eps, rounds=residual.rounds
    )


def write(x: Array, y: Array, mix: Array | None, ops: Ops) -> Array:
    """The residual behind a block with output y (rows, hidden)."""
    return ops.add(x, y) if mix is None else ops.hyper_out(x, y, mix)


def row_shape(spec: ModelSpec) -> tuple[int, ...]:
    """Shape of one row of the residual."""
    return (spec.residual.streams + 1, spec.hidden) if spec.residual else (spec.hidden,)


def payload_width(spec: ModelSpec) -> int:
    """Floats of a row that the next layer reads."""
    return spec.hidden * (spec.residual.streams if spec.residual else 1)


def payload(x: Array, spec: ModelSpec) -> Array:
    """What the next layer reads of the residual, a view (rule 67): not the place for outputs."""
    return x[:, : spec.residual.streams] if spec.residual else x


def collapse(x: Array, spec: ModelSpec, ops: Ops) -> Array:
    """The residual as one row a token (rows, hidden), before the final norm."""
    return ops.hyper_mean(x) if spec.residual else x
