"""The calls of torch's own op tests as tiny models: what is differentiable is a parameter, the loss a weighted sum of all results.

>>> case = next(cases("linalg.solve"))
>>> outcome(case, ("2", "2,2"), seeds=(0, 1))
Outcome(kind='holds', said='')
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
import unittest
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from points import plan_of, random_point
from torch import nn

from solver_shard.costs.cluster import Cluster, load_cluster
from solver_shard.costs.model import CostModel
from solver_shard.errors import InternalError, SolverShardError
from solver_shard.graph.lowering import lower
from solver_shard.mesh import Mesh
from solver_shard.options import Options
from solver_shard.program import Role
from solver_shard.verification import check
from solver_shard.verification.subject import Subject, subject_of

DTYPES = (torch.float64, torch.float32, torch.int64, torch.bool)
"""Of the samples: the first that an op takes."""
SIZE = 6
"""Of most dims of the samples, for torch's own 5: it can be cut in 2 and in 3, and unevenly in 4."""
ELEMENTS = 4096
"""Of a sample's tensors together; larger samples are left out."""
OPS = 250
"""Of a case's program; larger ones are left out."""
UNSET = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_", "resize_as_"})
"""Ops whose results are whatever was in memory."""


@functools.cache
def database() -> dict[str, Any]:
    """torch's op tests by name, as ``div.floor_rounding``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _stand_in()
        from torch.testing._internal.opinfo import core

        core.S = SIZE
        from torch.testing._internal.common_methods_invocations import op_db
    found: dict[str, Any] = {}
    for info in op_db:
        name = f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name
        while name in found:
            name += "'"
        found[name] = info
    return found


def _stand_in() -> None:
    """torch's test library imports ``expecttest``, and nothing that is used here does."""
    try:
        __import__("expecttest")
    except ImportError:
        module = types.ModuleType("expecttest")
        module.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = module


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """A call of an op, with values."""

    op: str
    sample: int
    model: nn.Module
    inputs: tuple[torch.Tensor, ...]
    forward_only: bool

    def run(self) -> None:
        """Forward and backward, unsharded."""
        found = self.model(*self.inputs)
        if not self.forward_only:
            found.backward()


@dataclass(frozen=True, slots=True)
class Outcome:
    """``holds``; ``refused`` where an error says so before anything is planned; ``unrun`` where a plan is refused when it is to run;
    ``unset`` where nothing can be compared; ``wrong`` where numbers or bytes differ; ``failed`` where anything else is raised;
    ``large`` where it is not tried."""

    kind: str
    said: str = ""


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where a leaf of the arguments is: a parameter by name, an input by position."""

    at: int | str


class Call(nn.Module):
    """One call; what wants a gradient is a parameter, other tensors are inputs."""

    def __init__(self, op: Any, sample: Any, *, forward_only: bool) -> None:
        super().__init__()
        self._op, self._after, self._forward_only = op, sample.output_process_fn_grad, forward_only
        leaves, self._spec = pytree.tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
        self._leaves: list[Any] = []
        self.given: list[torch.Tensor] = []
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                self._leaves.append(leaf)
            elif leaf.requires_grad and not forward_only:
                name = f"p{len(list(self.parameters()))}"
                self.register_parameter(name, nn.Parameter(leaf.detach().clone()))
                self._leaves.append(_Slot(name))
            else:
                self._leaves.append(_Slot(len(self.given)))
                self.given.append(leaf.detach().clone())
        self._calls = len(self.given)

    def weigh(self) -> None:
        """Weights for all results, which are inputs, too."""
        numbers = torch.Generator().manual_seed(0)
        with torch.no_grad():
            found = self._results(self.given)
        for result in found:
            dtype = result.dtype if result.dtype.is_floating_point else torch.float64
            for _ in range(1 + result.is_complex()):
                self.given.append(torch.rand(result.shape, generator=numbers, dtype=torch.float64).add(0.5).to(dtype))

    def forward(self, *given: torch.Tensor) -> Any:
        found = self._results(given[: self._calls])
        if self._forward_only:
            return tuple(found)
        weights = iter(given[self._calls :])
        loss = torch.zeros((), dtype=torch.float64)
        for result in found:
            parts = (result.real, result.imag) if result.is_complex() else (result,)
            for part in parts:
                loss = loss + (part * next(weights)).sum()
        return loss

    def _results(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        leaves = []
        for leaf in self._leaves:
            if isinstance(leaf, _Slot):
                leaf = given[leaf.at] if isinstance(leaf.at, int) else getattr(self, leaf.at)
            leaves.append(leaf)
        first, args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        made = self._op(first, *args, **kwargs)
        made = made if self._forward_only else self._after(made)
        tensors = [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        return tensors if self._forward_only else [t for t in tensors if t.numel() and (t.is_floating_point() or t.is_complex())]


def cases(op: str, most: int = 1) -> Iterator[Case]:
    """The first samples of an op that are of plain tensors, small, and have something to cut."""
    info = database()[op]
    held = info.supported_backward_dtypes("cpu") if info.supports_autograd else info.supported_dtypes("cpu")
    dtype = next((d for d in DTYPES if d in held), None) or min(info.supported_dtypes("cpu"), key=str)
    trained = info.supports_autograd and dtype.is_floating_point
    torch.manual_seed(0)
    found = 0
    for number, sample in enumerate(info.sample_inputs("cpu", dtype, requires_grad=trained)):
        tensors = [t for t in pytree.tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(t, torch.Tensor)]
        plain = all(t.layout == torch.strided and t.numel() for t in tensors)
        if not plain or sum(t.numel() for t in tensors) > ELEMENTS or max((n for t in tensors for n in t.shape), default=2) < 2:
            continue
        forward_only = not trained or not any(t.requires_grad for t in tensors)
        model = Call(info.op, sample, forward_only=forward_only)
        if not forward_only:
            model.weigh()
        if any(not t.numel() for t in model.given):
            continue
        yield Case(op=op, sample=number, model=model, inputs=tuple(model.given), forward_only=forward_only)
        found += 1
        if found == most:
            return


def subject(case: Case) -> Subject:
    """The case traced, with the sample's own numbers."""
    made = subject_of(case.model, case.inputs, name=case.op, forward_only=case.forward_only)
    tensors = made.program.tensors
    given = {f"arg{k}": value for k, value in enumerate(case.inputs)}
    values = {t: given[tensors[t].name] if tensors[t].role is Role.INPUT else value for t, value in made.values[0].items()}
    return dataclasses.replace(made, values=(values,))


@functools.cache
def near() -> Cluster:
    """An H100 whose links answer at once."""
    cluster = load_cluster("h100")
    return dataclasses.replace(cluster, launch_ns=10, levels=tuple(dataclasses.replace(x, latency_ns=5) for x in cluster.levels))


def outcome(case: Case, meshes: Sequence[str] = ("2",), seeds: Sequence[int] = (0,)) -> Outcome:
    """Plans of a case at random points, run and compared: the first that does not hold, or that all do."""
    if case.op in UNSET:
        return Outcome("unset", "its results are whatever was in memory")
    try:
        made = subject(case)
    except SolverShardError as error:
        return Outcome("refused", str(error))
    except Exception as error:  # a bug is an outcome, and the other cases are still made
        return Outcome("failed", f"trace: {_said(error)}")
    if len(made.program.ops) > OPS:
        return Outcome("large", f"{len(made.program.ops)} ops")
    options = Options(memory_limit=2**62, tied=False, forward_only=case.forward_only)
    for mesh in meshes:
        costs = CostModel(Mesh.parse(mesh), near())
        try:
            lowering = lower(made.program, options.rulebook(), costs, optimizer_state=options.optimizer_state())
        except Exception as error:
            return Outcome("failed", f"lower on {mesh}: {_said(error)}")
        for seed in seeds:
            try:
                verdict = check(plan_of(lowering, random_point(lowering.graph, seed), costs, options), made)
            except Exception as error:
                kind = "unrun" if isinstance(error, SolverShardError) and not isinstance(error, InternalError) else "failed"
                return Outcome(kind, f"{mesh}, point {seed}: {_said(error)}")
            if not verdict.holds:
                wrong = [f"{d.kind} {d.name} against {d.reference} {d.value:.1e}" for d in verdict.differences if not d.holds]
                wrong += [
                    f"{c.kind} {c.axes}: {c.planned_nbytes} bytes planned, {c.run_nbytes} run" for c in verdict.collectives if not c.holds
                ]
                return Outcome("wrong", f"{mesh}, point {seed}: {verdict.problem or '; '.join(wrong) or 'nothing compared'}")
    return Outcome("holds")


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
