"""Every strategy on two mesh axes gives the unsharded numbers; ``rules check`` proves those of one axis (``test_check.py``)."""

from __future__ import annotations

import pytest

from solver_shard.rules.check import UNSET, draws_of
from solver_shard.rules.check.instances import load_instances, tensor_of
from solver_shard.rules.check.shards import run_local, verify
from solver_shard.rules.rulebook import build_rule
from solver_shard.rules.table import load_table

TABLE = load_table()
INSTANCES = load_instances()


@pytest.mark.parametrize("family", sorted({row.family for row in TABLE.values()}))
def test_strategies_on_two_axes_are_sound(family: str) -> None:
    failures, count = [], 0
    ops = [op for op, row in TABLE.items() if row.family == family and op not in UNSET]
    for op in ops[:1] if family == "sdpa_backward" else ops:  # all of these are one rule
        for call in INSTANCES[op][:2]:
            draws, random = draws_of(call, 1)
            if random:
                continue
            results = [tensor_of(f"y{i}", value) for i, value in enumerate(draws[0].results)]
            rule = build_rule(call.op, call.operands(), results, TABLE)
            checked = verify(
                call.op, draws[0].operands, rule, run_local, result_shapes=[r.shape for r in results], mesh_shape=(2, 2), seed=1
            )
            count += checked.strategies
            failures += [f"[{call.text}] {failure}" for failure in checked.failures]
    assert not failures, "\n".join(failures[:9])
    assert count > 0
