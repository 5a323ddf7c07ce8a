"""Every strategy of every rule gives the unsharded numbers."""

from __future__ import annotations

import pytest
from rulebook.execute import execute
from rulebook.instances import FAMILIES

from solver_shard.rulebook import build_rule, load_table
from solver_shard.rulebook.verify import verify

TABLE = load_table()
MESHES = ((2,), (3,), (2, 2))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_strategies_are_sound(family: str) -> None:
    failures, count = [], 0
    for case in FAMILIES[family]():
        operands, results = case.tensors(execute)
        rule = build_rule(case.op, operands, results, TABLE)
        assert rule.source == "table", case.label
        for mesh in MESHES:
            checked = verify(case.op, case.values, rule, execute, result_shapes=[r.shape for r in results], mesh_shape=mesh)
            count += checked.strategies
            failures += [f"{case.label}: {failure}" for failure in checked.failures]
    assert not failures, "\n".join(failures)
    assert count > 0
