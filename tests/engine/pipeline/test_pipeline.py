"""The real pipeline over the tiny checkpoint: tokens do not depend on chunks, company or slots."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from engine.cache.budget import CachePlan, plan_caches
from engine.config import EngineConfig
from engine.device.faults import Judge, Latch
from engine.device.host import HostDevice
from engine.engine import Engine
from engine.errors import CapacityExceeded, ConfigRefused, StateReleased
from engine.messages import Event, Failed, Finished, Generate, RequestId, Sampling, Token
from engine.models.registry import LoadedModel, load_model
from engine.ops.reference.ops import ReferenceOps
from engine.pipeline.pipeline import Pipeline
from engine.pipeline.stage import Stage
from engine.scheduler.plan import Draw, StepPlan, Work

TINY = Path(__file__).parents[2] / "fixtures" / "glm5_next_tiny"


class Machine:
    """A loaded tiny model and what is needed to run it."""

    def __init__(self) -> None:
        self.device = HostDevice("cpu:0", 0, 0)
        self.ops = ReferenceOps(self.device)
        self.model: LoadedModel = load_model(TINY, self.ops, self.device, lambda *_: None)

    def caches(self, **settings: int) -> CachePlan:
        config = EngineConfig(model="tiny", max_sequences=8, page_tokens=16, **settings)  # type: ignore[arg-type]
        return plan_caches(self.model.spec, config, free_bytes=1 << 28)

    def stage(self, caches: CachePlan) -> Stage:
        return Stage(
            range(len(self.model.spec.layers)),
            device=self.device,
            ops=self.ops,
            spec=self.model.spec,
            weights=self.model.weights,
            caches=caches,
        )

    def engine(self, *, step_tokens: int = 1_024, caches: CachePlan | None = None) -> Engine:
        caches = caches or self.caches()
        config = EngineConfig(model="tiny", max_sequences=8, step_tokens=step_tokens)
        return Engine(
            config,
            self.model.spec,
            Pipeline([self.stage(caches)]),
            None,
            Judge([self.device], Latch()),
        )

    def prompt(self, seed: int, tokens: int) -> tuple[int, ...]:
        """Plain ids."""
        spec = self.model.spec
        plain = [
            i for i in range(spec.usable_vocab) if i not in {*spec.vision_ids, spec.image_token}
        ]
        draw = np.random.default_rng(seed)
        return tuple(int(plain[i]) for i in draw.integers(0, len(plain), tokens))


@pytest.fixture(scope="module")
def machine() -> Machine:
    return Machine()


def ask(name: str, prompt: tuple[int, ...], max_tokens: int, temperature: float = 0.0) -> Generate:
    return Generate(
        request=RequestId(name),
        prompt=prompt,
        max_tokens=max_tokens,
        sampling=Sampling(temperature=temperature, seed=5),
    )


def answers(engine: Engine, *asks: Generate) -> dict[str, list[int]]:
    """Run all of them together; their tokens."""
    for one in asks:
        engine.add(one)
    events: list[Event] = []
    while engine.busy:
        events += engine.step()
    assert not [event for event in events if isinstance(event, Failed)]
    assert sum(isinstance(event, Finished) for event in events) == len(asks)
    return {
        one.request: [e.id for e in events if isinstance(e, Token) and e.request == one.request]
        for one in asks
    }


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_chunks_company_and_slots_do_not_change_the_tokens(
    machine: Machine, temperature: float
) -> None:
    """R30, R64, D9: alone and whole, in chunks of 16, beside others, on a used slot."""
    asks = [ask(f"r{i}", machine.prompt(i, 20 + 9 * i), 12, temperature) for i in range(6)]
    alone: dict[str, list[int]] = {}
    engine = machine.engine()
    for one in asks:
        alone |= answers(engine, one)

    assert answers(machine.engine(), *asks) == alone
    assert answers(machine.engine(step_tokens=16), *asks) == alone
    assert answers(engine, *asks) == alone


def test_a_sequence_that_was_sent_back_goes_on_with_its_own_tokens(machine: Machine) -> None:
    """Rule 89: prompt + emitted, computed again."""
    whole = machine.engine()
    asks = [ask(f"r{i}", machine.prompt(i, 8), 150) for i in range(2)]
    want = answers(whole, *asks)
    few = dataclasses.replace(machine.caches(), pages=18)

    engine = machine.engine(caches=few)

    assert answers(engine, *asks) == want
    assert engine.stats().counters["preemptions_total"] > 0


def test_a_released_slot_refuses_rows_until_a_sequence_begins_there(machine: Machine) -> None:
    """R29, R59: a failed sequence's rows cannot be read on."""
    pipeline = Pipeline([machine.stage(machine.caches())])
    rows = Work(
        request=RequestId("a"),
        slot=3,
        start=0,
        count=4,
        tokens=machine.prompt(0, 4),
        pages=(0,),
        draw=None,
        fresh=True,
    )
    pipeline.submit(StepPlan(number=1, work=(rows,)), {})
    pipeline.result(1)

    pipeline.release(3)

    later = dataclasses.replace(rows, start=4, fresh=False)
    with pytest.raises(StateReleased):
        pipeline.submit(StepPlan(number=2, work=(later,)), {})
    pipeline.submit(StepPlan(number=3, work=(rows,)), {})
    assert pipeline.result(3).number == 3


def test_steps_allocate_nothing_that_stays(machine: Machine) -> None:
    """R61, R65."""
    engine = machine.engine()
    answers(engine, ask("first", machine.prompt(0, 40), 8))
    before = machine.device.allocations

    for i in range(20):
        answers(engine, ask(f"r{i}", machine.prompt(i, 40), 4))

    assert machine.device.allocations == before


def test_the_self_test_passes(machine: Machine) -> None:
    """R98."""
    assert 0 <= machine.engine().self_test() < machine.model.spec.usable_vocab


def test_stages_of_different_capacity_are_refused(machine: Machine) -> None:
    """R104."""
    one, other = machine.caches(), machine.caches(max_context=64)

    with pytest.raises(ConfigRefused, match="different capacities"):
        Pipeline([machine.stage(one), machine.stage(other)])


def test_an_over_long_step_leaves_every_layer_as_it_was(machine: Machine) -> None:
    """R28: recurrent layers stand before the first one that counts its rows."""
    caches = machine.caches(max_context=64)
    prompt, pages = machine.prompt(3, caches.context + 1), tuple(range(caches.pages_per_sequence))

    def step(number: int, start: int, count: int) -> StepPlan:
        chunk = prompt[start : start + count]
        part = Work(
            request=RequestId("a"),
            slot=0,
            start=start,
            count=count,
            tokens=chunk,
            pages=pages,
            draw=Draw(sampling=Sampling(), choice=0, position=start + count),
            fresh=start == 0,
        )
        return StepPlan(number=number, work=(part,))

    drawn = []
    for refused in (False, True):
        pipeline = Pipeline([machine.stage(caches)])
        pipeline.submit(step(1, 0, 10), {})
        if refused:
            with pytest.raises(CapacityExceeded, match="--max-context"):
                pipeline.submit(step(2, 10, caches.context - 9), {})
            assert not pipeline.wrote
        pipeline.submit(step(3, 10, 5), {})
        drawn.append(pipeline.result(3).drawn)
    assert drawn[0] == drawn[1]
