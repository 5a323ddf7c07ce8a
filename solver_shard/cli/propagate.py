"""``solver-shard propagate``: greedy propagation of the shardings that are given, over a StableHLO module or a traced model;
``solver-shard expand``: how one op runs on a mesh, given the layouts of its inputs."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from solver_shard.cli.options import check_output, takes_options
from solver_shard.cli.terminal import progress_lines
from solver_shard.files import read_json

PASSES, LEVELS = "Passes", "Levels of op-priority"
OF_MODULE, OF_MODEL, OUTPUT = "Of a StableHLO module", "Of a model", "Output"
"""Under which headings --help lists the options."""

_MODULE = (".mlir", ".stablehlo")
_OF_MODELS = {name: f"--{name.replace('_', '-')}" for name in ("mesh", "pin", "batch", "seq", "dtype", "forward_only", "cluster")}
_OF_MODULES = {"keep_rules": "--keep-sharding-rules", "dump": "--module-dump-directory"}
_OF_PASSES = {"conservative": "--conservative-propagation", "strategy": "--propagation-strategy", "levels": "--run-op-priority-propagation"}
"""Parameters of one kind of input or pass, and the options that set them."""


Pass = Literal["basic", "aggressive", "op-priority", "user-priority", "dtensor-greedy", "dijkstra-greedy", "populate-op-sharding-rules"]
"""What to run."""

_GREEDY = ("dtensor-greedy", "dijkstra-greedy")


@takes_options("propagate", "pins", panel=OF_MODEL)
def propagate(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODULE|MODEL", help="A StableHLO module (FILE.mlir), or a preset or package.module:function.")
    ],
    which: Annotated[
        Pass,
        typer.Option(
            "--pass",
            metavar="PASS",
            help="basic, aggressive, op-priority or user-priority: each runs the ones before. dtensor-greedy and dijkstra-greedy decide a "
            "model op by op, as DTensor does and by our costs. populate-op-sharding-rules only attaches rules to the ops of a module.",
            rich_help_panel=PASSES,
        ),
    ] = "user-priority",
    conservative: Annotated[
        bool,
        typer.Option(
            "--conservative-propagation", help="Propagate no part of an axis, nor what could yield uneven shards.", rich_help_panel=PASSES
        ),
    ] = False,
    strategy: Annotated[
        Literal["basic", "aggressive", "basic-then-aggressive"],
        typer.Option(
            "--propagation-strategy",
            metavar="NAME",
            help="Of aggressive and up: basic, aggressive or basic-then-aggressive.",
            rich_help_panel=PASSES,
        ),
    ] = "aggressive",
    levels: Annotated[
        bool,
        typer.Option(
            "--run-op-priority-propagation/--no-run-op-priority-propagation",
            help="Five levels of ops, or all ops at once: see above.",
            show_default=False,
            rich_help_panel=LEVELS,
        ),
    ] = True,
    keep_rules: Annotated[
        bool, typer.Option("--keep-sharding-rules", help="Leave the rules that were made on its ops.", rich_help_panel=OF_MODULE)
    ] = False,
    dump: Annotated[
        Path | None,
        typer.Option(
            "--module-dump-directory",
            metavar="DIR",
            help="Write the module after every user priority but the last.",
            show_default=False,
            rich_help_panel=OF_MODULE,
        ),
    ] = None,
    mesh: Annotated[
        str | None, typer.Option(metavar="AXES", help="Axes as in solve, dp=4,tp=2.", show_default=False, rich_help_panel=OF_MODEL)
    ] = None,
    *,
    cluster: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="What prices the plan, as in solve.", rich_help_panel=OF_MODEL)
    ] = "h100",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write the module, or a model's plan as JSON, to this file.",
            show_default=False,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print every value's sharding, or a model's plan, as JSON.", rich_help_panel=OUTPUT)
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.", rich_help_panel=OUTPUT)] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print a traceback on errors.", rich_help_panel=OUTPUT)] = False,
    **asked: Any,
) -> None:
    """Spread the shardings that are given over all other values, greedily, as Shardy does; or op by op, as DTensor does.

    A module without sdy.data_flow_edge ops gets edges on what its control flow hands on, and loses them after the pass; one that has
    edges is taken as it is. A model is traced; its pins are propagated, and the plan that follows is priced. With --pass dtensor-greedy
    the collectives that DTensor itself would run are listed as well, and the ops at which it raises.

    Op-priority and the passes after it take five levels of ops one after the other; --no-run-op-priority-propagation takes all at once.

    Exit codes: 0 done, 1 bad input, 2 usage.
    """
    from solver_shard.errors import printable
    from solver_shard.files import write_whole

    check_output(output)
    if dump is not None and not dump.is_dir():
        raise typer.BadParameter(f"{dump} is no folder; make it first", param_hint="--module-dump-directory")
    is_module = Path(model).suffix in _MODULE or Path(model).is_file()
    _check_usage(context, is_module, mesh, which)
    passes: dict[str, Any] = {"which": which, "strategy": strategy, "conservative_propagation": conservative, "run_op_priority": levels}
    with progress_lines(quiet) as progress:
        if is_module:
            from solver_shard.shardy.stablehlo import propagate_module

            module = propagate_module(model, **passes, keep_rules=keep_rules, stages=dump is not None)
            for warning in module.warnings:
                print(printable(f"warning: {model}: {warning}"), file=sys.stderr)
            for name, stage in module.stages:
                assert dump is not None, "stages are only kept for a folder"
                write_whole(dump / name, stage)
            text, as_data, shown = module.text, json.dumps(module.shardings, indent=2) + "\n", module.text if output is None else ""
        else:
            from solver_shard.analysis.greedy_plans import propagate as propagate_model
            from solver_shard.plan.io import plan_to_json

            assert mesh is not None, "checked above"
            command = shlex.join(["solver-shard", *context.find_root().obj])
            greedy = propagate_model(model, mesh=mesh, **passes, cluster=cluster, command=command, progress=progress, **asked)
            text = as_data = plan_to_json(greedy.plan)
            shown = f"{greedy}\n"
        if output is not None:
            write_whole(output, text)
    sys.stdout.write(as_data if as_json else shown)


def _check_usage(context: typer.Context, is_module: bool, mesh: str | None, which: Pass) -> None:
    """Options that belong to the other kind of input, or are missing for this one."""
    names = _OF_MODELS if is_module else _OF_MODULES
    sources = {name: context.get_parameter_source(name) for name in names}
    alien = [option for name, option in names.items() if (source := sources[name]) is not None and source.name == "COMMANDLINE"]
    if alien:
        what = "a module, whose text has its meshes, shapes and shardings" if is_module else "a model; they are for StableHLO modules"
        raise typer.BadParameter(f"{', '.join(alien)} cannot be given with {what}; leave {'it' if len(alien) == 1 else 'them'} out")
    if not is_module and mesh is None:
        raise typer.BadParameter(
            "a model needs --mesh, as in --mesh dp=4,tp=2 (a module is a file that ends in .mlir)", param_hint="--mesh"
        )
    if is_module and which in _GREEDY:
        raise typer.BadParameter(
            f"{which} decides the ops of a traced model; give a preset or package.module:function", param_hint="--pass"
        )
    if which in _GREEDY:
        given = [option for name, option in _OF_PASSES.items() if (s := context.get_parameter_source(name)) and s.name == "COMMANDLINE"]
        if given:
            raise typer.BadParameter(f"{', '.join(given)}: {which} is no propagation; leave it out")
    if not is_module and which == "populate-op-sharding-rules":
        raise typer.BadParameter(f"{which} prints a module's rules; give a StableHLO module", param_hint="--pass")


def expand(
    op: Annotated[str, typer.Argument(metavar="OP", help="An ATen op with its overload: aten.mm.default.")],
    more: Annotated[
        list[str] | None, typer.Argument(metavar="[INPUT]...", help="Further inputs after --inputs.", show_default=False)
    ] = None,
    inputs: Annotated[
        list[str], typer.Option(help="Tensor arguments in order, with their layouts: 'f32[512,1024]| S(0)R'; ? is an unknown size.")
    ] = ...,  # type: ignore[assignment]  # typer's mark for a required option
    mesh: Annotated[str, typer.Option(help="Axes, outermost first: dp=4,tp=2.")] = ...,  # type: ignore[assignment]
    arg: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=JSON", help="Another argument of the op, repeatable: size=[8,4], dim=1.", show_default=False),
    ] = None,
    prices: Annotated[Literal["cluster", "dtensor"], typer.Option(help="The costs of a cluster, or DTensor's own formulas.")] = "cluster",
    cluster: Annotated[str, typer.Option(help="a100, h100, gb200, tpu-v5p, ethernet, or a TOML file.")] = "h100",
    devices_per_host: Annotated[int, typer.Option(min=1, help="For DTensor's formulas.")] = 8,
    source: Annotated[
        Literal["auto", "rules", "dtensor"], typer.Option(help="Strategies of our rules, of DTensor, or the first that has some.")
    ] = "auto",
    every: Annotated[bool, typer.Option("--all", help="Also list every way to run the op, cheapest first.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of text.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print a traceback on errors.")] = False,
) -> None:
    """Show how one op runs on a mesh: the cheapest strategy for inputs in these layouts, and the moves that it needs."""
    from solver_shard.expander.expander import expand as expand_op

    if more and len(inputs) > 1:
        raise typer.BadParameter("give all inputs after one --inputs, or each after its own", param_hint="--inputs")
    expanded = expand_op(
        op,
        (*inputs, *(more or ())),
        mesh=mesh,
        arguments=_arguments(arg or []),
        prices=prices,
        cluster=cluster,
        devices_per_host=devices_per_host,
        source=source,
        ways=every,
    )
    sys.stdout.write(f"{json.dumps(expanded.to_json(), indent=2) if as_json else expanded}\n")


def _arguments(given: list[str]) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for text in given:
        name, sign, value = text.partition("=")
        try:
            arguments[name.strip()] = read_json(value)
        except ValueError:
            raise typer.BadParameter(f"cannot read {text!r}; write NAME=JSON, as in dim=1 or size=[8,4]", param_hint="--arg") from None
        if not sign or not name.strip():
            raise typer.BadParameter(f"cannot read {text!r}; write NAME=JSON, as in dim=1 or size=[8,4]", param_hint="--arg")
    return arguments
