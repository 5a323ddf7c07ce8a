"""What is run to verify a plan: the plan itself where it is small, else a small twin that carries its decisions.

>>> case = prepare(plan, "llama3-8b")
>>> case.changes
('mesh dp=32,tp=8 -> dp=2,tp=2', 'num_hidden_layers 32 -> 1, one of each kind', 'hidden_size 4096 -> 64, ...', ...)

A twin is traced anew, so its plan is one of a graph of its own: each axis of the mesh is cut to 2 (or to what makes the number of
processes asked for), of a preset or config the layers to one of each kind and the widths and vocabulary to a scale
(:mod:`solver_shard.verification.twin`). The decisions of the plan are carried to it by names (:mod:`solver_shard.verification.twin`). In
one process it computes in 64-bit floats, in which there is no rounding to hide a mistake. A module of the user's own cannot be made smaller
here: its twin has the smaller mesh alone, unless the user gives a smaller model with the same names and asks for a twin.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch

from solver_shard.errors import InputError
from solver_shard.graph.build import Lowered
from solver_shard.graph.choice_graph import Masks
from solver_shard.graph.narrowing import Narrowing
from solver_shard.graph.pins import parse_pin, resolve_pins
from solver_shard.mesh import Axis, Mesh
from solver_shard.options import Options
from solver_shard.plan.decode import Decisions
from solver_shard.plan.plan import Plan
from solver_shard.program import Program, constrain
from solver_shard.runtime.apply import difference, in_the_other_mode
from solver_shard.tracing.load import is_entry_point
from solver_shard.verification.subject import Subject, model_of, of_program, subject_of, widened

if TYPE_CHECKING:
    pass


MAX_PROCESSES = 64
_MOST = 1 << 27
"""Elements of a parameter or an activation, and of all parameters together, of what is run."""
_SMALL_DEVICES, _SMALL_PARAMETERS, _SMALL_ELEMENTS = 8, 1 << 22, 1 << 26
_LISTED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A plan to run and the model with numbers that it is for; what of it is not as in the plan that was given."""

    plan: Plan
    subject: Subject
    changes: tuple[str, ...] = ()


def prepare(
    plan: Plan,
    model: str | torch.nn.Module | Program,
    inputs: Mapping[str, Any] | tuple[Any, ...] | None = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    processes: int | None = None,
    twin: bool | None = None,
    scale: str | float | Fraction | None = None,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> Case:
    """What to run for a plan; arguments as of ``verify``.

    Raises:
        InputError: the model is not the plan's, or no twin can be made; the message says what can.
        TraceError: the model cannot be traced.
    """
    factor = _scale(scale)
    if processes is not None and not (isinstance(processes, int) and not isinstance(processes, bool) and 1 <= processes <= MAX_PROCESSES):
        raise InputError(f"{processes!r} processes were asked; give a whole number, 1 to {MAX_PROCESSES}")
    fits = processes is None or processes == plan.mesh.size
    if twin is False and not fits:
        raise InputError(
            f"the plan is for {plan.mesh.size} devices ({plan.mesh.whole}), {processes} processes were asked; give --processes "
            f"{plan.mesh.size}, or leave --no-twin out to carry the plan to a smaller mesh"
        )
    as_it_is = twin is False or (twin is None and fits and _is_small(plan))
    mesh = plan.mesh if as_it_is else twin_mesh(plan.mesh, processes)
    named = isinstance(model, str) and not is_entry_point(model)
    if as_it_is and scale is not None:
        raise InputError("a scale is for a twin, and this plan is run as it is; leave --scale out, or ask for --twin")
    if not named and factor is not None:
        raise InputError("a model of your own cannot be scaled; give a smaller one with the same names and --twin, and leave --scale out")
    say("tracing the model")
    if named and not as_it_is:
        subject, changes = _shrunk(plan, str(model), mesh, factor, seed)
    else:
        _check_size(plan)
        subject, changes = _given(plan, model, inputs, loss_fn, seed), []
        changes += [f"mesh {plan.mesh} -> {mesh}"] if mesh != plan.mesh else []
    planned = _relayed(plan, subject)
    found = difference(plan, planned.program)
    if as_it_is and found is not None:
        raise InputError(_other(plan, found, subject))
    if as_it_is:
        return Case(plan=plan, subject=planned)
    if not named and found is not None:
        if twin is None:
            raise InputError(f"{_other(plan, found, subject)}; or ask for --twin, to carry the plan to a smaller model with the same names")
        changes.append(f"the model given is another one: {found}")
    return _carried(plan, subject, mesh, changes, wide=processes is None, say=say)


def twin_mesh(mesh: Mesh, processes: int | None = None) -> Mesh:
    """The mesh with each axis cut to 2, or to what makes so many processes, the left axes small.

    >>> str(twin_mesh(Mesh.parse("dp=32,tp=8"))), str(twin_mesh(Mesh.parse("dp=32,tp=8"), 8))
    ('dp=2,tp=2', 'dp=2,tp=4')

    Raises:
        InputError: the axes cannot be cut to so many processes; the message says to how many they can.
    """
    least = [min(2, axis.size) for axis in mesh.axes]
    if processes is None:
        return _sized(mesh, least)
    options = [[n for n in range(low, axis.size + 1) if axis.size % n == 0 or n == low] for low, axis in zip(least, mesh.axes, strict=True)]
    options = [[n for n in sizes if n <= MAX_PROCESSES] for sizes in options]
    products = {math.prod(sizes): sizes for sizes in itertools.product(*(sorted(sizes, reverse=True) for sizes in options))}
    if processes not in products:
        legal = ", ".join(str(n) for n in sorted(products) if n <= MAX_PROCESSES)
        raise InputError(f"the mesh {mesh} cannot be cut to {processes} processes, each axis to a part of it; legal: {legal}")
    return _sized(mesh, products[processes])


def _sized(mesh: Mesh, sizes: Any) -> Mesh:
    return Mesh(axes=tuple(Axis(name=axis.name, size=size, parent=axis.parent) for axis, size in zip(mesh.axes, sizes, strict=True)))


def _scale(scale: str | float | Fraction | None) -> Fraction | None:
    if scale is None:
        return None
    try:
        found = Fraction(scale)
    except (ValueError, ZeroDivisionError, TypeError, OverflowError):
        found = Fraction(0)
    if not 0 < found <= 1:
        raise InputError(
            f"scale {scale!r} is not legal; it is a factor on widths and vocabulary, more than 0 and at most 1, as 0.05 or 1/64"
        )
    return found


def _is_small(plan: Plan) -> bool:
    """Whether a plan can be run as it is in seconds."""
    elements = [math.prod(tensor.shape) for tensor in plan.tensors]
    parameters = sum(n for n, tensor in zip(elements, plan.tensors, strict=True) if tensor.role == "parameter")
    return plan.mesh.size <= _SMALL_DEVICES and parameters <= _SMALL_PARAMETERS and sum(elements) <= _SMALL_ELEMENTS


def _check_size(plan: Plan) -> None:
    parameters = sum(math.prod(tensor.shape) for tensor in plan.tensors if tensor.role == "parameter")
    largest = max(plan.tensors, key=lambda tensor: math.prod(tensor.shape))
    if parameters > _MOST or math.prod(largest.shape) > _MOST:
        raise InputError(
            f"the plan is of {parameters:,} parameters, its largest tensor {largest.name!r} has {math.prod(largest.shape):,} elements, "
            f"and at most {_MOST:,} are run here; verify a twin: presets and configs are made smaller by themselves (leave --no-twin out), "
            "of a model of your own make a plan with fewer layers and smaller sizes"
        )


def _other(plan: Plan, found: str, subject: Subject) -> str:
    """What to say of a model that is not the plan's."""
    mode = None if subject.model is None else in_the_other_mode(plan, subject.model, subject.inputs, subject.loss_fn)
    advice = "give the same model, loss and inputs" if mode is None else mode[0].lower() + mode[1:]
    return f"the model is not the one that the plan of {plan.name!r} was made for: {found}; {advice}"


def _given(plan: Plan, model: Any, inputs: Any, loss_fn: Callable[..., Any] | None, seed: int) -> Subject:
    """The model as the user gives it, with numbers."""
    options = plan.options
    if isinstance(model, Program):
        return of_program(model, microbatches=options.microbatches, seed=seed)
    model, inputs, loss_fn, limits = model_of(plan, model, inputs, loss_fn, weights=True, seed=seed)
    return _pinned(
        plan,
        plan.mesh,
        subject_of(
            model,
            inputs,
            name=plan.name,
            loss_fn=loss_fn,
            forward_only=options.forward_only,
            microbatches=options.microbatches,
            labels=limits.get("labels"),
            words=limits.get("input_ids"),
            seed=seed,
        ),
    )


def _shrunk(plan: Plan, model: str, mesh: Mesh, scale: Fraction | None, seed: int) -> tuple[Subject, list[str]]:
    """A small model of the same kind."""
    from solver_shard.tracing.huggingface import filled_config, load

    options = plan.options
    if options.batch is None:
        raise InputError(
            f"the plan was not made from a preset or config; give the module or entry point of {plan.name!r} instead of {model!r}"
        )
    small = shrink(filled_config(model), plan, mesh, scale)
    torch.manual_seed(seed)
    try:
        module, inputs, _ = load(
            small.config,
            batch=small.batch,
            seq=small.seq,
            labels=not options.forward_only,
            checkpoint=options.checkpoint,
            weights=True,
        )
        subject = subject_of(
            module,
            inputs,
            name=plan.name,
            forward_only=options.forward_only,
            microbatches=min(options.microbatches, 2),
            labels=small.labels,
            words=small.words,
            seed=seed,
        )
    except InputError as error:
        raise InputError(
            f"no small twin of {model!r} can be built: {error}; give a smaller model of your own, package.module:function with the same "
            "names, and --twin; or --no-twin where the model fits into this machine"
        ) from None
    changes = list(small.changes)
    if options.microbatches > 2:
        changes.append(f"microbatches {options.microbatches} -> 2")
    return _pinned(plan, mesh, subject), changes


def _pinned(plan: Plan, mesh: Mesh, subject: Subject) -> Subject:
    """With the identity ops that pins of activations put into a program."""
    program = subject.program
    pins = [parse_pin(text, plan.mesh) for text in plan.options.pins]
    try:
        program, _ = constrain(program, resolve_pins(pins, program, mesh))
    except InputError:  # what is pinned may be cut into more parts than a twin's tensors allow
        return subject
    return dataclasses.replace(subject, program=program)


def _relayed(plan: Plan, subject: Subject) -> Subject:
    """With the relays of the plan in the program, which has places for its pins."""
    return dataclasses.replace(subject, program=constrain(subject.program, {}, plan.relays)[0])


def _carried(plan: Plan, subject: Subject, mesh: Mesh, changes: list[str], *, wide: bool, say: Callable[[str], None]) -> Case:
    dtype = plan.options.dtype or "its own"
    if wide:
        subject = widened(subject)
    say(f"carrying the plan to {mesh}")
    options = dataclasses.replace(
        plan.options, microbatches=len(subject.values), batch=None, seq=None, dtype=None, checkpoint=plan.options.checkpoint
    )
    made = transfer(plan, subject.program, mesh, options)
    if not made.carried:
        raise InputError(f"nothing of the plan of {plan.name!r} can be carried to this model: no tensor or op of it has the same name")
    changes.append(f"floats of {dtype} -> {'f64' if wide else 'f32'}")
    total = made.carried + len(made.left)
    line = f"{made.carried} of {total} decisions carried"
    if made.left:
        line += f"; {len(made.left)} are left to the solver" + (", for instance" if len(made.left) > _LISTED else "")
    return Case(
        plan=made.plan, subject=_relayed(made.plan, subject), changes=(*changes, line, *(f"  {said}" for said in made.left[:_LISTED]))
    )


# A Hugging Face config made small, so that what a plan cuts can still be cut, and what it cannot still cannot.
#
# >>> sizes = Sizes(mesh=Mesh.parse("dp=32,tp=8"), twin=Mesh.parse("dp=2,tp=2"))
# >>> sizes.fit(14336, 200), sizes.fit(50257, 200)      # 14336 is a multiple of 256, 50257 is odd
# (200, 199)
#
# A size s of the model becomes the number nearest to its target that is a multiple of as many devices of the twin as s is of the plan's
# mesh, for every set of axes. Heads of keys and queries, the width of a head and of the model stay in their proportions. Layers become
# as many as there are kinds of them. Dropout inside attention is off, for which there is no kernel here.

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
_GROUPS = ("num_key_value_heads", "num_kv_heads")
_HEAD = ("head_dim", "d_kv")
_WIDTH = ("hidden_size", "n_embd", "d_model", "dim")
_INNER = (
    *("intermediate_size", "n_inner", "d_ff", "ffn_dim", "hidden_dim", "encoder_ffn_dim", "decoder_ffn_dim"),
    *("moe_intermediate_size", "shared_expert_intermediate_size"),
)
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_CHOSEN = ("num_experts_per_tok", "top_k")
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx")
_WORDS = 512
"""Of a twin's vocabulary at most, where no scale is given."""
_MODEL_WIDTH = 64
_SEQ, _BATCH, _PATCHES = 16, 2, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes on two meshes with the same axes."""

    mesh: Mesh
    twin: Mesh

    def fit(self, size: int, target: float, *, least: int = 1, multiple: int = 1) -> int:
        """The size of a twin that divides as ``size`` does, near the target.

        Args:
            least, multiple: what the answer must be besides; they come first.
        """
        pairs = [
            (math.prod(self.mesh.shape[a] for a in axes), math.prod(self.twin.shape[a] for a in axes))
            for count in range(1, len(self.mesh.axes) + 1)
            for axes in itertools.combinations(range(len(self.mesh.axes)), count)
        ]
        target = min(max(target, 1), size)

        def misfit(found: int) -> tuple[int, int, float, int]:
            lost = sum(size % n == 0 and found % m != 0 for n, m in pairs) + sum(n <= size and found < m for n, m in pairs)
            won = sum(size % n != 0 and found % m == 0 for n, m in pairs)
            return lost, won, abs(found - target), found

        reach = int(target) + 2 * max(self.twin.size, multiple) + least
        candidates = [found for found in range(max(least, 1), reach + 1) if found % multiple == 0] or [multiple]
        return min(candidates, key=misfit)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrunkConfig:
    """A small config, the sizes of a step, and what was changed, for a person to read."""

    config: Mapping[str, Any]
    batch: int
    seq: int | None
    labels: int
    words: int
    changes: tuple[str, ...]


def shrink(config: Mapping[str, Any], plan: Plan, twin: Mesh, scale: Fraction | None) -> ShrunkConfig:
    """The config of a small twin of what a plan is for.

    Args:
        config: with all settings filled in.
        scale: of widths and vocabulary; None for what makes the model 64 wide, with at most 512 words.
    """
    sizes, made = Sizes(mesh=plan.mesh, twin=twin), dict(config)
    batch = sizes.fit((plan.options.batch or 1) // plan.options.microbatches, _BATCH, least=2 if (plan.options.batch or 1) > 1 else 1)
    seq = None if plan.options.seq is None else sizes.fit(plan.options.seq, _SEQ, least=min(8, plan.options.seq))
    _layers(made, config, plan)
    width = next((config[k] for k in _WIDTH if isinstance(config.get(k), int)), _MODEL_WIDTH)
    factor = scale if scale is not None else min(Fraction(1), Fraction(_MODEL_WIDTH, width))
    _heads(made, config, sizes, factor, width)
    for key in _INNER:
        if _is_size(config.get(key)):
            made[key] = sizes.fit(config[key], float(config[key] * factor), least=4)
    chosen = max((config[k] for k in _CHOSEN if _is_size(config.get(k))), default=1)
    for key in _EXPERTS:
        if _is_size(config.get(key)):
            made[key] = sizes.fit(config[key], 4, least=chosen)
    words = _words(made, config, sizes, factor, capped=scale is None)
    labels = _labels(made, config, sizes)
    stored = {tensor.shape[0] for tensor in plan.tensors if tensor.role == "parameter" and tensor.shape}
    for key in _POSITIONS:
        if _is_size(config.get(key)) and stored & {config[key], config[key] + 2}:  # a table of learned positions; some have two more
            made[key] = sizes.fit(config[key], 2 * (seq or 1), least=seq or 1)
    if _is_size(config.get("image_size")) and _is_size(config.get("patch_size")):
        made["patch_size"] = min(config["patch_size"], 4)
        made["image_size"] = made["patch_size"] * min(config["image_size"] // config["patch_size"], _PATCHES)
    dropped = [key for key, value in config.items() if "att" in key and "drop" in key and isinstance(value, float) and value > 0]
    made |= dict.fromkeys(dropped, 0.0)
    return ShrunkConfig(
        config=made,
        batch=batch,
        seq=seq,
        labels=labels if config.get("image_size") else words,
        words=words,
        changes=_said(config, made, plan, batch, seq, twin, dropped),
    )


def kinds_of_layers(plan: Plan) -> int:
    """How many layers from the first on hold one of every kind: stacks are told by the first number in a module's path.

    >>> kinds_of_layers(plan)        # all layers of a Llama are alike; the first block of a T5 has position biases of its own
    1
    """
    ops: dict[str, dict[int, list[object]]] = {}
    for op in plan.ops:
        parts = op.module.split(".")
        at = next((k for k, part in enumerate(parts) if part.isdigit()), None)
        if at is not None and op.phase == "forward":
            held = ops.setdefault(".".join(parts[:at]), {}).setdefault(int(parts[at]), [])
            held.append((op.name, ".".join(parts[at + 1 :]), tuple(plan.tensors[t].shape for t in op.results)))
    least = 1
    for layers in ops.values():
        seen: set[tuple[object, ...]] = set()
        for number in sorted(layers):
            kind = tuple(layers[number])
            if kind not in seen:
                seen.add(kind)
                least = max(least, number + 1)
    return least


def _layers(made: dict[str, Any], config: Mapping[str, Any], plan: Plan) -> None:
    counts = {config[key] for key in _LAYERS if _is_size(config.get(key))}
    least = kinds_of_layers(plan)
    for key in _LAYERS:
        if _is_size(config.get(key)):
            made[key] = min(config[key], least)
    for key, value in config.items():
        if isinstance(value, list | tuple) and len(value) in counts and key != "architectures":
            made[key] = list(value[:least])


def _heads(made: dict[str, Any], config: Mapping[str, Any], sizes: Sizes, factor: Fraction, width: int) -> None:
    """Heads, their width, and the width of the model."""
    groups = next((config[k] for k in _GROUPS if _is_size(config.get(k))), None)
    few = sizes.fit(groups, 1) if groups is not None else None
    heads = next((config[k] for k in _HEADS if _is_size(config.get(k))), 1)
    many = few if few is not None and heads == groups else sizes.fit(heads, 1, least=2 * few if few else 1, multiple=few or 1)
    for key in _GROUPS:
        if few is not None and _is_size(config.get(key)):
            made[key] = few
    for key in _HEADS:
        if _is_size(config.get(key)):
            made[key] = many
    own = next((config[k] for k in _HEAD if _is_size(config.get(k))), width // heads)
    wide = sizes.fit(own, max(4, round(float(width * factor) / (many or 1))), least=min(4, own), multiple=2 if own % 2 == 0 else 1)
    for key in _HEAD:
        if _is_size(config.get(key)):
            made[key] = wide
    for key in _WIDTH:
        if _is_size(config.get(key)):
            made[key] = wide * (many or 1) if own * heads == width else sizes.fit(width, float(width * factor), least=4, multiple=2)


def _words(made: dict[str, Any], config: Mapping[str, Any], sizes: Sizes, factor: Fraction, *, capped: bool) -> int:
    """The vocabulary, and tokens with a meaning inside it."""
    if not _is_size(config.get("vocab_size")):
        return 1
    target = max(float(config["vocab_size"] * factor), 32.0)
    made["vocab_size"] = words = sizes.fit(config["vocab_size"], min(target, _WORDS) if capped else target, least=4)
    for key, value in config.items():
        if key.endswith("_token_id") and isinstance(value, int):
            made[key] = min(value, words - 1)
        elif key.endswith("_token_id") and isinstance(value, list):
            made[key] = [min(item, words - 1) for item in value]
    return words


def _labels(made: dict[str, Any], config: Mapping[str, Any], sizes: Sizes) -> int:
    """The classes that a classifier tells apart."""
    named = config.get("id2label")
    count = config.get("num_labels", len(named) if isinstance(named, Mapping) else 2)
    made.pop("id2label", None)
    made.pop("label2id", None)
    made["num_labels"] = sizes.fit(count, 10)
    return int(made["num_labels"])


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _said(
    config: Mapping[str, Any], made: Mapping[str, Any], plan: Plan, batch: int, seq: int | None, twin: Mesh, dropped: list[str]
) -> tuple[str, ...]:
    layers = [f"{key} {config[key]} -> {made[key]}" for key in _LAYERS if key in config and config[key] != made[key]]
    others = (*_WIDTH, *_HEADS, *_GROUPS, *_HEAD, *_INNER, *_EXPERTS, "vocab_size", *_POSITIONS, "image_size", "patch_size")
    widths = [f"{key} {config[key]} -> {made[key]}" for key in others if key in config and config[key] != made[key]]
    step = [f"batch {plan.options.batch} -> {batch * plan.options.microbatches}"]
    step += [f"seq {plan.options.seq} -> {seq}"] if seq is not None else []
    lines = [f"mesh {plan.mesh} -> {twin}"] if plan.mesh != twin else []
    lines += [", ".join([*layers, "one of each kind"])] if layers else []
    lines += [", ".join(widths)] if widths else []
    lines.append(", ".join(step))
    lines += [f"attention dropout off ({', '.join(dropped)})"] if dropped else []
    return tuple(lines)


# Carry the decisions of a plan to another program and mesh: by names of tensors and modules, and of the mesh's axes.
#
# >>> made = transfer(big, program, Mesh.parse("dp=2,tp=2"))
# >>> made.plan.mesh, made.carried, made.left
# (Mesh(...), 353, ())
#
# The other program is the same model with fewer layers, smaller sizes or another dtype: parameters, inputs and modules keep their names, an
# op is what it was in the plan if it is the n-th of its kind in its module and phase. For it the choice graph is built anew and narrowed to
# what the plan decides: layouts of sources and optimizer states, strategies of ops, reshards and what is kept between forward and backward.
# A decision that cannot be had there (a strategy that the smaller sizes do not allow, or that contradicts those before it) is left
# to the solver and named; of the same program on the same mesh every decision is carried.

NO_LIMIT = 1 << 50
_SECONDS = 60.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """The plan for the other program, how many decisions it has from the plan, and what those left to the solver are about."""

    plan: Plan
    carried: int
    left: tuple[str, ...]


def transfer(plan: Plan, program: Program, mesh: Mesh, options: Options | None = None) -> Transfer:
    """A plan for ``program`` on ``mesh`` with the decisions of ``plan``.

    Args:
        mesh: axes called as those of the plan, in the same order.
        options: what the new plan records; by default those of the plan, without limit and pins.

    Raises:
        SolverShardError: as ``plan_program``.
    """
    from solver_shard.pipeline import plan_program

    said: list[str] = []
    counts: list[int] = []

    def decided(lowered: Lowered) -> tuple[Masks, str]:
        narrowing = Narrowing(lowered.lowering.graph)
        carried, left = Decisions(plan, lowered.lowering).apply(narrowing)
        counts.append(carried)
        said.extend(left)
        return narrowing.left, f"carried from a plan on {plan.mesh}"

    asked = dataclasses.replace(
        options or plan.options,
        memory_limit=NO_LIMIT,
        reserve=0,
        pins=(),
        template=None,
        split="off",
        objective="time",
        memory_weight=0,
        tied=False,
        gap=0.1,
        time_limit=_SECONDS,
        work_limit=None,
    )
    made = plan_program(
        program,
        mesh=mesh,
        cluster=plan.cluster,
        options=asked,
        baseline=decided,
        relays=bool(plan.relays),
        source=plan.provenance.source,
    )
    return Transfer(plan=made, carried=counts[0], left=tuple(said))
