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

What ``fully_shard`` and ``replicate`` can say of the data axes is ``read_data_parallel``; the collectives that the form issues are held
against those of the plan by ``compare``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from solver_shard.exporters import Dropped, merged
from solver_shard.layout import Layout, P, Placement, R
from solver_shard.plan.plan import Plan, PlannedOp
from solver_shard.plan.summary import local_nbytes
from solver_shard.program import DTYPE_BYTES
from solver_shard.text import fold_names, format_bytes

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
    reader = _EagerReader(plan, reduces)
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
    reader = _EagerReader(reduced_early(plan, tensor), reduces)
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


class _EagerReader:
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

    def _cores(self, a: int, dropped: list[Dropped]) -> dict[str, _ModuleCore]:
        """The op of every module that is cut by columns or rows; other cut weights are dropped."""
        axis = self.plan.mesh.names[a]
        uses: dict[int, list[tuple[int, int]]] = {t: self.readers.get(t, []) for t in range(len(self.plan.tensors)) if self.is_parameter(t)}
        cores: dict[str, _ModuleCore] = {}
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

    def _core(self, weight: int, readers: list[tuple[int, int]], a: int) -> _ModuleCore | None:
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
        return _ModuleCore(
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

    def _given(
        self, t: int, core: _ModuleCore, at: Mapping[int, _ModuleCore], a: int, dropped: list[Dropped], regions: Regions
    ) -> Placement:
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
        self, a: int, at: Mapping[int, _ModuleCore], given: Mapping[int, Placement], dropped: list[Dropped], regions: Regions
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
class _ModuleCore:
    """The op of a parallel module: its position, which operand is the input, its final result, and the op that adds a bias."""

    path: str
    op: int
    position: int
    cut: Cut
    result: int
    bias: int | None
    bias_position: int


_MEANS = ("aten.mean.default", "aten.mean.dim")
_WEIGHTED = ("shard.nll_loss_forward", "aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel:
    """How parameters lie on the data axes.

    Attributes:
        replicate_axes, shard_axes: data axes on which parameters are whole, and cut; in mesh order.
        dims: parameter to the dim that the shard axes cut.
        keeps: parameter to whether its gathered form is kept from forward to backward.
        dropped, notes: as in ``Exported``.
    """

    replicate_axes: tuple[str, ...]
    shard_axes: tuple[str, ...]
    dims: Mapping[str, int]
    keeps: Mapping[str, bool]
    dropped: tuple[Dropped, ...]
    notes: tuple[str, ...]


def read_data_parallel(plan: Plan, eager: Eager) -> DataParallel:
    """Read how a plan stores and gathers its parameters along the data axes of its eager form.

    >>> found = read_data_parallel(plan, eager)
    >>> found.shard_axes, found.dims["model.layers.0.mlp.down_proj.weight"], found.keeps["lm_head.weight"]
    (('dp',), 0, True)

    FSDP2 cuts every parameter by one dim over all its axes, after the tensor axis has cut it (so the two may share a dim, in the order
    that ``_S(d)S(d)`` says on ``dp,tp``). The optimizer's states lie as the parameters do. A module's parameters are gathered for forward,
    and are then either kept until backward or freed and gathered again. Gradients are averaged over the processes of the axes, which
    is the gradient of the whole batch where the loss is a mean over it.
    """
    positions = [plan.mesh.index(name) for name in eager.data_axes]
    parameters = [t for t, tensor in enumerate(plan.tensors) if tensor.role == "parameter"]
    shard = [a for a in positions if _mostly_cut(plan, parameters, a)]
    dropped: list[Dropped] = []
    notes: list[str] = []
    dims = {plan.tensors[t].name: _dim(plan, eager, t, shard, positions, dropped) for t in parameters}
    keeps = _keeps(plan, parameters, notes) if shard else {}
    for t in parameters:
        tensor = plan.tensors[t]
        if tensor.state is not None and tensor.state != tensor.layout:
            dropped.append(
                Dropped(
                    tensors=(tensor.name,),
                    what=f"optimizer state {tensor.state} beside a parameter {tensor.layout}",
                    why="the state that an optimizer makes lies as its parameter does",
                )
            )
    if plan.options.microbatches > 1:
        dropped.append(
            Dropped(
                tensors=tuple(plan.gradients)[:1],
                what=f"gradients of {plan.options.microbatches} microbatches accumulated",
                why="accumulation is the training loop's in this form",
            )
        )
    if positions and not plan.options.forward_only:
        _check_mean(plan, dropped, notes)
    return DataParallel(
        replicate_axes=tuple(plan.mesh.names[a] for a in positions if a not in shard),
        shard_axes=tuple(plan.mesh.names[a] for a in shard),
        dims=dims,
        keeps=keeps,
        dropped=tuple(dropped),
        notes=tuple(notes),
    )


def _mostly_cut(plan: Plan, parameters: list[int], a: int) -> bool:
    """Whether at least half of the parameters' elements are cut by an axis."""
    total = cut = 0
    for t in parameters:
        tensor = plan.tensors[t]
        elements = 1
        for size in tensor.shape:
            elements *= size
        total += elements
        cut += elements if tensor.layout[a].is_shard else 0
    return 2 * cut >= total > 0


def _dim(plan: Plan, eager: Eager, t: int, shard: list[int], positions: list[int], dropped: list[Dropped]) -> int:
    """The dim by which the shard axes cut a parameter; what differs from what FSDP2 does is dropped."""
    tensor = plan.tensors[t]
    where = ", ".join(plan.mesh.names[a] for a in shard)
    for a in positions:
        placement = tensor.layout[a]
        if a not in shard and placement.is_shard:
            dropped.append(
                Dropped(
                    tensors=(tensor.name,),
                    what=f"cut by {plan.mesh.names[a]}",
                    why=f"most parameters are whole on {plan.mesh.names[a]}, and the form replicates all of them there",
                )
            )
    cut = [tensor.layout[a] for a in shard]
    wanted = list(dict.fromkeys(p.dim for p in cut if p.is_shard))
    if shard and (len(wanted) != 1 or not all(p.is_shard for p in cut)):
        dropped.append(
            Dropped(
                tensors=(tensor.name,),
                what=f"{''.join(map(str, cut))} on {where}",
                why=f"fully_shard cuts every parameter of the model by one dim over {where}",
            )
        )
        return 0
    if not shard:
        return 0
    (dim,) = wanted
    tensor_axis = [] if eager.tensor_axis is None else [plan.mesh.index(eager.tensor_axis)]
    first = [a for a in tensor_axis if tensor.layout[a].is_shard and tensor.layout[a].dim == dim]
    if list(tensor.layout.order(dim)) != first + shard:
        names = [plan.mesh.names[a] for a in tensor.layout.order(dim)]
        dropped.append(
            Dropped(
                tensors=(tensor.name,),
                what=f"dim {dim} cut by {' then '.join(names)}",
                why="fully_shard cuts a dim after the tensor axis has, and by its own axes from left to right",
            )
        )
    shards = 1
    for a in shard:
        shards *= plan.mesh.shape[a]
    local = tensor.shape[dim]
    for a in first:
        local = -(-local // plan.mesh.shape[a])
    if local % shards and (dim or first or len(shard) > 1):
        dropped.append(
            Dropped(
                tensors=(tensor.name,),
                what=f"dim {dim} of {local} rows cut into {shards} unequal shards",
                why="fully_shard cuts only dim 0 so",
            )
        )
        return 0
    return dim


def _keeps(plan: Plan, parameters: list[int], notes: list[str]) -> dict[str, bool]:
    held = {hold.tensor for hold in plan.holds if hold.reshard is not None}
    again = {reshard.tensor for reshard in plan.reshards if reshard.purpose == "backward"}
    keeps, idle = {}, []
    for t in parameters:
        tensor = plan.tensors[t]
        keeps[tensor.name] = t in held or t not in again
        if t not in held and t not in again and not plan.options.forward_only:
            idle.append(t)
    if idle:
        nbytes = sum(local_nbytes(plan, plan.tensors[t].shape, plan.tensors[t].dtype, _gathered(plan, t)) for t in idle)
        names = ", ".join(fold_names(plan.tensors[t].name for t in idle)[:4])
        notes.append(
            f"{names}: gathered for forward only in the plan, and kept until backward by fully_shard, {format_bytes(nbytes)} of memory more"
        )
    return keeps


def _gathered(plan: Plan, t: int) -> Layout:
    for reshard in plan.reshards:
        if reshard.tensor == t and reshard.purpose == "forward":
            return reshard.layout
    return plan.tensors[t].layout


def _check_mean(plan: Plan, dropped: list[Dropped], notes: list[str]) -> None:
    """The loss must be known as a mean over the batch, as the gradients of its parts are averaged."""
    made = {t: op for op in plan.ops if op.phase == "forward" for t in op.results}
    loss = plan.outputs[0] if plan.outputs else None
    todo, seen = [loss] if loss is not None else [], set()
    wrong: list[str] = []
    while todo:
        t = todo.pop()
        if t in seen or t not in made:
            continue
        seen.add(t)
        op = made[t]
        if all(all(size == 1 for size in plan.tensors[x].shape) for x in op.operands):
            todo += op.operands
        elif op.name not in (*_MEANS, *_WEIGHTED) and not any(p.is_partial and p.reduction == "avg" for p in op.result_layouts[0]):
            wrong.append(f"{plan.tensors[t].name} by {op.name}")
        elif op.name in _WEIGHTED and not any(op.results[1] in other.operands for other in made.values()):
            wrong.append(f"{plan.tensors[t].name} by {op.name}, without a division by the number of labels")
    if wrong and loss is not None:
        dropped.append(
            Dropped(
                tensors=(plan.tensors[loss].name,),
                what=f"computed from {', '.join(wrong)}",
                why="the form averages gradients over processes, which is right for a loss that is a mean over the batch",
            )
        )
    notes.append(
        "the loss of each process is the mean over its own part of the batch, and gradients are averaged: the same as the plan's where all "
        "parts have as many labels that count"
    )


def wrap_order(paths: Mapping[str, bool]) -> list[str]:
    """Module paths, inner ones first."""
    return sorted(paths, key=lambda path: (-path.count(".") if path else 1, path))


def wrapped(plan: Plan, keeps: Mapping[str, bool]) -> dict[str, bool]:
    """Module to wrap (empty for the whole model) to whether its gathered parameters are freed after forward.

    A repeated block is one module; where its parameters differ, those with the rarer choice are wrapped by their own modules.
    Parameters that several modules use go with the whole model.
    """
    users: dict[str, set[str]] = {}
    for op in plan.ops:
        if op.phase == "forward":
            for t in op.operands:
                if plan.tensors[t].role == "parameter":
                    users.setdefault(plan.tensors[t].name, set()).add(op.module)
    blocks: dict[str, list[str]] = {}
    for name in keeps:
        shared = len(users.get(name, ())) > 1 and not all(u == owner(name) or u.startswith(f"{owner(name)}.") for u in users[name])
        blocks.setdefault("" if shared else _block(name), []).append(name)
    found: dict[str, bool] = {}
    for block, names in blocks.items():
        kept = [name for name in names if keeps[name]]
        common = 2 * len(kept) > len(names)
        found[block] = not common
        for name in names:
            if keeps[name] != common and owner(name) != block and block:
                found.setdefault(owner(name), not keeps[name])
    found.setdefault("", False)
    return found


def _block(name: str) -> str:
    """The repeated block that a parameter is in, else its own module."""
    parts = owner(name).split(".")
    for k, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: k + 1])
    return owner(name)


class Regions:
    """Sets of tensors that are connected by local ops, and those in which a plan cannot be followed."""

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))
        self._bad: set[int] = set()

    def _root(self, t: int) -> int:
        while self._parent[t] != t:
            self._parent[t] = self._parent[self._parent[t]]
            t = self._parent[t]
        return t

    def join(self, tensors: list[int]) -> None:
        for t in tensors[1:]:
            self._parent[self._root(t)] = self._root(tensors[0])

    def spoil(self, t: int) -> None:
        """After all joins."""
        self._bad.add(self._root(t))

    def is_bad(self, t: int) -> bool:
        return self._root(t) in self._bad


class AxisCollective(NamedTuple):
    """One collective along the tensor axis: kinds and bytes as in ``plan.Step``."""

    phase: str
    kind: str
    nbytes: int


def move_of(before: Placement, after: Placement) -> str:
    """The collective that takes a tensor from one placement of the axis to another; empty where no device needs another's part.

    >>> move_of(P("sum"), R), move_of(R, S(0))
    ('all_reduce', '')
    """
    if before in (after, R):
        return ""
    if before.is_partial:
        return "all_reduce" if after == R else "reduce_scatter"
    return "all_gather" if after == R else "all_to_all"


def implied(plan: Plan, eager: Eager, *, shared: bool | Collection[int]) -> dict[AxisCollective, list[str]]:
    """The collectives of the form, each with the modules that issue it.

    Args:
        shared: whether modules that read one tensor alike lay it out once (else each does it for itself), or the groups that do.
    """
    found: dict[AxisCollective, list[str]] = {}
    done: set[tuple[int, int]] = set()
    training = not plan.options.forward_only
    for module in eager.modules:
        entered = (module.group, int(module.read)) in done and (shared if isinstance(shared, bool) else module.group in shared)
        done.add((module.group, int(module.read)))
        if not entered:
            for phase, before, after in _entries(module, training):
                _add(found, plan, eager, phase, before, after, module.source, module.path)
        for phase, before, after in _exits(module, training):
            _add(found, plan, eager, phase, before, after, module.result, module.path)
    return found


def planned(plan: Plan, axis: str) -> dict[AxisCollective, list[str]]:
    """The plan's collectives along an axis between ops, and inside them, with the tensors that they move; not those of parameters."""
    found: dict[AxisCollective, list[str]] = {}
    for c in plan.collectives():
        if axis not in c.axes:
            continue
        if c.reshard is not None:
            reshard = plan.reshards[c.reshard]
            phase, t = "backward" if reshard.purpose == "backward" else "forward", reshard.tensor
            if plan.tensors[t].role == "parameter" or reshard.purpose in ("optimizer", "update", "accumulate"):
                continue
        elif c.op is not None:
            phase, t = plan.ops[c.op].phase, plan.ops[c.op].results[0]
        else:
            continue
        found.setdefault(AxisCollective(phase, c.kind, c.nbytes), []).append(plan.tensors[t].name)
    return found


def compare(plan: Plan, eager: Eager, *, shared: bool | Collection[int]) -> tuple[list[Dropped], list[str]]:
    """What the form issues beyond the plan's collectives, and notes on what it saves.

    >>> dropped, notes = compare(plan, eager, shared=True)

    What a module at its border does in forward follows from how its tensors lie and are read; what it does in backward is the transpose:

        forward                          backward
        input R as it is, columns        partial gradient of the input: all-reduce (reduce-scatter where it was gathered from a cut dim)
        input cut as it is, rows         nothing
        input R cut to rows              all-gather
        output P -> R  all-reduce        nothing
        output P -> S  reduce-scatter    all-gather
        output S -> R  all-gather        nothing (its own part is taken)

    Collectives are compared by phase, kind and bytes per device. Where the form issues more than the plan, the plan is not expressed;
    where it issues fewer, one collective serves what the plan moves in several equal copies, and that is noted.
    """
    if eager.tensor_axis is None:
        return [], []
    axis = eager.tensor_axis
    form, wanted = implied(plan, eager, shared=shared), planned(plan, axis)
    dropped, notes = [], []
    position = plan.mesh.index(axis)
    if reduced_early(plan, position) is not plan:
        notes.append(f"partial sums over {axis} are reduced before they are added to a residual, not after, by as many collectives")
    for t in plan.outputs:
        output = plan.tensors[t]
        if any(m.result == t and not m.given.is_replicate for m in eager.modules):
            notes.append(f"{output.name} is {output.layout[position]} on {axis}: each process returns its part of it")
    for move in dict.fromkeys((*form, *wanted)):
        mine, theirs = form.get(move, []), wanted.get(move, [])
        size = format_bytes(move.nbytes)
        if len(mine) > len(theirs):
            dropped.append(
                Dropped(
                    tensors=tuple(dict.fromkeys(mine)),
                    what=f"{len(theirs)} {move.kind} of {size} over {axis} in the {move.phase} pass",
                    why=f"the form issues {len(mine)}{', as every such module moves its tensors by itself' if theirs else ''}",
                )
            )
        elif len(mine) < len(theirs):
            names = ", ".join(fold_names(dict.fromkeys(theirs))[:4])
            notes.append(
                f"{len(theirs)} {move.kind} of {size} over {axis} in the {move.phase} pass of the plan ({names}), {len(mine)} in this form"
            )
    return dropped, notes


def _entries(module: Parallel, training: bool) -> Iterator[tuple[str, Placement, Placement]]:
    yield "forward", module.arrives, module.read
    if training and module.gradient:
        partial = module.kind == "linear" and module.cut == "columns"
        yield "backward", P("sum") if partial else module.read, module.arrives


def _exits(module: Parallel, training: bool) -> Iterator[tuple[str, Placement, Placement]]:
    yield "forward", module.made, module.given
    if training:
        # the gradient of a partial tensor is whole on every device
        yield "backward", module.given, R if module.made.is_partial else module.made


def _add(
    found: dict[AxisCollective, list[str]], plan: Plan, eager: Eager, phase: str, before: Placement, after: Placement, t: int, path: str
) -> None:
    kind = move_of(before, after)
    if kind:
        axis = plan.mesh.names.index(str(eager.tensor_axis))
        found.setdefault(AxisCollective(phase, kind, _nbytes(plan, t, axis, before if kind == "all_to_all" else R)), []).append(path)


def _nbytes(plan: Plan, t: int, axis: int, placement: Placement) -> int:
    """Bytes per device of a tensor that has this placement on the axis."""
    tensor = plan.tensors[t]
    layout = list(tensor.layout)
    for op in plan.ops:
        if t in op.results:
            layout = list(op.result_layouts[op.results.index(t)])
            break
    layout[axis] = placement
    size = DTYPE_BYTES[tensor.dtype]
    for n in Layout(layout).local_shape(tensor.shape, plan.mesh.shape):
        size *= n
    return size


def reduced_early(plan: Plan, axis: int) -> Plan:
    """The plan with partial sums along an axis reduced before additions, where it reduces them after: ``P + P -> P`` as ``R + R -> R``.

    A plan may add a partial product to a residual (as a part of it, which is free) and reduce the sum; reducing the product first moves
    the same bytes by as many collectives. Only additions whose every reader wants the whole sum, or adds it likewise, are changed.
    """
    partial = P("sum")
    readers: dict[int, list[tuple[int, int]]] = {}
    late: set[int] = set()
    for i, op in enumerate(plan.ops):
        if op.phase != "forward":
            break
        for k, t in enumerate(op.operands):
            readers.setdefault(t, []).append((i, k))
        if op.name == "aten.add.Tensor" and all(x[axis] == partial for x in (*op.operand_layouts, *op.result_layouts)):
            late.add(i)
    shrinking = True
    while shrinking:
        kept = {
            i
            for i in late
            if not set(plan.ops[i].results) & set(plan.outputs)
            and all(j in late or plan.ops[j].operand_layouts[k][axis] == R for j, k in readers.get(plan.ops[i].results[0], ()))
        }
        shrinking = kept != late
        late = kept

    def whole(layout: Layout) -> Layout:
        return Layout(R if a == axis else p for a, p in enumerate(layout))

    ops = list(plan.ops)
    for i in sorted(late):
        op = ops[i]
        ops[i] = dataclasses.replace(
            op, operand_layouts=tuple(map(whole, op.operand_layouts)), result_layouts=tuple(map(whole, op.result_layouts))
        )
    return dataclasses.replace(plan, ops=tuple(ops)) if late else plan
