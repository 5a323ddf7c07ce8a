"""Problems without a plan, from the traced model to the message: the pins, times and ops that conflict, and what dropping a pin gives."""

from __future__ import annotations

import functools
from typing import Any

import model_zoo
import pytest
import torch
from programs import mlp

import solver_shard
from solver_shard.cli import main
from solver_shard.errors import InfeasibleError
from solver_shard.plan.plan import Plan
from solver_shard.program import Program, Role
from solver_shard.tracing.load import program_of

pytestmark = pytest.mark.usefixtures("one_thread")

KIB = 1024


@functools.cache
def gpt2() -> Program:
    """The forward pass of two layers, without a loss."""
    model, inputs = model_zoo.make("gpt2")
    return program_of(model, {"input_ids": inputs["input_ids"]}, forward_only=True)[0]


def plan_of(program: Program, **options: Any) -> Plan:
    options = {"mesh": "4", "forward_only": not program.gradients, "time_limit": 300.0, "gap": 0.05, **options}
    return solver_shard.optimize(program, **options)


def refused(program: Program, **options: Any) -> InfeasibleError:
    with pytest.raises(InfeasibleError) as caught:
        plan_of(program, **options)
    return caught.value


REPLICATED = ("*.c_fc.weight=R", "*.wte.weight=R", "input_ids=S(0)")
"""The first two keep 370 KiB each, together 466 KiB: 96 KiB of a weight that would be cut by four are kept whole."""


def test_pins_that_force_replication_above_the_limit() -> None:
    error = refused(gpt2(), memory=420 * KIB, reserve=0, pins=REPLICATED)
    found = error.conflict
    assert found is not None
    assert found.pins == REPLICATED[:2]
    assert found.minimal
    assert len(found.times) == 1
    running, most, least = found.times[0]
    assert "(forward)" in running
    assert most is not None
    assert 420 * KIB < least <= most
    for dropped, pin in zip(found.dropped, found.pins, strict=True):
        assert dropped.pin == pin
        assert dropped.nanoseconds is not None
        assert dropped.bound is not None
        assert dropped.peak is not None
        assert dropped.peak <= 420 * KIB
    plan = plan_of(gpt2(), memory=420 * KIB, reserve=0, pins=REPLICATED[1:])
    first = found.dropped[0]
    assert (first.bound or 0) <= plan.costs.total_ns
    assert plan.certificate.bound <= (first.nanoseconds or 0)
    said = "\n".join([str(error), *error.details])
    assert "drop or loosen a pin ('*.c_fc.weight=R', '*.wte.weight=R')" in said
    assert "with '*.c_fc.weight=R', '*.wte.weight=R', a device needs at least" in said
    assert "no part in this conflict have 'input_ids=S(0)'" in said
    assert "transformer.wte.weight (parameters) 128 KiB" in said


def test_a_limit_below_every_plan_blames_no_pin() -> None:
    error = refused(gpt2(), memory=200 * KIB, reserve=0, pins=REPLICATED)
    found = error.conflict
    assert found is not None
    assert found.pins == ()
    assert found.times
    (without,) = found.dropped
    assert without.pin is None
    assert without.nanoseconds is None
    assert without.proven
    assert without.peak_bound is not None
    assert without.peak_bound > 200 * KIB
    assert "drop or loosen a pin" not in str(error)
    assert any(line.startswith("even without pins, a device needs at least") for line in error.details)


def test_two_pins_that_fight() -> None:
    """One cuts the sequence in the last block, the other wants whole logits, and the template gathers nothing in between."""
    pins = ["transformer.h.0:out=R", "transformer.h.1.mlp.c_fc:out=S(1)", "lm_head:out=R"]
    error = refused(gpt2(), template="replicate", pins=pins)
    found = error.conflict
    assert found is not None
    assert (found.pins, found.times, found.minimal) == (tuple(pins[1:]), (), True)
    assert all(dropped.nanoseconds is not None for dropped in found.dropped)
    assert found.ops[0].startswith("transformer.h.1.mlp.act: aten.mul.Tensor")
    assert found.ops[-1].startswith("lm_head: ")
    for pin in pins[1:]:
        assert plan_of(gpt2(), template="replicate", pins=[text for text in pins if text != pin]).costs.total_ns > 0
    assert "keeps the pins 'transformer.h.1.mlp.c_fc:out=S(1)', 'lm_head:out=R', and is of the template 'replicate'" in str(error)


class Summed(torch.nn.Module):  # type: ignore[misc]  # torch is not checked
    """Running sums over the rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(0)


def test_a_template_that_cannot_be_met_names_the_ops_that_block_it() -> None:
    """Data parallelism cuts the rows and gathers none; running sums over them read all."""
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(256, 1024, bias=False), Summed(), torch.nn.Linear(1024, 256, bias=False))
        program, _ = program_of(model, (torch.empty(64, 256),), forward_only=True)
    error = refused(program, template="ddp")
    assert error.conflict is not None
    assert error.conflict.ops == ("0: aten.einsum.default (forward)",)  # its result is cut, and its reader has it whole
    assert "with the template this op cannot run: 0: aten.einsum.default (forward)" in error.details[0]


@pytest.mark.parametrize("tied", [True, False])
def test_pins_of_single_layers(tied: bool) -> None:
    """Four equal weights: the limit is exceeded with all of them whole, not with any three, and ties do not hide which are."""
    program = mlp(64, 64, 256, 2)
    weights = [program.tensors[t].name for t in program.sources() if program.tensors[t].role is Role.PARAMETER]
    pins = [f"{name}=R" for name in weights]
    three, four = (plan_of(program, pins=some, tied=tied, objective="memory").memory.peak for some in (pins[:3], pins))
    assert three + 32 * KIB < four
    error = refused(program, memory=four - 16 * KIB, reserve=0, pins=[*pins, "x=S(0)"], tied=tied)
    assert error.conflict is not None
    assert len(pins) == 4
    assert error.conflict.pins == tuple(pins)
    assert all(dropped.nanoseconds is not None for dropped in error.conflict.dropped)


def test_a_work_limit_gives_the_same_conflict_every_time() -> None:
    options = {"memory": 420 * KIB, "reserve": 0, "pins": REPLICATED, "work_limit": 5.0}
    first, again = refused(gpt2(), **options), refused(gpt2(), **options)
    assert first.conflict is not None
    assert (first.details, first.conflict) == (again.details, again.conflict)


def test_the_command_line_says_it_and_exits_with_3(capsys: pytest.CaptureFixture[str]) -> None:
    """Two weights of 64 KiB: both whole on every device need 313 KiB at least, one of them 297 KiB or less."""
    words = (
        "solve entry_models:mlp --mesh 4 --memory 300KiB --reserve 0 --pin up.weight=R --pin down.weight=R --pin x=S(0) --time-limit 300"
        " --optimizer adamw-fused"
    )
    assert main([*words.split(), "-q"]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert "drop or loosen a pin ('up.weight=R', 'down.weight=R')\n" in err
    assert "\n  with 'up.weight=R', 'down.weight=R', a device needs at least " in err
    assert "\n  without 'up.weight=R': a plan of " in err
    assert "\n  without 'down.weight=R': a plan of " in err
    assert "\n  no part in this conflict have 'x=S(0)'\n" in err
