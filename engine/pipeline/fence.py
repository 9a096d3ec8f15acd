"""which layers and which device each stage has; inexact means refused at boot."""

from __future__ import annotations

from itertools import pairwise

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.spec import ModelSpec


def cuts(layers: int, stages: int, fence: tuple[int, ...] | None) -> tuple[range, ...]:
    """Layers of each stage: the given cuts, or the even split `s*layers//stages` (rule 48).

    Raises: ConfigError when cuts or stages do not fit the model exactly; nothing is rounded.
    """
    if not 1 <= stages <= layers:
        raise ConfigError(
            f"--stages is {stages} and the model has {layers} layers; use 1 to {layers}."
        )
    if fence is None:
        fence = tuple(s * layers // stages for s in range(stages + 1))
    shown = ",".join(str(cut) for cut in fence)
    if len(fence) != stages + 1:
        raise ConfigError(
            f"--fence {shown} makes {len(fence) - 1} stages and there are {stages} devices; "
            f"give {stages + 1} integers."
        )
    if fence[0] != 0 or fence[-1] != layers or any(a >= b for a, b in pairwise(fence)):
        raise ConfigError(
            f"--fence {shown} does not rise from 0 to {layers} without a repeat; an even one is "
            f"{','.join(str(s * layers // stages) for s in range(stages + 1))}."
        )
    return tuple(range(a, b) for a, b in pairwise(fence))


def stage_layers(config: EngineConfig, spec: ModelSpec) -> tuple[range, ...]:
    """Layers of each device in `config.devices`, in order.

    Raises: ConfigError for an inexact fence; asked before weights are read.
    """
    return cuts(len(spec.layers), len(config.devices), config.fence)
