"""Steps of several microbatches, gradients in a reduce dtype, and clipping: plans run on all devices give the unsharded step."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

import pytest
import torch
from lowered import agrees, confirms, lowered, random_assignment, with_relays
from programs import Builder, trained_mlp
from traced_models import values_of

from solver_shard.api import optimize
from solver_shard.costs.cluster import Cluster, load_cluster
from solver_shard.costs.model import CostModel
from solver_shard.errors import InputError, InternalError
from solver_shard.ops.run import run
from solver_shard.plan.evaluate import evaluate
from solver_shard.plan.plan import Plan
from solver_shard.program import Phase, Program, Role
from solver_shard.rules.rulebook import Rulebook
from solver_shard.tracing.torch import trace
from solver_shard.verification.simulate import SimulationResult, simulate

Values = dict[int, torch.Tensor]
RATE, MAX_NORM = 0.3, 0.5

pytestmark = pytest.mark.usefixtures("one_thread")


def microbatches(program: Program, count: int) -> tuple[list[Values], list[Values]]:
    """Values of every microbatch, which share their parameters, and what the program makes of them."""
    generator = torch.Generator().manual_seed(0)
    stored = {t: torch.randn(program.tensors[t].shape, generator=generator) * 0.3 for t in program.sources()}
    inputs = [t for t in program.sources() if program.tensors[t].role.value == "input"]
    values = [stored | {t: torch.randn(program.tensors[t].shape, generator=generator) for t in inputs} for _ in range(count)]
    return values, [run(program, batch) for batch in values]


def collectives_of(plan: Plan) -> Counter[tuple[str, tuple[str, ...]]]:
    """Those of a whole step: of every microbatch, and of the update."""
    found: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for reshard in plan.reshards:
        for step in reshard.steps:
            if step.kind != "slice":
                found[step.kind, step.axes] += plan.runs(reshard)
    for op in plan.ops:
        for collective in op.collectives:
            found[collective.kind, collective.axes] += plan.options.microbatches
    if plan.clip is not None:
        found[plan.clip.kind, plan.clip.axes] += 1
    return found


def check(plan: Plan, program: Program, values: list[Values], reference: list[Values], tolerance: float) -> SimulationResult:
    """Outputs of every microbatch, mean gradients, their norm, updated parameters and collectives are those of the unsharded step."""
    one = len(values) == 1
    result = simulate(
        plan, program, values[0] if one else values, reference=reference[0] if one else reference, rate=RATE, max_norm=MAX_NORM
    )
    assert result.collectives == collectives_of(plan)
    for k, found in enumerate(result.outputs):
        batch, t = divmod(k, len(program.outputs))
        torch.testing.assert_close(found, reference[batch][program.outputs[t]], rtol=1e-5, atol=1e-5)
    mean = {p: sum(batch[g] for batch in reference) / len(reference) for p, g in program.gradients.items()}
    norm = math.sqrt(sum(float(g.square().sum()) for g in mean.values()))
    largest = max(float(g.abs().max()) for g in mean.values())
    scale = 1.0
    if plan.options.clip:
        assert result.norm == pytest.approx(norm, rel=max(1e-5, tolerance))
        scale = min(1.0, MAX_NORM / (norm + 1e-6))
        assert scale < 0.9
    for p, gradient in mean.items():
        name = program.tensors[p].name
        torch.testing.assert_close(result.gradients[name].float(), scale * gradient, rtol=0, atol=tolerance * scale * largest)
        if plan.options.optimizer != "none":
            stepped = values[0][p] - RATE * scale * gradient
            torch.testing.assert_close(result.parameters[name], stepped, rtol=1e-5, atol=RATE * tolerance * scale * largest)
    return result


CASES: dict[str, tuple[dict[str, Any], float]] = {
    "accumulated": ({"microbatches": 3}, 1e-5),
    "accumulated and clipped": ({"microbatches": 2, "clip": True, "overlap": 0.5}, 1e-5),
    "clipped": ({"clip": True}, 1e-5),
    "reduced in bf16": ({"reduce_dtype": "bf16"}, 5e-2),
    "accumulated in bf16, clipped": ({"microbatches": 2, "reduce_dtype": "bf16", "clip": True}, 5e-2),
    "without an optimizer": ({"microbatches": 2, "optimizer": "none"}, 1e-5),
}


@pytest.mark.parametrize(("options", "tolerance"), CASES.values(), ids=CASES.keys())
def test_random_plans_give_the_unsharded_step(options: dict[str, Any], tolerance: float) -> None:
    program = trained_mlp(13, 8, 20, 2)
    values, reference = microbatches(program, options.get("microbatches", 1))
    met: Counter[str] = Counter()
    for mesh in ("2,2", "3,2"):
        made = lowered(program, mesh, **options)
        for seed in range(8):
            plan = agrees(made, random_assignment(made.graph, seed))
            check(plan, program, values, reference, tolerance)
            for reshard in plan.reshards:
                if reshard.purpose == "accumulate":
                    met["unreduced" if any(p.is_partial for p in reshard.layout) else "reduced"] += 1
                    met["as made" if not reshard.copy else "resharded"] += 1
                elif reshard.purpose == "optimizer":
                    met["to a copy" if reshard.nbytes else "in place"] += 1
            met["norm over some axes" if plan.clip else "norm of whole states"] += 1
    if options.get("microbatches", 1) > 1 and plan.options.optimizer != "none":
        assert {"unreduced", "reduced", "as made", "resharded", "to a copy", "in place"} <= met.keys()
    assert not options.get("clip") or met["norm over some axes"]


def near() -> Cluster:
    """An H100 whose links answer at once, so that sharding a tiny model pays."""
    cluster = load_cluster("h100")
    levels = tuple(dataclasses.replace(level, latency_ns=5) for level in cluster.levels)
    return dataclasses.replace(cluster, launch_ns=10, levels=levels)


@pytest.mark.parametrize("pins", [(), ("*proj.weight=S(0),S(1)",)], ids=["free", "cut weights"])
def test_a_llama_in_two_microbatches_gives_the_mean_gradients_of_its_own(pins: tuple[str, ...]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=32, use_cache=False, pad_token_id=None, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    batches = [{"input_ids": ids, "labels": ids.clone()} for ids in (torch.randint(0, 64, (4, 8)) for _ in range(2))]
    program = trace(model, batches[0], name="llama")
    plan = optimize(
        program, mesh="dp=2,tp=2", cluster=near(), microbatches=2, reduce_dtype="f32", clip=True, pins=pins, gap=0.05, time_limit=15
    )
    program = with_relays(program, plan)
    found = evaluate(plan, program, Rulebook(), CostModel(plan.mesh, plan.cluster))
    confirms(found, plan)
    assert found.objective == plan.certificate.objective
    values = [values_of(program, model, batch) for batch in batches]
    result = check(plan, program, values, [run(program, batch) for batch in values], 1e-5)
    for batch in batches:
        (model(**batch).loss / 2).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    assert result.norm == pytest.approx(float(norm), rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(result.gradients[name], parameter.grad, rtol=0, atol=1e-5)


def test_a_norm_that_leaves_out_an_axis_is_found_out() -> None:
    program = trained_mlp(12, 8, 20, 1)
    values, reference = microbatches(program, 1)
    made = lowered(program, "2,2", clip=True)
    plans = (made.plan(random_assignment(made.graph, seed)) for seed in range(50))
    plan = next(p for p in plans if p.clip is not None and any(t.state is not None and t.state[0].is_shard for t in p.tensors))
    assert plan.clip is not None
    broken = dataclasses.replace(plan, clip=dataclasses.replace(plan.clip, axes=("d1",)))
    with pytest.raises(InternalError, match="states are cut by"):
        made.evaluate(broken)
    with pytest.raises(InternalError, match="devices find different gradient norms"):
        simulate(broken, program, values[0], reference=reference[0])


def test_as_many_values_as_microbatches_are_needed() -> None:
    program = trained_mlp(12, 8, 20, 1)
    values, _ = microbatches(program, 2)
    made = lowered(program, "2", microbatches=2)
    plan = made.plan(random_assignment(made.graph, 0))
    with pytest.raises(InputError, match=r"values of 1 microbatches .* give a list of 2"):
        simulate(plan, program, values[0])


@pytest.mark.parametrize("options", [{"microbatches": 2, "clip": True}, {"reduce_dtype": "bf16"}, {"microbatches": 2, "optimizer": "none"}])
def test_a_gradient_may_be_of_two_parameters_and_made_by_the_forward_pass(options: dict[str, Any]) -> None:
    """The gradient of v and of w in sum(v * relu(x)) + sum(w * relu(x)) is relu(x), which is read again in the backward pass."""
    b = Builder()
    x, v, w = b.input("x", 8, 6), b.weight("v", 8, 6, trainable=True), b.weight("w", 8, 6, trainable=True)
    h = b.relu(x)
    loss = b.add(b.einsum("ab,ab->", h, v), b.einsum("ab,ab->", h, w), role=Role.OUTPUT, result="loss")
    more = b.relu(h, phase=Phase.BACKWARD, role=Role.OUTPUT, result="more")
    program = b.program(loss, more, gradients={v: h, w: h})
    values, reference = microbatches(program, options.get("microbatches", 1))
    made = lowered(program, "2,2", **options)
    for seed in range(6):
        plan = agrees(made, random_assignment(made.graph, seed))
        check(plan, program, values, reference, 5e-2 if "reduce_dtype" in options else 1e-5)
