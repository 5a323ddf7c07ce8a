"""Chains of ops with any legal layouts give the unsharded numbers: rules, transitions and free moves fit together.

A chain is 3 to 8 calls of ops from the table, made by giving the shipped instances of other ops the sizes of a tensor at hand.
It is lowered on a mesh, every node of its choice graph takes a random strategy, and the plan runs on all devices in one process.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lowered import lowered, random_assignment
from programs import Builder

from solver_shard.errors import InternalError, SolverShardError
from solver_shard.ops.run import run
from solver_shard.program import Op, Program, Ref, Role
from solver_shard.rules.check import UNSET, draws_of
from solver_shard.rules.check.instances import Instance, Spec, load_instances, tensor_of
from solver_shard.rules.check.shards import NO_KERNEL, run_whole
from solver_shard.rules.rulebook import build_rule
from solver_shard.rules.table import load_table
from solver_shard.verification.simulate import simulate

pytestmark = pytest.mark.usefixtures("one_thread")

TABLE = load_table()
JUMPS = {
    "sign", "sgn", "floor", "ceil", "round", "trunc", "frac", "remainder", "fmod", "floor_divide", "div.Tensor_mode",
    "div.Scalar_mode", "eq", "ne", "lt", "le", "gt", "ge", "signbit", "angle", "logical_not", "atan2", "histc", "mode",
    "isnan", "isinf", "isfinite", "nan_to_num", "_to_copy", "copy",
}  # fmt: skip
"""Ops with steps, on which rounding of a sum may decide."""
PIVOTS = ("linalg_", "_linalg_", "_cholesky", "cholesky", "lu_", "triangular_solve", "geqrf", "ormqr", "orgqr", "linalg.")
"""Of decompositions: rounding decides which row is the pivot, and what is next to singular comes out as anything."""
CHAINS, ASSIGNMENTS = 50, 4
"""Per mesh."""


def pool() -> list[Instance]:
    """Calls that can be part of a chain: of an op that is not random, has no steps, and reads a plain tensor of numbers."""
    found = []
    for op, calls in load_instances().items():
        name = op.split(".", 1)[1]
        if op in UNSET | NO_KERNEL or name in JUMPS or name.split(".")[0] in JUMPS or "scaled_dot_product" in op or "_grouped_mm" in op:
            continue
        if name.startswith(PIVOTS):
            continue
        found += [call for call in calls if plain(call) and not draws_of(call, 1)[1]]
    return found


def plain(call: Instance) -> list[int]:
    """Operands that any tensor of numbers can be."""
    return [i for i, spec in enumerate(call.specs) if spec.dtype == "f64" and not spec.kind and spec.shape]


class Chain:
    """Grows a program call by call; values of all tensors are known, so that every call is known to run."""

    def __init__(self, seed: int, calls: list[Instance]) -> None:
        self.draw, self.calls = random.Random(seed), calls
        self.builder = Builder()
        self.values: dict[int, torch.Tensor] = {}
        self.generator = torch.Generator().manual_seed(seed)
        shape = self.draw.choice([(8, 6), (12, 5), (4, 6, 8), (6, 4, 10), (8, 12), (4, 6, 3, 3)])
        spec = Spec(dtype="f64", shape=shape)
        self.current = self.source(spec, spec.draw(self.generator, 0))

    def source(self, spec: Spec, value: torch.Tensor) -> int:
        position = self.builder.source(f"x{len(self.builder.tensors)}", spec.shape, Role.INPUT, dtype=spec.dtype)
        self.values[position] = value
        return position

    def grow(self) -> bool:
        """Add one call that reads the current tensor; False where this one does not fit."""
        call = self.draw.choice(self.calls)
        entry = self.draw.choice(plain(call))
        shape = tuple(self.values[self.current].shape)
        if len(call.specs[entry].shape) != len(shape):
            return False
        sizes: dict[float, int] = {}
        for old, new in zip(call.specs[entry].shape, shape, strict=True):
            if sizes.setdefault(old, new) != new:
                return False
        specs = [
            Spec(
                dtype=s.dtype,
                shape=tuple(int(sizes.get(n, n)) for n in s.shape),
                kind=s.kind,
                bounds=tuple(sizes.get(b, b) for b in s.bounds),
            )
            for s in call.specs
        ]
        known = [self.values[self.current] if i == entry else spec.draw(self.generator, 0) for i, spec in enumerate(specs)]
        if any(tuple(value.shape) != spec.shape for value, spec in zip(known, specs, strict=True)):  # numbers that fit only as written
            return False
        op = Op(name=call.op.name, operands=call.op.operands, results=(), attributes=call.op.attributes)
        try:
            results = run_whole(op, known)
            made = [tensor_of(f"y{i}", value) for i, value in enumerate(results)]
            build_rule(op, [tensor_of(f"x{i}", value) for i, value in enumerate(known)], made, TABLE)
        except (RuntimeError, IndexError, ValueError, KeyError, SolverShardError):
            return False
        value = results[0]
        if value.dtype != torch.float64 or not value.isfinite().all() or value.numel() < 2 or float(value.abs().max()) > 1e6:
            return False
        earlier = {tuple(v.shape): t for t, v in self.values.items() if v.dtype == torch.float64}
        operands = []
        for i, spec in enumerate(specs):
            again = earlier.get(spec.shape) if i in plain(call) and self.draw.random() < 0.4 else None
            operands.append(self.current if i == entry else again if again is not None else self.source(spec, known[i]))
        return self.add(call, operands, [tuple(t.shape) for t in made])

    def add(self, call: Instance, operands: list[int], shapes: list[tuple[int, ...]]) -> bool:
        distinct = list(dict.fromkeys(operands))
        attributes: Mapping[str, Any] = call.op.attributes if len(distinct) == len(operands) else renumbered(call.op.attributes, operands)
        results = run_whole(
            Op(name=call.op.name, operands=tuple(range(len(distinct))), results=(), attributes=attributes),
            [self.values[t] for t in distinct],
        )
        if not results[0].isfinite().all():
            return False
        first = self.builder.call(call.op.name, tuple(distinct), attributes, *shapes)
        for j, value in enumerate(results):
            self.builder.tensors[first + j] = tensor_of(f"v{first + j}", value)
            self.values[first + j] = value
        self.current = first
        return True

    def program(self, length: int) -> Program:
        calls = tries = 0
        while calls < length and tries < 3000:
            tries += 1
            calls += self.grow()
        self.builder.tensors[self.current] = tensor_of("output", self.values[self.current])
        return self.builder.program(self.current, name="chain")


def renumbered(attributes: Mapping[str, Any], operands: list[int]) -> dict[str, Any]:
    """The arguments of a call in which one tensor is read twice."""
    distinct = list(dict.fromkeys(operands))

    def changed(value: Any) -> Any:
        if isinstance(value, Ref):
            return Ref(distinct.index(operands[value.operand]))
        return tuple(map(changed, value)) if isinstance(value, tuple) else value

    return {name: changed(value) for name, value in attributes.items()}


@pytest.mark.parametrize("mesh", ["2,2", "2,3"])
def test_chains_with_random_layouts_give_the_unsharded_numbers(mesh: str) -> None:
    calls, ops, kinds = pool(), set(), set()
    for seed in range(CHAINS):
        chain = Chain(seed, calls)
        program = chain.program(3 + seed % 6)
        assert 3 <= len(program.ops) <= 8
        sources = {t: chain.values[t] for t in program.sources()}
        reference = run(program, sources)
        case = lowered(program, mesh)
        for assignment in range(ASSIGNMENTS):
            plan = case.plan(random_assignment(case.graph, 100 * seed + assignment))
            found = simulate(plan, program, sources, reference=reference)
            torch.testing.assert_close(found.outputs[0], reference[program.outputs[0]], rtol=1e-6, atol=1e-6)
            kinds |= {kind for kind, _ in found.collectives}
        ops |= {op.name for op in program.ops}
    assert len(ops) > 60
    assert {"all_gather", "all_reduce", "all_to_all", "reduce_scatter"} <= kinds


def test_a_wrong_rule_breaks_a_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An activation that lets pending sums through, between two products."""
    builder = Builder()
    x, up, down = builder.input("x", 8, 12), builder.weight("up", 6, 12), builder.weight("down", 4, 6)
    hidden = builder.relu(builder.einsum("ac,bc->ab", x, up))
    output = builder.einsum("ac,bc->ab", hidden, down, role=Role.OUTPUT, result="output")
    program = builder.program(output)
    torch.manual_seed(0)
    sources = {t: torch.randn(program.tensors[t].shape) for t in program.sources()}
    reference = run(program, sources)

    def failures() -> int:
        case, count = lowered(program, "2,2"), 0
        for seed in range(40):
            try:
                simulate(case.plan(random_assignment(case.graph, seed)), program, sources, reference=reference)
            except InternalError as error:
                count += "as the unsharded step does" in str(error)
        return count

    assert failures() == 0
    wrong = tmp_path / "wrong.toml"
    wrong.write_text('"aten.relu.default" = { family = "pointwise", linear = "self" }\n')
    monkeypatch.setattr("lowered.load_table", lambda: load_table([wrong]))
    assert failures() > 0
