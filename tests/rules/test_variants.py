"""In-place, out and list ops: their rules follow other rows, and every strategy gives the unsharded numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from rules.cases import Case, case, flags, ints, pos, t, tensor_of

from solver_shard.errors import RuleError
from solver_shard.program import Op, Ref, Tensor, refs
from solver_shard.rules.check.shards import verify
from solver_shard.rules.rule import Rule
from solver_shard.rules.rulebook import build_rule
from solver_shard.rules.table import load_table
from solver_shard.rules.variants import PREFIXES, element_rules, follows, is_list_op, overload_of

TABLE = load_table()
MESHES = ((2,), (3,), (2, 2))


def execute(op: Op, operands: Sequence[torch.Tensor], _shapes: Any = None) -> list[torch.Tensor]:
    """Runs on copies; an op that returns nothing, or a part, gives all that it wrote."""
    copies = [x.clone() for x in operands]

    def value(item: Any) -> Any:
        if isinstance(item, Ref):
            return copies[item.operand]
        return [value(x) for x in item] if isinstance(item, tuple) else item

    overload = overload_of(op.name)
    found = overload(**{name: value(item) for name, item in op.attributes.items()})
    written = [a.name for a in overload._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if written:
        return [copies[ref.operand] for name in written for ref in refs(op.attributes[name])]
    made = list(found) if isinstance(found, tuple | list) else [found]
    return [x for item in made for x in (item if isinstance(item, list) else [item])]


def rule_of(made: Case) -> Rule:
    operands = [tensor_of(f"x{i}", v) for i, v in enumerate(made.values)]
    results = [tensor_of(f"y{i}", v) for i, v in enumerate(execute(made.op, made.values))]
    return build_rule(made.op, operands, results, TABLE)


def sound(made: Case) -> list[str]:
    """The names of the strategies, after every one was run on shards."""
    rule, whole = rule_of(made), execute(made.op, made.values)
    for mesh in MESHES:
        checked = verify(made.op, made.values, rule, execute, result_shapes=[tuple(r.shape) for r in whole], mesh_shape=mesh)
        assert not checked.failures, "\n".join(map(str, checked.failures))
    assert rule.source == "family"
    return [s.name for s in rule.strategies()]


IN_PLACE = {
    "aten.add_.Tensor": {"self": t(4, 6), "other": t(6), "alpha": 1},
    "aten.mul_.Tensor": {"self": t(4, 6), "other": t(4, 6)},
    "aten.div_.Tensor": {"self": t(4, 6), "other": pos(6)},
    "aten.relu_.default": {"self": t(4, 6)},
    "aten.clamp_.default": {"self": t(4, 6), "min": 0.0, "max": 0.5},
    "aten.masked_fill_.Scalar": {"self": t(4, 6), "mask": flags(6), "value": 0},
    "aten.addcmul_.default": {"self": t(4, 6), "tensor1": t(4, 6), "tensor2": t(6), "value": 2},
    "aten.lerp_.Scalar": {"self": t(4, 6), "end": t(4, 6), "weight": 0.25},
    "aten.copy_.default": {"self": t(4, 6), "src": t(6)},
    "aten.zero_.default": {"self": t(4, 6)},
    "aten.fill_.Scalar": {"self": t(4, 6), "value": 3.0},
    "aten.index_put_.default": {"self": t(6, 4), "indices": (ints(6, 5),), "values": t(5, 4), "accumulate": True},
    "aten.scatter_add_.default": {"self": t(6, 4), "dim": 0, "index": ints(6, 5, 4), "src": t(5, 4)},
    "aten.index_add_.default": {"self": t(6, 4), "dim": 0, "index": ints(6, 5), "source": t(5, 4), "alpha": 2},
    "aten.addmm_.default": {"self": t(4, 5), "mat1": t(4, 6), "mat2": t(6, 5), "beta": 1, "alpha": 1},
}
OUT = {
    "aten.add.out": {"self": t(4, 6), "other": t(6), "alpha": 1, "out": t(4, 6)},
    "aten.mm.out": {"self": t(4, 6), "mat2": t(6, 8), "out": t(4, 8)},
    "aten.sum.IntList_out": {"self": t(4, 6), "dim": (1,), "keepdim": False, "dtype": None, "out": t(4)},
    "aten.cat.out": {"tensors": (t(4, 2), t(4, 6)), "dim": 1, "out": t(4, 8)},
    "aten.max.dim_max": {"self": t(4, 6), "dim": 1, "keepdim": False, "max": t(4), "max_values": ints(6, 4)},
}


@pytest.mark.parametrize("op", IN_PLACE)
def test_in_place_ops_follow_their_functional_op_and_keep_the_layout(op: str) -> None:
    made = case(op, **IN_PLACE[op])
    assert len(sound(made)) > 1
    assert all(s.operands[0] == s.results[0] for s in rule_of(made).strategies())


def test_an_in_place_product_sums_only_what_may_be_partial_before() -> None:
    names = sound(case("aten.mul_.Tensor", self=t(4, 6), other=t(4, 6)))
    assert names == ["R", "a", "b", "P(sum):0", "P(avg):0"]  # not P(sum):1, which would make self partial
    kept = sound(case("aten.addmm_.default", self=t(4, 5), mat1=t(4, 6), mat2=t(6, 5), beta=1, alpha=1))
    assert "k" in kept  # self is partial where the contracted dim is cut


@pytest.mark.parametrize("op", OUT)
def test_out_variants_write_to_a_tensor_of_the_results_layout(op: str) -> None:
    made = case(op, **OUT[op])
    assert len(sound(made)) > 1
    for strategy in rule_of(made).strategies():
        outs = [ref.operand for name in follows(op).outs for ref in refs(made.op.attributes[name])]  # type: ignore[union-attr]
        assert tuple(strategy.operands[i] for i in outs) == strategy.results


def test_a_variant_without_results_has_the_same_strategies() -> None:
    x = Tensor(name="x", shape=(4, 6), dtype="f32")
    op = Op(name="aten.add_.Tensor", operands=(0, 1), results=(), attributes={"self": Ref(0), "other": Ref(1), "alpha": 1})
    names = [s.name for s in build_rule(op, [x, x], [], TABLE).strategies()]
    assert names == ["R", "a", "b", "P(sum):0,1", "P(avg):0,1", "P(max):0", "P(min):0"]


def foreach_ops() -> list[str]:
    """Every op on lists of tensors that torch has, out variants aside."""
    names = sorted(name.replace("::", ".") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    names = [name if name.count(".") > 1 else f"{name}.default" for name in names]
    return [n for n in names if n.removeprefix("aten.").startswith(PREFIXES) and "out" not in n.split(".")[2] and is_list_op(n)]


def made_up(op: str) -> Case:
    """A call on two elements, of different shapes."""
    values: dict[str, Any] = {}
    for argument in overload_of(op)._schema.arguments:
        name, kind = argument.name, str(argument.type)
        if name == "state_steps":
            values[name] = (torch.tensor(3.0), torch.tensor(4.0))
        elif kind == "List[Tensor]":
            columns = (t(6, 4) if name == "mat2" else pos(4, 6) * 0.3, t(5, 2) if name == "mat2" else pos(3, 5) * 0.3)
            values[name] = tuple(x.float() for x in columns)
        elif kind == "Tensor":
            values[name] = torch.tensor(0.5) if name != "scalars" else torch.tensor([0.5, 2.0])
            values[name] = values[name].reshape(1) if name in ("inv_scale", "found_inf") else values[name]
        elif argument.has_default_value():
            values[name] = argument.default_value
        else:
            by_kind = {"List[number]": (0.5, 2.0), "number": 0.5, "float": 0.5, "bool": False, "int": 1, "Optional[int]": None}
            values[name] = by_kind[kind]
    values |= {"amsgrad": True} if "amsgrad" in values else {}
    values |= {"ord": 1} if op == "aten._foreach_norm.Scalar" else {}  # what needs collectives inside has rules per element only
    if "sgd" in op:
        values["is_first_step"] = False
    if "foreach_non_finite" in op:
        values["self"][1][2, 1] = float("inf")
    return case(op, **values)


@pytest.mark.parametrize("op", foreach_ops())
@pytest.mark.filterwarnings("ignore")
def test_list_ops_do_the_same_to_every_element(op: str) -> None:
    names = sound(made_up(op))
    assert {"R", "b" if op.startswith("aten._foreach_mm.") else "a"} & set(names)
    assert len(names) > 1, op


def test_an_op_that_only_shares_the_prefix_is_no_list_op() -> None:
    assert not is_list_op("aten._fused_rms_norm.default")
    made = case("aten._fused_rms_norm.default", input=t(4, 6), normalized_shape=(6,), weight=t(6), eps=1e-5)
    assert rule_of(made).source == "table"


def adamw(count: int = 2, states: int = 2) -> Op:
    lists = {name: tuple(Ref(i * count + k) for k in range(count)) for i, name in enumerate(("self", "grads", "exp_avgs"))}
    lists["exp_avg_sqs"] = tuple(Ref(3 * count + k) for k in range(states))
    lists |= {"max_exp_avg_sqs": (), "state_steps": tuple(Ref(3 * count + states + k) for k in range(count))}
    rest = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False, "maximize": False}
    operands = tuple(range(4 * count + states))
    return Op(name="aten._fused_adamw_.default", operands=operands, results=(), attributes={**lists, **rest})


def test_an_optimizer_step_has_a_rule_per_parameter() -> None:
    shapes = [(4, 6), (6,)]
    tensors = [Tensor(name="x", shape=shape, dtype="f32") for _ in range(4) for shape in shapes]
    tensors += [Tensor(name="step", shape=(), dtype="f32")] * 2
    first, second = element_rules(adamw(), tensors, [], lambda op, ins, outs: build_rule(op, ins, outs, TABLE))
    assert [[str(p) for p in s.operands] for s in first.strategies()][1:] == [["S(0)"] * 4 + ["R"], ["S(1)"] * 4 + ["R"]]
    assert [s.name for s in second.strategies()] == ["R", "a"]
    assert [s.name for s in build_rule(adamw(), tensors, [], TABLE).strategies()] == ["R", "a", "b"]


def test_lists_of_different_lengths_are_an_error() -> None:
    tensors = [Tensor(name="x", shape=(4, 6), dtype="f32")] * 9
    with pytest.raises(RuleError, match=r"_fused_adamw_\.default.*self has 2, grads has 2, exp_avgs has 2, exp_avg_sqs has 1"):
        build_rule(adamw(states=1), tensors, [], TABLE)
