"""``solver-shard export``: a plan in the form that another tool reads, or as a program."""

from __future__ import annotations

import enum
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from solver_shard.cli.output import check_output


class Target(enum.StrEnum):
    """Forms of a plan."""

    DTENSOR_SCRIPT = "dtensor-script"
    PARALLELIZE = "parallelize"
    HF = "hf"
    TORCHTITAN = "torchtitan"
    JAX = "jax"
    SDY = "sdy"


def export(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file that solve wrote with -o.")],
    to: Annotated[
        Target,
        typer.Option(
            help="dtensor-script: a torchrun program that runs all of the plan; parallelize: a Python file of parallelize_module styles "
            "and FSDP2 calls; hf: a tp_plan with the other arguments of transformers' DistributedConfig; torchtitan: sharding configs; "
            "jax: PartitionSpecs and logical-axis rules; sdy: Shardy annotations on a StableHLO signature."
        ),
    ] = ...,  # type: ignore[assignment]  # typer's mark for a required option
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Write it to this file.")] = ...,  # type: ignore[assignment]
    lossy: Annotated[bool, typer.Option("--lossy", help="Leave out what the form cannot express, and list it.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print a traceback on errors.")] = False,
) -> None:
    """Write a plan in another form: as a program that runs it, or for a tool that shards by declarations.

    A form that cannot express a part of the plan refuses, and names the tensors; with --lossy it lists what it leaves out.
    """
    check_output(output, plan)
    from solver_shard.export.exported import Exported
    from solver_shard.files import write_whole
    from solver_shard.names import text_of
    from solver_shard.plan.io import load_plan

    loaded = load_plan(plan)
    made: Exported
    if to is Target.DTENSOR_SCRIPT:
        from solver_shard.export import script

        made = script.export(loaded, plan_path=os.path.relpath(plan.resolve(), output.resolve().parent))
    else:
        import importlib

        name = "huggingface" if to is Target.HF else to.value
        made = importlib.import_module(f"solver_shard.export.{name}").export(loaded, lossy=lossy)
    write_whole(output, made.text)
    lines = [f"wrote {output}"]
    if made.dropped:
        lines += ["left out:", *(f"  - {item}" for item in made.dropped)]
    if made.notes:
        lines += ["in another way than in the plan:", *(f"  - {note}" for note in made.notes)]
    sys.stdout.write(text_of(lines) + "\n")
