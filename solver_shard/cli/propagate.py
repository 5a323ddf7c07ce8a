"""``solver-shard propagate``: greedy propagation of the shardings that are given, over a StableHLO module or a traced model."""

from __future__ import annotations

import enum
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from solver_shard.cli.options import check_output
from solver_shard.cli.terminal import progress_lines

if TYPE_CHECKING:
    from solver_shard.shardy.graph import PropagationGraph
    from solver_shard.shardy.passes import PassName, PropagationOptions


PASSES, LEVELS = "Passes", "Levels of op-priority"
OF_MODULE, OF_MODEL, OUTPUT = "Of a StableHLO module", "Of a model", "Output"
"""Under which headings --help lists the options."""

_MODULE = (".mlir", ".stablehlo")
_OF_MODELS = {name: f"--{name.replace('_', '-')}" for name in ("mesh", "pin", "batch", "seq", "dtype", "forward_only", "cluster")}
_OF_MODULES = {"keep_rules": "--keep-sharding-rules", "dump": "--module-dump-directory"}
"""Parameters of one kind of input, and the options that set them."""


class Pass(enum.StrEnum):
    """What to run."""

    BASIC = "basic"
    AGGRESSIVE = "aggressive"
    OP_PRIORITY = "op-priority"
    USER_PRIORITY = "user-priority"
    DTENSOR = "dtensor-greedy"
    DIJKSTRA = "dijkstra-greedy"
    RULES = "populate-op-sharding-rules"


class Strategy(enum.StrEnum):
    """How the axes of one op's factors are settled."""

    BASIC = "basic"
    AGGRESSIVE = "aggressive"
    BOTH = "basic-then-aggressive"


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
    ] = Pass.USER_PRIORITY,
    conservative: Annotated[
        bool,
        typer.Option(
            "--conservative-propagation", help="Propagate no part of an axis, nor what could yield uneven shards.", rich_help_panel=PASSES
        ),
    ] = False,
    strategy: Annotated[
        Strategy,
        typer.Option(
            "--propagation-strategy",
            metavar="NAME",
            help="Of aggressive and up: basic, aggressive or basic-then-aggressive.",
            rich_help_panel=PASSES,
        ),
    ] = Strategy.AGGRESSIVE,
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
    pin: Annotated[
        list[str] | None,
        typer.Option(metavar="PIN", help="PATTERN=LAYOUT as in solve, repeatable.", show_default=False, rich_help_panel=OF_MODEL),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Of a preset: global batch of one step.", show_default=False, rich_help_panel=OF_MODEL),
    ] = None,
    seq: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Of a language model: tokens per sequence.", show_default=False, rich_help_panel=OF_MODEL),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="bf16, f32, ... (default: bf16).", show_default=False, rich_help_panel=OF_MODEL)
    ] = None,
    forward_only: Annotated[bool, typer.Option("--forward-only", help="No backward pass, no update.", rich_help_panel=OF_MODEL)] = False,
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
) -> None:
    """Spread the shardings that are given over all other values, greedily, as Shardy does; or op by op, as DTensor does.

    A module without sdy.data_flow_edge ops gets edges on what its control flow hands on, and loses them after the pass; one that has
    edges is taken as it is. A model is traced; its pins are propagated, and the plan that follows is priced. With --pass dtensor-greedy
    the collectives that DTensor itself would run are listed as well, and the ops at which it raises.

    Op-priority and the passes after it take five levels of ops one after the other; --no-run-op-priority-propagation takes all at once.

    Exit codes: 0 done, 1 bad input, 2 usage.
    """
    from solver_shard.files import write_whole
    from solver_shard.shardy.passes import PropagationOptions

    check_output(output)
    if dump is not None and not dump.is_dir():
        raise typer.BadParameter(f"{dump} is no folder; make it first", param_hint="--module-dump-directory")
    is_module = Path(model).suffix in _MODULE or Path(model).is_file()
    _check_usage(context, is_module, mesh, which)
    options = PropagationOptions(conservative=conservative, strategy=strategy.value, run_op_priority=levels, keep_rules=keep_rules)
    with progress_lines(quiet) as progress:
        own = ""
        if is_module:
            text, shown = _module(Path(model), which, options, dump)
        elif which in _GREEDY:
            from solver_shard.analysis.greedy_plans import greedy_plan, walk_report
            from solver_shard.plan.io import plan_to_json

            assert mesh is not None, "checked above"
            plan, walk = greedy_plan(
                model,
                mesh=mesh,
                name="dtensor-greedy" if which is Pass.DTENSOR else "dijkstra-greedy",
                pins=tuple(pin or ()),
                cluster=cluster,
                batch=batch,
                seq=seq,
                dtype=dtype,
                forward_only=forward_only,
                command=shlex.join(["solver-shard", *context.find_root().obj]),
                progress=progress,
            )
            text = shown = plan_to_json(plan)
            own = "" if walk is None else f"\n{walk_report(walk, plan.cluster)}\n"
        else:
            from solver_shard.analysis.greedy_plans import propagated_plan
            from solver_shard.plan.io import plan_to_json

            assert mesh is not None, "checked above"
            plan = propagated_plan(
                model,
                mesh=mesh,
                name=_pass_name(which),
                pins=tuple(pin or ()),
                options=options,
                cluster=cluster,
                batch=batch,
                seq=seq,
                dtype=dtype,
                forward_only=forward_only,
                command=shlex.join(["solver-shard", *context.find_root().obj]),
                progress=progress,
            )
            text = shown = plan_to_json(plan)
        if output is not None:
            write_whole(output, text)
    if as_json:
        sys.stdout.write(shown)
    elif not is_module:
        sys.stdout.write(f"{plan}\n{own}")
    elif output is None:
        sys.stdout.write(text)


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
            f"{which.value} decides the ops of a traced model; give a preset or package.module:function", param_hint="--pass"
        )
    if which in _GREEDY:
        given = [option for name, option in _OF_PASSES.items() if (s := context.get_parameter_source(name)) and s.name == "COMMANDLINE"]
        if given:
            raise typer.BadParameter(f"{', '.join(given)}: {which.value} is no propagation; leave it out")
    if not is_module and which is Pass.RULES:
        raise typer.BadParameter(f"{which.value} prints a module's rules; give a StableHLO module", param_hint="--pass")


def _module(path: Path, which: Pass, options: PropagationOptions, dump: Path | None) -> tuple[str, str]:
    """Run a pass over a module: its text after, and its shardings as JSON. Dumps are written once everything is done."""
    import dataclasses

    from solver_shard.errors import printable
    from solver_shard.files import write_whole
    from solver_shard.shardy.data_flow import add_edges, sink_edges
    from solver_shard.shardy.graph import OpKind
    from solver_shard.shardy.passes import populate_rules, propagate
    from solver_shard.shardy.stablehlo import StablehloModule
    from solver_shard.shardy.stablehlo.rules import StablehloRules

    module = StablehloModule.load(path)
    rules = StablehloRules()
    dumped: list[tuple[str, str]] = []
    warnings: tuple[str, ...] = ()
    if which is Pass.RULES:
        graph = populate_rules(module.graph, rules, conservative=options.conservative)
    else:
        edged = any(module.graph.ops[i].kind is OpKind.EDGE for i in module.graph.walk())
        given = module.graph if edged else add_edges(module.graph)

        def final(made: PropagationGraph) -> PropagationGraph:
            return made if edged else sink_edges(made)

        if dump is not None:
            options = dataclasses.replace(options, dump=lambda made, name: dumped.append((name, module.print(final(made), verify=False))))
        done = propagate(given, _pass_name(which), rules, options)
        graph, warnings = final(done.graph), done.warnings
    text = module.print(graph)
    for warning in (*warnings, *(f"no sharding rule for {name}; nothing propagates through it" for name in rules.missing)):
        print(printable(f"warning: {path}: {warning}"), file=sys.stderr)
    for name, made in dumped:
        assert dump is not None, "dumps are only made for a folder"
        write_whole(dump / name, made)
    return text, json.dumps(_shardings(graph), indent=2) + "\n"


def _shardings(graph: PropagationGraph) -> dict[str, Any]:
    """Every value's sharding, function after function."""
    from solver_shard.shardy.sharding import format_sharding

    def entry(value: int, **more: Any) -> dict[str, Any]:
        found = graph.values[value]
        sharding = None if found.sharding is None else format_sharding(found.sharding, graph.meshes)
        return {"value": found.name, **more, "shape": found.shape, "dtype": found.dtype, "sharding": sharding}

    def inside(ops: tuple[int, ...]) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []
        for i in ops:
            op = graph.ops[i]
            rule = {} if op.rule is None else {"rule": str(op.rule)}
            made += [entry(value, op=op.name, **rule) for value in op.results]
            for block in op.regions:
                made += inside(block.ops)
        return made

    functions = [
        {
            "function": function.name,
            "arguments": [entry(value) for value in function.body.arguments],
            "values": inside(function.body.ops),
            "results": [None if s is None else format_sharding(s, graph.meshes) for s in function.result_shardings],
        }
        for function in graph.functions
    ]
    return {"meshes": {name: str(mesh) for name, mesh in graph.meshes.items()}, "functions": functions}


_GREEDY = (Pass.DTENSOR, Pass.DIJKSTRA)
_OF_PASSES = {"conservative": "--conservative-propagation", "strategy": "--propagation-strategy", "levels": "--run-op-priority-propagation"}


def _pass_name(which: Pass) -> PassName:
    from typing import get_args

    from solver_shard.shardy.passes import PassName

    return next(name for name in get_args(PassName) if name == which.value)
