"""Who reads a tensor together, and how long its bytes live.

The readers of a tensor are grouped statically by phase and by how they read it, because readers of one group share one
reshard: three projections of a sequence-cut activation pay one all-gather. Matrix products form one group per phase
whatever their equation (in backward, the data and the weight gradient of one incoming gradient); other ops group by name.

Times are op positions; T is their number, the optimizer update runs at T, and the step ends at T + 1. A reshard runs
just before its first reader, so a tensor's own bytes must live up to the last of its groups' first readers. A group that
reads the tensor as it is (an alias) keeps it alive up to its own last reader; results of view ops carry no bytes and
prolong the life of what they view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from solver_shard.program import Program, Role
from solver_shard.rulebook.rule import Rule

OPTIMIZER = "optimizer"
OUTPUT = "output"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Readers of one tensor that share one reshard.

    Attributes:
        tensor: position in the program.
        purpose: forward, backward, optimizer (a gradient's way to its parameter) or output.
        family: how the readers read it; for messages and for tying repeated layers.
        readers: (op position, operand index); empty for optimizer and output.
        start: position of the first reader, when the reshard runs.
        stop: one past the last use, uses through views included.
    """

    tensor: int
    purpose: str
    family: str
    readers: tuple[tuple[int, int], ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lives:
    """Groups by tensor, in order of their first reader, and the half-open base interval of every tensor."""

    groups: dict[int, tuple[Group, ...]]
    base: tuple[tuple[int, int], ...]
    end: int


def family_of(rule: Rule, name: str) -> str:
    """The key by which readers of one tensor and phase are grouped."""
    return "matmul" if rule.matmul and name == "aten.einsum.default" else name


def lives(program: Program, rules: Sequence[Rule]) -> Lives:
    """Group the readers of every tensor and find when its bytes live; ``rules`` has one rule per op."""
    update = len(program.ops)
    end = update + 1
    made = {t: i for i, op in enumerate(program.ops) for t in op.results}
    keyed: dict[int, dict[tuple[str, str], list[tuple[int, int]]]] = {}
    for t, uses in program.readers().items():
        for i, j in uses:
            op = program.ops[i]
            keyed.setdefault(t, {}).setdefault((op.phase.value, family_of(rules[i], op.name)), []).append((i, j))
    ends: dict[tuple[int, str], int] = {}
    for t in program.gradients.values():
        keyed.setdefault(t, {})[(OPTIMIZER, "update")] = []
        ends[t, OPTIMIZER] = made[t]
    for t in program.outputs:
        keyed.setdefault(t, {})[(OUTPUT, "output")] = []
        ends[t, OUTPUT] = update

    def first(t: int, key: tuple[str, str], readers: list[tuple[int, int]]) -> int:
        return readers[0][0] if readers else ends[t, key[0]]

    base: list[tuple[int, int]] = []
    for t, tensor in enumerate(program.tensors):
        if tensor.role in (Role.PARAMETER, Role.BUFFER, Role.INPUT) and t not in made:
            base.append((0, end))
        else:
            last = max((first(t, key, readers) for key, readers in keyed.get(t, {}).items()), default=made[t])
            base.append((made[t], last + 1))
    groups: dict[int, tuple[Group, ...]] = {}
    for t, found in keyed.items():
        made_groups = []
        for (purpose, family), readers in found.items():
            start = first(t, (purpose, family), readers)
            stop = start + 1 if readers else end
            for i, _ in readers:
                stop = max(stop, i + 1)
                if rules[i].view:
                    stop = max(stop, *(base[r][1] for r in program.ops[i].results))
            made_groups.append(Group(tensor=t, purpose=purpose, family=family, readers=tuple(readers), start=start, stop=stop))
        groups[t] = tuple(sorted(made_groups, key=lambda g: (g.start, g.purpose, g.family)))
    return Lives(groups=groups, base=tuple(base), end=end)
