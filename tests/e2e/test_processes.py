"""Plans in four real processes: they follow the unsharded model, and a checkpoint of one plan is one of another."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

from lowered import lowered, random_assignment
from process_model import built, run_process

from solver_shard.plan.plan import Plan
from solver_shard.tracing.torch import trace


def random_plan(seed: int) -> Plan:
    model, inputs = built()
    made = lowered(trace(model, inputs, name="odd"), "dp=2,tp=2", clip=True)
    return made.plan(random_assignment(made.graph, seed))


def test_a_run_of_twenty_steps_follows_the_unsharded_loss_under_one_plan_after_the_other(tmp_path: Path) -> None:
    plans = {"one": random_plan(0), "two": random_plan(1)}
    for name, plan in plans.items():
        plan.save(tmp_path / f"{name}.json")
    for plan in plans.values():
        assert any(t.state not in (None, t.layout) for t in plan.tensors)
    assert plans["one"].layouts["tokens.weight"] != plans["two"].layouts["tokens.weight"]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["solver_shard.runtime.optimizer", "torch.distributed.checkpoint"])
    processes = [context.Process(target=run_process, args=(rank, 4, str(tmp_path))) for rank in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=300)
    failed = {path.name: path.read_text() for path in sorted(tmp_path.glob("failed*"))}
    assert not failed, "\n".join(failed.values())
    assert [process.exitcode for process in processes] == [0] * 4
