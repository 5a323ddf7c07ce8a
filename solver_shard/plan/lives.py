"""Who reads a tensor together, and when bytes live, from the program and its rules alone: the time axis of the evaluator.

Times are op positions; the update runs at T, the number of ops; the step ends at T + 1; all lives are half-open.

- The readers of a tensor that share one reshard are those of one phase that read it in the same way. The reshard runs
  just before the first of them. An op that needs only the shape of an operand is none of its readers. A use by a view op lasts as
  long as the bytes that the view's result borrows.
- A tensor that a forward op or nobody made, with forward readers and later ones (backward, or the step's output), is *held*:
  its own bytes end with its forward readers, what is kept of it stays until the last group of later readers has begun.
- What is held of a view as its op produced it is the storage that it lies in. Held tensors of one storage have it together, from
  the end of its owner's own bytes (of the first member's, where the owner is not held) until none of them is needed.
- An identity that alone reads what an op has made, the place of a pin or a relay, takes over: what it hands on owns the bytes from one
  past its time, as they are or copied, and the tensor before it ends there. Behind a view it is a view, and what is viewed lives on.
- The bytes of any other tensor end when the last group of its readers has begun. Sources stay for the whole step.
- If nothing but that last group (of a held tensor: the last of the forward and of the later ones) can have a use for them when it begins,
  it takes them as they are, or they end with its reshard, before its first reader runs. So it is where all other groups have ended, and
  a view's tensor has no other readers, nor is it held. What is held is kept all the same, from when the last forward reshard has run, and
  so is a storage that several tensors share, until the later reader of each has run.
- What an expanded tensor repeats stays until the last of its readers is done, however they get it.
- With several microbatches the times are those of any one of them. A gradient then has a group of its own, "accumulate", that ends
  with the addition, and the update's group starts from the accumulator, after the last microbatch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from solver_shard.constraints import IDENTITY, places
from solver_shard.plan.plan import CATEGORIES
from solver_shard.program import Phase, Program
from solver_shard.rulebook.rule import Rule

Key = tuple[int, str, str]
"""A group of readers: tensor, purpose, and how they read it."""

Life = tuple[int, int, int]
"""From when until when how many bytes are owned: start, stop, bytes per device; the same start and stop for none."""

ACCUMULATE = "accumulate"

LATER = ("backward", "output")
"""Purposes whose readers start from what is held of a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lives:
    """Groups of readers and the ends of lives.

    Attributes:
        end: of the step.
        readers: (op position, operand index) of every group; none for optimizer and output.
        first, stop: when the reshard of a group runs; one past the group's last use.
        views: ops whose results have no bytes of their own.
        places: identities that alone read what an op has made.
        base_start, base_stop: when a tensor's own bytes begin and end; of tensors that ops make, and of all.
        held_stop: when what is held of a tensor is no longer needed for any reshard; only of tensors that are held. Where the last group
            takes it, that is its first reader, but for what lies in a storage that is shared.
        taking: groups that take what is left of a tensor, or leave nothing of it.
        storages: by owner, the held tensors that may lie in what it is, with the groups that view ops read on the way; where there
            are several, or one that is a part, or the owner is a source.
    """

    end: int
    readers: Mapping[Key, tuple[tuple[int, int], ...]]
    first: Mapping[Key, int]
    stop: Mapping[Key, int]
    views: frozenset[int]
    places: frozenset[int]
    base_start: Mapping[int, int]
    base_stop: Mapping[int, int]
    held_stop: Mapping[int, int]
    taking: frozenset[Key]
    storages: Mapping[int, Mapping[int, tuple[Key, ...]]]

    def later(self, key: Key) -> bool:
        """Whether a group starts from what is held."""
        return key[0] in self.held_stop and key[1] in LATER


def find_lives(program: Program, rules: Sequence[Rule], *, accumulates: bool = False) -> Lives:
    """The groups of readers of every tensor and when bytes end; ``rules`` has one rule per op."""
    found = _walk(program, rules, accumulates, frozenset(), frozenset())
    shared = frozenset(t for members in found.storages.values() for t in members)
    return _walk(program, rules, accumulates, _taking(program, found, shared), shared)


def _taking(program: Program, lives: Lives, shared: frozenset[int]) -> frozenset[Key]:
    """The groups that nothing else outlives, by lives that have none yet."""
    made = {t: i for i, op in enumerate(program.ops) for t in op.results}
    keys: dict[int, list[Key]] = {}
    for key in lives.readers:
        if key[1] != "optimizer" or (key[0], ACCUMULATE, ACCUMULATE) not in lives.readers:  # whose group starts from the accumulator
            keys.setdefault(key[0], []).append(key)

    def unused(t: int, time: int) -> bool:
        """Whether nothing reads at a time or later what a view is of, but for the view."""
        if t not in made or made[t] not in lives.views:
            return t in made
        (x, *others), mine = program.ops[made[t]].operands, ((made[t], 0),)
        alike = program.tensors[x].numel == program.tensors[t].numel
        over = all(lives.readers[key] == mine or lives.stop[key] <= time for key in keys[x])
        return not others and alike and x not in lives.held_stop and over and unused(x, time)

    def owned(t: int, time: int) -> bool:
        """Whether the group that reads what is viewed has the bytes, not what is viewed itself."""
        x, mine = program.ops[made[t]].operands[0], ((made[t], 0),)
        if program.ops[made[t]].name == IDENTITY and x in made and made[x] in lives.views:
            return owned(x, time)  # a place behind a view hands it on
        return lives.base_stop[x] < time or any(key[0] == x and lives.readers[key] == mine for key in found)

    found: set[Key] = set()
    for t in made:
        if _expanded(program, made, t):
            continue
        held = t in lives.held_stop
        for later in (False, True):
            groups = [key for key in keys.get(t, ()) if lives.later(key) == later]
            if not groups or (t in shared and not later):
                continue
            last = max(groups, key=lambda key: lives.first[key])
            time, before_view = lives.first[last], any(i in lives.views and i in lives.places for i, _ in lives.readers[last])
            # what is held may lie in what an update reads
            over = all(lives.stop[key] <= time for key in (keys[t] if later else groups) if key != last)
            if not lives.readers[last] or not over or before_view:
                continue
            if (t in shared and lives.stop[last] > time + 1) or (held and not later and lives.stop[last] >= lives.held_stop[t]):
                continue
            if later or made[t] not in lives.views or (owned(t, time) and unused(t, time)):
                found.add(last)
    return frozenset(found)


def _walk(program: Program, rules: Sequence[Rule], accumulates: bool, taking: frozenset[Key], shared: frozenset[int]) -> Lives:
    update = len(program.ops)
    end = update + 1
    readers = _readers(program, rules)
    made = {t: i for i, op in enumerate(program.ops) for t in op.results}
    before = places(program)
    views = {i for i, rule in enumerate(rules) if rule.view}
    takers = {i for t, i in before.items() if made[t] not in views}
    views -= takers
    base_start = {t: i + (i in takers) for t, i in made.items()}
    leaving = "optimizer"
    if accumulates:  # what the producer has made is added up; only the sum goes to the update
        leaving = ACCUMULATE
        readers |= dict.fromkeys(((t, ACCUMULATE, ACCUMULATE) for t in program.gradients.values()), ())
    summed = [key for key in readers if accumulates and key[1] == "optimizer"]
    of_tensor: dict[int, list[Key]] = {}
    for key in readers:
        if key not in summed:
            of_tensor.setdefault(key[0], []).append(key)
    first = {key: min(i for i, _ in uses) if uses else made[key[0]] if key[1] == leaving else update for key, uses in readers.items()}
    stop: dict[Key, int] = dict.fromkeys(summed, end)
    base_stop: dict[int, int] = {}
    held_stop: dict[int, int] = {}
    for t in (*reversed(made), *program.sources()):  # what is viewed after its views
        keys = of_tensor.get(t, [])
        for key in keys:
            stops = [] if readers[key] else [first[key] + 1] if key[1] == ACCUMULATE else [end]
            for i, _ in readers[key]:
                stops.append(i + 1)
                if i in views:
                    stops += [base_stop[r] for r in program.ops[i].results]
            stop[key] = max(stops)
        later = [key for key in keys if key[1] in LATER]
        early = [key for key in keys if key[1] not in LATER]
        forward = t not in made or program.ops[made[t]].phase is Phase.FORWARD
        held = forward and later and any(key[1] == "forward" for key in early)
        begun = {key: stop[key] if readers[key] and _expanded(program, made, t) else first[key] + (key not in taking) for key in keys}
        if held:
            held_stop[t] = max(first[key] + 1 if t in shared and key in taking else begun[key] for key in later)
        if t not in made:
            base_stop[t] = end
        elif before.get(t) in views:
            base_stop[t] = base_stop[program.ops[before[t]].results[0]]
        elif held:
            base_stop[t] = max(first[key] if key in taking else stop[key] for key in early)
        else:
            base_stop[t] = max(begun.values(), default=base_start[t] + 1)
    together: dict[int, dict[int, tuple[Key, ...]]] = {}
    for t in held_stop:
        owner, way = _viewed(program, views, made, readers, t)
        if owner != t or t in made:
            together.setdefault(owner, {})[t] = way
    storages = {
        owner: members
        for owner, members in together.items()
        if owner not in made or len(members) > 1 or any(program.tensors[t].numel != program.tensors[owner].numel for t in members)
    }
    return Lives(
        end=end,
        readers=readers,
        first=first,
        stop=stop,
        views=frozenset(views),
        places=frozenset(before.values()),
        base_start=base_start,
        base_stop=base_stop,
        held_stop=held_stop,
        taking=taking,
        storages=storages,
    )


def _viewed(
    program: Program, views: Collection[int], made: Mapping[int, int], readers: Mapping[Key, tuple[tuple[int, int], ...]], t: int
) -> tuple[int, tuple[Key, ...]]:
    """The tensor in whose storage a view lies, and the groups through which views read it, back from the view."""
    way: list[Key] = []
    while t in made and made[t] in views and len(program.ops[made[t]].operands) == 1:
        (x,) = program.ops[made[t]].operands
        grows = program.tensors[t].numel > program.tensors[x].numel
        merged = _expanded(program, made, x) and program.ops[made[t]].name != IDENTITY  # an expanded tensor that is merged is written out
        if merged or (grows and not _expanded(program, made, t)):
            break
        way.append(next(key for key, uses in readers.items() if key[0] == x and (made[t], 0) in uses))
        t = x
    return t, tuple(way)


def _expanded(program: Program, made: Mapping[int, int], t: int) -> bool:
    """Whether dims of a tensor are repeated without being written out."""
    return distinct_shape(program, made, t) != program.tensors[t].shape


def distinct_shape(program: Program, made: Mapping[int, int], t: int) -> tuple[int, ...]:
    """A tensor's shape, with 1 for dims that are repeated without being written out."""
    whole = program.tensors[t].shape
    while t in made and program.ops[made[t]].name == IDENTITY:
        (t,) = program.ops[made[t]].operands
    if t not in made or program.ops[made[t]].name != "aten.expand.default":
        return whole
    before = program.tensors[program.ops[made[t]].operands[0]].shape
    return (1,) * (len(whole) - len(before)) + before


class Profile:
    """Bytes per device over time, by category, filled life after life."""

    def __init__(self, end: int) -> None:
        self.end = end
        self.change = {category: np.zeros(end + 1, dtype=np.int64) for category in CATEGORIES}

    def add(self, category: str, start: int, stop: int, nbytes: int) -> Life:
        """Own bytes from start to stop; nothing if that is not later. The life as plans state it."""
        if start >= stop:
            return stop, stop, 0
        self.change[category][start] += nbytes
        self.change[category][stop] -= nbytes
        return start, stop, nbytes

    def series(self) -> dict[str, tuple[int, ...]]:
        """Bytes at each time from 0 to the end."""
        return {category: tuple(np.cumsum(change)[: self.end].tolist()) for category, change in self.change.items()}


def _readers(program: Program, rules: Sequence[Rule]) -> dict[Key, tuple[tuple[int, int], ...]]:
    """Readers of one tensor, in one phase, that read it in the same way."""
    found: dict[Key, list[tuple[int, int]]] = {}
    for i, op in enumerate(program.ops):
        matmul = rules[i].matmul and op.name == "aten.einsum.default"
        for j, t in enumerate(op.operands):
            if not rules[i].needs(j):
                continue
            found.setdefault((t, op.phase.value, "matmul" if matmul else op.name), []).append((i, j))
    for t in program.gradients.values():
        found[t, "optimizer", "update"] = []
    for t in program.outputs:
        found[t, "output", "output"] = []
    return {key: tuple(uses) for key, uses in found.items()}
