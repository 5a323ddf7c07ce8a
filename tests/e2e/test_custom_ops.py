"""A user's own ops get rules from a file, or from what is registered with DTensor, and are sharded like any other."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._ops.single_dim_strategy import _ShardingPlaceholder, register_single_dim_strategy
from torch.distributed.tensor.experimental import register_sharding
from traced_models import values_of

from solver_shard.api import optimize
from solver_shard.cli import main
from solver_shard.costs.cluster import Cluster, load_cluster
from solver_shard.costs.model import CostModel
from solver_shard.errors import InputError, RuleError
from solver_shard.ops.run import arguments_of, call, call_with, run
from solver_shard.plan.evaluate import evaluate
from solver_shard.plan.io import load_plan
from solver_shard.plan.plan import Plan
from solver_shard.program import Program
from solver_shard.rules.check.shards import verify
from solver_shard.rules.rulebook import Rulebook, build_rule
from solver_shard.rules.table import load_table
from solver_shard.tracing.torch import trace
from solver_shard.verification.simulate import simulate

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = """
# x[b, s, h] times a weight per column, and its gradients
"shard_test.scaled.default" = { dims = "b s h, h -> b s h", linear = ["x", "weight"] }
"shard_test.scaled_backward.default" = { dims = "b s h, b s h, h -> b s h, h", reduce = { b = "sum", s = "sum" }, linear = "gradient" }
"""


@torch.library.custom_op("shard_test::scaled", mutates_args=())
def scaled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * weight


@torch.library.custom_op("shard_test::scaled_backward", mutates_args=())
def scaled_backward(gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return gradient * weight, (gradient * x).sum((0, 1))


@torch.library.custom_op("shard_test::rows", mutates_args=())
def rows(x: torch.Tensor, scale: float) -> torch.Tensor:
    return x.softmax(-1) * scale


@torch.library.custom_op("shard_test::product", mutates_args=())
def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight


scaled.register_fake(lambda x, weight: torch.empty_like(x))
scaled_backward.register_fake(lambda gradient, x, weight: (torch.empty_like(x), torch.empty_like(weight)))
rows.register_fake(lambda x, scale: torch.empty_like(x))
product.register_fake(lambda x, weight: x.new_empty(*x.shape[:-1], weight.shape[1]))
scaled.register_autograd(
    lambda context, gradient: torch.ops.shard_test.scaled_backward(gradient, *context.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@register_sharding(torch.ops.shard_test.rows.default)
def shard_rows(x, scale):  # type: ignore[no-untyped-def]  # as DTensor's own example
    every = [([Replicate()], [Replicate(), None])]
    return every + [([Shard(d)], [Shard(d), None]) for d in range(x.ndim - 1)]


@register_single_dim_strategy(torch.ops.shard_test.product.default)
def shard_product(op, args, kwargs):  # type: ignore[no-untyped-def]
    last = len(args[0].shape) - 1
    return [
        *([_ShardingPlaceholder(d), _ShardingPlaceholder(d), Replicate()] for d in range(last)),
        [_ShardingPlaceholder(last), Replicate(), _ShardingPlaceholder(1)],
        [Partial(), _ShardingPlaceholder(last), _ShardingPlaceholder(0)],
        [Partial(), Partial(), Replicate()],
    ]


class Model(nn.Module):
    """Two matrices with a custom op between them."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.weight = nn.Parameter(torch.randn(4 * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down(torch.ops.shard_test.scaled(self.up(x), self.weight)) ** 2).mean()


def near() -> Cluster:
    """An H100 whose links answer at once, so that sharding a tiny model pays."""
    cluster = load_cluster("h100")
    return dataclasses.replace(cluster, launch_ns=10, levels=tuple(dataclasses.replace(x, latency_ns=5) for x in cluster.levels))


def program() -> tuple[Program, Model, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model, inputs = Model(16).double(), {"x": torch.randn(8, 4, 16, dtype=torch.float64)}
    return trace(model, inputs, name="custom"), model, inputs


def planned(found: Program, **options: object) -> Plan:
    plan: Plan = optimize(found, mesh="dp=2,tp=2", cluster=near(), gap=0.05, time_limit=15, **options)  # type: ignore[arg-type]
    return plan


def file(folder: Path, text: str = ROWS) -> Path:
    path = folder / "my_ops.toml"
    path.write_text(text)
    return path


def test_rows_of_a_file_shard_the_users_ops(tmp_path: Path) -> None:
    found, model, inputs = program()
    plan = planned(found, rules=[file(tmp_path)])
    own = [op for op in plan.ops if op.name.startswith("shard_test.")]
    assert len(own) == 2
    assert {op.source for op in own} == {"user"}
    assert not any(op.source == "fallback" for op in plan.ops)
    assert all(set(op.strategy) != {"R"} for op in own)
    assert "my_ops.toml for shard_test.scaled.default x1, shard_test.scaled_backward.default x1" in str(plan)
    values = values_of(found, model, inputs)
    simulate(plan, found, values, reference=run(found, values), tolerance=1e-9)


def test_a_plan_keeps_the_rules_it_was_made_with(tmp_path: Path) -> None:
    found, _, _ = program()
    planned(found, rules=[file(tmp_path)]).save(str(tmp_path / "plan.json"))
    (tmp_path / "my_ops.toml").unlink()
    plan = load_plan(tmp_path / "plan.json")
    costs = CostModel(plan.mesh, plan.cluster)
    assert evaluate(plan, found, plan.options.rulebook(), costs).objective == plan.certificate.objective
    with pytest.raises(InputError, match=r"planned by a row of the user's, here it has no rule; .*my_ops\.toml.*plan\.options\.rulebook"):
        evaluate(plan, found, Rulebook(), costs)


def test_without_rows_the_users_ops_are_replicated_and_listed() -> None:
    plan = planned(program()[0])
    assert {op.source for op in plan.ops if op.name.startswith("shard_test.")} == {"fallback"}
    assert "Ops without a rule, replicated on every axis" in str(plan)
    assert "shard_test.scaled.default" in str(plan)


def test_a_row_of_the_users_replaces_a_shipped_one(tmp_path: Path) -> None:
    found, _, _ = program()
    path = file(tmp_path, ROWS + '"aten.einsum.default" = { family = "replicated", reason = "to see what it costs" }\n')
    plan = planned(found, rules=[path])
    products = [op for op in plan.ops if op.name == "aten.einsum.default"]
    assert {op.source for op in products} == {"user"}
    assert all(set(op.strategy) == {"R"} for op in products)
    assert plan.certificate.objective > planned(found, rules=[file(tmp_path)]).certificate.objective


WRONG = {
    "an op that torch does not have": (
        '"aten.softmaxx.int" = { family = "pointwise" }', r"no op of this name.*similar ones: .*aten\.softmax\.int",
    ),
    "an op of a library that is not imported": ('"nolib.op" = { family = "pointwise" }', r"row 'nolib\.op\.default'.*import the library"),
    "an argument that the op does not have": (
        '"shard_test.scaled.default" = { family = "pointwise", linear = "y" }', r"no argument 'y'; legal: x, weight; correct the row",
    ),
    "a factor of two sizes": (
        ROWS.replace("b s h, h -> b s h", "b s h, b -> b s h"), r"row 'shard_test\.scaled\.default'.*'b' has sizes 8 and 64.*use two names",
    ),
    "too few operands": (
        ROWS.replace("b s h, h -> b s h", "b s h -> b s h"), r"row 'shard_test\.scaled\.default'.*describes 1 operands.*the op has 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_with_a_row_is_said_with_its_file(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RuleError, match=rf"my_ops\.toml, {'' if 'row' in message else '.*'}.*{message}"):
        planned(program()[0], rules=[file(tmp_path, text)])


@pytest.mark.parametrize("op", ["rows", "product"])
def test_strategies_registered_with_dtensor_are_picked_up_and_sound(op: str) -> None:
    from rules.cases import case, t

    made = (
        case("shard_test.rows.default", x=t(4, 6, 8), scale=2.0)
        if op == "rows"
        else case("shard_test.product.default", x=t(4, 6, 8), weight=t(8, 5))
    )
    operands, results = made.tensors(
        lambda op, values, _: [
            torch.ops.shard_test.rows(values[0], 2.0) if op.name.endswith("rows.default") else torch.ops.shard_test.product(*values)
        ]
    )
    rule = build_rule(made.op, operands, results, load_table())
    assert rule.source == "unproven"
    expected = {
        "rows": ["R", "S(0)<-S(0)", "S(1)<-S(1)"],
        "product": ["R", "S(0)<-S(0),R", "S(1)<-S(1),R", "S(2)<-R,S(1)", "P(sum)<-S(2),S(0)", "P(sum)<-P(sum),R"],
    }[op]
    assert [s.name for s in rule.strategies()] == expected
    for mesh in ((2,), (2, 2)):
        checked = verify(made.op, made.values, rule, call, result_shapes=[r.shape for r in results], mesh_shape=mesh)
        assert checked.strategies > 1
        assert not checked.failures


RESULTS = {"aten.logaddexp.default": (4, 6, 8), "aten.avg_pool3d.default": (2, 2, 2, 2, 2)}


class Registered(nn.Module):
    """A custom op whose strategies DTensor knows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.shard_test.rows(x, 2.0) + 1


def test_a_model_with_registered_strategies_needs_no_fallback() -> None:
    found = trace(Registered(), {"x": torch.empty(8, 64, 32)}, name="registered", forward_only=True)
    plan = planned(found, forward_only=True)
    (own,) = (op for op in plan.ops if op.name == "shard_test.rows.default")
    assert own.source == "unproven"
    assert set(own.strategy) != {"R"}
    assert "by the strategies that are registered for them with DTensor, NOT PROVEN" in str(plan)


def test_a_row_of_the_users_comes_before_a_registration(tmp_path: Path) -> None:
    found = trace(Registered(), {"x": torch.empty(8, 64, 32)}, name="registered", forward_only=True)
    plan = planned(
        found, forward_only=True, rules=[file(tmp_path, '"shard_test.rows.default" = { dims = "b s h -> b s h", whole = "s h" }')]
    )
    (own,) = (op for op in plan.ops if op.name == "shard_test.rows.default")
    assert own.source == "user"
    assert set(own.strategy) <= {"R", "b"}


@pytest.mark.parametrize("op", ["logaddexp", "avg_pool3d"])
def test_an_op_of_torch_without_a_row_uses_dtensors_strategy(op: str) -> None:
    """One lists its strategies, the other answers to given operands."""
    from rules.cases import case, t

    if op == "logaddexp":
        made = case("aten.logaddexp.default", self=t(4, 6, 8), other=t(4, 6, 8))
    else:
        made = case("aten.avg_pool3d.default", self=t(2, 2, 4, 4, 4), kernel_size=(2, 2, 2))
    operands, results = made.tensors(lambda op, values, _: call_with(op, arguments_of(op, values), [RESULTS[op.name]]))
    assert made.op.name not in load_table()
    rule = build_rule(made.op, operands, results, load_table())
    assert rule.source == "dtensor"
    checked = verify(made.op, made.values, rule, call, result_shapes=[r.shape for r in results], mesh_shape=(2,))
    assert checked.strategies > 2
    assert not checked.failures


def build() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    with torch.device("meta"):
        return Model(), {"x": torch.empty(8, 16, 256)}


def test_the_command_line_takes_rules_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "my_model", sys.modules[__name__])
    path = str(file(tmp_path))
    target = str(tmp_path / "plan.json")
    assert main(["solve", "my_model:build", "--mesh", "4", "--rules", path, "--conservative", "-q", "-o", target]) == 0
    assert "my_ops.toml for shard_test.scaled.default x1" in capsys.readouterr().out
    assert main(["show", target]) == 0
    assert "conservative rules" in capsys.readouterr().out
    assert main(["rules", "list", "my_model:build", "--rules", path]) == 0
    listed = capsys.readouterr().out
    assert "all have rules" in listed
    assert path in listed
    assert main(["rules", "list", "my_model:build"]) == 0
    assert "2 without a rule: " in capsys.readouterr().out
    replacing = file(tmp_path, ROWS + '"aten.einsum.default" = { family = "replicated", reason = "to see what it costs" }\n')
    assert main(["rules", "list", "my_model:build", "--rules", str(replacing), "--json"]) == 0
    found = {row["op"]: row for row in json.loads(capsys.readouterr().out)}
    product = found["aten.einsum.default"]
    assert (product["source"], product["replaces"], product["count"]) == ("user", "aten.toml", 5)
    assert product["rule"] == "replicated: to see what it costs"
    assert sum(row["flops"] for row in found.values()) == pytest.approx(1)
    assert product["replicated_nbytes"] == product["nbytes"] > 0.2
    assert found["shard_test.scaled.default"]["rule"].startswith("b s h, h -> b s h")
    assert main(["rules", "list", "--rules", str(replacing)]) == 0
    assert "my_ops.toml (replaces aten.toml)" in capsys.readouterr().out
    assert main(["solve", "my_model:build", "--mesh", "4", "--rules", str(tmp_path / "none.toml"), "-q"]) == 1
    assert "none.toml" in capsys.readouterr().err
