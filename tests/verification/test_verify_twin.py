"""What is run for a plan: itself where it is small, else a twin with the same decisions; and what is said of the difference."""

from __future__ import annotations

import dataclasses
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lowered import lowered
from points import random_point
from traced_models import MLP, squares

from solver_shard.api import optimize
from solver_shard.errors import InputError, InternalError
from solver_shard.graph.narrowing import Narrowing
from solver_shard.mesh import Mesh
from solver_shard.plan.plan import Plan
from solver_shard.tracing.huggingface import filled_config
from solver_shard.tracing.torch import trace
from solver_shard.verification import verify
from solver_shard.verification.subject import subject_of
from solver_shard.verification.twin import Sizes, kinds_of_layers, prepare, shrink, transfer, twin_mesh

pytestmark = pytest.mark.usefixtures("one_thread")

GPT2 = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 211, "n_embd": 48, "n_layer": 2, "n_head": 6,
    "n_positions": 48, "bos_token_id": 200, "eos_token_id": 200,
}  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpt2") / "config.json"
    path.write_text(json.dumps(GPT2))
    return path


@pytest.fixture(scope="module")
def planned(config: Path) -> Plan:
    """On more devices than a twin has."""
    return optimize(config, batch=8, seq=24, mesh="dp=4,tp=2", dtype="f32", template="dp=zero3,tp=megatron", time_limit=10)


@pytest.mark.parametrize(
    ("mesh", "processes", "made"),
    [
        ("dp=32,tp=8", None, "dp=2,tp=2"),
        ("dp=32,tp=8", 8, "dp=2,tp=4"),
        ("dp=32,tp=8", 16, "dp=2,tp=8"),
        ("dp=32,tp=8", 32, "dp=4,tp=8"),
        ("dp=1,tp=3", None, "dp=1,tp=2"),
        ("dp=1,tp=3", 3, "dp=1,tp=3"),
        ("dp=4,tp=8x2", None, "dp=2,tp=2x2"),
    ],
)
def test_every_axis_is_cut_to_two_or_to_what_makes_the_processes(mesh: str, processes: int | None, made: str) -> None:
    assert str(twin_mesh(Mesh.parse(mesh), processes)) == made


def test_processes_that_no_parts_of_the_axes_make_are_refused() -> None:
    with pytest.raises(InputError, match=r"cannot be cut to 6 processes, .* legal: 4, 8, 16"):
        twin_mesh(Mesh.parse("dp=4,tp=4"), 6)


@pytest.mark.parametrize(
    ("size", "target", "made"), [(14336, 200, 200), (50257, 200, 199), (8, 1, 4), (12, 1, 6), (4096, 64, 64), (3, 9, 3)]
)
def test_a_size_divides_as_it_did(size: int, target: int, made: int) -> None:
    assert Sizes(mesh=Mesh.parse("dp=4,tp=2"), twin=Mesh.parse("dp=2,tp=2")).fit(size, target) == made


@given(size=st.integers(1, 2000), target=st.integers(1, 64), axes=st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_what_could_be_cut_evenly_still_can(size: int, target: int, axes: list[int]) -> None:
    mesh = Mesh.parse(",".join(str(2**n) for n in axes))
    sizes = Sizes(mesh=mesh, twin=twin_mesh(mesh))
    found = sizes.fit(size, target)
    for n, m in zip(mesh.shape, sizes.twin.shape, strict=True):
        assert size % n != 0 or found % m == 0
    assert size % mesh.size != 0 or found % sizes.twin.size == 0


def test_the_config_of_a_twin_is_small_and_in_proportion(planned: Plan, config: Path) -> None:
    small = shrink(filled_config(config), planned, twin_mesh(planned.mesh), None)
    made = small.config
    assert (made["n_layer"], made["n_head"], made["n_embd"] % made["n_head"]) == (1, 2, 0)
    assert made["vocab_size"] % 2 == 1
    assert made["bos_token_id"] < made["vocab_size"]
    assert made["n_positions"] >= small.seq == 16
    assert (made["attn_pdrop"], made["resid_pdrop"]) == (0.0, 0.1)  # there is no kernel for the one, the other draws by position
    quarter = shrink(filled_config(config), planned, twin_mesh(planned.mesh), Fraction(1, 4))
    assert quarter.config["n_embd"] < made["n_embd"]
    assert quarter.words < small.words


def test_layers_of_one_kind_are_one(planned: Plan) -> None:
    assert kinds_of_layers(planned) == 1
    other = next(i for i, op in enumerate(planned.ops) if ".h.1." in op.module and op.phase == "forward")
    ops = (*planned.ops[:other], *planned.ops[other + 1 :])
    assert kinds_of_layers(dataclasses.replace(planned, ops=ops)) == 2


def test_a_twin_carries_every_decision_and_holds(planned: Plan, config: Path) -> None:
    said: list[str] = []
    verdict = verify(planned, config, twin=True, progress=said.append)
    assert verdict.holds, str(verdict)
    assert "carrying the plan to dp=2,tp=2" in said
    text = str(verdict)
    assert "mesh dp=4,tp=2 -> dp=2,tp=2" in text
    assert "n_layer 2 -> 1" in text
    assert "attention dropout off (attn_pdrop)" in text
    assert "floats of f32 -> f64" in text
    case = prepare(planned, str(config), twin=True)
    layouts = case.plan.layouts
    assert all(layouts[name] == planned.layouts[name] for name in layouts if name.endswith((".weight", ".bias")))
    assert case.changes[-1].endswith("decisions carried"), case.changes
    assert "left to the solver" not in " ".join(case.changes)


@pytest.mark.parametrize("mesh", ["4", "2,2", "2,2,2"])
def test_the_same_program_on_the_same_mesh_gets_the_same_plan(mesh: str) -> None:
    program = trace(MLP(9, 14), {"x": torch.zeros(12, 9)}, name="mlp", loss_fn=squares)
    for microbatches, clip in ((1, False), (2, True)):
        made = lowered(program, mesh, microbatches=microbatches, clip=clip)
        for seed in range(3):
            plan = made.plan(random_point(made.graph, seed))
            found = transfer(plan, program, plan.mesh)
            assert not found.left
            assert (found.plan.tensors, found.plan.ops, found.plan.clip) == (plan.tensors, plan.ops, plan.clip)
            assert [(r.source, r.layout, r.steps, r.copy) for r in found.plan.reshards] == [
                (r.source, r.layout, r.steps, r.copy) for r in plan.reshards
            ]
            assert [(h.tensor, h.reshard, h.layout) for h in found.plan.holds] == [(h.tensor, h.reshard, h.layout) for h in plan.holds]


def test_decisions_that_cannot_be_had_are_left_and_named() -> None:
    wide = trace(MLP(8, 16), {"x": torch.zeros(8, 8)}, name="mlp", loss_fn=squares)
    made = lowered(wide, "4")
    cut = next(v for v, node in enumerate(made.lowering.nodes) if made.graph.names[v] == "source up.bias")
    layout = next(k for k, x in enumerate(made.lowering.nodes[cut].layouts) if str(x) == "S(0)")
    plan = made.plan(random_point(made.graph, 0, {cut: layout}))
    narrow = trace(MLP(8, 3), {"x": torch.zeros(8, 8)}, name="mlp", loss_fn=squares)
    found = transfer(plan, narrow, plan.mesh)
    assert any("up.bias" in said for said in found.left)
    assert found.carried > 0


def test_random_points_are_drawn_by_seed_and_keep_what_is_fixed() -> None:
    program = trace(MLP(8, 16), {"x": torch.zeros(8, 8)}, name="mlp", loss_fn=squares)
    graph = lowered(program, "2,2").graph
    assert random_point(graph, 1) == random_point(graph, 1) != random_point(graph, 2)
    assert all(graph.allowed(random_point(graph, seed)) for seed in range(5))
    assert random_point(graph, 1, {0: 3})[0] == 3
    narrowing = Narrowing(graph)
    assert narrowing.only(0, 3)
    assert not narrowing.only(0, 2)
    assert narrowing.left[0].sum() == 1
    with pytest.raises(InternalError, match="do not fit together"):
        random_point(graph, 1, {v: 0 if v % 2 else len(graph.node_costs(v)) - 1 for v in range(graph.size)})


# A model of the user's own


def _of(width: int, batch: int = 16) -> tuple[Any, dict[str, torch.Tensor]]:
    return MLP(width, 2 * width), {"x": torch.zeros(batch, width)}


def test_a_small_plan_is_run_as_it_is_and_a_large_mesh_is_cut() -> None:
    model, x = _of(12)
    small = optimize(model, x, mesh="4", loss_fn=squares, template="zero3", time_limit=5)
    assert prepare(small, model, x, loss_fn=squares).plan is small
    large = optimize(model, x, mesh="dp=4,tp=4", loss_fn=squares, template="dp=zero3,tp=replicate", time_limit=5)
    case = prepare(large, model, x, loss_fn=squares)
    assert case.plan.mesh == Mesh.parse("dp=2,tp=2")
    assert case.changes[0] == "mesh dp=4,tp=4 -> dp=2,tp=2"
    assert verify(large, model, x, loss_fn=squares).holds


def test_another_model_is_refused_unless_a_twin_is_asked_for() -> None:
    model, x = _of(24)
    plan = optimize(model, x, mesh="2", loss_fn=squares, template="zero3", time_limit=5)
    other, y = _of(12)
    with pytest.raises(InputError, match=r"the model is not the one .* parameter 'up.weight' f32\[48, 24\].*give the same model"):
        verify(plan, other, y, loss_fn=squares)
    verdict = verify(plan, other, y, loss_fn=squares, twin=True)
    assert verdict.holds, str(verdict)
    assert "the model given is another one" in str(verdict)


def test_weights_without_values_are_drawn_and_told() -> None:
    with torch.device("meta"):
        model = MLP(8, 12)
    case = subject_of(model, {"x": torch.zeros(4, 8)}, name="mlp", loss_fn=squares)
    assert case.notes == ("4 weights and buffers without values were drawn",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"processes": 3, "twin": False}, r"the plan is for 2 devices \(d0=2\), 3 processes were asked; give --processes 2"),
        ({"processes": 0}, "0 processes were asked; give a whole number, 1 to 64"),
        ({"scale": "2"}, "scale '2' is not legal"),
        ({"scale": "1/0"}, "scale '1/0' is not legal"),
        ({"scale": 0.5}, "a scale is for a twin"),
        ({"scale": 0.5, "twin": True}, "a model of your own cannot be scaled"),
    ],
)
def test_wrong_use(options: dict[str, Any], message: str) -> None:
    model, x = _of(12)
    plan = optimize(model, x, mesh="2", loss_fn=squares, template="ddp", time_limit=5)
    with pytest.raises(InputError, match=message):
        verify(plan, model, x, loss_fn=squares, **options)


def test_a_preset_needs_a_plan_of_a_preset() -> None:
    model, x = _of(12)
    plan = optimize(model, x, mesh="2", loss_fn=squares, template="ddp", time_limit=5)
    for twin in (True, False):
        with pytest.raises(InputError, match="the plan was not made from a preset or config"):
            verify(plan, "gpt2", twin=twin)
    with pytest.raises(InputError, match="example inputs for MLP are missing"):
        verify(plan, model)
