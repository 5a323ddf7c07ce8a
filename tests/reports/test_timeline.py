"""The timeline adds up to the step, to the nanosecond, whatever the plan; and everything in it is where the plan says."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterable
from typing import Any

import pytest
from lowered import Lowered, lowered, random_assignment
from plan_examples import example, stepped
from programs import Builder, mlp, trained_mlp

from solver_shard.errors import InputError
from solver_shard.graph.nodes import OpNode
from solver_shard.plan.plan import Plan
from solver_shard.program import Program, Role
from solver_shard.reports.timeline import (
    COLLECTIVES,
    MODULES,
    MOST_REPLAYED,
    OPS,
    PHASES,
    STREAM,
    WINDOWS,
    Gaps,
    Slice,
    Timeline,
    merged,
    timeline,
)


def spans(slices: Iterable[Slice]) -> list[tuple[int, int]]:
    return sorted((piece.start, piece.stop) for piece in slices)


def length(slices: Iterable[Slice]) -> int:
    return sum(piece.stop - piece.start for piece in slices)


def holds_together(plan: Plan) -> Timeline:
    """All that must be true of a timeline of any plan."""
    line, costs = timeline(plan), plan.costs
    by_kind = {kind: [piece for piece in line.slices if piece.kind == kind] for kind in ("compute", "exposed", "hidden")}
    assert line.stop == costs.total_ns
    assert length(by_kind["compute"]) == costs.compute_ns + costs.update_ns
    assert length(by_kind["exposed"]) == sum(line.exposed.values()) == costs.communication_ns
    assert length(by_kind["hidden"]) == sum(line.hidden.values()) == costs.hidden_ns - line.unplaced_ns
    assert bool(line.marks) == (line.unplaced_ns > 0)
    end_to_end = spans([*by_kind["compute"], *by_kind["exposed"]])
    assert all(before[1] == after[0] for before, after in itertools.pairwise(end_to_end)), (
        "compute and exposed collectives follow each other"
    )
    assert not end_to_end or (end_to_end[0][0], end_to_end[-1][1]) == (0, costs.total_ns)
    compute = merged(spans(by_kind["compute"]))
    for start, stop in spans(by_kind["hidden"]):
        assert any(a <= start < stop <= b for a, b in compute), "what is hidden lies under compute"
    for row in {piece.row for piece in line.slices}:
        pieces = [piece for piece in line.slices if piece.row == row]
        if row in (PHASES, MODULES):
            assert nested(pieces), row
        else:
            assert all(before.stop <= after.start for before, after in itertools.pairwise(pieces)), row
    follows_the_ops(plan, line)
    is_drawn_side_by_side(plan, line)
    return line


def is_drawn_side_by_side(plan: Plan, line: Timeline) -> None:
    """Windows and the compute stream follow each other to the end, lanes serve one thing at a time, and all that computes is there."""
    rows: dict[tuple[str, str], list[Slice]] = {}
    for piece in line.side_by_side:
        rows.setdefault(piece.row, []).append(piece)
    assert bool(rows) == (plan.options.microbatches <= MOST_REPLAYED)
    for row, pieces in rows.items():
        ends = spans(pieces)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(ends)), row
        if row in (WINDOWS, STREAM):
            assert (ends[0][0], ends[-1][1], length(pieces)) == (0, line.runtime_ns, line.runtime_ns), row
    if rows:
        computing = [piece for piece in rows[STREAM] if piece.name == "compute"]
        assert length(computing) == plan.costs.compute_ns + plan.costs.update_ns


def nested(pieces: list[Slice]) -> bool:
    """Whether each lies inside or beside those before it, as trace viewers take them."""
    opened: list[Slice] = []
    for piece in pieces:
        while opened and opened[-1].stop <= piece.start:
            opened.pop()
        if opened and (piece.stop > opened[-1].stop or piece.start < opened[-1].start):
            return False
        opened.append(piece)
    return True


def follows_the_ops(plan: Plan, line: Timeline) -> None:
    """In every microbatch that is drawn in full the ops are there in order, each while the memory is what the plan says."""
    count = plan.options.microbatches
    timed = [i for i, op in enumerate(plan.ops) if op.nanoseconds]
    drawn = [piece for piece in line.slices if piece.row == OPS and "op" in piece.args]
    assert [piece.args["op"] for piece in drawn] == [plan.ops[i].name for i in timed] * min(count, 2)
    assert [piece.stop - piece.start for piece in drawn] == [plan.ops[i].nanoseconds for i in timed] * min(count, 2)
    assert [moment for moment, _ in line.memory] == sorted(moment for moment, _ in line.memory)
    memory = plan.memory
    for piece, i in zip(drawn, timed * min(count, 2), strict=True):
        k = max(k for k, time in enumerate(memory.times) if time <= i)
        now = [row for moment, row in line.memory if moment <= piece.start][-1]
        assert {name: size for name, size in now.items() if size} == {
            name: values[k] for name, values in memory.series.items() if values[k]
        }, (i, piece.name)
    assert max(sum(row.values()) for _, row in line.memory) == memory.peak


OPTIONS = [
    {},
    {"overlap": 0.37},
    {"overlap": 1.0, "optimizer": "sgd", "cluster": "ethernet"},
    {"fusion": True, "overlap": 0.5},
    {"microbatches": 2, "reduce_dtype": "bf16", "clip": True, "fusion": True},
    {"microbatches": 5, "overlap": 0.9, "clip": True},
    {"reduce_dtype": "bf16", "clip": True, "overlap": 0.3},
    {"microbatches": 3, "optimizer": "none", "reduce_dtype": "f16", "overlap": 0.5},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(map(str, options)) or "plain")
@pytest.mark.parametrize("mesh", ["2,2", "2,1,3"])
def test_any_plan_adds_up(mesh: str, options: dict[str, Any]) -> None:
    for program in (trained_mlp(12, 8, 20, 2), mlp(16, 32, 64, 2)) if options.get("microbatches", 1) == 1 else (trained_mlp(12, 8, 20, 2),):
        case = lowered(program, mesh, **options)
        for seed in range(4):
            holds_together(case.plan(random_assignment(case.graph, seed)))


def classifier() -> Program:
    """A product and a softmax of it, twice."""
    b = Builder()
    x = b.input("x", 16, 24)
    for k in range(2):
        last, attributes = k == 1, {"self": b.ref(0), "dim": -1, "half_to_float": False}
        x = b.einsum("ac,bc->ab", x, b.weight(f"{k}.w", 24, 24), module=f"{k}")
        role, name = (Role.OUTPUT, "output") if last else (Role.ACTIVATION, None)
        x = b.call("aten._softmax.default", (x,), attributes, (16, 24), role=role, result=name, module=f"{k}")
    return b.program(x, name="classifier")


def with_implementations(case: Lowered, seed: int) -> Plan:
    """Every op that has an implementation runs one."""
    fixed = {}
    for i, column in enumerate(case.lowering.strategies):
        ways = [k for k in range(len(column.axis_choice)) if column.implementation(k)]
        if ways:
            fixed[case.lowering.index[OpNode, i, 0]] = random.Random(seed).choice(ways)
    return case.plan(random_assignment(case.graph, seed, fixed))


@pytest.mark.parametrize("options", [{}, {"microbatches": 3, "overlap": 0.5}])
def test_collectives_inside_ops_are_drawn_after_them_and_never_hidden(options: dict[str, Any]) -> None:
    plan = with_implementations(lowered(classifier(), "2,2", **options), seed=1)
    line = holds_together(plan)
    inside = [piece for piece in line.slices if "implementation" in piece.args]
    assert inside
    assert {piece.kind for piece in inside} == {"exposed"}
    assert len(inside) == min(2, plan.options.microbatches) * sum(len(op.collectives) for op in plan.ops)
    for piece in inside:
        assert any(op.stop == piece.start for op in line.slices if op.kind in ("compute", "exposed"))


@pytest.mark.parametrize("options", [{}, {"overlap": 0.6, "reduce_dtype": "bf16", "clip": True}], ids=["plain", "overlap"])
def test_a_reshard_runs_after_what_it_reads_and_before_its_readers(options: dict[str, Any]) -> None:
    case = lowered(trained_mlp(12, 8, 20, 2), "2,2", **options)
    seen = set()
    for seed in range(6):
        plan = case.plan(random_assignment(case.graph, seed))
        line = holds_together(plan)
        ops = iter([piece for piece in line.slices if piece.row == OPS and "op" in piece.args])
        runs = {i: next(ops) for i, op in enumerate(plan.ops) if op.nanoseconds}
        update = next(piece for piece in line.slices if piece.row == OPS and piece.name == "adamw update")
        for reshard in plan.reshards:
            name = plan.tensors[reshard.tensor].name
            made = next((i for i, op in enumerate(plan.ops) if reshard.tensor in op.results), None)
            pieces = [piece for piece in line.slices if piece.args.get("tensor") == name and piece.row[0] == COLLECTIVES]
            if reshard.purpose == "optimizer" and made is not None:
                assert all(runs[made].stop <= piece.start and piece.stop <= update.start for piece in pieces)
            elif reshard.purpose == "update":
                mine = [piece for piece in pieces if piece.args["purpose"] == "parameter updates"]
                assert all(piece.start >= update.stop for piece in mine if piece.kind == "exposed")
                read = min(i for i, op in enumerate(plan.ops) if reshard.tensor in op.operands and i in runs)
                assert all(piece.stop <= runs[read].start for piece in mine if piece.kind == "hidden")
            elif reshard.steps and reshard.readers:
                first = min(i for i, _ in reshard.readers)
                mine = [piece for piece in pieces if str(piece.args["purpose"]).endswith(("gathers", reshard.purpose))]
                assert all(piece.start >= runs[made].stop for piece in mine if made in runs)
                ready = max((piece.stop for piece in mine if first not in runs or piece.start < runs[first].start), default=0)
                assert first not in runs or ready <= runs[first].start
            seen |= {(reshard.purpose, piece.kind) for piece in pieces}
    wanted = {("forward", "exposed"), ("backward", "exposed"), ("optimizer", "exposed"), ("update", "exposed")}
    wanted |= {(purpose, "hidden") for purpose in ("backward", "optimizer", "update")} if options else set()
    assert seen >= wanted


def drawn(line: Timeline, *rows: tuple[str, str]) -> list[tuple[str, str, int, int]]:
    return [(piece.kind, piece.name, piece.start, piece.stop) for piece in line.slices if piece.row in rows]


def test_a_gather_is_hidden_under_the_compute_before_it() -> None:
    """One block; half of each gather is to be hidden. Before the first one there is nothing to hide it under."""
    line = holds_together(example(layers=1))
    assert drawn(line, PHASES) == [("phase", "forward", 0, 26_000)]
    assert drawn(line, MODULES) == [
        ("module", "layers.0", 0, 17_000),
        ("module", "up", 0, 8_500),
        ("module", "down", 8_500, 17_000),
    ]
    assert drawn(line, OPS) == [("compute", "einsum: layers.0.up", 3_500, 8_500), ("compute", "einsum: layers.0.down", 12_000, 17_000)]
    assert drawn(line, (COLLECTIVES, "dp"), (COLLECTIVES, "tp")) == [
        ("exposed", "all_gather dp: layers.0.up.weight", 0, 3_500),
        ("hidden", "all_gather dp: layers.0.down.weight", 5_000, 8_500),
        ("exposed", "all_gather dp: layers.0.down.weight", 8_500, 12_000),
        ("exposed", "all_reduce tp: output", 17_000, 26_000),
    ]
    gather = next(piece for piece in line.slices if piece.kind == "hidden")
    assert gather.args == {
        "purpose": "parameter gathers", "tensor": "layers.0.down.weight", "of": "bf16[32, 128]", "before": "S(0)S(1)", "after": "RS(1)",
        "bytes": 4096, "launch": "shared by 2 of its block", "in_all_ns": 7_000, "hidden_ns": 3_500,
    }  # fmt: skip
    assert [(mark.name, mark.at) for mark in line.marks] == [("all_gather dp: layers.0.up.weight: no compute to hide 3.50 us under", 0)]


def updated() -> Plan:
    """One block with an update after it, whose new values go home by half hidden collectives."""
    plan = stepped(example(layers=1))
    total = plan.costs.total_ns + 500
    return dataclasses.replace(
        plan,
        costs=dataclasses.replace(plan.costs, update_ns=500, total_ns=total, objective=total),
        certificate=dataclasses.replace(plan.certificate, objective=total, bound=total, history=()),
    )


def test_new_values_go_home_under_the_next_steps_compute_until_they_are_read() -> None:
    """Of the second weight's there is time before it is read, for which its gather then is no longer the only one; of the first's none."""
    line = holds_together(updated())
    assert drawn(line, PHASES)[-1] == ("phase", "update", 26_000, 28_500)
    assert drawn(line, OPS)[-1] == ("compute", "adamw update", 26_000, 26_500)
    assert drawn(line, (COLLECTIVES, "dp")) == [
        ("exposed", "all_gather dp: layers.0.up.weight", 0, 3_500),
        ("hidden", "all_to_all dp: layers.0.down.weight, of the step before", 3_500, 4_500),
        ("hidden", "all_gather dp: layers.0.down.weight", 5_000, 8_500),
        ("exposed", "all_gather dp: layers.0.down.weight", 8_500, 12_000),
        ("exposed", "all_to_all dp: layers.0.up.weight", 26_500, 27_500),
        ("exposed", "all_to_all dp: layers.0.down.weight", 27_500, 28_500),
    ]
    assert line.unplaced_ns == 3_500 + 1_000


def in_two_steps(exposed: int) -> Plan:
    """One block whose second weight is gathered over tp in 4 us, then over dp in 3 us, of which so much is exposed."""
    plan = example(layers=1)
    gather, step, costs = plan.reshards[1], plan.reshards[1].steps[0], plan.costs
    steps = (dataclasses.replace(step, axes=("tp",), nanoseconds=4_000, after=step.before), dataclasses.replace(step, nanoseconds=3_000))
    reshards = (plan.reshards[0], dataclasses.replace(gather, steps=steps, nanoseconds=exposed), plan.reshards[2])
    less = gather.nanoseconds - exposed
    changed = {"communication_ns": costs.communication_ns - less, "total_ns": costs.total_ns - less, "hidden_ns": costs.hidden_ns + less}
    return dataclasses.replace(plan, reshards=reshards, costs=dataclasses.replace(costs, **changed))


@pytest.mark.parametrize(
    ("exposed", "tp", "dp"),
    [
        (3_500, [("hidden", 5_000, 8_500), ("exposed", 8_500, 9_000)], [("exposed", 9_000, 12_000)]),
        (1_000, [("hidden", 3_500, 6_500)], [("hidden", 6_500, 8_500), ("exposed", 8_500, 9_500)]),  # 5 us of compute for 6 us
    ],
)
def test_of_several_steps_the_first_are_hidden_before_readers(exposed: int, tp: list[Any], dp: list[Any]) -> None:
    line = holds_together(in_two_steps(exposed))
    for axis, wanted in (("tp", tp), ("dp", dp)):
        found = [piece for piece in line.slices if piece.row == (COLLECTIVES, axis) and "layers.0.down" in piece.name]
        assert [(piece.kind, piece.start, piece.stop) for piece in found] == wanted


def test_the_one_reduction_of_several_microbatches_hides_behind_what_follows_the_last_ones_gradient() -> None:
    case, found = lowered(trained_mlp(12, 8, 20, 2), "2,2", microbatches=2, overlap=0.6), 0
    for seed in range(6):
        plan = case.plan(random_assignment(case.graph, seed))
        line = holds_together(plan)
        once = {r.tensor for r in plan.reshards if r.purpose == "optimizer" and r.steps}
        once -= {r.tensor for r in plan.reshards if r.purpose == "accumulate" and r.steps}
        for t in sorted(once):
            made = next(op for op in plan.ops if t in op.results)
            runs = [
                piece for piece in line.slices if piece.args.get("op") == made.name and piece.args["makes"] == str(made.result_layouts[0])
            ]
            hidden = [p for p in line.slices if p.kind == "hidden" and p.args.get("tensor") == plan.tensors[t].name]
            second = [piece for piece in runs if piece.start >= runs[len(runs) // 2].start]
            assert all(piece.start >= second[0].stop for piece in hidden)
            found += len(hidden)
    assert found


def test_many_microbatches_take_no_more_slices_than_three() -> None:
    def case(count: int) -> Timeline:
        made = lowered(trained_mlp(12, 8, 20, 1), "2,2", microbatches=count)
        return holds_together(made.plan(random_assignment(made.graph, 0)))

    three, thousand = case(3), case(1000)
    assert [name for _, name, *_ in drawn(three, PHASES)] == [
        "microbatch 1 of 3", "forward", "backward", "microbatch 2, as the first", "microbatch 3 of 3", "forward", "backward", "update",
    ]  # fmt: skip
    assert [name for _, name, *_ in drawn(thousand, PHASES)][3] == "microbatches 2 to 999, each as the first"
    assert len(thousand.slices) == len(three.slices)


def test_what_does_not_add_up_is_refused() -> None:
    plan = example(layers=1)
    with pytest.raises(InputError, match=r"costs\.total_ns: the file says 1, and its other figures give 26000: it was changed"):
        timeline(dataclasses.replace(plan, costs=dataclasses.replace(plan.costs, total_ns=1)))


def test_gaps_give_what_is_free_once() -> None:
    """Against a row of seconds that are free or not."""
    draw = random.Random(0)
    for _ in range(300):
        edges = sorted(draw.sample(range(40), 6))
        gaps, free = (
            Gaps(zip(edges[::2], edges[1::2], strict=True)),
            [any(a <= s < b for a, b in zip(edges[::2], edges[1::2], strict=True)) for s in range(40)],
        )
        for _ in range(5):
            low, high = sorted(draw.choices(range(41), k=2))
            need, latest = draw.randrange(1, 9), draw.random() < 0.5
            seconds = [s for s in range(low, high) if free[s]]
            wanted = sorted((seconds[::-1] if latest else seconds)[:need])
            found = (gaps.latest if latest else gaps.first)(low, high, need)
            assert [s for start, stop in found for s in range(start, stop)] == wanted
            for s in wanted:
                free[s] = False
