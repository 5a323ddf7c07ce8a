"""The front against brute force, the ranking and what is proven of it, and the table."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from solver_shard.analysis.sweep.results import Row, Sweep, front, not_proven_slower, per_second, ranked, table_text, time_of


def row(name: str = "a", step: int = 100, peak: int = 10, *, batch: int | None = 4, bound: int | None = None, **more: Any) -> Row:
    bound = step if bound is None else bound
    return Row(
        **{
            "name": name,
            "mesh": name,
            "devices": 8,
            "batch": batch,
            "seq": 1024,
            "memory_limit": 64 << 30,
            "reserve": 0,
            "cluster": "h100",
            "status": "optimal",
            "step_ns": step,
            "compute_ns": step // 2,
            "communication_ns": step // 4,
            "peak": peak,
            "objective": step,
            "bound": bound,
            "gap": (step - bound) / step,
            "seconds": 1.0,
            **more,
        }
    )


def sweep_of(*rows: Row, **asked: str) -> Sweep:
    return Sweep(model="toy", tool="solver-shard 0.1.0", asked={"objective": "time", "memory_weight": "0", **asked}, rows=rows)


rows_of = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6), st.sampled_from([1, 2, 3])), max_size=12).map(
    lambda found: [row(f"p{i}", step, peak, batch=batch) for i, (step, peak, batch) in enumerate(found)]
)


@given(rows_of)
def test_the_front_is_what_no_other_point_beats(rows: list[Row]) -> None:
    def beaten(one: Row) -> bool:
        mine = Fraction(one.step_ns or 0, one.batch or 1), one.peak or 0
        others = [(Fraction(o.step_ns or 0, o.batch or 1), o.peak or 0) for o in rows]
        return any(t <= mine[0] and m <= mine[1] and (t, m) != mine for t, m in others)

    assert {one.name for one in front(rows)} == {one.name for one in rows if not beaten(one)}


@given(st.lists(st.tuples(st.integers(2, 30), st.integers(0, 30)), min_size=2, max_size=8))
def test_a_mark_says_that_some_row_above_may_be_passed(found: list[tuple[int, int]]) -> None:
    rows = ranked([row(f"p{i}", step, bound=min(step, low)) for i, (step, low) in enumerate(found)])
    for k in range(1, len(rows)):
        assert not_proven_slower(rows[k], rows[k - 1]) == any(not_proven_slower(rows[k], above) for above in rows[:k])


def test_batches_are_compared_by_sequence() -> None:
    large, small = row("large", 190, batch=8), row("small", 100, batch=4)
    assert [one.name for one in ranked([small, large])] == ["large", "small"]
    assert time_of(large) == Fraction(190, 8)
    assert per_second(large) == 8 * 1024 / 190e-9


def test_the_table_ranks_marks_and_says_what_is_not_proven() -> None:
    text = table_text(
        sweep_of(
            row("d0=4", 2_000_000, 3 << 30),
            row("d0=2", 1_000_000, 9 << 30),
            row("d0=8", 1_010_000, 9 << 30, bound=990_000, status="feasible", baseline="megatron"),
        )
    )
    assert text == (
        "toy: 3 points, 3 with a plan\n"
        "  8 devices, batch 4, seq 1024, cluster h100, 64.0 GiB per device\n"
        "\n"
        "      mesh  step time   tokens/s  slower by      peak  communication            gap\n"
        "  --  ----  ---------  ---------  ---------  --------  -------------  -------------\n"
        "  *   d0=2    1.00 ms  4,096,000       best  9.00 GiB            25%             0%\n"
        "   ~  d0=8    1.01 ms  4,055,446       1.0%  9.00 GiB            25%  2% (megatron)\n"
        "  *   d0=4    2.00 ms  2,048,000     100.0%  3.00 GiB            25%             0%\n"
        "  *  on the front: no other plan is at least as fast and as small, and better in one\n"
        "  ~  not proven slower than the row above: its bound is lower than that one's step time\n"
        "  not proven slower than d0=2: d0=8 (bound 990 us)"
    )


def test_where_bounds_are_above_the_best_that_is_said() -> None:
    text = table_text(sweep_of(row("a", 100, bound=99), row("b", 120, bound=110)))
    assert "~" not in text
    assert text.endswith("  proven: none of the others is faster than a")


def test_bounds_of_another_objective_prove_nothing_of_times() -> None:
    text = table_text(sweep_of(row("a", 100), row("b", 120), objective="memory"))
    assert "nothing is proven of this order" in text
    assert "none of the others" not in text


def test_what_has_no_plan_comes_last_with_what_it_would_need() -> None:
    nothing: dict[str, Any] = dict.fromkeys(("step_ns", "compute_ns", "communication_ns", "objective", "bound", "gap"))
    misfit = dataclasses.replace(row("b", status="infeasible", peak=70 << 30, peak_bound=69 << 30), **nothing)
    failed = dataclasses.replace(row("c", status="error", message="its process was ended by SIGKILL"), **nothing)
    waiting = dataclasses.replace(row("d", status="pending"), **nothing)
    pinned = dataclasses.replace(row("e", status="infeasible", message="no plan keeps the pins 'x=R'"), **{**nothing, "peak": None})
    text = table_text(sweep_of(misfit, failed, waiting, pinned, row("a"), reserve="default"))
    assert text.startswith("toy: 5 points, 1 with a plan, 2 without one that fits, 1 failed\n")
    assert text.endswith(
        "No plan fits\n"
        "  mesh  for tensors  least peak found  proven least\n"
        "  ----  -----------  ----------------  ------------\n"
        "  b        64.0 GiB          70.0 GiB      69.0 GiB\n"
        "  e        64.0 GiB\n"
        "  e: no plan keeps the pins 'x=R'\n"
        "\n"
        "Failed; the same command runs them again\n"
        "  c: its process was ended by SIGKILL\n"
        "\n"
        "1 of 5 points are not run yet"
    )


def test_columns_that_are_alike_are_said_once() -> None:
    text = table_text(sweep_of(row("a", batch=4), row("b", batch=8, cluster="a100", memory_limit=1 << 30, devices=4)))
    head = next(line for line in text.splitlines() if "step time" in line)
    assert head.split()[:5] == ["mesh", "devices", "batch", "limit", "cluster"]
    assert text.splitlines()[1] == "  seq 1024"


def test_a_text_from_a_file_cannot_steer_the_terminal() -> None:
    assert "\x1b" not in table_text(sweep_of(row("a", message="\x1b[2J", status="error")))
