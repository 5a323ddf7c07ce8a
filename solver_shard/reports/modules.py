"""The model as a tree of modules with what each costs: time on compute and on collectives, and bytes at the peak.

Copies of a repeated layer are one node where their modules, parameters, layouts and the ops that take time agree; its figures are of all
copies together.

>>> root = module_tree(plan, entry_of)
>>> [child["name"] for child in root["children"]]
['model', 'lm_head', '(own ops)']
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from solver_shard.plan.index import PlanIndex
from solver_shard.plan.plan import Plan, Reshard
from solver_shard.reports.tensors import chips, summary
from solver_shard.text import fold_members, template

MAX_PARAMETERS = 40
"""Parameters listed of one module that has them itself; a module with more says how many are left out."""


MAX_DEPTH = 30
"""Levels of modules; a path that goes deeper ends with all its rest as one name."""

OWN = "(own ops)"
"""Name of the node for what a module with children does itself."""


@dataclass(slots=True)
class _Module:
    """One module of the model, before copies are folded."""

    path: str
    children: dict[str, _Module] = field(default_factory=dict)
    parameters: list[int] = field(default_factory=list)
    ops: list[int] = field(default_factory=list)
    forward_ns: int = 0
    backward_ns: int = 0
    communication_ns: int = 0
    peak: int = 0


def module_tree(plan: Plan, entry_of: Sequence[int]) -> dict[str, Any]:
    """The root node.

    Every node has name, path, count (copies), forward_ns, backward_ns, communication_ns (before overlap) and peak (bytes at the peak of
    the step), all of it and its children, all copies; parameters and outputs (entry, name, chips); children; ops (how many of its own).
    Collectives belong to the parameter that they gather or whose gradient they reduce, else to the module whose result they move.
    """
    root, index = _Module(path=""), PlanIndex(plan)
    _fill(index, root)
    signatures: dict[str, Hashable] = {}
    _sign(plan, root, signatures)
    return _node(plan, [root], plan.name, _Context(plan, entry_of, index.module_outputs, signatures))


@dataclass(frozen=True, slots=True)
class _Context:
    plan: Plan
    entry_of: Sequence[int]
    outputs: dict[str, list[int]]
    signatures: dict[str, Hashable]


def _fill(index: PlanIndex, root: _Module) -> None:
    """Modules in the order of their first parameter or op, with costs of their own."""
    plan = index.plan

    def at(path: str) -> _Module:
        module = root
        for part in path.split(".", MAX_DEPTH) if path else ():
            below = f"{module.path}.{part}" if module.path else part
            module = module.children.setdefault(part, _Module(path=below))
        return module

    modules: dict[str, _Module] = {}
    tensor_module: dict[str, str] = {}
    order: list[tuple[str, int | None, int | None]] = []
    for t, tensor in enumerate(plan.tensors):
        if tensor.role in ("parameter", "buffer"):
            tensor_module[tensor.name] = tensor.name.rpartition(".")[0]
            order.append((tensor_module[tensor.name], t, None))
    for i, op in enumerate(plan.ops):
        order.append((op.module, None, i))
        for t in op.results:
            tensor_module[plan.tensors[t].name] = op.module
    for path, _, _ in sorted(order, key=lambda item: item[2] is None):  # ops first: the order in which the model runs
        modules.setdefault(path, at(path))
    runs = plan.options.microbatches
    for path, parameter, position in order:
        module = modules[path]
        if parameter is not None:
            module.parameters.append(parameter)
        elif position is not None:
            op = plan.ops[position]
            module.ops.append(position)
            if op.phase == "forward":
                module.forward_ns += runs * op.nanoseconds
            else:
                module.backward_ns += runs * op.nanoseconds

    def home(reshard: Reshard) -> _Module:
        owner = index.place(reshard)
        return modules.get(tensor_module.get(owner, owner), root)

    for reshard in plan.reshards:
        module = home(reshard)
        if reshard.purpose == "forward":
            module.forward_ns += plan.runs(reshard) * reshard.traffic_ns
        else:
            module.backward_ns += plan.runs(reshard) * reshard.traffic_ns
    for c in plan.collectives():
        module = root if c.op is None else modules[plan.ops[c.op].module]
        module = module if c.reshard is None else home(plan.reshards[c.reshard])
        module.communication_ns += c.runs * c.nanoseconds
    for holder in plan.memory.holders:
        modules.get(tensor_module.get(holder.name, ""), root).peak += holder.nbytes


def _sign(plan: Plan, module: _Module, signatures: dict[str, Hashable]) -> Hashable:
    """What copies of a layer have in common: not the module's own name, and no ops that take no time."""
    below = tuple((template(name), _sign(plan, child, signatures)) for name, child in module.children.items())
    held = tuple((t.name.rpartition(".")[2], t.shape, t.dtype, t.layout, t.state) for t in (plan.tensors[i] for i in module.parameters))
    ops = tuple(
        (op.name, op.phase, op.strategy, op.result_layouts, op.nanoseconds) for op in (plan.ops[i] for i in module.ops) if op.nanoseconds
    )
    signatures[module.path] = found = hash((below, held, ops))
    return found


def _node(plan: Plan, copies: Sequence[_Module], name: str, context: _Context) -> dict[str, Any]:
    """One node for modules that are copies of each other; the one in the middle stands for them where layouts are shown."""
    shown = copies[len(copies) // 2]
    children = [_node(plan, found, text, context) for text, found in _children(copies, context)]
    own = {
        "forward_ns": sum(m.forward_ns for m in copies),
        "backward_ns": sum(m.backward_ns for m in copies),
        "communication_ns": sum(m.communication_ns for m in copies),
        "peak": sum(m.peak for m in copies),
    }
    ops = [plan.ops[i] for i in shown.ops]
    timed = any(own.values())
    if children and timed:
        described = summary([op for op in ops if op.nanoseconds]) or "stored tensors"
        children.append(_leaf(OWN, shown.path, own, len(ops), described, _tensors(plan, shown.parameters, context), []))
    total = {key: own[key] + sum(child[key] for child in children if child["name"] != OWN) for key in own}
    outputs = _tensors(plan, context.outputs.get(shown.path, ()), context, relative=shown.path)
    node = _leaf(
        name, shown.path, total, len(ops), summary(ops), [] if children and timed else _tensors(plan, shown.parameters, context), outputs
    )
    node["children"], node["count"] = children, len(copies)
    return node


def _leaf(
    name: str, path: str, costs: dict[str, int], ops: int, described: str, parameters: list[dict[str, Any]], outputs: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "name": name,
        "path": path,
        "count": 1,
        **costs,
        "ops": ops,
        "summary": described,
        "parameters": parameters,
        "outputs": outputs,
        "children": [],
    }


def _children(copies: Sequence[_Module], context: _Context) -> Iterable[tuple[str, list[_Module]]]:
    """The nodes below: copies of a layer together, and a list of layers that does nothing itself left out: ``layers.{0..31}``."""
    shown = copies[len(copies) // 2]
    for name, child in shown.children.items():
        same = [module.children[name] for module in copies]
        hollow = not any((child.ops, child.parameters)) and all(part.isdigit() for part in child.children)
        if not hollow:
            yield from _folded([(name, same)], context)
        else:
            yield from _folded([(f"{name}.{k}", [module.children[k] for module in same]) for k in child.children], context)


def _folded(found: list[tuple[str, list[_Module]]], context: _Context) -> Iterable[tuple[str, list[_Module]]]:
    items = [(name, tuple(context.signatures[module.path] for module in modules)) for name, modules in found]
    by_name = dict(found)
    for text, _, members in fold_members(items):
        yield text, [module for name in members for module in by_name[name]]


def _tensors(plan: Plan, positions: Iterable[int], context: _Context, relative: str = "") -> list[dict[str, Any]]:
    found = []
    for t in list(positions)[:MAX_PARAMETERS]:
        tensor = plan.tensors[t]
        name = tensor.name.rpartition(".")[2] if not relative else tensor.name.removeprefix(f"{relative}.")
        found.append({"entry": context.entry_of[t], "name": name, "chips": chips(tensor.layout, plan.mesh)})
    return found
