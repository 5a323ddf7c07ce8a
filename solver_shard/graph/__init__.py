"""The problem that is solved: which layout every tensor has on a device mesh. Stated here once, each term with the function that builds it.

    choose       x[v] in {0, ..., K[v] - 1}                         for every node v                                            (1)
    to minimise  time(x) + weight * peak(x) // MiB,  or peak(x)                                                                 (2)
    where        time(x)   = sum over v of c[v](x[v]) + sum over edges (u, v) of C[u, v](x[u], x[v])       nanoseconds          (3)
                 use(x, t) = sum over v and its intervals [a, b) with a <= t < b of m[v](x[v])             bytes of a device    (4)
                 peak(x)   = max over t of use(x, t)                                                                            (5)
    subject to   peak(x) <= limit, and no c or C that is paid is FORBIDDEN                                                      (6)

(1) ``ChoiceGraph.sizes``, (2) ``solve.solution.objective_value``, (3) ``ChoiceGraph.cost``, (4) ``ChoiceGraph.profile``, (5)
``ChoiceGraph.peak``, (6) ``ChoiceGraph.allowed``. All numbers are integers. This is the problem of IOPDDL files, too, which are read into
the same class (``graph/iopddl.py``). ``graph/build.py`` makes a graph of a program and what the user asks for, ``graph/lowering.py`` its
nodes and edges.

**Variables.** One node each; the classes are in ``graph/nodes.py``, the functions are of ``lowering._Lowerer``. What something may choose
from is not narrowed by what is likely to be good: only what cannot be executed is left out.

    what it is of          class                x chooses                                                       built by
    stored tensor t        SourceNode           its layout                                                      _source
    op i                   OpNode               a strategy: per mesh axis a factor, a linear set, an           _op, strategies.op_strategies
                                                implementation, or whole
    result t of an op      ResultNode           the layout in which the op leaves it; follows from the op       _op
    group k of t's readers ReshardNode          a layout, and whether it is an alias of what is there or a copy _reshard
    t between its forward  HoldNode             a layout, and whose: the producer's, or the copy of a forward   _hold
      and its later readers                     group
    parameter p            StateNode, StepNode  the layout of the optimizer's state; the second follows         _state
                           MasterNode           whether a part of the parameter is stepped, or a copy; follows, too   _state
    gradient g             AccumulateNode,      how each microbatch's arrives, and the accumulator's layout     _accumulator
                           AccumulatorNode
    gradient norm          ClipNode             the mesh axes over which it is summed                           _clipping
    bytes of t             KeepNode, TailNode,  nothing: all follow from the others, so that each byte is       _hold, _member, _tails,
                           StorageNode,         the usage of one node                                           _final_tails, _storage,
                           AheadNode, BehindNode                                                                _brought, _reduced

**Costs of nodes**, c[v]: roofline time of an op and the collectives inside its implementation (``strategies.op_nanoseconds``), of the
update where the state is (``_state``), of adding a gradient up (``lowering.addition_ns``), of the all-reduce of the norm (``_clipping``).
Else 0.

**Costs of edges**, C[u, v] (``_moved``): the cheapest way from one layout to another (``costs.transitions``), with launches shared by what
is moved together (``costs.schedule``), less the overlap discount for gathers of parameters and reductions of gradients
(``costs.model.exposed``), with the conversion of a gradient into its reduce dtype (``lowering.conversion_ns``) and the traffic of a tensor
that is fused away elsewhere (``strategies.spill_nanoseconds``). All other tables say what fits together, 0 or FORBIDDEN
(``graph/tables.py``):

    producer -> reshard    0 to the alias of the same layout, the transition's cost to a copy of another        reshard_table
    reshard -> op          a strategy's operand has what is given, or gets it by a move without communication:  read_table
                           R to S(d), R to P for ops that are linear in it
    op -> result           the strategy's result                                                                result_table
    producer -> hold       what it left; a forward group -> hold: what it copied                                hold_table
    hold -> reshard        as from the producer, for the later groups                                           reshard_table
    gradient -> state      the update reads its slice of the reduced gradient: a free move                      free_table
    state, parameter ->    a part of what is stored where a device stores what it steps, else a copy           stepped_table
      master
    gradient -> parameter  without an optimizer: the gradient is stored like the parameter                      equal_table
    state -> parameter     the transition of the new values, after the step                                     _moved
    output -> buffer,      the new value is written where the old one lies                                      free_table
      input
    clip -> state          the axes that cut the state are among those of the norm                              norm_table

**Parameters, states, gradients** are three nodes of a trained parameter, so ZeRO-1, 2, 3 (Rajbhandari et al., SC 2020), hybrid sharding and
their mixtures are points of the graph, as is gathering a parameter once (its hold keeps the forward copy) or again for the backward pass
(its hold keeps what is stored). All three, the gradient once it is reduced, may be cut by several axes on one dim in either order,
``_S(d)`` (``liveness.either_order``); no op reads or makes such a layout.

**Microbatches.** A step runs the program N times, then the update once. What forward and backward pay is paid N times
(``choice_graph.repeated``); updates, the norm, transitions to the update and of new values once. Where N > 1 a gradient has an accumulator,
whose bytes live for the whole step, and the way to the update starts from it (``_gradient``):

    microbatch's gradient --AccumulateNode, N times--> accumulator --ReshardNode, once--> state

It may be unreduced and reduced once (DDP's ``no_sync``: Li et al., "PyTorch Distributed", VLDB 13(12), 2020, section 3.2.4; ZeRO-1), cut,
each microbatch's gradient reduce-scattered into it (ZeRO-2 and 3, FSDP2), or cut inside a node and unreduced across nodes (FSDP2's
``set_requires_all_reduce``). What a reduction leaves lies inside the accumulator's bytes wherever a device could cut it from the whole of
what it accumulates, for NCCL's all_reduce and reduce_scatter work in place (``in_place_table``). That a loss is a mean over N is a factor
in the loss, and free. **Clipping** needs the norm of all gradients: each device sums the squares of the slices that its states read, one
all-reduce of one f32 sums over the axes that cut any state, and each slice is scaled: ``torch.nn.utils.clip_grad_norm_`` in the sharded
form of torchtitan.

**Memory over time.** Times are op positions 0 .. T - 1 of one microbatch, T the update, T + 1 the end of the step (``liveness.liveness``).
m[v] is the fullest shard of each layout (``_bytes``); the intervals are

    stored tensor, state, accumulator   [0, T + 1)
    result of an op                     from the op until the last of its groups has begun (until the last forward one, where it is held)
    copy                                from the transition to the group's last reader
    alias, hold                         none: the bytes are the producer's, then a tail's, a keep's or a storage's
    result of a view                    none: what it views lives longer instead; so it is with what an op has written into a part of
                                        a buffer or input (program.in_place), which costs the time of that part only
    step of a parameter                 [T, T + 1)

*Tails.* A group that reads a tensor as it is may go on after the tensor's own bytes end; several such groups read the same bytes. So the
tails of one tensor are a chain, the longest first: each has the bytes from the end of the next shorter one to its own, if its group or a
longer one reads the tensor as it is (``tail_table``, ``chain_table``). After a hold the same is true of what is held; where that is a
stored tensor as it is stored, the bytes are there anyway (``stored_table``).

    x ──own bytes──► 6                    the last group has begun
      products (alias) ─────► 9           [6, 9) are bytes of the products' tail
      sums     (alias) ──────────► 12     [9, 12) are bytes of the sums'
      slices   (copy) ───► 7              has bytes of its own

A *final* group, the last to need what it starts from, has the bytes itself, unless they may stay for another reason: then its tail has them
where they do not (``stays_table``, ``kept_table``).

*Storages.* What is held of a view is the storage that it lies in, and other tensors of that storage may be held too:

    c_attn ──split──► q ──► held until its attention's backward      the storage of c_attn is there until the last of
              ├─────► k ──► held                                     those that are held as produced is not needed
              └─────► v ──► held as the copy that attention gathered

A member is held in the storage if it is held as produced and nothing on the way from the owner to it was copied or sliced, and alone
otherwise (``member_table``, ``copied_table``, ``sliced_table``). A chain of nodes, one per member, the longest held first, owns the
storage's bytes: each is needed from the end of the next shorter one to its own, if its member or a longer one lies in the storage
(``storage_table``, ``longer_table``). What is held in the storage of a source costs nothing more. What is expanded has the bytes of what it
repeats.

*Transitions* hold more than their source and destination while they run. That depends on two nodes, so it is the usage of a node that knows
both, at a time point of its own; such nodes are added where a solution needs them (``transient_memory.Transients``).

**Relays.** A tensor that several groups read has an identity behind it that may bring it to another layout at once for all of them; its
groups start from there (``read_table`` with ``exact``). Where bytes count there is one behind every tensor that could be pinned, for a way
in two legs may hold less. Pinned activations have the same places. See ``liveness.relayed_tensors`` and ``program.constrain``.

**Sub-axes.** A mesh axis that is larger than a count of heads or experts is split into two, and each part chooses for itself
(``sub_axes.split_where_needed``).

**Ties.** Copies of a repeated layer may share their decisions: nodes of one class (``symmetry.node_classes``) become one whose costs are
their sum and whose intervals are all of theirs (``symmetry.fold``). Every tied x is a free one of the same time and use, so a tied plan is
a plan of the free problem; a tied bound is of tied plans only.

**Narrowing.** Which strategies are allowed is said by masks, node to bool[K[v]] (``choice_graph.Masks``): of pins (``pins.pin_masks``), of
baselines (:mod:`solver_shard.baselines`), of a plan (``plan.decode``). ``ChoiceGraph.narrowed`` forbids the others, ``narrowing.shrink``
leaves them out. A template also forbids transitions (``templates.TemplateRestriction``): a graph is lowered without them, for a template
leaves little of a mesh that would be too large, or they are taken out of one that was lowered with them (``baselines.candidates``).

**Windows.** What runs side by side does not add up. With windows w of terms r (a lane of links, or the compute stream), (3) becomes

    time(x)    = sum over v of c[v](x[v]) + sum over edges (u, v) of C[u, v](x[u], x[v]) + sum over w of max over r of load(x, w, r)  (3')
    load(x, w, r) = sum over v of l[v, w, r](x[v]) + sum over pairs (u, v) of L[u, v, w, r](x[u], x[v])                             (3'')

``ChoiceGraph.loads`` has l and L (``choice_graph.Loads``): each is a cost times how many times it is paid on its term, for a folded node
stands for copies in several windows, and a mean of copies before the maximum would be too low. Windows that fold alike become one
(``symmetry.fold``). For whole weights y[w, r] >= 0 that sum to 2**20 in each window

    sum over w of max over r of load(x, w, r)   >=   sum over w, r of y[w, r] load(x, w, r) / 2**20                                 (3*)

and the right side, rounded down entry by entry, is a graph without windows (``ChoiceGraph.priced``): its bounds are bounds of this one.
What is forbidden is so in c and C only, whatever the weights.

Lowered with ``schedule="windows"``, c and C say what is possible and l and L all times (``lowering._takes``, ``_moved``). The windows, the
lanes and what runs beside which window are those of :mod:`solver_shard.costs.schedule`. Bytes follow: a copy of a parameter is there from
the start of the window before its first reader (AheadNode), what a reduction starts from and makes until the end of the window after it
(BehindNode, AheadNode); ``plan.windows`` works out the same figures from a plan. The solver finds weights and closes what they leave open
(``solve/bounds/lagrangian.py``).
"""
