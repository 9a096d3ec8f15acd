"""Where the parts are put together: what the default model's worker says that it can do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from app.config import BUILT_IN
from app.control import Vitals
from app.worker import WatchedEncoder, build, choose_ops, free_memory
from engine.config import EngineConfig
from engine.device.faults import Latch
from engine.device.orders import FaultBoard
from engine.errors import ConfigError, DeviceError, ModelError
from engine.messages import Inject, Picture
from engine.ops.exact.ops import ExactOps
from engine.ops.reference.ops import ReferenceOps
from tests.fakes.decoder import a_device
from vision.encoder import Encoder

GLIMMER = str(BUILT_IN["glimmer"])


def test_the_worker_says_what_the_model_can_do_and_reads_every_byte() -> None:
    """Loaded: limits, pictures, ids; Loading: up to the last byte."""
    steps: list[tuple[int, int]] = []
    config = EngineConfig(model=GLIMMER, max_sequences=4, generation=7)
    machine = build(
        config, FaultBoard(), Latch(), Vitals(), lambda done, total: steps.append((done, total))
    )
    loaded = machine.loaded
    assert (loaded.family, loaded.max_sequences, loaded.context) == ("glm5_next", 4, 8_192)
    assert loaded.patches is not None
    assert loaded.pool_tokens >= loaded.context
    assert loaded.image_token in loaded.vision_ids
    assert steps[-1][0] == steps[-1][1] > 0
    [device] = machine.judge.devices
    assert (device.name, device.residency.generation) == ("cpu:0", 7)
    assert isinstance(machine.engine.self_test(), int)


def test_the_deterministic_mode_computes_with_the_exact_ops() -> None:
    """D9: and without it nothing of them is in the way."""
    device = a_device()
    assert type(choose_ops(EngineConfig(model=GLIMMER, deterministic=True), device)) is ExactOps
    assert type(choose_ops(EngineConfig(model=GLIMMER), device)) is ReferenceOps


@pytest.mark.parametrize("devices", [("cuda:0",), ("cpu:0", "cuda:1"), ("tpu",)])
def test_devices_that_this_version_cannot_use_are_refused(devices: tuple[str, ...]) -> None:
    """O97: a setting that cannot be had, never silently another one."""
    config = EngineConfig(model=GLIMMER, devices=devices)
    with pytest.raises(ConfigError, match="--devices"):
        build(config, FaultBoard(), Latch(), Vitals(), lambda _done, _total: None)


@pytest.mark.parametrize("changed", [{"num_experts_per_tok": 999}, {"num_attention_heads": 0}])
def test_a_geometry_that_cannot_be_served_is_the_models_fault(
    changed: dict[str, int], tmp_path: Path
) -> None:
    """R7, O97: exit 1, a bad model, and not 2: nobody can mend it with a flag."""
    folder = tmp_path / "model"
    shutil.copytree(GLIMMER, folder, ignore=shutil.ignore_patterns("samples"))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"].update(changed)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=next(iter(changed))) as refused:
        build(EngineConfig(model=str(folder)), FaultBoard(), Latch(), Vitals(), lambda _d, _t: None)
    assert str(folder) in str(refused.value)


def test_orders_for_the_tower_strike_in_it_and_its_time_is_counted() -> None:
    """Rule 120, O101: vision_encode_seconds."""
    board, vitals = FaultBoard(), Vitals()
    config = EngineConfig(model=GLIMMER, max_sequences=2, fault_injection=True)
    machine = build(config, board, Latch(), vitals, lambda _done, _total: None)
    encoder = machine.engine._builder  # type: ignore[attr-defined]
    assert isinstance(encoder, WatchedEncoder)
    picture = grey(encoder._encoder)
    encoder.build([picture])
    assert vitals.counters["vision_encode_seconds_count"] == 1
    assert vitals.counters["vision_encode_seconds_sum"] > 0
    board.order(Inject(fault="isolated", where="tower"))
    with pytest.raises(DeviceError):
        encoder.build([picture])
    assert vitals.counters["vision_encode_seconds_count"] == 1


def grey(encoder: Encoder) -> Picture:
    spec = encoder.patches
    rows, columns = spec.merge, spec.merge * spec.min_tokens
    size = rows * columns * 3 * spec.patch**2
    patches = np.full(size, 128, np.uint8).tobytes()
    return Picture(patches, (1, rows, columns), position=0, tokens=spec.min_tokens, digest="grey")


def test_free_memory_is_what_this_machine_may_still_give() -> None:
    assert 1 << 20 < free_memory() < 1 << 50
