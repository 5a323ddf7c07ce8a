"""Who reads a tensor together, and how long its bytes live.

The readers of a tensor are grouped statically by phase and by how they read it, because readers of one group share one
reshard: three projections of a sequence-cut activation pay one all-gather. Matrix products form one group per phase
whatever their equation (in backward, the data and the weight gradient of one incoming gradient); other ops group by name.

Times are op positions; T is their number, the optimizer update runs at T, and the step ends at T + 1. A reshard runs
just before its first reader, so a tensor's own bytes must live up to the last of its groups' first readers. A group that
reads the tensor as it is (an alias) keeps it alive up to its own last reader; results of view ops carry no bytes and
prolong the life of what they view. An operand of which an op needs only the shape (``Rule.needs``) is no reader: it is in no
group, asks for no layout and keeps nothing alive.

When the last of a tensor's groups begins, no other group needs it any more, mostly. That group then is **final**: the tensor's own bytes
end just before the group's first reader, with the reshard. If it is an alias the group has them from there on; if it is a copy, the
tensor is there while it is copied, and gone when the reader runs (see :mod:`solver_shard.graph.transient_memory`). Where others may still
read the tensor, as it is or through views, its bytes last until the reader has run. Which it is depends on the program alone. What a final
group reads as it is may be **kept** anyway: after its forward readers a tensor may be held, and a held one lie in the storage of others.
What an expanded tensor repeats is small beside it: it lives until the last of its readers is done.

A tensor that is read in the forward pass and again later (by the backward pass, or as an output) is *held* in between:
either as its producer left it, or as the copy that a forward group made. Its own bytes then end with its last forward
reader, the held ones live from there until the last of the later groups has begun, and later groups start from what is held.
What is held of a view is the storage that it lies in; a :class:`Storage` lists the held tensors that share one.

The place of a pin or a relay (:mod:`solver_shard.program`) is an identity, the only reader of what an op made. It **takes over**: what
it hands on owns the bytes from one past its own time, be they the very same or a copy, and the tensor before it ends there. Where that
tensor is a view, the place is a view as well, and what is viewed lives as long as what it hands on.

With several microbatches a step, all times are those of one microbatch, of any: what lives for the whole step lives through each
of them. A gradient is then added to its accumulator where it is made, and its own bytes end there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from solver_shard.program import IDENTITY, Phase, Program, Role, in_place, places
from solver_shard.rules.rule import Rule

FORWARD = "forward"
ACCUMULATE = "accumulate"
OPTIMIZER = "optimizer"
OUTPUT = "output"
UPDATE = "update"
EXPAND = "aten.expand.default"
"""Repeats dims without writing them out."""
LATER = (Phase.BACKWARD.value, OUTPUT)
"""Purposes whose readers start from what is held of a tensor."""

Ending = dict[tuple[int, bool], bool]
"""Tensors whose last group is final, before and after they are held; whether what it starts from may be kept anyway."""

Keyed = dict[int, dict[tuple[str, str], list[tuple[int, int]]]]
"""By tensor, and by purpose and family: the readers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Readers of one tensor that share one reshard.

    Attributes:
        tensor: position in the program.
        purpose: forward, backward, optimizer (a gradient's way to the update) or output.
        family: how the readers read it; for messages and for tying repeated layers.
        readers: (op position, operand index); empty for optimizer and output.
        start: position of the first reader, when the reshard runs.
        stop: one past the last use, uses through views included.
        late: the group starts from what is held of the tensor after its forward readers.
        final: nothing else needs what the group starts from when it begins.
        kept: it is final, but what it starts from may stay for another reason: because it is held, or in a storage that others need.
    """

    tensor: int
    purpose: str
    family: str
    readers: tuple[tuple[int, int], ...]
    start: int
    stop: int
    late: bool = False
    final: bool = False
    kept: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A held tensor of a storage.

    Attributes:
        tensor: position in the program.
        path: (tensor, group) of every read by a view op on the way from the owner, in order; empty for the owner.
        until: when it is no longer needed for any reshard.
    """

    tensor: int
    path: tuple[tuple[int, int], ...]
    until: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """The held tensors that may lie in what one op made, or nobody; those that are held longest come first.

    Attributes:
        owner: the tensor that is no view.
        made: whether an op made it.
        start: when forward reads no longer keep the storage, so that its members must.
    """

    owner: int
    made: bool
    start: int
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lives:
    """Groups by tensor, in order of their first reader, and the half-open intervals of every tensor's bytes.

    Attributes:
        base: when the producer's own bytes live.
        views: ops whose results have no bytes of their own.
        expanded: tensors with repeated dims, and their shapes with 1 for those.
        held: when what is held of a tensor must be there at the latest: one past the first readers of its late groups, or at that of
            the final one; of an expanded tensor, one past the last. Only tensors that are held have an entry.
        storages: those in which several tensors may be held, or a view that is only a part.
    """

    groups: dict[int, tuple[Group, ...]]
    base: tuple[tuple[int, int], ...]
    held: dict[int, int]
    end: int
    views: frozenset[int] = frozenset()
    storages: tuple[Storage, ...] = ()
    expanded: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def until(self, t: int) -> int:
        """When what is held of a tensor, but for what lies in a storage with others, is no longer needed for any reshard."""
        last = self.groups[t][-1]
        return last.start if last.final else self.held[t]


def read_for(program: Program, lives: Lives, made: Mapping[int, int], t: int) -> tuple[int, int]:
    """What a view is of, and the group that reads it for the view and so has its bytes; a place behind a view is seen through."""
    i = made[t]
    (x, *_) = program.ops[i].operands
    while program.ops[i].name == IDENTITY and x in made and made[x] in lives.views:
        i = made[x]
        (x, *_) = program.ops[i].operands
    return x, next(k for k, g in enumerate(lives.groups[x]) if (i, 0) in g.readers)


def either_order(program: Program) -> frozenset[int]:
    """Tensors that several axes may cut on one dim in either order: what is stored or reduced, not what ops make for each other."""
    parameters = {t for t, tensor in enumerate(program.tensors) if tensor.role is Role.PARAMETER}
    return frozenset(parameters | set(program.gradients.values()))


def family_of(rule: Rule, name: str) -> str:
    """The key by which readers of one tensor and phase are grouped."""
    return "matmul" if rule.matmul and name == "aten.einsum.default" else name


def liveness(program: Program, rules: Sequence[Rule], *, accumulates: bool = False) -> Lives:
    """Group the readers of every tensor and find when its bytes live; ``rules`` has one rule per op.

    ``accumulates``: gradients go to accumulators; the optimizer group of a gradient then ends with its addition.
    """
    keyed = _keyed_readers(program, rules)
    known = _lives(program, rules, keyed, accumulates, {})
    known = _lives(program, rules, keyed, accumulates, _ending(program, known))
    return replace(known, storages=_storages(program, known))


def _lives(program: Program, rules: Sequence[Rule], keyed: Keyed, accumulates: bool, ending: Ending) -> Lives:
    """Without storages."""
    update = len(program.ops)
    end = update + 1
    made = {t: i for i, op in enumerate(program.ops) for t in op.results}
    handing = places(program)
    inside = in_place(program)
    views = frozenset(i for i, rule in enumerate(rules) if rule.view) | inside
    taking = frozenset(i for t, i in handing.items() if made[t] not in views)
    views -= taking
    spread = _expanded(program)
    order = sorted(range(len(program.tensors)), key=lambda t: made.get(t, -1), reverse=True)
    base: list[tuple[int, int]] = [(0, end)] * len(program.tensors)
    groups: dict[int, tuple[Group, ...]] = {}
    held: dict[int, int] = {}
    for t in order:  # a view's result before what it views
        found = []
        for (purpose, family), readers in keyed.get(t, {}).items():
            start = readers[0][0] if readers else made[t] if purpose == OPTIMIZER else update
            stop = start + 1 if readers or (purpose == OPTIMIZER and accumulates) else end
            for i, j in readers:
                stop = max(stop, i + 1)
                if i in views and not (i in inside and j):
                    stop = max(stop, *(base[r][1] for r in program.ops[i].results))
            found.append((start, purpose, family, tuple(readers), stop))
        found.sort()
        early = any(purpose == FORWARD for _, purpose, *_ in found)
        late = early and _is_forward(program, made, t) and any(purpose in LATER for _, purpose, *_ in found)
        known = [
            Group(tensor=t, purpose=purpose, family=family, readers=readers, start=start, stop=stop, late=late and purpose in LATER)
            for start, purpose, family, readers, stop in found
        ]
        for k, group in enumerate(known):
            if (t, group.late) in ending and (k + 1 == len(known) or known[k + 1].late > group.late):  # the last of its kind
                known[k] = replace(group, final=True, kept=ending[t, group.late])
        groups[t] = tuple(known)
        # what an expanded tensor views is small beside it, and there as long as anything reads it
        begun = [(g.stop if t in spread and g.readers else g.start + (not g.final or (g.late and g.kept)), g.late) for g in groups[t]]
        if late:
            held[t] = max(time for time, later in begun if later)
        if t in made:
            since = made[t] + (made[t] in taking)
            first = max((time for time, _ in begun), default=since + 1)
            if late:
                first = max(g.start if g.final else g.stop for g in groups[t] if not g.late)
            base[t] = (since, first)
            if t in handing and handing[t] in views:
                base[t] = (since, base[program.ops[handing[t]].results[0]][1])
    return Lives(groups={t: g for t, g in groups.items() if g}, base=tuple(base), held=held, end=end, views=views, expanded=spread)


def _ending(program: Program, known: Lives) -> Ending:
    """The final groups: when one begins no other is left, and nothing else of the same storage is read."""
    made, handing, spread = {t: i for i, op in enumerate(program.ops) for t in op.results}, places(program), _expanded(program)
    together = {member.tensor for storage in _storages(program, known) for member in storage.members}
    found: Ending = {}
    for t, groups in sorted(known.groups.items(), key=lambda pair: made.get(pair[0], -1)):  # what is viewed before its views
        if t not in made or t in spread or handing.get(t) in known.views:
            continue
        for late in {g.late for g in groups}:
            *others, last = (g for g in groups if g.late == late)
            if late:  # what is held may lie in what an update reads
                others = [g for g in groups if g is not last]
            if not last.readers or any(g.stop > last.start for g in others):
                continue
            if t in together and (not late or last.stop > last.start + 1):
                continue
            if t in known.held and not late and last.stop >= known.held[t]:
                continue
            if (
                late
                or made[t] not in known.views
                or (_owned(program, known, found, made, t, last.start) and _alone(program, known, made, t, last.start))
            ):
                found[t, late] = t in known.held if not late else t in together
    return found


def _owned(program: Program, known: Lives, found: Ending, made: Mapping[int, int], t: int, time: int) -> bool:
    """Whether the reshard or the tail of what a view is of has the bytes at a time, not what is viewed itself; places are seen through."""
    x = program.ops[made[t]].operands[0]
    if program.ops[made[t]].name == IDENTITY and x in made and made[x] in known.views:
        return _owned(program, known, found, made, x, time)
    return known.base[x][1] < time or ((x, False) in found and known.groups[x][-1].readers == ((made[t], 0),))


def _alone(program: Program, known: Lives, made: dict[int, int], t: int, time: int) -> bool:
    """Whether nothing that a view views is read after a time but through it."""
    while t in made and made[t] in known.views:
        op = program.ops[made[t]]
        x = op.operands[0]
        if len(op.operands) > 1 or x in known.held or program.tensors[x].numel != program.tensors[t].numel:
            return False
        if any(g.stop > time for g in known.groups[x] if g.readers != ((made[t], 0),)):
            return False
        t = x
    return t in made


def relayed_tensors(program: Program, rules: Sequence[Rule], *, everywhere: bool) -> tuple[int, ...]:
    """What gets a relay: what ops make for each other, not for the step's end, and several groups read, or (``everywhere``) any.

    One reshard may serve several groups. A relay behind a tensor of a single group never saves time: the way from one layout to another
    through a third costs no less (transition tables obey the triangle inequality), and what the group may read without communication of the
    third it may read of the one that the reshard could have brought. It can save bytes: what the way starts from goes in between, and
    buffers of collectives are needed when less else is there. So where bytes count, a relay is behind every tensor that could be pinned.
    """
    final = {*program.outputs, *program.gradients.values()}
    if not everywhere:  # what a traced identity hands on has a relay
        final |= {t for i in places(program).values() for t in program.ops[i].results}
    keyed = _keyed_readers(program, rules)
    made = [t for op in program.ops for t in op.results]
    return tuple(t for t in made if len(keyed.get(t, ())) > (not everywhere) and t not in final)


def _storages(program: Program, known: Lives) -> tuple[Storage, ...]:
    """The storages in which several tensors may be held, or one that is only a part; those of sources with every held view."""
    path: dict[int, tuple[int, tuple[tuple[int, int], ...]]] = {}
    made: set[int] = set()
    inside = in_place(program)
    spread = _expanded(program)
    for i, op in enumerate(program.ops):
        made.update(op.results)
        if i not in known.views or (len(op.operands) != 1 and i not in inside):
            continue
        x = op.operands[0]
        grows = program.tensors[op.results[0]].numel > program.tensors[x].numel
        if (x in spread and op.name != IDENTITY) or (grows and op.name != EXPAND):
            continue  # an expanded tensor that is merged is written out
        owner, before = path.get(x, (x, ()))
        group = next(k for k, g in enumerate(known.groups[x]) if (i, 0) in g.readers)
        path.update(dict.fromkeys(op.results, (owner, (*before, (x, group)))))
    found: dict[int, list[Member]] = {}
    for t in sorted(known.held, key=lambda t: (-known.held[t], t)):
        owner, way = path.get(t, (t, ()))
        if way or t in made:
            found.setdefault(owner, []).append(Member(tensor=t, path=way, until=known.held[t]))
    kept = []
    for owner, members in found.items():
        if owner not in made or len(members) > 1 or program.tensors[members[0].tensor].numel != program.tensors[owner].numel:
            # an alias of the owner keeps the storage as long as its group reads, through views too
            ends = [known.groups[owner][m.path[0][1]].stop if m.path else known.base[owner][1] for m in members]
            start = known.base[owner][1] if owner in known.held and owner in made else min(ends)
            kept.append(Storage(owner=owner, made=owner in made, start=start, members=tuple(members)))
    return tuple(kept)


def _expanded(program: Program) -> dict[int, tuple[int, ...]]:
    """Tensors with dims that are repeated without being written out, and their shapes with 1 for those dims."""
    found: dict[int, tuple[int, ...]] = {}
    for op in program.ops:
        x, t = op.operands[:1], op.results[0]
        if op.name == EXPAND and program.tensors[t].numel > program.tensors[x[0]].numel:
            before, shape = program.tensors[x[0]].shape, program.tensors[t].shape
            found[t] = (*(1,) * (len(shape) - len(before)), *before)
        elif op.name == IDENTITY and x[0] in found:
            found[t] = found[x[0]]
    return found


def _is_forward(program: Program, made: dict[int, int], t: int) -> bool:
    return t not in made or program.ops[made[t]].phase is Phase.FORWARD


def _keyed_readers(program: Program, rules: Sequence[Rule]) -> Keyed:
    """Readers of every tensor by purpose and family."""
    keyed: Keyed = {}
    for t, uses in program.readers().items():
        for i, j in uses:
            op = program.ops[i]
            if rules[i].needs(j):
                keyed.setdefault(t, {}).setdefault((op.phase.value, family_of(rules[i], op.name)), []).append((i, j))
    for t in program.gradients.values():
        keyed.setdefault(t, {})[OPTIMIZER, "update"] = []
    for t in program.outputs:
        keyed.setdefault(t, {})[OUTPUT, "output"] = []
    return keyed
