"""A plan as an eager program: what each mesh axis is for, which modules are parallel and how, and what this cannot express.

>>> eager = read_eager(plan)
>>> eager.tensor_axis, [(m.path, m.cut) for m in eager.modules][:2]
('tp', [('model.layers.0.self_attn.q_proj', 'columns'), ('model.layers.0.self_attn.k_proj', 'columns')])

Eager forms (``parallelize_module``, a Hugging Face ``tp_plan``, torchtitan's configs) have no graph. They lay tensors out at the borders
of modules that have weights; everything between such modules runs on the local shards as they are. So along each axis:

- a **data** axis cuts the batch of every input; parameters are read whole, stored whole or cut, and nothing else communicates;
- the **tensor** axis (at most one) cuts weights of linear and embedding modules by columns or by rows. Such a module takes its input in the
  layout in which it lies, converts it, and hands its output on in one layout.

A plan that converts a tensor anywhere else is not expressible. Activations that are connected by ops outside the parallel modules are a
*region*; where a plan cannot be followed in a region, a lossy form keeps the whole region replicated on the tensor axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from solver_shard.export.early import reduced_early
from solver_shard.export.exported import Dropped, merged
from solver_shard.export.regions import Regions
from solver_shard.layout import Placement, R
from solver_shard.plan.plan import Plan, PlannedOp

Cut = Literal["columns", "rows"]

_LINEAR, _EMBEDDING = "aten.einsum.default", "aten.embedding.default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """A module whose weight is cut by the tensor axis.

    Attributes:
        path: of the module; ``weight`` and ``bias`` are its parameters' last names.
        kind, cut: a linear module or an embedding, cut by columns (output features) or rows (input features, words).
        source: position of the tensor that it reads.
        arrives, read: placement on the tensor axis in which its input lies, and in which its op reads it.
        result: position of the tensor that its op makes (after the bias).
        made, given: placement in which the op leaves it, and in which the module hands it on.
        group: modules of one group read one tensor alike, and the plan lays it out for them once.
        gradient: whether its input has a gradient.
    """

    path: str
    kind: Literal["linear", "embedding"]
    cut: Cut
    source: int
    arrives: Placement
    read: Placement
    result: int
    made: Placement
    given: Placement
    group: int
    gradient: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Eager:
    """A plan as an eager program.

    Attributes:
        tensor_axis: name of the tensor axis; None where no weight is cut.
        data_axes: axes that cut the batch, in mesh order.
        idle_axes: axes on which everything is repeated (only lossy forms have them beside axes of one device).
        modules: the parallel ones, in the order in which they run.
        whole: paths of other modules with parameters of their own, in order.
        partial: those of ``whole`` whose activations are cut by the tensor axis, so that each process has a part of their gradients.
        dropped: what of the plan is not in here.
    """

    tensor_axis: str | None
    data_axes: tuple[str, ...]
    idle_axes: tuple[str, ...]
    modules: tuple[Parallel, ...]
    whole: tuple[str, ...]
    partial: tuple[str, ...]
    dropped: tuple[Dropped, ...]


def owner(parameter: str) -> str:
    """Path of the module that has a parameter."""
    return parameter.rpartition(".")[0]


def read_eager(plan: Plan, *, reduces: bool = False) -> Eager:
    """Read a plan as an eager program; ``dropped`` lists what does not fit, and the rest is consistent without it.

    Args:
        reduces: whether the form can sum, over the tensor axis, the gradients of parameters that are whole there and act on cut
            activations (norms of heads); else such plans do not fit.
    """
    reader = _Reader(plan, reduces)
    dropped: list[Dropped] = []
    tensor, data, idle = reader.roles(dropped)
    if tensor is None:
        reader.check_data(data, dropped)
        return Eager(
            tensor_axis=None,
            data_axes=tuple(plan.mesh.names[a] for a in data),
            idle_axes=tuple(plan.mesh.names[a] for a in idle),
            modules=(),
            whole=reader.owners(()),
            partial=(),
            dropped=merged(dropped),
        )
    reader.check_data(data, dropped)
    reader = _Reader(reduced_early(plan, tensor), reduces)
    modules = reader.parallel(tensor, dropped)
    return Eager(
        tensor_axis=plan.mesh.names[tensor],
        data_axes=tuple(plan.mesh.names[a] for a in data),
        idle_axes=tuple(plan.mesh.names[a] for a in idle),
        modules=modules,
        whole=reader.owners(m.path for m in modules),
        partial=tuple(reader.partial),
        dropped=merged(dropped),
    )


class _Reader:
    def __init__(self, plan: Plan, reduces: bool) -> None:
        self.plan = plan
        self.reduces = reduces
        self.partial: dict[str, int] = {}
        self.forward = [i for i, op in enumerate(plan.ops) if op.phase == "forward"]
        self.made = [tensor.layout for tensor in plan.tensors]
        for op in plan.ops:
            for t, layout in zip(op.results, op.result_layouts, strict=True):
                self.made[t] = layout
        self.readers: dict[int, list[tuple[int, int]]] = {}
        for i in self.forward:
            for k, t in enumerate(plan.ops[i].operands):
                self.readers.setdefault(t, []).append((i, k))
        self.group = {reader: r for r, reshard in enumerate(plan.reshards) for reader in reshard.readers}

    def name(self, t: int) -> str:
        return self.plan.tensors[t].name

    def is_stored(self, t: int) -> bool:
        return self.plan.tensors[t].role in ("parameter", "buffer")

    def is_parameter(self, t: int) -> bool:
        return self.plan.tensors[t].role == "parameter"

    def owners(self, without: Iterable[str]) -> tuple[str, ...]:
        left_out = set(without)
        paths = dict.fromkeys(owner(tensor.name) for tensor in self.plan.tensors if tensor.role == "parameter")
        return tuple(path for path in paths if path not in left_out)

    def roles(self, dropped: list[Dropped]) -> tuple[int | None, list[int], list[int]]:
        """Positions of the tensor axis, of the data axes and of idle ones."""
        mesh = self.plan.mesh
        cut = [0] * len(mesh.axes)
        for i in self.forward:
            op = self.plan.ops[i]
            for t, layout in zip(op.operands, op.operand_layouts, strict=True):
                for a, placement in enumerate(layout):
                    cut[a] += self.is_parameter(t) and placement.is_shard
        live = [a for a, axis in enumerate(mesh.axes) if axis.size > 1]
        tensors = [a for a in live if cut[a]]
        tensor = max(tensors, key=lambda a: (cut[a], a)) if tensors else None
        data, idle = [], [a for a in range(len(mesh.axes)) if a not in live]
        inputs = [t for t, tensor_ in enumerate(self.plan.tensors) if tensor_.role == "input" and tensor_.shape]
        for a in live:
            if a == tensor:
                continue
            name = mesh.names[a]
            if a in tensors:
                weights = [t for i in self.forward for t, read in self._operands(i) if self.is_parameter(t) and read[a].is_shard]
                dropped.append(
                    Dropped(
                        tensors=tuple(dict.fromkeys(map(self.name, weights))),
                        what=f"cut by {name} where they are used",
                        why=f"one axis can cut weights in this form, and {mesh.names[tensor or 0]} does",
                    )
                )
            uncut = [t for t in inputs if self.plan.tensors[t].layout[a] != 0]
            if len(uncut) == len(inputs):
                if any(self.made[t][a] != R for t in range(len(self.made)) if not self.is_stored(t)) or any(
                    self.plan.tensors[t].layout[a] != R for t in inputs
                ):
                    dropped.append(
                        Dropped(
                            tensors=tuple(map(self.name, uncut)),
                            what=f"not cut by batch on {name}, and activations are",
                            why="the form cuts a batch where it is read, or not at all",
                        )
                    )
                idle.append(a)
                continue
            if uncut:
                dropped.append(
                    Dropped(
                        tensors=tuple(map(self.name, uncut)),
                        what=f"{self.plan.tensors[uncut[0]].layout[a]} on {name}, unlike other inputs",
                        why="the form cuts dim 0 of every input there",
                    )
                )
            data.append(a)
        return tensor, data, sorted(idle)

    def _operands(self, i: int) -> list[tuple[int, tuple[Placement, ...]]]:
        op = self.plan.ops[i]
        return list(zip(op.operands, op.operand_layouts, strict=True))

    def check_data(self, data: list[int], dropped: list[Dropped]) -> None:
        """Along a data axis only parameters, their gradients and single numbers may move."""
        plan = self.plan
        for a in data:
            name = plan.mesh.names[a]
            for t, tensor in enumerate(plan.tensors):
                if tensor.role == "buffer" and self.made[t][a] != R:
                    dropped.append(
                        Dropped(
                            tensors=(tensor.name,),
                            what=f"{self.made[t][a]} on {name}",
                            why="every process of the form holds buffers and constants of the model whole; hand over as an input what goes "
                            "with the batch",
                        )
                    )
            for i, op in enumerate(plan.ops):
                for t, layout in self._operands(i):
                    tensor = plan.tensors[t]
                    if self.is_parameter(t):
                        continue  # a weight that is cut where it is used is said by roles()
                    if layout[a] != self.made[t][a] and any(size != 1 for size in tensor.shape):
                        dropped.append(
                            Dropped(
                                tensors=(tensor.name,),
                                what=f"{self.made[t][a]} on {name} and read as {layout[a]}",
                                why="along an axis that cuts the batch the form moves parameters and gradients only",
                            )
                        )
                inside = [c for c in op.collectives if name in c.axes]
                if inside:
                    dropped.append(self._implemented(op, name))
            for reshard in plan.reshards:
                tensor = plan.tensors[reshard.tensor]
                if reshard.purpose == "output" and reshard.source[a] != reshard.layout[a] and any(size != 1 for size in tensor.shape):
                    dropped.append(
                        Dropped(
                            tensors=(tensor.name,),
                            what=f"handed over {reshard.layout[a]} on {name}, and made {reshard.source[a]}",
                            why="each process of the form returns its own part of the batch",
                        )
                    )

    def _implemented(self, op: PlannedOp, axis: str) -> Dropped:
        return Dropped(
            tensors=tuple(self.name(t) for t in op.results[:1]),
            what=f"made by {op.name} with the implementation {op.implementation!r} on {axis}",
            why="the form runs ops as they are",
        )

    def parallel(self, a: int, dropped: list[Dropped]) -> tuple[Parallel, ...]:
        """The parallel modules along the tensor axis."""
        cores = self._cores(a, dropped)
        at = {core.op: core for core in cores.values()} | {core.bias: core for core in cores.values() if core.bias is not None}
        results = {core.result: core for core in cores.values()}
        regions = Regions(len(self.plan.tensors))
        for i in self.forward:
            if i not in at:
                op = self.plan.ops[i]
                regions.join([t for t in (*op.operands, *op.results) if not self.is_stored(t)])
        given = {t: self._given(t, core, at, a, dropped, regions) for t, core in results.items()}
        self._check_local(a, at, given, dropped, regions)
        self.partial = {path: t for path, t in self.partial.items() if self.reduces and not regions.is_bad(t)}
        found = []
        for i in self.forward:
            core = at.get(i)
            if core is None or core.op != i:
                continue
            op = self.plan.ops[i]
            source = op.operands[core.position]
            arrives = R if regions.is_bad(source) else given.get(source, self.made[source][a])
            found.append(
                Parallel(
                    path=core.path,
                    kind="embedding" if op.name == _EMBEDDING else "linear",
                    cut=core.cut,
                    source=source,
                    arrives=arrives,
                    read=op.operand_layouts[core.position][a],
                    result=core.result,
                    made=op.result_layouts[0][a],
                    given=R if regions.is_bad(core.result) else given[core.result],
                    group=self.group.get((i, core.position), -1 - i),
                    gradient=self.plan.tensors[source].role != "input" and not self.plan.options.forward_only,
                )
            )
        return tuple(found)

    def _cores(self, a: int, dropped: list[Dropped]) -> dict[str, _Core]:
        """The op of every module that is cut by columns or rows; other cut weights are dropped."""
        axis = self.plan.mesh.names[a]
        uses: dict[int, list[tuple[int, int]]] = {t: self.readers.get(t, []) for t in range(len(self.plan.tensors)) if self.is_parameter(t)}
        cores: dict[str, _Core] = {}
        for t, readers in uses.items():
            tensor = self.plan.tensors[t]
            if not any(self.plan.ops[i].operand_layouts[k][a].is_shard for i, k in readers) or len(tensor.shape) != 2:
                continue
            path = owner(tensor.name)
            core = self._core(t, readers, a) if tensor.name.rpartition(".")[2] == "weight" and path not in cores else None
            if core is not None:
                cores[path] = core
        for t, readers in uses.items():
            core = cores.get(owner(self.name(t)))
            known = {(core.op, 1 - core.position), (core.bias, core.bias_position)} if core is not None else set()
            wrong = [
                self.plan.ops[i].operand_layouts[k][a]
                for i, k in readers
                if (i, k) not in known and self.plan.ops[i].operand_layouts[k][a] != R
            ]
            stored = self.plan.tensors[t].layout[a]
            used = [self.plan.ops[i].operand_layouts[k][a] for i, k in readers]
            if wrong:
                cores.pop(owner(self.name(t)), None)
                dropped.append(
                    Dropped(
                        tensors=(self.name(t),),
                        what=f"used {wrong[0]} on {axis}",
                        why="the form knows weights and biases of nn.Linear and nn.Embedding modules, cut by columns or by rows",
                    )
                )
            elif used and any(stored != placement for placement in used):
                dropped.append(
                    Dropped(
                        tensors=(self.name(t),),
                        what=f"stored {stored} on {axis} and used {used[0]}",
                        why="the form stores a parameter on the tensor axis as it is used",
                    )
                )
        return cores

    def _core(self, weight: int, readers: list[tuple[int, int]], a: int) -> _Core | None:
        """How one op uses a cut weight, where it does so by columns or rows."""
        if len(readers) != 1:
            return None  # tied, or used twice
        ((i, k),) = readers
        op, shape = self.plan.ops[i], self.plan.tensors[weight].shape
        placement = op.operand_layouts[k][a]
        if op.name not in (_LINEAR, _EMBEDDING) or len(op.operands) != 2 or placement.is_strided:
            return None
        position = 1 - k
        source, result = op.operands[position], op.results[0]
        read, made = op.operand_layouts[position][a], op.result_layouts[0][a]
        last, final = len(self.plan.tensors[source].shape) - 1, len(self.plan.tensors[result].shape) - 1
        cut: Cut
        if op.name == _EMBEDDING:
            if read != R or not ((placement == 0 and made.is_partial) or (placement == 1 and made == final)):
                return None
            cut = "rows" if placement == 0 else "columns"
        elif placement == 0 and read == R and made == final and self.plan.tensors[result].shape[-1] == shape[0]:
            cut = "columns"
        elif placement == 1 and read == last and made.is_partial and self.plan.tensors[source].shape[-1] == shape[1]:
            cut = "rows"
        else:
            return None
        bias = self._bias(weight, result, a, cut)
        after = result if bias is None else self.plan.ops[bias[0]].results[0]
        return _Core(
            path=owner(self.name(weight)),
            op=i,
            position=position,
            cut=cut,
            result=after,
            bias=None if bias is None else bias[0],
            bias_position=-1 if bias is None else bias[1],
        )

    def _bias(self, weight: int, result: int, a: int, cut: Cut) -> tuple[int, int] | None:
        """The op that adds the module's bias to the product, and the bias's operand."""
        uses = self.readers.get(result, [])
        name = f"{owner(self.name(weight))}.bias"
        if len(uses) != 1:
            return None
        op = self.plan.ops[uses[0][0]]
        for k, t in enumerate(op.operands):
            if self.name(t) == name and op.name == "aten.add.Tensor":
                wanted = R if cut == "rows" else Placement(0)
                return (uses[0][0], k) if op.operand_layouts[k][a] == wanted else None
        return None

    def _given(self, t: int, core: _Core, at: Mapping[int, _Core], a: int, dropped: list[Dropped], regions: Regions) -> Placement:
        """In which placement a parallel module hands its output on: the one in which ops outside read it."""
        axis = self.plan.mesh.names[a]
        made = self.made[t][a]
        if core.bias is not None and core.cut == "rows":
            made = R  # the product is reduced, then the bias is added
        ops = self.plan.ops
        local = dict.fromkeys(ops[i].operand_layouts[k][a] for i, k in self.readers.get(t, []) if i not in at)
        if t in self.plan.outputs:
            local[self.plan.tensors[t].layout[a]] = None
        others = dict.fromkeys(ops[i].operand_layouts[k][a] for i, k in self.readers.get(t, []) if i in at)
        wanted = list(local or ({made: None} if not made.is_partial else others))
        if len(wanted) == 1 and not wanted[0].is_partial:
            return wanted[0]
        dropped.append(
            Dropped(
                tensors=(self.name(t),),
                what=f"read as {', '.join(map(str, wanted)) or made} on {axis}",
                why="a module of the form hands its output on in one layout, and not partial",
            )
        )
        regions.spoil(t)
        return R

    def _check_local(
        self, a: int, at: Mapping[int, _Core], given: Mapping[int, Placement], dropped: list[Dropped], regions: Regions
    ) -> None:
        """Ops outside the parallel modules must take every tensor as it lies."""
        axis = self.plan.mesh.names[a]
        for i in self.forward:
            op = self.plan.ops[i]
            if i in at:
                core = at[i]
                source = op.operands[core.position] if core.op == i else -1
                if core.op == i and given.get(source, self.made[source][a]).is_partial:
                    self._spoil(
                        source,
                        f"partial on {axis} where {core.path} reads it",
                        "a module of the form reads no partial tensor",
                        dropped,
                        regions,
                    )
                continue
            for t, layout in self._operands(i):
                if self.is_parameter(t):
                    self._check_whole(t, layout[a], i, a, dropped, regions)
                    continue
                lies = given.get(t, self.made[t][a])
                if layout[a] != lies:
                    self._spoil(
                        t,
                        f"{lies} on {axis} and read as {layout[a]}",
                        "the form converts tensors only where a module with a cut weight takes or returns them",
                        dropped,
                        regions,
                    )
            if any(axis in c.axes for c in op.collectives) or (op.implementation and op.strategy[a] == op.implementation):
                dropped.append(self._implemented(op, axis))
                for t in (*op.operands, *op.results):
                    if not self.is_stored(t):
                        regions.spoil(t)
            if not op.operands and any(layout[a] != R for layout in op.result_layouts):
                t = op.results[0]
                self._spoil(
                    t, f"made {op.result_layouts[0][a]} on {axis} by {op.name}", "a process of the form makes it whole", dropped, regions
                )
        for t in self.plan.outputs:
            lies = given.get(t, self.made[t][a])
            if self.plan.tensors[t].layout[a] != lies:
                self._spoil(
                    t,
                    f"made {lies} on {axis} and handed over {self.plan.tensors[t].layout[a]}",
                    "the form converts tensors only where a module with a cut weight takes or returns them",
                    dropped,
                    regions,
                )
        for t, tensor in enumerate(self.plan.tensors):
            if tensor.role in ("input", "buffer") and tensor.layout[a] != R and self.readers.get(t):
                self._spoil(
                    t, f"stored {tensor.layout[a]} on {axis}", "the form gives every process of that axis the whole of it", dropped, regions
                )

    def _check_whole(self, t: int, placement: Placement, i: int, a: int, dropped: list[Dropped], regions: Regions) -> None:
        """A parameter that an op outside the parallel modules reads must be whole, and so must what it acts on, or gradients be summed."""
        tensor, op = self.plan.tensors[t], self.plan.ops[i]
        beside = [x for x in (*op.operands, *op.results) if not self.is_stored(x)]
        layouts = [read[a] for x, read in self._operands(i) if not self.is_stored(x)]
        local = placement != R or any(p != R for p in (*layouts, *(made[a] for made in op.result_layouts)))
        if placement == R and local and tensor.trainable and not self.plan.options.forward_only:
            self.partial[owner(tensor.name)] = beside[0]
            if not self.reduces:
                dropped.append(
                    Dropped(
                        tensors=(tensor.name,),
                        what=f"whole on {self.plan.mesh.names[a]} and used with cut activations, so its gradient is summed over it",
                        why="the form sums no gradients over that axis",
                    )
                )
        if placement != R or (local and not self.reduces):
            for x in beside:
                regions.spoil(x)

    def _spoil(self, t: int, what: str, why: str, dropped: list[Dropped], regions: Regions) -> None:
        dropped.append(Dropped(tensors=(self.name(t),), what=what, why=why))
        regions.spoil(t)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Core:
    """The op of a parallel module: its position, which operand is the input, its final result, and the op that adds a bias."""

    path: str
    op: int
    position: int
    cut: Cut
    result: int
    bias: int | None
    bias_position: int
