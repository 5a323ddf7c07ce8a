"""A plan in another form: which forms there are, what an exporter hands back, and how one says that it cannot express a part of a plan.

>>> exported = export(plan, "parallelize")
>>> exported.text[:3], exported.dropped, exported.notes
('\"\"\"', (), ('the loss of each process is the mean over its own part of the batch; ...',))

Three kinds of difference are told apart, and none is silent. *Dropped* is what the plan says and the form cannot: it refuses the export,
unless the caller wants it lossy. *Notes* are what the form does in another way with the same layouts, numbers and no collective more.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from solver_shard.arguments import checked
from solver_shard.errors import InputError, printable
from solver_shard.mesh import Mesh
from solver_shard.text import fold_names

if TYPE_CHECKING:
    from solver_shard.plan.plan import Plan
    from solver_shard.program import Program

_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """A part of a plan that a form cannot express.

    Attributes:
        tensors: names of the tensors (or modules) that it is about, in the plan's order.
        what: the plan says of them.
        why: the form cannot say it, or what it says instead.
    """

    tensors: tuple[str, ...]
    what: str
    why: str

    def __str__(self) -> str:
        folded = fold_names(self.tensors)
        more = f", +{len(folded) - _SHOWN} more" if len(folded) > _SHOWN else ""
        return printable(f"{', '.join(folded[:_SHOWN])}{more}: {self.what}; {self.why}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A plan in another form.

    Attributes:
        text: of the file.
        dropped: what was left out; empty unless the export was lossy.
        notes: what differs from the plan without a loss.
    """

    text: str
    dropped: tuple[Dropped, ...] = ()
    notes: tuple[str, ...] = ()


FORMS: Mapping[str, str] = MappingProxyType(
    {
        "dtensor-script": "script",
        "parallelize": "parallelize",
        "hf": "huggingface",
        "torchtitan": "torchtitan",
        "jax": "jax",
        "sdy": "shardy",
    }
)
"""The forms, and the file here that writes each."""


@checked
def export(
    plan: Plan | str | os.PathLike[str], to: str, *, lossy: bool = False, plan_path: str | os.PathLike[str] = "plan.json"
) -> Exported:
    """Write a plan in another form: as a program that runs it, or for a tool that shards by declarations.

    >>> exported = export(plan, "hf", lossy=True)                        # doctest: +SKIP
    >>> Path("tp_plan.json").write_text(exported.text), exported.dropped  # doctest: +SKIP

    Args:
        plan: what to write, or its file.
        to: dtensor-script, a torchrun program that runs all of the plan; parallelize, a Python file of ``parallelize_module`` styles and
            FSDP2 calls; hf, a ``tp_plan`` with the other arguments of transformers' DistributedConfig; torchtitan, sharding configs; jax,
            PartitionSpecs and logical-axis rules; sdy, Shardy annotations on a StableHLO signature (needs jaxlib).
        lossy: leave out what the form cannot express; ``dropped`` lists it.
        plan_path: of dtensor-script: where the plan's file lies, seen from the program.

    Returns:
        The text, what was left out, and what the form does in another way.

    Raises:
        InputError: no such form, or it cannot express a part of the plan, whose tensors are named.
    """
    if to not in FORMS:
        raise InputError(f"there is no form {to!r}; legal: {', '.join(FORMS)}")
    from solver_shard.plan.io import load_plan

    plan = load_plan(plan)
    form = importlib.import_module(f"{__name__}.{FORMS[to]}")
    exported: Exported = form.export(plan, plan_path=os.fspath(plan_path)) if to == "dtensor-script" else form.export(plan, lossy=lossy)
    return exported


@checked
def read_pins(text: str, form: str, program: Program, *, mesh: str | Mesh | None = None, axis: str = "tp") -> tuple[str, ...]:
    """Pins of what another tool's declarations say, for ``optimize(pins=...)``; the text is read as data.

    >>> read_pins(Path("tp_plan.json").read_text(), "hf", program, axis="tp")  # doctest: +SKIP
    ('model.layers.*.mlp.up_proj.weight=tp=S(0)',)

    Args:
        text: a ``tp_plan`` (hf), styles (parallelize), sharding configs (torchtitan), PartitionSpecs (jax) or an annotated module (sdy).
        form: hf, parallelize, torchtitan, jax or sdy.
        program: that the pins are for; its tensors have the names.
        mesh: of jax and sdy, whose axes are named.
        axis: of the others, the mesh axis that they are about.

    Returns:
        A pin for each tensor or pattern.

    Raises:
        InputError: no such form, not such a text, or a name or placement that cannot be.
    """
    if form not in FORMS or form == "dtensor-script":
        raise InputError(f"there are no pins in the form {form!r}; legal: {', '.join(name for name in FORMS if name != 'dtensor-script')}")
    reader = importlib.import_module(f"{__name__}.{FORMS[form]}")
    dims = {tensor.name: len(tensor.shape) for tensor in program.tensors}
    pins: tuple[str, ...]
    if form in ("jax", "sdy"):
        if mesh is None:
            raise InputError(f"the form {form!r} names mesh axes; give the mesh, as in mesh='dp=4,tp=2'")
        axes = mesh if isinstance(mesh, Mesh) else Mesh.parse(mesh)
        pins = reader.read(text, dims, axes) if form == "jax" else reader.pins(reader.read(text, axes))
    else:
        pins = reader.read(text, dims if form == "torchtitan" else program, axis=axis)
    return pins


def check_lossless(target: str, dropped: Sequence[Dropped], *, lossy: bool) -> None:
    """Refuse an export that leaves something out, unless it may.

    Raises:
        InputError: something is dropped and ``lossy`` is false; every item is listed.
    """
    if dropped and not lossy:
        raise InputError(
            f"the form {target!r} cannot express this plan:",
            *(f"  - {item}" for item in dropped),
            "export to dtensor-script, which expresses all of a plan, or drop these with --lossy (lossy=True)",
        )


def merged(dropped: Iterable[Dropped]) -> tuple[Dropped, ...]:
    """Items that say the same of several tensors as one, in order of first appearance."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for item in dropped:
        found.setdefault((item.what, item.why), {}).update(dict.fromkeys(item.tensors))
    return tuple(Dropped(tensors=tuple(names), what=what, why=why) for (what, why), names in found.items())


def listing(exported_lines: Iterable[object], prefix: str = "#   ") -> str:
    """Items one a line, for the head of a written file."""
    return "".join(f"{prefix}{printable(str(line))}\n" for line in exported_lines)
