"""The table of options: each is one entry here, mostly a field of :class:`Options`, and whatever has options reads it.

>>> OPTIONS["seed"].read(2**40)
Traceback (most recent call last):
solver_shard.errors.InputError: seed 1099511627776 is not legal; give a whole number, 0 to 2147483647

An entry says the option's name, type and default (those of the field), its legal values, its help on the command line, what Python's help
says of it with its unit, and where it shows. The commands make their parameters of it (:mod:`solver_shard.cli.options`),
``optimize``, ``sweep`` and ``propagate`` their signature, defaults, checks and documentation, ``compare`` what plans must agree in, and
a plan records the field. So a new option is one field and its use. The one line besides is its type in :class:`SolveOptions`: type checkers
and editors read no table, and a ``TypedDict`` tells them all keywords without that three functions repeat, default and hand them on.
A test holds the two against each other.

Checks of one value stand in its entry; those of several together are functions below. All of it is said before the model is traced.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import numbers
import os
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

from solver_shard.arguments import Several, kind_of
from solver_shard.codec import MAY_LACK
from solver_shard.errors import InputError
from solver_shard.files import RulesFile
from solver_shard.text import format_bytes, parse_bytes

if TYPE_CHECKING:
    from solver_shard.costs.cluster import Cluster
    from solver_shard.costs.memory import OptimizerState
    from solver_shard.program import Relays
    from solver_shard.rules.rulebook import Rulebook

MODEL, MESH, MEMORY, OPTIMIZER = "Model", "Mesh and cluster", "Memory", "Optimizer and gradients"
LAYOUTS, SEARCH = "Layouts", "Search"
"""Under which headings ``--help`` lists the options."""

MAX_MEMORY_WEIGHT = 10**9
MAX_MICROBATCHES = 4096
MAX_WORKERS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of a solve.

    Attributes:
        name, default: its keyword in Python, and what it is where it is not given.
        recorded: the field of :class:`Options` that it has; empty for one that a plan does not record.
        annotation: of the keyword, as written in :class:`SolveOptions`.
        kind: of one value on the command line.
        help: on the command line; ``about``: in Python, where more is to be said.
        unit: of its numbers; nanoseconds, bytes, seconds.
        check: hands on a legal value in the form that a plan records, and raises InputError at another; None: what is of
            its annotation's type is legal, or what a check of several, below, the frontend or the cost model leaves of it.
        shows: commands that have it, each with its help there, or with "" for ``help``.
        panel, metavar, follows: heading and placeholder in ``--help``; ``follows``: after which option, where that is not the one before.
        flag: how the command line spells it, where not as the keyword; ``least``, ``choices``: what it takes; ``each``: it is repeatable.
        negated: giving the flag means False; ``off``: another flag, which means False, and its help.
        of_step: it says what a step is and costs, so plans must agree in it to be compared.
    """

    name: str
    default: Any
    recorded: str
    annotation: str
    kind: type
    help: str
    about: str = ""
    unit: str = ""
    check: Callable[[str, Any], Any] | None = None
    shows: Mapping[str, str]
    panel: str
    metavar: str | None = None
    follows: str = ""
    flag: str = ""
    least: int | None = None
    choices: tuple[str, ...] = ()
    each: bool = False
    negated: bool = False
    off: tuple[str, str] | None = None
    of_step: bool = False

    def read(self, value: object) -> Any:
        """The value as a plan records it; InputError says what is legal."""
        if value is None and self.default is None:
            return value
        if self.check is None:
            example = re.search(r'``(".+?")``', self.about)
            return kind_of(self.annotation, {}).read(self.name, value, f", as in {example[1]}" if example else "")
        return self.check(self.name.replace("_", " "), value)


EVERYWHERE: Mapping[str, str] = {"solve": "", "sweep": ""}
"""Where an option shows if nothing else is said."""


def option(default: Any, kind: type, *, asked: Any = ..., **entry: Any) -> Any:
    """A field of :class:`Options` with its entry. ``asked``: the keyword's default, where what is recorded is worked out from it."""
    entry = {"shows": EVERYWHERE, **entry, "kind": kind, "default": default if asked is ... else asked}
    return dataclasses.field(default=default, metadata={**entry.pop("metadata", {}), "option": entry})


def _truth(name: str, value: object) -> bool:
    """Yes or no, of Python or numpy, or 1 or 0; of a text or a list, which are true where they say no, nobody means the truth."""
    import numpy as np

    if not (isinstance(value, numbers.Integral | np.bool_) and value in (0, 1)):
        raise InputError(f"{name.replace(' ', '_')}={value!r:.60} is not legal; give True or False")
    return bool(value)


def _flag(name: str, value: object) -> bool:
    """The same where a 1 would look as if it meant more, as a norm to clip to."""
    if not isinstance(value, bool):
        raise InputError(f"{name.replace(' ', '_')}={value!r} is not legal; give True or False")
    return value


def _number(legal: str, within: Callable[[Any], bool], *, whole: bool = False) -> Callable[[str, Any], Any]:
    """Numbers of Python or numpy, recorded as Python's; ``legal`` ends the message of one that is not ``within``."""

    def check(name: str, value: Any) -> Any:
        if not _is_number(value, whole=whole) or not within(value):
            raise InputError(f"{f'{value!r} {name} are' if name == 'workers' else f'{name} {value!r} is'} not legal; {legal}")
        return int(value) if whole else float(value)

    return check


def _one_of(*names: str) -> Callable[[str, Any], Any]:
    def check(name: str, value: Any) -> Any:
        if not isinstance(value, str) or value not in names:
            raise InputError(f"{name} {value!r} is not known; legal: {', '.join(names)}")
        return value

    return check


_SECONDS = _number("give seconds, more than 0", lambda x: 0 < x < math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was asked for.

    The fields are the table's entries; what is recorded in another form than it is asked in says so below its entry.
    """

    batch: int | None = option(
        None,
        int,
        help="Global batch of one step (presets and configs).",
        about="global batch of a step, all its microbatches together: of presets and configs.",
        unit="sequences, or samples",
        shows={"solve": "", "propagate": "Of a preset: global batch of one step."},
        panel=MODEL,
        metavar="N",
        least=1,
        of_step=True,
    )
    seq: int | None = option(
        None,
        int,
        help="Tokens per sequence; of models that only hear, samples or frames.",
        about="tokens per sequence, of presets and configs of language models; of models that only hear, samples or frames.",
        unit="tokens",
        shows={**EVERYWHERE, "propagate": "Of a language model: tokens per sequence."},
        panel=MODEL,
        metavar="N",
        least=1,
        of_step=True,
    )
    dtype: str | None = option(
        None,
        str,
        help="Of parameters and compute: bf16, f32, ... (default: bf16).",
        about='of parameters and compute, as ``"bf16"``; default bf16 for presets and configs.',
        shows={**EVERYWHERE, "propagate": "bf16, f32, ... (default: bf16)."},
        panel=MODEL,
        metavar="DTYPE",
        of_step=True,
    )
    microbatches: int = option(
        1,
        int,
        help="Run the batch in this many parts, one after the other, and accumulate their gradients; the inputs of an entry "
        "point are those of one part.",
        about="parts of the batch that run forward and backward one after the other; their gradients are accumulated, then the parameters "
        "updated once. A preset or config is traced with ``batch`` / ``microbatches`` sequences; the inputs of a module or an entry "
        "point, and a Program, are those of one microbatch.",
        check=_number(f"give a whole number, 1 to {MAX_MICROBATCHES}", lambda x: 1 <= x <= MAX_MICROBATCHES, whole=True),
        panel=MODEL,
        metavar="N",
        least=1,
        of_step=True,
    )
    optimizer: str = option(
        "adamw",
        str,
        help="Whose state and step to count: adamw (torch's default, all parameters at once), adamw-fused, adamw-forloop, sgd or none.",
        about="whose state and step to count: adamw as torch steps it on accelerators by default, adamw-fused, adamw-forloop, sgd or none.",
        shows=EVERYWHERE,
        panel=OPTIMIZER,
        metavar="NAME",
        choices=("adamw", "adamw-fused", "adamw-forloop", "sgd", "none"),
        of_step=True,
    )
    master_weights: bool = option(
        True,
        bool,
        help="Parameters of 16 bits or less have an f32 copy to step, or none.",
        about="parameters of 16 bits or less have an f32 copy that the optimizer steps.",
        check=_truth,
        panel=OPTIMIZER,
        flag="--master-weights/--no-master-weights",
        of_step=True,
    )
    state_bytes: int | None = option(
        None,
        int,
        help="Optimizer state per parameter element, where it is not the optimizer's own.",
        about="optimizer state per parameter element, where it is not the optimizer's own: 2 for 8-bit AdamW.",
        unit="bytes",
        panel=OPTIMIZER,
        metavar="N",
        of_step=True,
    )
    reduce_dtype: str | None = option(
        None,
        str,
        help="Reduce, accumulate and hold gradients in f32, bf16 or f16 (default: each in its own dtype).",
        about="f32, bf16 or f16, in which gradients are reduced, accumulated and held until the update; default their own.",
        check=_one_of("f32", "bf16", "f16"),
        panel=OPTIMIZER,
        metavar="DTYPE",
        choices=("f32", "bf16", "f16"),
        of_step=True,
    )
    clip: bool = option(
        False,
        bool,
        help="Clip gradients to a norm before the update.",
        about="gradients are clipped to a norm before the update, as ``torch.nn.utils.clip_grad_norm_`` does; the norm itself does not "
        "matter to the plan.",
        check=_flag,
        panel=OPTIMIZER,
        of_step=True,
    )
    forward_only: bool = option(
        False,
        bool,
        help="Plan inference: no backward pass, no update.",
        check=_truth,
        shows={**EVERYWHERE, "propagate": "No backward pass, no update."},
        panel=MODEL,
        of_step=True,
    )
    checkpoint: bool = option(
        False,
        bool,
        help="Checkpoint every layer: its activations are computed again in backward (presets and configs).",
        about="of presets and configs: checkpoint every layer, whose activations are then computed again in the backward pass. In a module "
        "of your own, ``torch.utils.checkpoint`` regions are followed as they are.",
        check=_truth,
        panel=MODEL,
        of_step=True,
    )
    overlap: float = option(
        0.0,
        float,
        help="Part of parameter gathers and gradient reductions hidden behind compute, 0 to 1.",
        check=_number("it is the hidden part of parameter gathers and gradient reductions, 0 to 1", lambda x: 0 <= x <= 1),
        panel=MESH,
        metavar="PART",
        follows="split",
        of_step=True,
    )
    fusion: bool = option(
        False,
        bool,
        help="Price chains of pointwise ops as fused (torch.compile).",
        about="price chains of pointwise ops as a compiler runs them: what one hands to the next is neither written nor read.",
        check=_truth,
        panel=MESH,
        follows="split",
        of_step=True,
    )
    memory_limit: int = option(
        dataclasses.MISSING,
        str,
        asked=None,
        name="memory",
        annotation="str | int | None",
        help="Limit per device: 70GiB, 80GB, bytes (default: 90% of the device's).",
        about='limit per device, a number or text, ``"70GiB"``; default 90% of the device\'s memory.',
        unit="bytes",
        check=lambda _, value: parse_bytes(value),
        shows={"solve": ""},
        panel=MEMORY,
        metavar="SIZE",
    )
    """Bytes per device."""
    reserve: int = option(
        0,
        str,
        asked=None,
        annotation="str | int | None",
        help="Part of that limit that no tensor may have: context, collective buffers, fragmentation "
        "(default: the cluster's; none beside the default limit).",
        about="the part of that limit which no tensor may have (driver context, buffers of the collective library, fragmentation of the "
        "allocator), a number or text; default the cluster's number for its device, or none beside the default limit, whose missing tenth "
        "is for that.",
        unit="bytes",
        check=lambda _, value: parse_bytes(value, least=0),
        panel=MEMORY,
        metavar="SIZE",
    )
    """Bytes of the limit that no tensor may have; every plan keeps peak + reserve <= memory_limit."""
    objective: Literal["time", "memory"] = option(
        "time",
        str,
        help="Minimise step time or peak memory.",
        about="time, or memory for the smallest peak.",
        check=_one_of("time", "memory"),
        panel=SEARCH,
        choices=("time", "memory"),
    )
    memory_weight: int = option(
        0,
        int,
        help="Nanoseconds per MiB of peak added to the time objective.",
        about="what the peak adds to the time that is minimised.",
        unit="nanoseconds per MiB",
        check=_number(
            f"it is a whole number of nanoseconds per MiB of peak, 0 to {MAX_MEMORY_WEIGHT}",
            lambda x: 0 <= x <= MAX_MEMORY_WEIGHT,
            whole=True,
        ),
        panel=SEARCH,
        metavar="NS",
        least=0,
    )
    pins: tuple[str, ...] = option(
        (),
        str,
        asked=(),
        annotation="Several[str]",
        help="PATTERN=LAYOUT, repeatable: 'w=R,S(0)' is one placement per mesh axis, 'x=dp=S(0)' those of named axes, "
        "'w=S(*),*' any cut and any placement, 'w=_S(0),S(0)' dim 0 cut by the right axis first; w may be a glob.",
        about='layouts to fix, ``"PATTERN=S(0),R"``: a placement per mesh axis, or ``"PATTERN=tp=S(0)"`` those of named axes, '
        "``S(*)`` for any cut and ``*`` for any placement; ``MODULE:out`` is what a module hands on.",
        shows={**EVERYWHERE, "propagate": "PATTERN=LAYOUT as in solve, repeatable."},
        panel=LAYOUTS,
        metavar="PIN",
        flag="--pin",
        each=True,
    )
    """As the user wrote them."""
    split: str = option(
        "auto",
        str,
        asked=True,
        annotation="Mapping[str, Sequence[int]] | str | bool",
        help="Split a mesh axis into sub-axes, outermost first, as in tp=8x2 (default: the innermost of one or two axes, where it "
        "has more devices than heads).",
        about='mesh axes to split into sub-axes, outermost first, as ``"tp=8x2"`` or ``{"tp": (8, 2)}``; by default at most one axis, '
        "where the model has fewer heads than it has devices; False for none.",
        panel=MESH,
        metavar="AXIS=AxB",
        off=("--no-split", "Split no mesh axis."),
    )
    """``auto`` (one axis into sub-axes where counts of heads ask for it), ``off``, or the split that the user gave, ``tp=8x2``."""
    template: str | None = option(
        None,
        str,
        help="Plan what experts write instead of the best: AXIS=TEMPLATE pairs of replicate, ddp, zero1, zero2, zero3, megatron, "
        "megatron-sp, vocab-parallel, context-parallel, ulysses, expert-parallel, free (no template), as in "
        "dp=zero3,tp=megatron+vocab-parallel, dp=ddp,tp=zero3+expert-parallel or dp=zero3,sp=zero3+ulysses; or one name for all; or hsdp.",
        about='plan only what experts write, as ``"dp=zero3,tp=megatron"``; ``solver-shard solve --help`` names them.',
        panel=LAYOUTS,
        metavar="TEMPLATE",
    )
    rules: tuple[RulesFile, ...] = option(
        (),
        Path,
        asked=(),
        annotation="Several[str | os.PathLike[str]]",
        help="A TOML file with sharding rules of your own, one row per op, repeatable; its rows replace shipped ones.",
        about="rules files of your own, for custom ops or in place of shipped rows; a later file's row replaces an earlier one's.",
        panel=LAYOUTS,
        metavar="FILE",
        each=True,
    )
    """The user's own rules files, whole, so that a plan can be evaluated without them."""
    conservative: bool = option(
        False,
        bool,
        help="Only equal shards, and no cut inside a dim that a view merges or splits.",
        check=_truth,
        panel=LAYOUTS,
    )
    trust_dtensor: bool = option(
        False,
        bool,
        metadata=MAY_LACK,
        help="Of ops without a rule, take what torch registers with DTensor though it is not proven; else they are replicated.",
        about="of ops without a row, take every strategy that torch registers with DTensor; by default only those that are proven on "
        "numbers.",
        check=_flag,
        panel=LAYOUTS,
    )
    propagation: str | None = None
    """The greedy pass or baseline whose answer the plan keeps; else None."""
    tied: bool = option(
        True,
        bool,
        help="Let copies of a repeated layer differ (a larger search).",
        about="copies of a repeated layer share one decision; False searches the larger, free space.",
        check=_truth,
        panel=LAYOUTS,
        flag="--free",
        negated=True,
    )
    gap: float = option(
        1e-4,
        float,
        help="Stop when (objective - bound) / objective is at most this.",
        check=_number("it is a part of the objective, at least 0 and less than 1, as in 0.01", lambda x: 0 <= x < 1),
        panel=SEARCH,
        metavar="PART",
    )
    time_limit: float = option(
        60.0,
        float,
        help="Seconds for the solver.",
        about="for the solver.",
        unit="seconds",
        check=_SECONDS,
        shows={**EVERYWHERE, "compare": "Seconds of solving for each plan that is made."},
        panel=SEARCH,
        metavar="SECONDS",
    )
    total_time_limit: float | None = option(
        None,
        float,
        help="Seconds for tracing, pricing and solving together; what is left of them bounds the solver, too.",
        about="for the whole call: what tracing and pricing leave of it bounds the solver, too.",
        unit="seconds",
        check=_SECONDS,
        shows={"solve": ""},
        panel=SEARCH,
        metavar="SECONDS",
    )
    work_limit: float | None = option(
        None,
        float,
        help="Units of solver work; the same limit and seed give the same plan.",
        about="for the solver; the same limit and seed give the same plan.",
        unit="units of work",
        check=_number("give a number of work units, more than 0", lambda x: 0 < x < math.inf),
        panel=SEARCH,
        metavar="UNITS",
    )
    seed: int = option(
        0,
        int,
        help="For the solver's random choices.",
        check=_number(f"give a whole number, 0 to {2**31 - 1}", lambda x: 0 <= x < 2**31, whole=True),
        panel=SEARCH,
        metavar="N",
    )

    @property
    def usable_memory(self) -> int:
        """Bytes per device that tensors may have: the limit less the reserve."""
        return self.memory_limit - self.reserve

    @property
    def prices_memory(self) -> bool:
        """Whether bytes are part of what is minimised."""
        return self.objective == "memory" or self.memory_weight > 0

    @property
    def relays(self) -> Relays:
        """Where a graph for these options has relays if nothing else is said: everywhere where bytes count."""
        return "everywhere" if self.prices_memory else "shared"

    def rulebook(self) -> Rulebook:
        """The rules that these options ask for: the shipped rows and the user's; RuleError where a row of theirs is not legal."""
        from solver_shard.rules.rulebook import Rulebook
        from solver_shard.rules.table import load_table

        return Rulebook(load_table(self.rules), conservative=self.conservative, trust_dtensor=self.trust_dtensor)

    def optimizer_state(self) -> OptimizerState:
        """What these options say is kept and moved per element of a trained parameter; InputError where they are not legal."""
        return _state("none" if self.forward_only else self.optimizer, self)


def _entries(record: type[Options]) -> Mapping[str, Option]:
    """The entries of a record's fields, by keyword; those that no plan records around them."""
    mesh = Option(
        name="mesh",
        default=...,
        recorded="",
        annotation="str | int | Mesh",
        kind=str,
        help="Axes, outermost first, the rightmost with the fastest links: dp=32,tp=8; a bare 8 is d0=8.",
        about='axes, outermost first, the rightmost with the fastest links: ``"dp=32,tp=8"``; a number of devices is one axis.',
        shows={"solve": ""},
        panel=MESH,
        metavar="AXES",
    )
    cluster = Option(
        name="cluster",
        default="h100",
        recorded="",
        annotation="str | os.PathLike[str] | Cluster",
        kind=str,
        help="a100, h100, gb200, tpu-v5p, ethernet, or a TOML file.",
        about="a preset name, a TOML file, or a Cluster.",
        shows={"solve": ""},
        panel=MESH,
        metavar="NAME|FILE",
    )
    workers = Option(
        name="workers",
        default=2,
        recorded="",
        annotation="int",
        kind=int,
        help="Processor cores for the solver; with a work limit the plan does not depend on it.",
        about="processor cores that the solver may use; with a work limit the plan does not depend on it.",
        check=_number(f"give a whole number of processor cores, 1 to {MAX_WORKERS}", lambda x: 1 <= x <= MAX_WORKERS, whole=True),
        shows={"solve": "", "compare": "Processor cores for the solver."},
        panel=SEARCH,
        metavar="N",
        least=1,
    )
    fields = [
        Option(**{"name": field.name, "annotation": str(field.type), **field.metadata["option"], "recorded": field.name})
        for field in dataclasses.fields(record)
        if "option" in field.metadata
    ]
    return MappingProxyType({entry.name: entry for entry in (mesh, cluster, *fields, workers)})


OPTIONS = _entries(Options)
"""The table, by keyword."""


class SweepOptions(TypedDict, total=False):
    """Keywords that ``optimize`` and ``sweep`` both have, for type checkers; what each means is in the table."""

    seq: int | None
    dtype: str | None
    microbatches: int
    optimizer: str
    master_weights: bool
    state_bytes: int | None
    reduce_dtype: str | None
    clip: bool
    forward_only: bool
    checkpoint: bool
    overlap: float
    fusion: bool
    reserve: str | int | None
    objective: Literal["time", "memory"]
    memory_weight: int
    pins: Several[str]
    split: Mapping[str, Sequence[int]] | str | bool
    template: str | None
    rules: Several[str | os.PathLike[str]]
    conservative: bool
    trust_dtensor: bool
    tied: bool
    gap: float
    time_limit: float
    work_limit: float | None
    seed: int


class SolveOptions(SweepOptions, total=False):
    """Those of ``optimize`` beside its model, mesh, cluster and workers."""

    batch: int | None
    memory: str | int | None
    total_time_limit: float | None


Function = TypeVar("Function", bound=Callable[..., Any])


def with_options(command: str = "") -> Callable[[Function], Function]:
    """Show what ``**options`` of a function are, where Python itself would not: by name, type and default in its signature, and in words
    in place of the line ``OPTIONS`` of its docstring. ``command``: only those that this command shows, too.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        entries = shown(command)
        more = [
            inspect.Parameter(entry.name, inspect.Parameter.KEYWORD_ONLY, default=entry.default, annotation=entry.annotation)
            for entry in entries
            if entry.name not in signature.parameters
        ]
        function.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]  # of every function
        function.__doc__ = function.__doc__ and function.__doc__.replace("        OPTIONS\n", "".join(map(_documented, entries)))
        return function

    return decorate


def shown(command: str = "") -> tuple[Option, ...]:
    """The options that a command shows; all where none is named."""
    return tuple(entry for entry in OPTIONS.values() if not command or command in entry.shows)


def _documented(entry: Option) -> str:
    text = f"{entry.name}{f' ({entry.unit})' if entry.unit else ''}: {entry.about or entry.help}"
    return textwrap.fill(text, 132, initial_indent=" " * 8, subsequent_indent=" " * 12) + "\n"


def read_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """All options by keyword, defaults for those that are not given, each by itself as a plan records it.

    Raises:
        InputError: one is not legal; the message says what is.
        TypeError: there is no such option.
    """
    unknown = [name for name in given if name not in OPTIONS]
    if unknown:
        raise TypeError(f"there is no option {unknown[0]!r}; there are {', '.join(OPTIONS)}")
    return {name: entry.read(given.get(name, entry.default)) for name, entry in OPTIONS.items()}


# What is legal of several options together.


def check_reserve(limit: int, reserve: int, cluster: Cluster) -> None:
    if reserve >= limit:
        raise InputError(
            f"a reserve of {format_bytes(reserve)} leaves nothing of the memory limit of {format_bytes(limit)}; give a larger --memory, "
            f"or a smaller --reserve (the one of cluster {cluster.name} is {format_bytes(cluster.device.reserve)}; 0 for none)"
        )


def check_optimizer(options: Options) -> None:
    """An optimizer that is known, with a state that something keeps."""
    _state(options.optimizer, options)
    if options.forward_only and (options.clip or options.reduce_dtype is not None):
        what = "clipping" if options.clip else f"a reduce dtype of {options.reduce_dtype}"
        raise InputError(f"{what} was asked with a forward-only step, which has no gradients; drop one of the two")
    if options.state_bytes is not None and (options.forward_only or options.optimizer == "none"):
        what = "a forward-only step" if options.forward_only else "optimizer none"
        raise InputError(f"{options.state_bytes} bytes of optimizer state were asked with {what}, which keeps none; drop one of the two")


def _state(optimizer: str, options: Options) -> OptimizerState:
    from solver_shard.costs.memory import optimizer_state

    return optimizer_state(
        optimizer,
        master_weights=options.master_weights,
        state_bytes=options.state_bytes,
        reduce_dtype=options.reduce_dtype,
        clip=options.clip,
    )


def check_microbatches(options: Options) -> None:
    """A batch that can be run in so many equal parts, each of which has gradients."""
    batch, microbatches = options.batch, options.microbatches
    if microbatches > 1 and options.forward_only:
        raise InputError("a forward-only step has no gradients to accumulate; plan one microbatch, and leave --microbatches out")
    if batch is not None and _is_number(batch, whole=True) and batch % microbatches:
        near = [n for n in range(1, min(batch, MAX_MICROBATCHES) + 1) if batch % n == 0]
        closest = sorted(near, key=lambda n: abs(n - microbatches))[:2]
        raise InputError(
            f"a batch of {batch} cannot be run in {microbatches} equal microbatches; give a number that divides it, as "
            f"{' or '.join(map(str, closest))}"
        )


def part_of(batch: int | None, microbatches: int) -> int | None:
    """The batch of one microbatch; what is no number is left for the frontend to refuse."""
    return batch // microbatches if batch is not None and microbatches > 1 and _is_number(batch, whole=True) else batch


def check_objective(options: Options) -> None:
    if options.memory_weight and options.objective == "memory":
        raise InputError("a memory weight only makes sense with the time objective; drop it, or use objective time")


def check_search(options: Options, **asked: Any) -> None:
    """Check how long and how exactly is searched anew on a plan's graph, before the model is traced for it; None is the plan's own."""
    own = {name: getattr(options, name) for name in ("overlap", "objective", "memory_weight", "gap", "seed")}
    for name, value in {**own, **{name: value for name, value in asked.items() if value is not None or name not in own}}.items():
        OPTIONS[name].read(value)
    check_objective(options)


def _is_number(value: object, *, whole: bool = False) -> bool:
    """Whether this is a number of Python or numpy; truth values are not."""
    return isinstance(value, numbers.Integral if whole else numbers.Real) and not isinstance(value, bool)
