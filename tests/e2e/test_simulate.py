"""Plans run with all devices in one process give the unsharded model's loss and gradients, whatever the plan.

The plans are of two kinds: the solver's, and random ones: every op has a random strategy, every tensor goes through
whatever collectives then lie between. Where noise must not hide a mistake, the traced program is widened to f64.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lowered import agrees, confirms, lowered, random_assignment, with_relays
from programs import Builder, trained_mlp
from torch import nn
from traced_models import values_of

from solver_shard.api import optimize
from solver_shard.costs.cluster import Cluster, load_cluster
from solver_shard.costs.model import CostModel
from solver_shard.errors import InputError, InternalError
from solver_shard.layout import Layout
from solver_shard.ops.run import run
from solver_shard.plan.evaluate import evaluate
from solver_shard.plan.plan import Plan
from solver_shard.program import Phase, Program, Role
from solver_shard.rules.rulebook import Rulebook
from solver_shard.tracing.torch import trace
from solver_shard.verification.simulate import SimulationResult, simulate

Values = dict[int, torch.Tensor]
RATE = 0.3


pytestmark = pytest.mark.usefixtures("one_thread")


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A program with values for its sources and for all its tensors, and the model's own loss and gradients."""

    program: Program
    values: Values
    reference: Values
    loss: torch.Tensor | None = None
    gradients: dict[str, torch.Tensor] | None = None


def _wide(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_wide, value))
    return "f64" if value == "f32" else value


def widened(program: Program, values: Values) -> tuple[Program, Values]:
    """The program with f64 in place of f32, so that the order of sums does not matter beyond 1e-15."""
    tensors = tuple(dataclasses.replace(t, dtype=_wide(t.dtype)) for t in program.tensors)
    ops = tuple(dataclasses.replace(op, attributes={k: _wide(v) for k, v in op.attributes.items()}) for op in program.ops)
    return (
        dataclasses.replace(program, tensors=tensors, ops=ops),
        {t: v.double() if v.is_floating_point() else v for t, v in values.items()},
    )


def of_program(program: Program) -> Case:
    torch.manual_seed(0)
    program, values = widened(program, {t: torch.randn(program.tensors[t].shape) for t in program.sources()})
    return Case(program, values, run(program, values))


def of_model(model: nn.Module, inputs: dict[str, torch.Tensor], *, wide: bool = True) -> Case:
    program = trace(model, inputs, name=type(model).__name__)
    values = values_of(program, model, inputs)
    if wide:
        program, values = widened(program, values)
    loss = model(**inputs).loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Case(program, values, run(program, values), loss.detach(), gradients)


def llama(batch: int = 8, seq: int = 16, *, wide: bool = True, **changes: int) -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
    }  # fmt: skip
    config = LlamaConfig(**(sizes | changes), use_cache=False, pad_token_id=None, bos_token_id=1, eos_token_id=2)
    ids = torch.randint(0, config.vocab_size, (batch, seq))
    labels = ids.clone()
    labels[0, : seq // 2] = -100
    return of_model(LlamaForCausalLM(config), {"input_ids": ids, "labels": labels}, wide=wide)


def gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=89, n_embd=39, n_layer=2, n_head=3, n_positions=32, use_cache=False, loss_type="ForCausalLMLoss",
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    ids = torch.randint(0, config.vocab_size, (5, 11))
    return of_model(GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids.clone()})


CASES: dict[str, Callable[[], Case]] = {
    "mlp": lambda: of_program(trained_mlp(12, 8, 20, 2)),
    "mlp in odd sizes": lambda: of_program(trained_mlp(13, 7, 23, 2)),
    "llama": llama,
    "llama in odd sizes": lambda: llama(
        5, 13, vocab_size=97, hidden_size=36, intermediate_size=50, num_hidden_layers=1, num_attention_heads=6, num_key_value_heads=3
    ),
    "gpt2 in odd sizes": gpt2,
}


@functools.cache
def case_of(name: str) -> Case:
    return CASES[name]()


def collectives_of(plan: Plan) -> Counter[tuple[str, tuple[str, ...]]]:
    """Those of reshards, and those inside ops."""
    steps = Counter((step.kind, step.axes) for reshard in plan.reshards for step in reshard.steps if step.kind != "slice")
    return steps + Counter((collective.kind, collective.axes) for op in plan.ops for collective in op.collectives)


def placed(case: Case, plan: Plan) -> Case:
    """The case with the plan's relays."""
    if not plan.relays:
        return case
    program = with_relays(case.program, plan)
    return dataclasses.replace(case, program=program, reference=run(program, case.values))


def check(case: Case, plan: Plan, *, tolerance: float = 1e-11) -> SimulationResult:
    """Run the plan: every op's results, outputs, gradients and updated parameters must be the unsharded ones, collectives the plan's."""
    case = placed(case, plan)
    result = simulate(plan, case.program, case.values, reference=case.reference, tolerance=tolerance, absolute=tolerance * 1e-3, rate=RATE)
    assert result.collectives == collectives_of(plan)
    largest = max(case.reference[g].abs().max().item() for g in case.program.gradients.values())
    for t, found in zip(case.program.outputs, result.outputs, strict=True):
        torch.testing.assert_close(found, case.reference[t], rtol=tolerance, atol=tolerance)
    for p, g in case.program.gradients.items():
        name = case.program.tensors[p].name
        torch.testing.assert_close(result.gradients[name], case.reference[g], rtol=0, atol=tolerance * largest)
        if plan.options.optimizer != "none":
            stepped = case.values[p] - RATE * case.reference[g]
            torch.testing.assert_close(result.parameters[name], stepped, rtol=tolerance, atol=tolerance * largest)
    if case.loss is not None and case.gradients is not None:  # the model itself runs in f32
        torch.testing.assert_close(result.outputs[0].float(), case.loss, rtol=1e-5, atol=0)
        for name, gradient in result.gradients.items():
            torch.testing.assert_close(gradient.float(), case.gradients[name], rtol=0, atol=2e-6 * largest)
    return result


RANDOM = [
    *[(name, mesh, 3) for name in ("mlp", "mlp in odd sizes") for mesh in ("2", "2,2", "4,2", "3,2", "2,1,2", "2,2,2")],
    *[(name, mesh, 2) for name in ("llama", "llama in odd sizes", "gpt2 in odd sizes") for mesh in ("2,2", "3,2")],
    ("llama", "4,2", 1),
    ("llama in odd sizes", "2,2,2", 1),
    ("gpt2 in odd sizes", "5", 1),
]


@pytest.mark.parametrize(("name", "mesh", "count"), RANDOM, ids=lambda value: str(value))
def test_random_plans_give_the_unsharded_step(name: str, mesh: str, count: int) -> None:
    case = case_of(name)
    made = lowered(case.program, mesh, overlap=0.25)
    kinds: Counter[str] = Counter()
    met: Counter[str] = Counter()
    for seed in range(count):
        plan = agrees(made, random_assignment(made.graph, seed))
        met.update("kept as produced" if hold.reshard is None else "kept copy" for hold in plan.holds)
        met.update("update" for reshard in plan.reshards if reshard.purpose == "update" and reshard.copy)
        result = check(case, plan)
        kinds.update({kind: n for (kind, _), n in result.collectives.items()})
    assert {"all_gather", "all_reduce", "reduce_scatter", "all_to_all"} <= kinds.keys()
    assert met.keys() == {"kept as produced", "kept copy", "update"}


def near() -> Cluster:
    """An H100 whose links answer at once, so that sharding a tiny model pays."""
    cluster = load_cluster("h100")
    levels = tuple(dataclasses.replace(level, latency_ns=5) for level in cluster.levels)
    return dataclasses.replace(cluster, launch_ns=10, levels=levels)


SOLVED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, sharded weights": ("llama", {"pins": ["*.weight=S(0),S(0)"]}),
    "llama, fully sharded over tensor parallel": (
        "llama",
        {
            "template": "dp=zero3,tp=megatron",
            "pins": [f"*{name}_proj.weight=_S(0),S(0)" for name in "qkv"]
            + ["*gate_proj.weight=dp=_S(0),tp=S(0)", "*up_proj.weight=_S(0)S(0)"],
        },
    ),
    "llama, other orders": ("llama", {"pins": ["*proj.weight=dp=_S(0)", "grad(*down_proj.weight)=_S(1)S(1)"]}),
    "gpt2, both orders": ("gpt2 in odd sizes", {"pins": ["*c_fc.weight=_S(1),S(1)", "*.bias=_S(0)S(0)"]}),
    "llama, batch and columns": ("llama", {"pins": ["input_ids=S(0),R", "*q_proj.weight=R,S(0)", "*o_proj.weight=R,S(1)"]}),
    "llama, cut sequence": ("llama", {"pins": ["input_ids=R,S(1)", "labels=R,S(1)"], "overlap": 0.5}),
    "llama, little memory": ("llama", {"memory": "1500KiB", "reserve": 0}),
    "gpt2": ("gpt2 in odd sizes", {"tied": False}),
    "mlp, least memory": ("mlp", {"objective": "memory"}),
}


@pytest.mark.parametrize(("name", "options"), SOLVED.values(), ids=SOLVED.keys())
def test_solved_plans_give_the_unsharded_step(name: str, options: dict[str, Any]) -> None:
    case = case_of(name)
    plan = optimize(case.program, mesh="dp=2,tp=2", cluster=near(), gap=0.05, time_limit=15, **options)
    check(case, plan)
    costs = CostModel(plan.mesh, plan.cluster, overlap=plan.options.overlap)
    found = evaluate(plan, with_relays(case.program, plan), Rulebook(), costs)
    confirms(found, plan)
    assert found.objective == plan.certificate.objective
    assert found.peak <= plan.options.memory_limit
    assert collectives_of(plan)


def test_a_llama_in_its_own_precision_gives_the_loss_and_the_gradients() -> None:
    case = llama(wide=False)
    plan = optimize(case.program, mesh="dp=2,tp=2", cluster=near(), pins=["*proj.weight=S(0),S(1)"], gap=0.05, time_limit=15)
    result = check(case, plan, tolerance=1e-5)
    kinds = {kind for kind, _ in result.collectives}
    assert {"all_gather", "reduce_scatter"} <= kinds


def test_a_plan_needs_a_value_of_the_right_shape_for_every_source() -> None:
    case = case_of("mlp")
    made = lowered(case.program, "2")
    plan = made.plan(random_assignment(made.graph, 0))
    with pytest.raises(InputError, match=r"'x' needs a value of shape \[12, 8\], got none"):
        simulate(plan, case.program, {t: v for t, v in case.values.items() if t})
    with pytest.raises(InputError, match=r"'x' needs a value of shape \[12, 8\], got \[12\]"):
        simulate(plan, case.program, {**case.values, 0: torch.ones(12)})


def _mislabelled(plan: Plan, i: int, layout: str) -> Plan:
    """The plan as a wrong rule would make it: op ``i`` said to leave its first result in another layout."""
    ops, reshards = list(plan.ops), list(plan.reshards)
    ops[i] = dataclasses.replace(ops[i], result_layouts=(Layout.parse(layout), *ops[i].result_layouts[1:]))
    return dataclasses.replace(plan, ops=tuple(ops), reshards=tuple(reshards))


@pytest.mark.parametrize(
    ("strategy", "layout", "message"),
    [
        ("c", "R", "should hold the same of a tensor in layout R"),
        ("c", "P(avg)", r"op 0 .*, with strategies c, does not make 'v\d+', .* as the unsharded step does: difference"),
        (
            "c",
            "S(0)",
            r"op 0 \(aten.einsum.default, model\), with strategies c, on device 0, made \(12, 20\) where its device holds \(6, 20\)",
        ),
    ],
)
def test_a_wrong_rule_is_found_out(strategy: str, layout: str, message: str) -> None:
    case = case_of("mlp")
    made = lowered(case.program, "2")
    plans = (made.plan(random_assignment(made.graph, seed)) for seed in range(200))
    plan = next(plan for plan in plans if plan.ops[0].strategy == (strategy,))
    with pytest.raises(InternalError, match=message):
        simulate(_mislabelled(plan, 0, layout), case.program, case.values, reference=case.reference)


def test_later_readers_have_nothing_but_what_is_kept() -> None:
    case = case_of("mlp")
    made = lowered(case.program, "2,2")
    plans = (made.plan(random_assignment(made.graph, seed)) for seed in range(200))
    plan = next(plan for plan in plans if plan.holds[0].reshard is not None)
    late = next(k for k, r in enumerate(plan.reshards) if r.tensor == plan.holds[0].tensor and r.purpose == "backward")
    holds = (dataclasses.replace(plan.holds[0], reshard=late), *plan.holds[1:])
    with pytest.raises(InternalError, match=r"nothing is left of '.*' for its backward readers"):
        simulate(dataclasses.replace(plan, holds=holds), case.program, case.values)


def test_an_input_that_is_returned_may_be_stored_and_returned_in_different_layouts() -> None:
    b = Builder()
    x, w = b.input("x", 8, 6), b.weight("w", 4, 6)
    program = b.program(b.einsum("ac,bc->ab", x, w, role=Role.OUTPUT, result="output"), x)
    values = {t: torch.randn(program.tensors[t].shape) for t in program.sources()}
    made = lowered(program, "2,2")
    for seed in range(8):
        plan = made.plan(random_assignment(made.graph, seed))
        made.evaluate(plan)
        product, same = simulate(plan, program, values, reference=run(program, values)).outputs
        torch.testing.assert_close(product, values[x] @ values[w].T)
        assert torch.equal(same, values[x])


@pytest.mark.parametrize("again", [False, True])
def test_a_gradient_may_be_what_the_forward_pass_made(again: bool) -> None:
    """The gradient of w in sum(w * relu(x)) is relu(x)."""
    b = Builder()
    x, w = b.input("x", 8, 6), b.weight("w", 8, 6, trainable=True)
    h = b.relu(x)
    product = b.einsum("ab,ab->", h, w, role=Role.OUTPUT, result="loss")
    outputs = (product, b.relu(h, phase=Phase.BACKWARD, role=Role.OUTPUT, result="more")) if again else (product,)
    program = b.program(*outputs, gradients={w: h})
    values = {t: torch.randn(program.tensors[t].shape) for t in program.sources()}
    for optimizer in ("adamw", "none"):
        made = lowered(program, "2,2", optimizer=optimizer)
        for seed in range(8):
            plan = agrees(made, random_assignment(made.graph, seed))
            assert bool(plan.holds) == again
            result = simulate(plan, program, values, reference=run(program, values))
            torch.testing.assert_close(result.gradients["w"], values[x].relu())
