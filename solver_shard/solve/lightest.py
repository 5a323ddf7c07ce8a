"""Whether a large problem has an assignment within its limit: multiplicative weights on the times that exceed it.

    found, bound = lightest(flat, clock, rng)

For weights w >= 0 that sum to one, every assignment has peak >= sum_t w_t usage_t: message passing bounds that from below. The weights
follow the use of memory, so the bound rises towards the least peak, and what is decoded uses little; it is repaired towards the
limit. The search ends when an assignment keeps the limit, when the bound exceeds it, or after STEPS steps.
"""

from __future__ import annotations

import numpy as np

from solver_shard.choice.graph import Ints
from solver_shard.solve.clock import Clock
from solver_shard.solve.descent import Local
from solver_shard.solve.flat import Flat
from solver_shard.solve.lagrange import MARGIN, Rows
from solver_shard.solve.sweeps import Passing

STEPS = 200
SWEEPS = 3
RATE = 2.0
"""How fast weights follow the use: exp(RATE x (use / peak - 1)) per step."""

UNITS = 2.0**40
"""Scaled cost of the limit."""


def lightest(flat: Flat, clock: Clock, rng: np.random.Generator) -> tuple[Ints | None, int]:
    """(an assignment within the limit or None, bytes that every assignment needs at least).

    ``flat`` has a limit and no costs but forbidden pairs.
    """
    assert flat.limit is not None
    rows, passing, local = Rows(flat), Passing(flat), Local(flat)
    unit = UNITS / max(1, flat.limit)
    weights, best = np.zeros(0), 0
    theta = flat.theta
    for _ in range(STEPS):
        value = max(passing.sweep(theta) for _ in range(SWEEPS))
        clock.spend((SWEEPS + 1) * passing.work + 1e-3)
        if len(rows):
            fixed = float(weights @ np.array(rows.least, dtype=np.float64))
            best = max(best, int(np.ceil((value / unit + fixed) * (1 - MARGIN))))
        chosen = local.settle(passing.decode(theta), theta, 3)
        profile = flat.profile(chosen)
        repaired = local.repair(chosen, theta)
        if repaired is not None and flat.problem.value(repaired) is not None:
            return repaired, best
        if best > flat.limit or clock.over():
            break
        new = sum(rows.add(t) for t in rows.exceeded(profile, 4))
        weights = np.append(weights, np.full(new, float(weights.max(initial=1.0))))
        use = profile[rows.times] / max(1.0, float(profile.max(initial=0)))
        weights = weights * np.exp(RATE * (use - 1.0))
        weights /= weights.sum()
        theta = rows.price(weights * unit)
    return None, best
