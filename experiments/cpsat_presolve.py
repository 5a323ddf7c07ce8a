"""CP-SAT calls a feasible program's worse solution optimal: a minimal program, and how often it happens by the size of coefficients.

    python experiments/cpsat_presolve.py [--each 400]

Needs OR-Tools alone. Everything is checked by enumeration of the eight booleans. The report that goes with it is cpsat_presolve.md.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Sequence

import ortools
from ortools.sat.python import cp_model

PAID = (200_000_000_000, 100_000_000_000, 500_000_000_000, 60_000_000_000, 540_000_000_000, 20_000_000_000)
"""Per boolean a, b, c, d, e, f: what the slack is less by."""

TOP = 1_000_000_000_000
USED = (2_000_000_000, 1_482_221_553, 700_000_000, 80_000_000)
"""Of a, b, c, d: coefficients of the knapsack row; they sum to 4,262,221,553."""

ROOM = 2_200_000_000


def program(paid: Sequence[int], top: int, used: Sequence[int], room: int) -> tuple[cp_model.CpModel, cp_model.IntVar]:
    """Minimise slack; paid . (a..f) + slack = top; used . (a..d) <= room; c + g = 1, f + h = 1, not both g and h."""
    model = cp_model.CpModel()
    a, b, c, d, e, f, g, h = (model.new_bool_var(name) for name in "abcdefgh")
    slack = model.new_int_var(0, top, "slack")
    model.add_exactly_one([c, g])
    model.add_exactly_one([f, h])
    model.add_bool_or([~g, ~h])
    model.add(cp_model.LinearExpr.weighted_sum([a, b, c, d, e, f], list(paid)) + slack == top)
    model.add(cp_model.LinearExpr.weighted_sum([a, b, c, d], list(used)) <= room)
    model.minimize(slack)
    return model, slack


def least(paid: Sequence[int], top: int, used: Sequence[int], room: int) -> int | None:
    """The least slack, by enumeration."""
    found = []
    for x in itertools.product((0, 1), repeat=6):
        g, h = 1 - x[2], 1 - x[5]
        slack = top - sum(p * v for p, v in zip(paid, x, strict=True))
        if not (g and h) and 0 <= slack <= top and sum(u * v for u, v in zip(used, x[:4], strict=True)) <= room:
            found.append(slack)
    return min(found, default=None)


def asked(paid: Sequence[int], top: int, used: Sequence[int], room: int, **parameters: object) -> tuple[str, int | None]:
    """(Status, slack) by CP-SAT with one worker."""
    model, slack = program(paid, top, used, room)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    for name, value in parameters.items():
        setattr(solver.parameters, name, value)
    status = solver.solve(model)
    return solver.status_name(status), solver.value(slack) if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None


def rate(bits: int, each: int, **parameters: object) -> int:
    """Wrong answers among random programs whose knapsack coefficients sum to about 2**bits; the equality is 90 times the row, roughly."""
    rng = random.Random(bits)
    wrong = 0
    for _ in range(each):
        used = [rng.randrange(2 ** (bits - 3), 2 ** (bits - 1)) for _ in range(4)]
        paid = [rng.randrange(85, 95) * u + rng.randrange(1000) for u in used] + [rng.randrange(90 * 2**bits) for _ in range(2)]
        case = paid, int(sum(paid) * rng.uniform(0.4, 1.0)), used, int(sum(used) * rng.uniform(0.3, 0.8))
        best = least(*case)
        status, value = asked(*case, **parameters)
        wrong += value != best or (status == "INFEASIBLE") != (best is None)
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=400, help="random programs of each size")
    each = parser.parse_args().each
    case = PAID, TOP, USED, ROOM
    print(f"OR-Tools {ortools.__version__}; least slack by enumeration: {least(*case):,}\n")
    print("| parameters | status | slack |\n|---|---|---|")
    settings: list[dict[str, object]] = [
        {},
        {"cp_model_presolve": False},
        {"presolve_inclusion_work_limit": 0},
        {"cp_model_probing_level": 0},
    ]
    for parameters in settings:
        status, value = asked(*case, **parameters)
        print(
            f"| {parameters or 'default'} | {status} | {value:,} |"
            if value is not None
            else f"| {parameters or 'default'} | {status} | - |"
        )
    print(f"\n| coefficients sum to about | wrong of {each:,} | with presolve_inclusion_work_limit=0 |\n|---|---|---|")
    for bits in (20, 28, 30, 31, 32, 33, 36, 40):
        print(f"| 2^{bits} | {rate(bits, each)} | {rate(bits, each, presolve_inclusion_work_limit=0)} |", flush=True)


if __name__ == "__main__":
    main()
