"""What a run of a plan has shown, beside what it should: numbers against the unsharded step, collectives against the plan.

``str(verdict)`` is the report; :meth:`Verdict.to_json` is the same data with every tensor.

**Differences.** Of two tensors a and b of one kind (all gradients, say), b the expected one:

    max |a - b| / (max |b| + max |B| / 100),  B all expected tensors of that kind

The second term is there for sums that cancel: the bias of a key projection has no gradient, and what a run computes for it is
rounding of numbers as large as other gradients. Tensors that are no floats must be equal.

**Tolerance.** Summing in another order changes a sum of n terms by about sqrt(n) roundings, and a step of the models meant here stacks
some dozens of sums of thousands of terms: about 2^10 roundings, 2e-13 in f64, 1e-4 in f32. A plan that is wrong misses or repeats a
term that some device has, a difference of the order of 1 / devices. The tolerance stands between: 1e-11 in f64, 2e-4 in f32. Formats
of 16 bits have little room between (2^-8 and 2^-11 for one rounding): 0.06 in bf16 and 0.01 in f16 find only gross mistakes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from solver_shard.plan.plan import Plan
from solver_shard.text import table, text_of

TOLERANCES: Mapping[str, float] = {"f64": 1e-11, "f32": 2e-4, "f16": 0.01, "bf16": 0.06}
"""Largest difference by the narrowest float that a step computes in."""

Traffic = Mapping[tuple[str, tuple[str, ...]], tuple[int, int]]
"""By kind and names of the mesh axes: how many collectives, and bytes that one device calls them with, all together."""

_FLOOR = 0.01
_KINDS = ("loss", "output", "gradient", "parameter")
_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorError:
    """One tensor of the sharded step beside that of an unsharded one.

    Attributes:
        kind: loss, output, gradient or parameter (after the optimizer's step).
        reference: graph (the same ops, unsharded) or model (the module itself, by autograd).
        value: the relative difference; infinite where shapes, dtypes, places of NaN or whole numbers differ.
    """

    kind: str
    name: str
    reference: str
    value: float
    tolerance: float

    @property
    def holds(self) -> bool:
        return self.value <= self.tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedCollective:
    """Collectives of one kind on one set of axes: planned and run, how many and with how many bytes per device."""

    kind: str
    axes: tuple[str, ...]
    planned: int
    run: int
    planned_nbytes: int
    run_nbytes: int

    @property
    def holds(self) -> bool:
        return (self.planned, self.planned_nbytes) == (self.run, self.run_nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a plan computes what the unsharded model computes, with the collectives that it predicts.

    Attributes:
        plan: what the plan is called and its mesh, as given.
        run: what was run: devices, how, and in which precision.
        changes: what is not as in the plan; empty where the plan itself was run.
        notes: what is not compared, and why.
        problem: what stopped the run, or where the first wrong number is made; empty where nothing is wrong.
        references: what the numbers are held against, by name.
    """

    plan: str
    run: str
    changes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    differences: tuple[TensorError, ...] = ()
    collectives: tuple[ComparedCollective, ...] = ()
    references: Mapping[str, str] = dataclasses.field(default_factory=dict)
    problem: str = ""

    @property
    def holds(self) -> bool:
        """Nothing stopped the run, there are numbers, and all of it holds."""
        fine = all(d.holds for d in self.differences) and all(c.holds for c in self.collectives)
        return not self.problem and bool(self.differences) and fine

    def to_json(self) -> str:
        """One JSON object; infinite differences are null."""
        found = dataclasses.asdict(self) | {"holds": self.holds}
        for row, source in zip(found["differences"], self.differences, strict=True):
            row["holds"] = source.holds
            row["value"] = source.value if source.value < float("inf") else None
        for row, collective in zip(found["collectives"], self.collectives, strict=True):
            row["holds"] = collective.holds
        return json.dumps(found, indent=1)

    def __str__(self) -> str:
        lines = [f"{self.plan}: {'holds' if self.holds else 'DOES NOT HOLD'}", "", *table([("run", self.run)])]
        lines += table([("not as in the plan" if not k else "", change) for k, change in enumerate(self.changes)])
        lines += table([("note", note) for note in self.notes])
        if self.problem:
            lines += ["", f"  problem: {self.problem}"]
        if self.differences:
            lines += ["", "Numbers, largest relative difference", *self._numbers()]
        if self.collectives or self.differences:
            lines += ["", "Collectives, planned and run", *self._traffic()]
        return text_of(lines)

    def _numbers(self) -> list[str]:
        rows = [("what", "tensors", "against", "difference", "tolerance", "", "largest at")]
        for kind in _KINDS:
            for reference, said in self.references.items():
                found = [d for d in self.differences if (d.kind, d.reference) == (kind, reference)]
                if found:
                    worst = max(found, key=lambda d: d.value - d.tolerance)
                    wrong = sum(not d.holds for d in found)
                    verdict = "ok" if not wrong else f"{wrong} WRONG"
                    rows.append((kind, str(len(found)), said, f"{worst.value:.1e}", f"{worst.tolerance:.0e}", verdict, worst.name))
        wrong_ones = [d for d in self.differences if not d.holds]
        lines = table(rows, right=(1, 3, 4), header=True)
        lines += [f"  wrong: {d.kind} {d.name} ({d.value:.1e} against {self.references[d.reference]})" for d in wrong_ones[:_SHOWN]]
        return lines + ([f"  and {len(wrong_ones) - _SHOWN} more"] if len(wrong_ones) > _SHOWN else [])

    def _traffic(self) -> list[str]:
        if not self.collectives:
            return ["  none, and none planned"]
        rows = [("kind", "axes", "planned", "run", "bytes planned", "bytes run", "")]
        for c in self.collectives:
            counts = (str(c.planned), str(c.run), f"{c.planned_nbytes:,}", f"{c.run_nbytes:,}")
            rows.append((c.kind, ",".join(c.axes), *counts, "ok" if c.holds else "WRONG"))
        return table(rows, right=(2, 3, 4, 5), header=True)


def differences(
    kind: str, reference: str, found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], tolerance: float
) -> list[TensorError]:
    """Every expected tensor of one kind beside what was found; one that is missing differs infinitely."""
    largest = max((_largest(tensor) for tensor in expected.values()), default=0.0)
    return [
        TensorError(
            kind=kind,
            name=name,
            reference=reference,
            value=_difference(found[name], tensor, largest) if name in found else float("inf"),
            tolerance=tolerance,
        )
        for name, tensor in expected.items()
    ]


def planned_traffic(plan: Plan) -> dict[tuple[str, tuple[str, ...]], tuple[int, int]]:
    """The collectives that a step of the plan runs: of reshards, inside ops, and of clipping."""
    total: dict[tuple[str, tuple[str, ...]], tuple[int, int]] = {}
    for c in plan.collectives():
        before = total.get((c.kind, c.axes), (0, 0))
        total[c.kind, c.axes] = before[0] + c.runs, before[1] + c.runs * c.nbytes
    return total


def collectives(planned: Traffic, run: Traffic) -> tuple[ComparedCollective, ...]:
    """What was planned beside what ran, by kind and axes."""
    keys: Sequence[tuple[str, tuple[str, ...]]] = sorted({*planned, *run})
    none = (0, 0)
    return tuple(
        ComparedCollective(
            kind=key[0],
            axes=key[1],
            planned=planned.get(key, none)[0],
            run=run.get(key, none)[0],
            planned_nbytes=planned.get(key, none)[1],
            run_nbytes=run.get(key, none)[1],
        )
        for key in keys
    )


def _difference(found: torch.Tensor, expected: torch.Tensor, largest: float) -> float:
    if found.shape != expected.shape:
        return float("inf")
    if not expected.is_floating_point() and not expected.is_complex():
        return 0.0 if torch.equal(found, expected) else float("inf")
    found, expected = _wide(found.to(expected.dtype)), _wide(expected)
    if expected.is_complex():
        found, expected = torch.view_as_real(found.resolve_conj()), torch.view_as_real(expected.resolve_conj())
    strange = ~(expected.isfinite() & found.isfinite())
    if not torch.equal(found[strange].nan_to_num(nan=0.5), expected[strange].nan_to_num(nan=0.5)):
        return float("inf")
    apart = (found - expected)[~strange].abs()
    scale = _largest(expected) + _FLOOR * largest
    worst = apart.max().item() if apart.numel() else 0.0
    return 0.0 if not worst else worst / scale if scale else float("inf")


def _largest(tensor: torch.Tensor) -> float:
    if not tensor.is_floating_point() and not tensor.is_complex():
        return 0.0
    tensor = _wide(tensor)
    finite = tensor[tensor.isfinite()].abs()
    return finite.max().item() if finite.numel() else 0.0


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Floats of 8 bits as wider ones, for torch computes nothing with them."""
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor
