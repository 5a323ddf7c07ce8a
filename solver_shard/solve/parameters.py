"""What is asked of a solve, and every number that the solver was tuned with.

    asked = SolveParameters(gap=1e-3, time_limit=30.0)
    solution = solve(graph, asked)
    solve(graph, gap=1e-3, time_limit=30.0)             # the same, for short calls

:class:`SolveParameters` is handed through the solver as one value; what is left of time and work travels beside it as one
:class:`~solver_shard.solve.limits.Clock`. Below it stand the constants, by the part that reads them, each with what it trades. Where a
figure is given, it was measured; of the others no measurement is on record. They steer where work goes and when a part gives up: the
bounds that come out rest on what solve/__init__.py says, not on them.

Two kinds of numbers are not here. Those that keep sums exact (2**53 and what follows from it) stand where the sums are taken. Those that
compiled loops read (``annealing.py``, ``trws_compiled.py``) stand beside their loops: numba keeps compiled code by the date of the loop's
own file, and would not see a change elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from solver_shard.errors import InputError
from solver_shard.graph.choice_graph import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveParameters:
    """What is asked of a solve.

    Attributes:
        objective: "time" minimises cost + memory_weight * peak // 2**20; "memory" minimises the peak.
        memory_weight: nanoseconds per MiB of peak, for the objective "time".
        gap: relative gap at which to stop.
        seed: of all random choices.
        workers: processor cores that may be used; the result does not depend on it.
        time_limit: seconds, or None. The result is valid whenever it stops.
        work_limit: work units (see ``Solution.work``), or None. With the same graph, seed and work limit, and no time limit that
            strikes, the assignment is the same.
        limited: False where only a bound that holds without the memory limit is of use: where what is cheapest does not keep the limit,
            the search ends with what it has.
    """

    objective: str = "time"
    memory_weight: int = 0
    gap: float = 1e-4
    seed: int = 0
    workers: int = 2
    time_limit: float | None = 60.0
    work_limit: float | None = None
    limited: bool = True

    def check(self) -> None:
        """What a caller may ask.

        Raises:
            InputError: a value is not legal.
        """
        if self.objective not in ("time", "memory"):
            raise InputError(f"objective {self.objective!r} is unknown; legal: 'time', 'memory'")
        if self.memory_weight < 0:
            raise InputError(f"memory weight {self.memory_weight} ns per MiB is negative; legal: 0 or more")
        if not 0 <= self.gap < 1:
            raise InputError(f"gap {self.gap} is not legal; give a fraction from 0 to 1, such as 1e-4")
        if self.time_limit is not None and not self.time_limit > 0:
            raise InputError(f"time limit {self.time_limit} s is not legal; give a positive number of seconds, or none")
        if self.work_limit is not None and not self.work_limit > 0:
            raise InputError(f"work limit {self.work_limit} is not legal; give a positive number, or none")
        if self.workers < 1:
            raise InputError(f"{self.workers} workers are not legal; give 1 or more")

    @staticmethod
    def of(parameters: SolveParameters | None, changes: Mapping[str, Any]) -> SolveParameters:
        """The parameters, the defaults where None, with some of them changed by name."""
        return replace(parameters or SolveParameters(), **changes)

    @property
    def peak_price(self) -> int:
        """Weight of the peak in the objective, per MiB."""
        return MIB if self.objective == "memory" else self.memory_weight


# Stages of a solve (engine.py)

FREE_SHARE, FREE_GAP = 0.05, 0.02
"""Share of time or work, and gap, after which the problem without its limit is left if its best assignment is above the limit."""

PEAK_GAP, PEAK_SHARE = 0.01, 0.05
"""Gap to the least peak, and share of time or work, after which it is no longer sought once it is known to be above the limit."""

RELAXED_SHARE = 0.4
"""Share of what is left of time or work that the problem without its limit gets once more, where the limited one does not get on.
(DeepSeek-V3 on 1,024 devices: optimal after 125 CPU s in place of a gap of 1.1% after 300.)"""

WARM_GAP, WARM_SHARE, WARM_WORK = 0.01, 0.05, 1.0
"""Gap, share of the time that is left, and work of completing a partial warm start: an incumbent only has to be good enough to fix by."""

TIME_RESERVE = 0.03
"""Share of the time limit kept for finishing up."""

ROUND_PATIENCE = 0.5
"""Share of what a round has of time or work after which it stops if its best plan needs more than the graph has counted."""

ROUND_NEARLY = 0.01
"""Gap at which it stops earlier."""

ROUND_WIDER = 0.01
"""Part of the limit by which more than what is missed is added after the first round; twice as much after each further one."""


# Waiting, writing and processes (limits.py)

POLL_SECONDS = 0.05
"""Seconds between two looks at the clock; a call that returns is noticed at once."""

CALL_GRACE = 0.5
"""Seconds by which a call may exceed its own time limit, and that one which is told to stop has for it."""

WRITING_SHARE = 0.02
"""Of the time that may go into writing."""

TASK_GRACE = 1.0
"""Seconds that a process still gets after ``over`` before it is stopped, and after that to end."""


# Memory over time (problem.py)

SMALL_DENSE = 2**22
"""Matrix of counts that is kept for looking up rows."""

MAX_DENSE = 2**26
"""Largest matrix of counts (times x columns) that is built."""

PERIODS = 6
"""Distances between repetitions that are tried in ``between``."""


# Presolve (presolve/)

MAX_ELIMINATION_CELLS = 2_000_000
"""Largest (cells of the new table) x (strategies of the node) of an elimination."""

MERGED_SHARE = 0.7
"""Part of the nodes that a round over the whole graph must leave at most, for another one to be worth its while."""

MAX_COVERED_TIMES = 1500
MAX_COVERED_CELLS = 1_000_000
"""Number of times, and size of the matrix of their counts, up to which all pairs of times are compared."""

MAX_DOMINANCE = 3000
"""Strategies of a node up to which all pairs of them are compared."""

DOMINANCE_CELLS = 1_000_000
"""Table cells that a dominance check copies at a time."""

DENSE_SUM_CELLS = 250_000
"""Size of a full table up to which parallel edges are added as full tables."""

KEPT_CELLS = 50_000
"""Cells of a sum or an elimination up to which it is kept for the copies of its edges in other layers."""

DENSE_ELIMINATION_CELLS = 20_000
"""(Cells of a new table) x (strategies) up to which an elimination is done in one go."""


# Which engine (bounds/__init__.py)

LARGE_CELLS = 20_000
LARGE_COUNTS = 2**24
"""Pairs, and times x columns, above which a problem is large."""

LARGE_FREE_CELLS = 600_000
"""Pairs above which a problem without memory is large: messages alone nearly always solve it, and sweeps are cheap."""

SPLIT_SWEEPS = 10
"""Sweeps at new multipliers before a problem is split."""


# Rounding of messages (bounds/trws.py)

ROUNDING_SLACKS = (1e-5, 1e-4)
"""Slacks that are tried on reparametrised costs, as parts of the bound."""

FIRST_ROUNDING, NEXT_ROUNDING = 3e-4, 0.2
"""Part of the bound that a step gains at most when it is first rounded, and what that is multiplied by for each next time."""

ROUNDING_FAR = 10.0
"""Times what such a step may gain by which an incumbent must be above the bound: one that is nearer was rounded, and the bound is late."""


# Lagrangian dual of small problems (bounds/lagrangian.py)

BOX_WINDOW = 15
"""Steps within which the bound must rise by a twentieth of the distance to the incumbent."""


# Lagrangian dual of large problems: subgradient and cutting planes (bounds/subgradient.py)

SUBGRADIENT_SWEEPS = 3
"""Sweeps per step."""

SUBGRADIENT_SMOOTHING = 0.7
"""Part of the last direction in the next one: the excess of a single decoded assignment jumps."""

SUBGRADIENT_PATIENCE = 20
"""Steps without a better bound after which the step length shrinks by LENGTH_SHRINK."""

LENGTH_SHRINK = 0.7
"""Factor of the step length after steps without a better bound."""

LAST_LENGTH, RESTARTS = 1e-3, 2
"""Step length at which the search for multipliers ends, and how often it begins anew."""

LEAST_SETTLING, MOST_SETTLING, SETTLED = 3 * SUBGRADIENT_SWEEPS, 100, 1e-6
"""Sweeps before margins are taken: until the bound is within this part of the best one."""

STILL_SWEEPS = 5
"""Sweeps without a better bound after which messages are taken to have settled."""

MOST_PLANES, WHOLE_PLANES, STALE_PLANES, PLANE_SWEEPS, SETTLING_WORTH = 60, 3, 6, 30, 1e-4
"""Steps by cutting planes; of those, the first ones that go all the way; steps without a better bound that end them; sweeps of one."""

PLANES_REACH = 4.0
"""Factor by which such a step changes a multiplier at most."""

REPAIR_EVERY = 5
"""Steps between two repairs of a decoded assignment: more of them, more incumbents and fewer steps of the bound."""

REPAIR_WITHIN = 0.2
"""Steps whose bound is this much below the best are not worth a repair."""

PEAK_STEPS = 200
PEAK_SWEEPS = 3
"""Steps of multiplicative weights towards the least peak at most, and sweeps of each."""

WEIGHTS_RATE = 2.0
"""How fast weights follow the use: exp(WEIGHTS_RATE x (use / peak - 1)) per step."""

PEAK_UNITS = 2.0**40
"""Scaled cost of the limit."""

FEW_PRICES = 3
"""Times with multipliers up to which cutting planes find good ones by themselves, where exact bounds follow (search.py)."""


# Bucket elimination (bounds/elimination.py)

MOST_ROWS = 30_000_000
"""Rows of all joined tables together: some seconds, and about a gigabyte."""

NARROW = 66.0
"""Logarithm to base 2 of the states of a node and those around it when it is eliminated, up to which a problem is narrow. The most are
2**20 to 2**60 in traced models on one to three axes, 2**77 to 2**560 in large graphs that have no such layers."""

FLOOR_WINDOWS = (1 / 16, 1 / 4)
"""Parts of the room within which the first pass keeps rows; the next one is tried where that limits a rise."""

FLOOR_FEWER = 4
"""How many times fewer rows the first pass may make: where it is not cheap, the next one is out of reach."""

ROW_WORK, TABLE_WORK = 2e-7, 7e-5
"""Work of a row and of a table."""

PLANES_TIE = 1e-7
"""Part of the price of the whole limit by which smaller multipliers are preferred."""


# Labels (bounds/labels.py)

LABEL_CELLS = 2**24
"""Numbers that the labels of one step may have."""

LABEL_USES = 2**24
"""Strategies x times of a problem that is tried."""

LABEL_WIDEST = 26.0
"""Logarithm to base 2 of the states of an order's widest step beyond which a problem is not tried."""

LABEL_WIDEST_WINDOWS = 40.0
"""The same of a problem with windows, which a split cuts to few of its states."""

LABEL_STARTS = 6
"""Nodes that an order is tried from."""

LABEL_NODE_WORK, LABEL_CELL_WORK = 4e-4, 6e-9
"""Work of a step, and of a number in it."""

LABEL_DISTANCES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
"""Distances in a sorted list at which labels are compared."""

LABEL_SORTINGS = 4
"""Sortings after which labels are compared."""

LABEL_MANY = 64
"""Labels from which on all these comparisons are worth their work."""


# The search (search.py)

FIRST_CELLS = 2500
"""Pairs in the first kernel before presolve; each next one has three times as many."""

KERNEL_PATIENCE = 9.0
"""Times the usual effort for an integer program: three times as much after one that is not solved to the end."""

KERNEL_PAUSE = 2
"""Epochs without an integer program after one that gave nothing."""

WORTH_FIXING = 600
"""Strategies below which a problem is not worth shrinking before its bound is done."""

FIXING_SHRINK = 0.8
"""Part of the strategies that fixing must leave at most, for a problem to be presolved and bounded anew."""

SHARPEN_NEARER = 0.5
"""Part of its distance to the bound to which an incumbent must come nearer for exact bounds to be tried again."""

SHARPEN_STEADY = 0.9
"""Part of the distance to the bound that an epoch must leave for exact bounds to be tried: they are the easier the better the incumbent."""

SHARPEN_WORK, SHARPEN_HALF = 5.0, 0.5
"""Work after which, and part of the strategies below which, no further step to exact bounds follows at once."""

SHARPEN_NARROWER = 0.7
"""Part of the strategies of a problem that was too wide for exact bounds that another must have at most to be tried."""

RELAX_AFTER = 0.4
"""Share of time or work after which a better bound is looked for in other ways, if the search was not seen to stand before."""

IDLE_EPOCHS = 12
"""Epochs without a better assignment or bound after which a large problem is given up."""

ANNEALING_FIRST_WORK, ANNEALING_FAR, ANNEALING_SHARE = 0.3, 0.01, 0.25
"""Work of the first epoch of annealing; gap from which on it is worth a part of the work while bounds are sought, or beside large
neighbourhood search; that part. (1,000 nodes with 12 strategies on circles: 79,652 after 2 s of annealing, 81,942 after 20 s without.)"""

TINY_VALUES, TINY_CELLS = 80, 800
"""Strategies and pairs up to which a problem is enumerated sooner than annealed."""

FINE_GAP = 0.01
"""Part of the gap asked for that is tried for when that gap is reached: the plan that is then found is mostly the proven best."""

FINE_SHARE, FINE_WORK = 0.1, 1.0
"""What that may take: this part of the work so far, and some units."""

SHARPEN_STEPS = 12
"""Multipliers that are tried at most."""

SHARPEN_WHOLE_STEPS = 3
"""Of those, the first ones that go all the way to what the planes say is best."""

SHARPEN_REACH = 1.5
"""Factor by which a step changes a multiplier at most."""

SHARPEN_SMALL = 0.05
"""Part of the distance to the incumbent that a step must promise."""


# Integer programs (integer_program.py)

QUICK_WORK = 0.3
"""Work of labels before an integer program is tried."""

CHECK_WORK = 2.0
"""Work of making a claim again, for labels and for CP-SAT: so many units, or so many times the work of the program that made it."""

KERNEL_GROWTH, KERNEL_QUICK = 3, 0.5
"""How many times as many pairs the next kernel has; work of an integer program after which that one follows at once."""

KERNEL_AT_ONCE = 12.0
"""Work after which no larger kernel follows at once."""

WEIGHTS_STEPS, WEIGHTS_WORK = 60, 60.0
"""Steps towards the best weights of windows' terms, and work units that all of them may take. A tied Llama-3-8B settles in 15 to 20."""

WEIGHTS_REACH, WEIGHTS_PRICE_REACH = 0.02, 3.0
"""The least box around the best weights, and the factor of multipliers, above one, in a box of one."""

WEIGHTS_SMALL = 0.02
"""Part of the gap that a step must promise."""

WHOLE_REACH, WHOLE_STEPS = 0.1, 10
"""The box around the best weights when one more window is kept whole, and the further steps that this is worth."""

WHOLE_WORK = 6.0
"""Work that an enumeration with some windows kept whole may take: beyond it, labels have become too many for any more windows."""

WEIGHTS_GAP, WEIGHTS_GAP_SHARE = 1e-3, 0.1
"""Gap to which a priced problem is solved, and the part of the whole gap that this is: planes need not be sharper than what is known."""

KERNEL_CELLS = 60_000
"""Pairs after presolve beyond which an integer program is not tried."""


# Large neighbourhood search (primal/lns.py)

FIRST_EPOCH_WORK, MOST_EPOCH_WORK, EPOCH_GROWTH = 1.0, 8.0, 1.5
"""Work of an improvement in the first and the later epochs."""

LEAST_SHARE = 0.25
"""Least share of the work of forest moves, and of regions: what gains nothing now may later."""

TASK_SECONDS, ALONE_SECONDS = 4.0, 20.0
"""Wall time of a task where nothing but time limits the whole: beside another one, and of an integer program alone."""

LNS_REST = 3
"""Epochs with an integer program alone, after one in which the improvement beside it gave nothing."""

PRICE_FACTORS = (0.8, 0.9, 1.0, 1.0, 1.1, 1.25)
"""Of the relaxation's prices of memory, for forest moves."""

KICK = 0.02
"""Share of the nodes that a disturbed incumbent gets a random strategy at."""

MOST_FOREST_MOVES = 60
"""Forest moves in a row at most."""

FIRST_NODES, LEAST_NODES, MOST_NODES = 80, 20, 1500
"""Nodes of a region at first, at least and at most; they follow the work that regions take."""

LNS_VALUES = 6
"""Strategies that each node of a region may choose from."""

LNS_CELLS = 25_000
"""Pairs of a region after presolve beyond which it is made smaller instead of solved."""

LNS_EFFORT = 3.0
"""Work units for one region."""


# Local search and annealing (primal/)

REPAIR_MOVES = 20_000
"""Changes after which a repair gives up."""

HOT, COLD = 0.5, 0.005
"""First and last temperature, as parts of what a random change of the given assignment costs or saves in the median."""

TEMPERATURE_SAMPLES = 200
"""Changes that the first temperature is taken from."""

PROPOSAL_WORK = 4e-8
"""Work of one proposal on a node without edges; an edge adds as much. (A core of 2026 makes 3 to 8 million proposals a second.)"""

ANNEALING_GROWTH, ANNEALING_MOST_WORK = 1.5, 8.0
"""How much more work the next epoch has; the largest."""

ANNEALING_RUNS, ANNEALING_LEAST_SWEEPS, ANNEALING_MOST_SWEEPS = 10, 1000, 200_000
"""Runs of an epoch where each can have ANNEALING_LEAST_SWEEPS: of 9 graphs of 60 nodes the optimum was mostly found in one of five runs of
3000, in hardly any of 300. Where it cannot, the epoch is one run."""

ANNEALING_RUN_SHARE = 0.1
"""Of the time that is left, for one run: it cannot be interrupted."""


# Infeasible subsystem (iis.py)

IIS_EFFORT = 2.0
"""Work units of one question to CP-SAT; what it leaves open the solver is asked."""

IIS_SHARE = 0.3
"""Of the time and work that are left: what one question to the solver may take."""

IIS_TIMES = 3
"""Broken times that are added at a time."""

IIS_SINGLE_TIMES = 4
"""How many times are asked alone before several are taken together."""

IIS_BLAME = 6
"""Elements from which on assumption literals are worth their program."""

IIS_LITERALS = 1_500_000
"""In support clauses; a larger program is not built."""

IIS_ROWS = 5
"""Broken memory rows that a program gets at a time."""

IIS_LABEL_WORK = 0.5
"""Of enumerating, before CP-SAT is asked."""
