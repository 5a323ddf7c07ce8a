"""Options that several commands share: what ``solver_shard.optimize`` takes, under the same names."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from solver_shard.errors import InputError

MODEL, MESH, MEMORY, OPTIMIZER = "Model", "Mesh and cluster", "Memory", "Optimizer and gradients"
LAYOUTS, SEARCH, OUTPUT = "Layouts", "Search", "Output"
"""Under which headings --help lists the options."""


class Objective(enum.StrEnum):
    """What to minimise."""

    TIME = "time"
    MEMORY = "memory"


class ReduceDtype(enum.StrEnum):
    """In which gradients are reduced."""

    F32 = "f32"
    BF16 = "bf16"
    F16 = "f16"


class Optimizer(enum.StrEnum):
    """Which optimizer's state to count."""

    ADAMW = "adamw"
    ADAMW_FUSED = "adamw-fused"
    ADAMW_FORLOOP = "adamw-forloop"
    SGD = "sgd"
    NONE = "none"


Reserve = Annotated[
    str | None,
    typer.Option(
        help="Part of that limit that no tensor may have: context, collective buffers, fragmentation "
        "(default: the cluster's; none beside the default limit).",
        show_default=False,
        metavar="SIZE",
        rich_help_panel=MEMORY,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="Of parameters and compute: bf16, f32, ... (default: bf16).", show_default=False, metavar="DTYPE", rich_help_panel=MODEL
    ),
]
Seq = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Tokens per sequence; of models that only hear, samples or frames.",
        show_default=False,
        metavar="N",
        rich_help_panel=MODEL,
    ),
]
Config = Annotated[
    str | None,
    typer.Option(
        "--config", metavar="FILE", help="A Hugging Face config.json instead of MODEL.", show_default=False, rich_help_panel=MODEL
    ),
]
Microbatches = Annotated[
    int,
    typer.Option(
        min=1,
        help="Run the batch in this many parts, one after the other, and accumulate their gradients; the inputs of an entry "
        "point are those of one part.",
        metavar="N",
        rich_help_panel=MODEL,
    ),
]
OptimizerName = Annotated[
    Optimizer,
    typer.Option(
        metavar="NAME",
        help="Whose state and step to count: adamw (torch's default, all parameters at once), adamw-fused, adamw-forloop, sgd or none.",
        rich_help_panel=OPTIMIZER,
    ),
]
MasterWeights = Annotated[
    bool,
    typer.Option(
        "--master-weights/--no-master-weights",
        help="Parameters of 16 bits or less have an f32 copy to step, or none.",
        rich_help_panel=OPTIMIZER,
    ),
]
StateBytes = Annotated[
    int | None,
    typer.Option(
        help="Optimizer state per parameter element, where it is not the optimizer's own.",
        show_default=False,
        metavar="N",
        rich_help_panel=OPTIMIZER,
    ),
]
ReduceDtypeName = Annotated[
    ReduceDtype | None,
    typer.Option(
        metavar="DTYPE",
        help="Reduce, accumulate and hold gradients in f32, bf16 or f16 (default: each in its own dtype).",
        show_default=False,
        rich_help_panel=OPTIMIZER,
    ),
]
Clip = Annotated[bool, typer.Option("--clip", help="Clip gradients to a norm before the update.", rich_help_panel=OPTIMIZER)]
ForwardOnly = Annotated[bool, typer.Option("--forward-only", help="Plan inference: no backward pass, no update.", rich_help_panel=MODEL)]
Checkpoint = Annotated[
    bool,
    typer.Option(
        "--checkpoint",
        help="Checkpoint every layer: its activations are computed again in backward (presets and configs).",
        rich_help_panel=MODEL,
    ),
]
Pins = Annotated[
    list[str] | None,
    typer.Option(
        help="PATTERN=LAYOUT, repeatable: 'w=R,S(0)' is one placement per mesh axis, 'x=dp=S(0)' those of named axes, "
        "'w=S(*),*' any cut and any placement, 'w=_S(0),S(0)' dim 0 cut by the right axis first; w may be a glob.",
        show_default=False,
        metavar="PIN",
        rich_help_panel=LAYOUTS,
    ),
]
Split = Annotated[
    str | None,
    typer.Option(
        metavar="AXIS=AxB",
        help="Split a mesh axis into sub-axes, outermost first, as in tp=8x2 (default: the innermost of one or two axes, where it "
        "has more devices than heads).",
        show_default=False,
        rich_help_panel=MESH,
    ),
]
NoSplit = Annotated[bool, typer.Option("--no-split", help="Split no mesh axis.", rich_help_panel=MESH)]
Template = Annotated[
    str | None,
    typer.Option(
        help="Plan what experts write instead of the best: AXIS=TEMPLATE pairs of replicate, ddp, zero1, zero2, zero3, megatron, "
        "megatron-sp, vocab-parallel, context-parallel, expert-parallel, free (no template), as in dp=zero3,tp=megatron+vocab-parallel "
        "or dp=ddp,tp=zero3+expert-parallel; or one name for all; or hsdp.",
        show_default=False,
        metavar="TEMPLATE",
        rich_help_panel=LAYOUTS,
    ),
]
Rules = Annotated[
    list[Path] | None,
    typer.Option(
        help="A TOML file with sharding rules of your own, one row per op, repeatable; its rows replace shipped ones.",
        show_default=False,
        metavar="FILE",
        rich_help_panel=LAYOUTS,
    ),
]
Conservative = Annotated[
    bool,
    typer.Option(
        "--conservative", help="Only equal shards, and no cut inside a dim that a view merges or splits.", rich_help_panel=LAYOUTS
    ),
]
TrustDTensor = Annotated[
    bool,
    typer.Option(
        "--trust-dtensor",
        help="Of ops without a rule, take what torch registers with DTensor though it is not proven; else they are replicated.",
        rich_help_panel=LAYOUTS,
    ),
]
Free = Annotated[bool, typer.Option("--free", help="Let copies of a repeated layer differ (a larger search).", rich_help_panel=LAYOUTS)]
ObjectiveName = Annotated[Objective, typer.Option(help="Minimise step time or peak memory.", rich_help_panel=SEARCH)]
MemoryWeight = Annotated[
    int, typer.Option(min=0, help="Nanoseconds per MiB of peak added to the time objective.", metavar="NS", rich_help_panel=SEARCH)
]
Overlap = Annotated[
    float,
    typer.Option(
        help="Part of parameter gathers and gradient reductions hidden behind compute, 0 to 1.", metavar="PART", rich_help_panel=MESH
    ),
]
Fusion = Annotated[bool, typer.Option("--fusion", help="Price chains of pointwise ops as fused (torch.compile).", rich_help_panel=MESH)]
Gap = Annotated[
    float, typer.Option(help="Stop when (objective - bound) / objective is at most this.", metavar="PART", rich_help_panel=SEARCH)
]
TimeLimit = Annotated[float, typer.Option(help="Seconds for the solver.", metavar="SECONDS", rich_help_panel=SEARCH)]
WorkLimit = Annotated[
    float | None,
    typer.Option(
        help="Units of solver work; the same limit and seed give the same plan.",
        show_default=False,
        metavar="UNITS",
        rich_help_panel=SEARCH,
    ),
]
Seed = Annotated[int, typer.Option(help="For the solver's random choices.", metavar="N", rich_help_panel=SEARCH)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.", rich_help_panel=OUTPUT)]
Debug = Annotated[bool, typer.Option("--debug", help="Print a traceback on errors.", rich_help_panel=OUTPUT)]

PlanModel = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="MODEL", help="What the plan was made for, where it is no preset: package.module:function.", show_default=False
    ),
]
PlanConfig = Annotated[
    str | None, typer.Option("--config", metavar="FILE", help="The Hugging Face config.json that it was made for.", show_default=False)
]


def plan_model(model: str | None, config: str | None) -> str | None:
    """The model of a plan by one of these options; None for the preset that the plan names."""
    if model is not None and config is not None:
        raise typer.BadParameter("give one of --model and --config", param_hint="--model")
    return config if config is not None else model


_AS_GIVEN = (
    *("seq", "reserve", "dtype", "microbatches", "master_weights", "state_bytes", "clip", "forward_only", "checkpoint", "template"),
    *("conservative", "trust_dtensor", "memory_weight", "overlap", "fusion", "gap", "time_limit", "work_limit", "seed"),
)


def shared(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that every command which solves has, of all its parameters by name, as ``solver_shard.optimize`` takes them."""
    if given["split"] is not None and given["no_split"]:
        raise typer.BadParameter("give one of --split and --no-split", param_hint="--split")
    return {
        **{name: given[name] for name in _AS_GIVEN},
        "optimizer": given["optimizer"].value,
        "reduce_dtype": None if given["reduce_dtype"] is None else given["reduce_dtype"].value,
        "pins": tuple(given["pin"] or ()),
        "split": given["split"] if given["split"] is not None else not given["no_split"],
        "rules": tuple(given["rules"] or ()),
        "objective": given["objective"].value,
        "tied": not given["free"],
    }


# ``-o``: whether a file can be written is said before the work is done for it; meanwhile it holds the best so far.

T = TypeVar("T")


def check_output(output: Path | None, *sources: Path | str | None) -> None:
    """Refuse, as wrong usage, an output that is not a file in a folder that exists and can be written, or is one of the ``sources``."""
    if output is None:
        return
    try:
        fits = (output.is_file() or not output.exists()) and output.parent.is_dir() and os.access(output.parent, os.W_OK)
    except OSError:  # as where the name is too long
        fits = False
    if not fits:
        raise typer.BadParameter(f"cannot write {output}: give a file in a folder that exists and can be written", param_hint="--output")
    for source in sources:
        if source is not None and os.path.exists(source) and output.exists() and output.samefile(source):
            raise typer.BadParameter(f"{output} is what is read, and would be lost; give another file", param_hint="--output")


def written_if_possible(write: Callable[[T], None]) -> Callable[[T], None]:
    """A write that may fail, because the search goes on and its result will be written once more, which says what is wrong."""

    def attempt(what: T) -> None:
        try:
            write(what)
        except InputError:
            return

    return attempt
