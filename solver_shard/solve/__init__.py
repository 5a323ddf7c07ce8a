"""The solver: a ``ChoiceGraph`` in, a ``Solution`` with its bound out.

    solution = solve(graph, SolveParameters(gap=1e-3, time_limit=30.0))         # engine.py, parameters.py

The problem is a pairwise discrete labelling (weighted constraint satisfaction, MAP in a Markov random field) under a limit on a peak:
minimise the costs of one strategy per node and of the pairs across edges, the bytes in use at every time at most the limit (problem.py).

**In what order.** ``engine.solve`` first leaves the limit out, for a small share of time: often the optimum fits, and is then the optimum.
Then it solves with the limit; where nothing is found within it, it minimises the peak alone, which tells an infeasible limit from a hard
one. Each of these is presolved and then a ``search.Search``: bound; fix strategies and presolve again while that removes a good part;
integer programs on ever larger kernels; elimination on what is narrow; large neighbourhood search and annealing beside all of this. Bounds
compose: a removed strategy occurs only in solutions that cost at least the incumbent it was removed with. A graph with windows is
bounded as the graph that weights of their terms make of it; what is found is judged with its windows.

========================================  ====================================  ==========================================================
part, by its textbook name                file                                  what it proves
========================================  ====================================  ==========================================================
presolve: aliases, dominance, min-plus    presolve/ (``reducer``, ``aliases``)  exact: the optimum stays; an empty domain proves that
  elimination of nodes of degree two                                            there is no assignment
postsolve                                 presolve/postsolve.py                 exact: same cost and bytes in the original
arc consistency (AC-3, Mackworth 1977)    ../graph/narrowing.py                 an emptied domain: there is no assignment
TRW-S (Kolmogorov 2006; message passing   bounds/trws.py (numpy),               a lower bound without the limit, of sums that are exact
  on the local polytope)                  bounds/trws_compiled.py (numba)       in floats
Lagrangian dual of the limit: column      bounds/lagrangian.py                  a lower bound for any multipliers; the linear programs
  generation (Dantzig and Wolfe 1960)                                           only suggest them
Lagrangian dual: subgradient (Polyak      bounds/subgradient.py                 the same; *cutting planes* (Kelley 1960,
  1969), multiplicative weights                                                 ``elimination.CuttingPlanes``) suggest multipliers
min-marginals on spanning forests         ``min_marginals`` of bounds/trws.py    a lower bound per strategy
                                          and bounds/trws_compiled.py
reduced-cost fixing                       ``search.Search._fixing``             removes strategies above the incumbent
bucket (variable) elimination             bounds/elimination.py                 the exact priced minimum, and exact min-marginals
  (Dechter 1999)
Lagrangian dual of windows: weights of    bounds/lagrangian.py                  a lower bound for any weights; with windows kept whole, by
  their terms (Kelley 1960)                                                     labels
labels: dynamic programming with          bounds/labels.py                      by enumeration in exact integers: the best below a
  dominance (Desrochers and Soumis 1988)                                        target, or that there is none
integer programs on a kernel (HiGHS,      integer_program.py                    a bound that both solvers claim, or that is enumerated;
  CP-SAT; kernel search, Angelelli 2010)                                        one solver's word proves nothing
lazy constraints                          ``engine.solve_in_rounds``,           each round's graph is a relaxation: its bound holds; memory
                                          ``integer_program._lazily``           rows are added where they are broken
local search, repair, forest moves        primal/local_search.py                nothing: assignments
simulated annealing (Kirkpatrick 1983)    primal/annealing.py                   nothing: assignments
  with strategic oscillation (Glover
  1989)
large neighbourhood search (Shaw 1998)    primal/lns.py                         nothing: assignments
infeasible subsystem (IIS) by a deletion  iis.py                                that a set of pins and times conflicts, and that each of
  filter (Chinneck and Dravnieks 1991)                                          them is needed
========================================  ====================================  ==========================================================

**What a certificate rests on.** An assignment is evaluated in exact integers before it counts. A bound is one of the table's, never one
solver's word; so is the claim that nothing keeps a limit. ``limits.py`` has the clock (decisions depend on counted work, not on time, so
the same graph, seed and work limit give the same answer), calls that can be left behind, and forked tasks; ``flat.py`` the arrays of
compiled loops.

**Two engines.** Message passing and its Lagrangian dual exist twice: batched numpy for small problems, and compiled loops on flat arrays,
with rows for few times, for large ones (``bounding.is_large``). One would do if its loops came compiled. As it is, a first small solve (14
nodes; one core of a busy machine, CPU seconds) takes 0.07 s with numpy, 19.7 s with the compiled engine where nothing is cached, 1.0 s
where all is (importing numba included). README's main job, a large one, takes 49 CPU s from command to plan the first time and 37 s then. A
newcomer's first solve may become slower by 3 s, so two stay. For one engine the 25 loops would be shipped compiled: as an extension module
per platform (C, Rust or Cython) in wheels, and numba only where there is no wheel. numba's own cache (2 MB for all of them) cannot be
shipped: it is bound to the date of the sources and to the processor.
"""
