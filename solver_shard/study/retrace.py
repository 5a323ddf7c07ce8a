"""The model behind a plan, traced anew: a plan names its model, and every question about other plans needs the program.

>>> found = retrace(load_plan("plan.json"))                              # a preset is known from the plan
>>> found = retrace(load_plan("plan.json"), "my_models:build")           # anything else is given
>>> found.program.name, found.source
('llama3-8b', 'llama3-8b, batch 64, seq 8192, bf16')

A plan file may come from anywhere, so a plan alone never makes a module be imported or a file be read: only presets are taken from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from solver_shard.arguments import part_of
from solver_shard.errors import InputError
from solver_shard.plan.plan import Plan
from solver_shard.program import Program
from solver_shard.source import is_entry_point, traced_of

if TYPE_CHECKING:
    import torch

    from solver_shard.frontends.clean import Traced


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Retraced:
    """The program of a plan, before pins.

    Attributes:
        traced: the trace that it was cleaned from; None where a Program was given.
        source: what to record as the origin of plans for it.
    """

    program: Program
    traced: Traced | None
    source: str


def retrace(
    plan: Plan,
    model: str | torch.nn.Module | Program | None = None,
    inputs: Mapping[str, Any] | tuple[Any, ...] | None = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
) -> Retraced:
    """Trace the model that a plan was made for, with the plan's batch, sequence, dtype and checkpointing.

    Args:
        model: as of ``solver_shard.optimize``; None for the preset that the plan names.
        inputs, loss_fn: of a module, as they were when the plan was made.

    Raises:
        InputError: the plan names no preset and no model is given, or the model's step is not the plan's: the first difference is named.
        TraceError: the model cannot be traced.
    """
    from solver_shard.export.loading import fitting

    options = plan.options
    model = named_model(plan) if model is None else model
    named = isinstance(model, str) and not is_entry_point(model)
    if named and options.batch is None:
        raise InputError(f"the plan was not made from a preset or config; give the module or entry point of {plan.name!r}, not {model!r}")
    program, traced, source = traced_of(
        model,
        inputs,
        batch=part_of(options.batch, options.microbatches) if named else None,
        seq=options.seq if named else None,
        dtype=options.dtype if named else None,
        loss_fn=loss_fn,
        forward_only=options.forward_only,
        checkpoint=options.checkpoint and named,
    )
    fitting(plan, program)
    return Retraced(program=program, traced=traced, source=plan.provenance.source or source)


def named_model(plan: Plan) -> str:
    """The preset that a plan says it was made from; InputError where it names none."""
    from solver_shard.frontends.huggingface import PRESETS

    name = plan.provenance.source.partition(", ")[0]
    if name in PRESETS:
        return name
    raise InputError(
        f"the plan was made from {plan.provenance.source or 'an unknown model'!r}, which is no preset; say which model it is: --model "
        "package.module:function, or --config FILE for a config.json (retrace(plan, model))"
    )
