"""What styles move where: a program in which every module of a style has a border, and the layouts along the tensor axis that follow.

A style is about one mesh axis. Of a module it says how weights are cut, how the input arrives and how the output is handed on; at
these borders tensors move, in backward their gradients the other way, and *each module moves its own*: three projections of one input
that lies whole each reduce its gradient. In between there is no one who moves anything: ops run on what is there. So

- a border that moves something is an identity op of its own, whose operand lies as the tensor arrives and whose result lies as it is
  handed on; readers of one identity share nothing with readers of another, so every collective of the tool is one of the plan;
- every other op runs in the one way that takes its operands as they lie (a whole operand may be cut by each device for itself). Where an
  op has no such way, plain tensors would give wrong numbers, which is an error here; DTensors would move by DTensor's own greedy choice,
  for which the fewest bytes stand here, with a note.

At a border (torch's and transformers' styles are the same in this, but for what is said of DTensor inputs):

    forward                                          backward
    input: arrives -> as the weight's cut needs it   what the module leaves of the input's gradient -> as the input arrived
    output: as the op leaves it -> as handed on      gradient as the output is handed on -> as the op left it, R where that was partial

An input that is a DTensor already (``SequenceParallel``, ``PrepareModuleInput`` and styles with ``use_local_output=False`` hand them
on) and is not moved has no border: its gradient flows on as it is, which is how one ``PrepareModuleInput`` serves several modules
with one gather and one reduction. Checkpointed modules pass their borders again when they are computed again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from solver_shard.errors import InputError
from solver_shard.layout import Placement, R, S
from solver_shard.program import Op, Phase, Program, Ref, Role, Tensor
from solver_shard.rulebook.build import Rulebook
from solver_shard.rulebook.rule import AxisStrategy, Rule
from solver_shard.study.styles import Style, placed

_EINSUM, _EMBEDDING, _ADD = "aten.einsum.default", "aten.embedding.default", "aten.add.Tensor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How an op runs on the tensor axis: placements of its operands and results, and the implementation, if it is one."""

    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    implementation: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bordered:
    """A program with borders.

    Attributes:
        stored: placement of every source.
        ways: of every op, in the program's order.
        notes: what DTensor decides, and where it would raise.
    """

    program: Program
    stored: Mapping[int, Placement]
    ways: tuple[Way, ...]
    notes: tuple[str, ...]


def bordered(program: Program, styles: Mapping[str, Style], size: int, rulebook: Rulebook) -> Bordered:
    """Put the borders of the styles into a program.

    Args:
        styles: by module path.
        size: devices along the axis that the styles are about.

    Raises:
        InputError: a module is no linear layer or embedding where its style needs one, an input does not lie as a style takes it to,
            or plain tensors would be computed with in part.
    """
    return _Follower(program, styles, size, rulebook).run()


@dataclass(slots=True, kw_only=True)
class _Core:
    """A linear module or an embedding under a style; positions are the program's.

    Attributes:
        forward: its product or look-up, where it runs and where it is computed again.
        last: the op whose result is the module's output (that adds the bias, where there is one), for each of these.
        data: what makes the gradient of its input; None where that has none.
        gradient: what it is given in backward; None where nothing is.
        made, given: how its op leaves the output, and how it is handed on.
    """

    path: str
    style: Style
    linear: bool
    weight: int
    forward: dict[int, int] = field(default_factory=dict)
    data: int | None = None
    gradient: int | None = None
    made: Placement = R
    given: Placement = R


@dataclass(slots=True, kw_only=True)
class _Entry:
    """A border at which an input is moved for some modules: by their own style, by what they share, or by a module around them.

    Attributes:
        merged: tensors: what the members leave of the input's gradient, added up.
        arrived: to where that is brought; None where the input is a DTensor that is not moved, so that there is no border.
    """

    where: str
    members: tuple[str, ...]
    style: Style
    merged: tuple[int, ...]
    arrived: Placement | None = None


class _Follower:
    def __init__(self, program: Program, styles: Mapping[str, Style], size: int, rulebook: Rulebook) -> None:
        self.program, self.styles, self.size, self.rulebook = program, styles, size, rulebook
        self.parameters = {tensor.name: t for t, tensor in enumerate(program.tensors) if tensor.role is Role.PARAMETER}
        self.readers = program.readers()
        self.tensors: list[Tensor] = list(program.tensors)
        self.ops: list[Op] = []
        self.ways: list[Way] = []
        self.notes: dict[str, None] = {}
        self.lies: dict[int, Placement] = {}
        self.dtensor: set[int] = set()
        self.entered: dict[tuple[int, int], None] = {}
        """Entry and input that have been dealt with."""
        self.within: set[tuple[str, int]] = set()
        """Module and input that is a DTensor inside it."""
        self.handed: dict[int, int] = {}
        """Tensor to what all later readers read in its place."""
        self.views: dict[tuple[str, int], int] = {}
        """Module and tensor to what the module reads in its place."""
        self.cores = {path: core for path, style in styles.items() if (core := self._core(path, style)) is not None}
        self.core_at = {i: core for core in self.cores.values() for i in core.forward}
        self.last_at = {i: core for core in self.cores.values() for i in core.forward.values()}
        self.entries = self._entries()
        self.stored = {t: self._stored(t) for t in program.sources()}

    def run(self) -> Bordered:
        self.lies |= self.stored
        self.dtensor |= {core.weight for core in self.cores.values()}
        for path, style in self.styles.items():
            if style.cut == "sequence":
                self.dtensor |= {t for name, t in self.parameters.items() if _inside(name, path)}
        for i, op in enumerate(self.program.ops):
            self._arrive(i, op)
            self._op(i, self._renamed(op))
            for t in op.results:
                self._leave(i, op, t)
        made = dataclasses.replace(
            self.program,
            tensors=tuple(self.tensors),
            ops=tuple(self.ops),
            outputs=tuple(self.handed.get(t, t) for t in self.program.outputs),
        )
        return Bordered(program=made, stored=self.stored, ways=tuple(self.ways), notes=tuple(self.notes))

    # What the styles are about

    def _core(self, path: str, style: Style) -> _Core | None:
        if style.cut not in ("columns", "rows"):
            return None
        weight = self.parameters.get(f"{path}.weight")
        if weight is None:
            raise InputError(f"{path} is cut by {style.cut}, and has no weight of its own (tied to another module's?); take the rule out")
        core = _Core(path=path, style=style, linear=True, weight=weight)
        for i, k in self.readers.get(weight, ()):
            op = self.program.ops[i]
            if op.phase is Phase.FORWARD or op.recompute:
                core.linear = self._check_core(core, op, k)
                core.forward[i] = self._last(i, path)
            elif op.name == _EINSUM and self.program.tensors[op.results[0]].role is not Role.GRADIENT:
                core.data, core.gradient = i, op.operands[1 - k]
        if not core.forward:
            raise InputError(f"{path} is cut by {style.cut}, but the step does not run it; take the rule out")
        if core.gradient is None:
            core.gradient = self._given(core)
        return core

    def _check_core(self, core: _Core, op: Op, k: int) -> bool:
        """Whether it is a linear module, rather than an embedding; others are refused, as torch does."""
        shape = self.program.tensors[core.weight].shape
        if op.name == _EMBEDDING:
            return False
        letters = op.attributes["equation"].split("->")[0].split(",") if op.name == _EINSUM else ["", ""]
        if op.name != _EINSUM or len(shape) != 2 or letters[k][-1] != letters[1 - k][-1]:
            raise InputError(f"{core.path} is cut by {core.style.cut}, and is neither an nn.Linear nor an nn.Embedding; take the rule out")
        return True

    def _last(self, i: int, path: str) -> int:
        """The op that makes a module's output: the product, or the addition of its bias."""
        bias = self.parameters.get(f"{path}.bias")
        for reader, _ in self.readers.get(self.program.ops[i].results[0], ()):
            if self.program.ops[reader].name == _ADD and bias in self.program.ops[reader].operands:
                return reader
        return i

    def _given(self, core: _Core) -> int | None:
        """The gradient that a module without a gradient of its input is given: what its weight's gradient is made of."""
        for op in self.program.ops:
            made = op.phase is Phase.BACKWARD and not op.recompute and op.module == core.path
            if made and (op.name == _EINSUM or "embedding" in op.name):
                return op.operands[0]
        return None

    def _entries(self) -> list[_Entry]:
        """Borders of inputs, those of modules around others first."""
        found = []
        for path, style in self.styles.items():
            if style.cut == "input":
                members = tuple(core for core in self.cores if _inside(core, path))
                x = self._first_input(path)
                members = tuple(m for m in members if any(x in self.program.ops[i].operands for i in self.cores[m].forward))
                others = [i for i, _ in self.readers[x] if _inside(self.program.ops[i].module, path) and self._forward(i)]
                if not members or any(i not in self.core_at for i in others):
                    raise InputError(
                        f"PrepareModuleInput on {path}: its input {self.program.tensors[x].name} is read by more than linear modules that "
                        "are cut, which cannot be followed; put the style on these modules"
                    )
                found.append(_Entry(where=path, members=members, style=style, merged=self._merged(members)))
        shared: dict[tuple[str, int], list[_Core]] = {}
        for path, core in self.cores.items():
            if core.style.shared:
                first = next(iter(core.forward))
                x = next(t for t in self.program.ops[first].operands if t != core.weight)
                shared.setdefault((core.style.shared, x), []).append(core)
            else:
                found.append(_Entry(where=path, members=(path,), style=core.style, merged=self._merged((path,))))
        for cores in shared.values():
            members = tuple(core.path for core in cores)
            found.append(_Entry(where=members[0], members=members, style=cores[0].style, merged=self._merged(members)))
        return found

    def _first_input(self, path: str) -> int:
        """The first activation from outside that a module's ops read: the hidden states."""
        inside = {t for op in self.program.ops if _inside(op.module, path) for t in op.results}
        for i, op in enumerate(self.program.ops):
            if _inside(op.module, path) and self._forward(i):
                for t in op.operands:
                    if t not in inside and self.program.tensors[t].role in (Role.ACTIVATION, Role.INPUT):
                        return t
        raise InputError(f"{path} reads nothing that could be moved; take the rule out")

    def _merged(self, members: Sequence[str]) -> tuple[int, ...]:
        """The gradients that modules leave of one input, as far as backward adds them to each other and to nothing else."""
        parts = {self.program.ops[core.data].results[0] for path in members if (core := self.cores[path]).data is not None}
        for op in self.program.ops:
            if op.phase is Phase.BACKWARD and op.name == _ADD and len(op.operands) == 2 and set(op.operands) <= parts:
                parts = (parts - set(op.operands)) | set(op.results)
        return tuple(sorted(parts))

    def _forward(self, i: int) -> bool:
        return self.program.ops[i].phase is Phase.FORWARD or self.program.ops[i].recompute

    def _stored(self, t: int) -> Placement:
        tensor = self.program.tensors[t]
        path, _, last = tensor.name.rpartition(".")
        core = self.cores.get(path) if tensor.role is Role.PARAMETER else None
        if core is None or (last != "weight" and core.style.cut == "rows"):
            return R
        return S(0) if (core.style.cut == "columns") == core.linear else S(1)

    # Borders

    def _arrive(self, i: int, op: Op) -> None:
        """Borders in front of an op: inputs of modules in forward, gradients of their outputs in backward."""
        if i in self.core_at:
            core = self.core_at[i]
            x = next(t for t in op.operands if t != core.weight)
            for k, entry in enumerate(self.entries):
                if core.path in entry.members and (k, x) not in self.entered:
                    self.entered[k, x] = None
                    self._enter(entry, core, x, op)
        elif self._forward(i):
            style = self.styles.get(op.module)
            if style is not None and style.cut == "sequence":
                self._check_sequence(op, style)
        elif (given := self.cores.get(op.module)) is not None and given.gradient in op.operands:
            self._return(given, op)

    def _enter(self, entry: _Entry, core: _Core, x: int, op: Op) -> None:
        """An input's way into the modules of a border."""
        style, now = entry.style, self.views.get((core.path, x), self.handed.get(x, x))
        tensor, lies = self.tensors[now], self.lies[now]
        dims, held = len(tensor.shape), now in self.dtensor or (core.path, x) in self.within
        said = placed(style.arrives, dims)
        if not held and lies != said:
            raise InputError(
                f"the style of {entry.where} takes its input for {said}, but {tensor.name} arrives {lies} there, as a plain tensor, and "
                "the numbers would be wrong; say input_layouts as it arrives, or hand it on so before"
            )
        wanted = placed(style.wanted, dims) if style.cut == "input" else self._needed(core, dims)
        moves = lies != wanted and (style.always or not held or said != wanted)
        entry.arrived = lies if moves or not held else None
        if moves:
            lying = self._identity(now, lies, lies, f"{tensor.name} (as handed to {entry.where})", op)
            now = self._identity(lying, wanted, wanted, f"{tensor.name} (as read in {entry.where})", op)
        for path in entry.members:
            self.views[path, x] = now
            if style.cut != "input" or not style.local:
                self.within.add((path, x))
            else:
                self.within.discard((path, x))

    def _needed(self, core: _Core, dims: int) -> Placement:
        return S(dims - 1) if core.linear and core.style.cut == "rows" else R

    def _leave(self, i: int, op: Op, t: int) -> None:
        """Borders behind an op: outputs of modules in forward, gradients of their inputs in backward."""
        core = self.last_at.get(i)
        if core is not None:
            core.made, core.given = self.lies[t], placed(core.style.given, len(self.tensors[t].shape))
            now = t
            if core.made != core.given:
                name = self.tensors[t].name
                self.tensors[t] = dataclasses.replace(self.tensors[t], name=f"{name} (as computed)")
                now = self.handed[t] = self._identity(t, core.given, core.given, name, op, role=self.tensors[t].role)
            (self.dtensor.discard if core.style.local else self.dtensor.add)(now)
        for entry in reversed(self.entries) if not self._forward(i) else ():
            if t in entry.merged and entry.arrived is not None:
                now, target = self.handed.get(t, t), R if entry.arrived.is_partial else entry.arrived
                if self.lies[now] != target:
                    name = f"{self.tensors[t].name} (as {entry.where} leaves it)"
                    self.handed[t] = self._identity(now, target, target, name, op)

    def _return(self, core: _Core, op: Op) -> None:
        """A gradient's way into a module whose output was moved."""
        g = core.gradient
        if g is None or (core.path, g) in self.views or core.made == core.given:
            return
        now, target = self.handed.get(g, g), R if core.made.is_partial else core.made
        lies, name = self.lies[now], self.tensors[now].name
        if lies != target:
            lying = self._identity(now, lies, lies, f"{name} (as handed to {core.path})", op)
            now = self._identity(lying, target, target, f"{name} (as read in {core.path})", op)
        self.views[core.path, g] = now

    def _check_sequence(self, op: Op, style: Style) -> None:
        """Modules that run on a cut sequence take it as it arrives; moving it is not followed."""
        for t in op.operands:
            now = self.handed.get(t, t)
            tensor = self.tensors[now]
            wide = tensor.role is Role.ACTIVATION and len(tensor.shape) > (style.arrives or 0) and tensor.shape[style.arrives or 0] > 1
            wanted = placed(style.arrives, len(tensor.shape))
            if wide and self.lies[now] != wanted:
                raise InputError(
                    f"the style of {op.module} takes its input for {wanted}, but {tensor.name} arrives {self.lies[now]} there; let the "
                    "modules before it hand it on so, as in RowwiseParallel(output_layouts=Shard(1))"
                )

    def _identity(self, t: int, read: Placement, given: Placement, name: str, op: Op, role: Role = Role.ACTIVATION) -> int:
        """An identity op in front of or behind another; the tensor that it hands on."""
        made = len(self.tensors)
        names = {tensor.name for tensor in self.tensors[len(self.program.tensors) :]}
        while name in names:  # a module that runs several times
            name += "'"
        self.tensors.append(dataclasses.replace(self.tensors[t], name=name, role=role, trainable=False))
        self.ops.append(
            Op(
                name="aten.alias.default",
                operands=(t,),
                results=(made,),
                attributes={"self": Ref(0)},
                phase=op.phase,
                module=op.module,
                recompute=op.recompute,
            )
        )
        self.ways.append(Way(operands=(read,), results=(given,)))
        self.lies[made] = given
        return made

    # Ops in between

    def _renamed(self, op: Op) -> Op:
        """An op that reads what its module, or everyone by now, reads in the place of its operands."""
        operands = tuple(self.views.get((op.module, t), self.handed.get(t, t)) for t in op.operands)
        return dataclasses.replace(op, operands=operands)

    def _op(self, i: int, op: Op) -> None:
        rule, lies = self.rulebook.rule(self.program, i), tuple(self.lies[t] for t in op.operands)
        core = i in self.core_at
        style = self.styles.get(op.module)
        inside = style is not None and style.cut == "sequence"
        held = {t in self.dtensor for t in op.operands if self.tensors[t].numel > 1}
        if len(held) > 1 and self._forward(i) and not core and not inside and i not in self.last_at:
            self.notes.setdefault(f"DTensor raises in {op.module or 'the model'}: {op.name} is given DTensors and plain tensors")
        found, moved = self._way(rule, op, lies, implementations=core or "embedding" in op.name)
        if moved:
            what = ", ".join(f"{self.tensors[op.operands[j]].name} from {lies[j]} to {found.operands[j]}" for j in moved)
            if True not in held and self._forward(i) and not inside:
                raise InputError(
                    f"{op.name} in {op.module or 'the model'} would run on parts of plain tensors, and the numbers would be wrong: it "
                    f"needs {what}; give the module before it other output_layouts"
                )
            self.notes.setdefault(f"DTensor decides in {op.module or 'the model'}: {op.name} takes {what}, here the fewest bytes")
        self.ops.append(op)
        self.ways.append(Way(operands=found.operands, results=found.results, implementation=_name(found)))
        self.lies.update(zip(op.results, found.results, strict=True))
        if (True in held and not core) or inside:
            local = inside and style is not None and style.local
            self.dtensor |= set() if local else set(op.results)

    def _way(self, rule: Rule, op: Op, lies: tuple[Placement, ...], *, implementations: bool) -> tuple[AxisStrategy, tuple[int, ...]]:
        """The strategy that takes the operands as they lie, and the operands that must be moved for it, which are none if possible.

        Among those, first the one with the fewest bytes to move, then with the fewest local cuts, then the first.
        """
        shapes = [self.tensors[t].shape for t in (*op.operands, *op.results)]
        best: tuple[tuple[int, int], AxisStrategy, tuple[int, ...]] | None = None
        for strategy in rule.strategies():
            if (strategy.implementation is not None and not implementations) or not self._legal(rule, strategy, shapes):
                continue
            nbytes, cuts, moved = 0, 0, []
            for j, (now, wanted) in enumerate(zip(lies, strategy.operands, strict=True)):
                if now == wanted or not rule.needs(j):
                    continue
                if now == R:
                    cuts += 1
                    continue
                moved.append(j)
                nbytes += self.tensors[op.operands[j]].nbytes * (2 if now.is_partial and wanted == R else 1)
            if best is None or (nbytes, cuts) < best[0]:
                best = (nbytes, cuts), strategy, tuple(moved)
        assert best is not None, "an op can always run on whole tensors"
        return best[1], best[2]

    def _legal(self, rule: Rule, strategy: AxisStrategy, shapes: Sequence[tuple[int, ...]]) -> bool:
        if strategy.factor is not None and not rule.factors[strategy.factor].legal(self.size):
            return False
        placements = (*strategy.operands, *strategy.results)
        return all(not p.is_shard or shape[p.dim] >= self.size for p, shape in zip(placements, shapes, strict=True))


def _name(strategy: AxisStrategy) -> str:
    return "" if strategy.implementation is None else strategy.implementation.name


def _inside(path: str, module: str) -> bool:
    """Whether a module or parameter is a module, or lies in it."""
    return path == module or path.startswith(f"{module}.")
