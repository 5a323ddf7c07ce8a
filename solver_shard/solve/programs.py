"""Every program for CP-SAT is made for a solver that is set up here, and its memory rows are put into a safe range here.

CP-SAT's presolve (OR-Tools 9.15) looks for linear rows that others include, and where coefficients of a row sum to 2**31 or more it may
then drop what a solution needs: a program is called optimal at more than its least cost, or infeasible (experiments/cpsat_presolve.md has
the smallest one found). So

- that step is switched off, for all programs;
- a memory row is given in units in which its coefficients sum to less than 2**30, usages and room both rounded down: whatever keeps the
  true row keeps this one, so what is proven of the program is true. A solution may break the true row; then a cover is added
  (``covering``), which what keeps the true row keeps too, and the program is solved again.

What any such program proves is held against something else all the same; see kernel.py.
"""

from __future__ import annotations

import numpy as np
from ortools.sat.python import cp_model

from solver_shard.choice.graph import Ints

SAFE_ROW = 2**30
"""Coefficients of a memory row together."""

SAFE_OBJECTIVE = 2**50
"""Coefficients of an objective together: the bound that CP-SAT gives is a float, exact up to 2**53."""


def new_solver(*, seed: int, seconds: float, work: float) -> cp_model.CpSolver:
    """A solver with one worker and these limits."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.presolve_inclusion_work_limit = 0
    solver.parameters.catch_sigint_signal = False  # who handles signals decides what they mean
    solver.parameters.max_time_in_seconds = min(seconds, 1e6)
    if np.isfinite(work):
        solver.parameters.max_deterministic_time = work
    return solver


def in_safe_units(usage: Ints, room: int) -> tuple[Ints, int]:
    """Usages and room of a row in a power of two of bytes, both rounded down: implied by the row.

    >>> in_safe_units(np.array([3, 5]), 6)
    (array([3, 5]), 6)
    >>> in_safe_units(np.array([2**31 + 1, 2**30]), 2**31)
    (array([536870912, 268435456]), 536870912)
    """
    shift = max(0, sum(usage.tolist()).bit_length() - SAFE_ROW.bit_length() + 1)
    return usage >> shift, room >> shift


def covering(usage: Ints, chosen: Ints, owner: Ints, room: int) -> list[Ints]:
    """Strategies of which not every group can be chosen from at once, where ``chosen`` together exceed the room of a row.

    A group for each of a few of the chosen strategies, those of most bytes, that exceed the room by themselves: the strategies of the
    same node with as many bytes or more.

    Args:
        usage: of the row, per flat strategy.
        chosen: flat strategies, one per node.
        owner: the node of each flat strategy.
        room: of the row.
    """
    order = chosen[np.argsort(-usage[chosen], kind="stable")]
    needed = int(np.flatnonzero(np.cumsum(usage[order]) > room)[0]) + 1
    return [np.flatnonzero((owner == owner[i]) & (usage >= usage[i])) for i in order[:needed].tolist()]
