"""From a program to its choice graph: rules, sub-axes, pins, template, costs; all that lies between tracing and solving.

>>> found = lower_program(program, mesh=Mesh.parse("dp=2,tp=2"), cluster=load_cluster("h100"), options=options)
>>> found.mesh, found.lowering.graph.size
(Mesh(...), 812)

Whoever asks for the same program with the same options gets the same graph, node by node: so a plan can be found in it again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from solver_shard.clock import StageClock
from solver_shard.costs.model import CostModel
from solver_shard.graph.choice_graph import Masks
from solver_shard.graph.liveness import relayed_tensors
from solver_shard.graph.lowering import Schedule, lower
from solver_shard.graph.nodes import Lowering
from solver_shard.graph.pins import Allowed, Pin, parse_pin, pins_apart, resolve_pins
from solver_shard.graph.sub_axes import split_where_needed
from solver_shard.graph.templates import TemplateRestriction, parse_template, restriction, tensor_axes
from solver_shard.mesh import Mesh
from solver_shard.program import Program, Relays, constrain
from solver_shard.rules.rulebook import Rulebook
from solver_shard.rules.table import check_ops

if TYPE_CHECKING:
    from solver_shard.costs.cluster import Cluster
    from solver_shard.options import Options


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lowered:
    """A program's choice graph, and what it was made from.

    Attributes:
        given: the program as it was traced.
        program: the same with a place for every pinned activation and with relays, see ``constraints``; ``lowering`` is of it.
        mesh: as layouts speak of it: with an axis split, where that was asked for or is needed.
        relays: where the program has them.
        pins: as read; ``pinned`` is what they leave of tensors, by position in ``program``.
        restriction: of the template; None without one.
    """

    given: Program
    program: Program
    mesh: Mesh
    options: Options
    rulebook: Rulebook
    costs: CostModel
    relays: Relays
    pins: tuple[Pin, ...]
    pinned: Mapping[int, Allowed]
    restriction: TemplateRestriction | None
    lowering: Lowering

    def narrowed(self, masks: Masks, said: str) -> Lowered:
        """With only the strategies that masks leave; ``said``: what a plan records of whose decisions these are."""
        options = dataclasses.replace(self.options, propagation=said)
        return dataclasses.replace(self, options=options, lowering=self.lowering.narrowed(masks))

    def pins_apart(self) -> dict[int, dict[str, Allowed]]:
        """Tensor to pin text to what that pin alone leaves of its layouts."""
        return constrain(self.given, pins_apart(self.pins, self.given, self.mesh), self.lowering.relays)[1]


def relay_spaces(options: Options, mesh: Mesh) -> tuple[Relays, ...]:
    """Where graphs for these options have relays: of several the first is solved first, and the next only where it does not do.

    Templates and propagation passes say how tensors get from op to op; relays would let them do better than they say. Relays everywhere
    are of use where bytes count: in the objective, or against a limit that a plan without them does not keep.
    """
    if options.template or options.propagation or mesh.size == 1:
        return ("none",)
    return ("everywhere",) if options.relays == "everywhere" else ("shared", "everywhere")


def lower_program(
    program: Program,
    *,
    mesh: Mesh,
    cluster: Cluster,
    options: Options,
    clock: StageClock | None = None,
    relays: Relays | None = None,
    schedule: Schedule = "sequential",
) -> Lowered:
    """The choice graph of a traced program under these options.

    Args:
        program: without places for pins.
        mesh: an axis is split where the model asks for it and the options leave it to us; a mesh that has one split stays as it is.
        clock: of the stage "lower".
        relays: by default ``Options.relays``; none where ``relay_spaces`` has none.
        schedule: whether times add up, or load windows; plans are written of graphs whose times add up only.

    Raises:
        InputError: a pin or the template is not legal for this program and mesh.
        RuleError: a row does not fit its op.
    """
    clock = clock or StageClock()
    rulebook = options.rulebook()
    check_ops(rulebook.table, known=frozenset(op.name for op in program.ops))
    mesh = _refined(program, rulebook, mesh, options)
    pins, given = tuple(parse_pin(text, mesh) for text in options.pins), program
    resolved = resolve_pins(pins, given, mesh)
    templates = parse_template(options.template, mesh) if options.template else None
    relays = options.relays if relays is None else relays
    behind: tuple[int, ...] = ()
    if relays != "none" and relay_spaces(options, mesh) != ("none",):
        rules = [rulebook.rule(given, i) for i in range(len(given.ops))]
        behind = relayed_tensors(given, rules, everywhere=relays == "everywhere")
    behind = tuple(t for t in behind if t not in resolved)
    program, pinned = constrain(given, resolved, behind)
    narrowed = restriction(program, mesh, templates) if templates else None
    with clock.stage("lower", f"pricing {len(program.ops)} ops on {mesh}"):
        costs = CostModel(mesh, cluster, overlap=options.overlap)
        lowering = lower(
            program,
            rulebook,
            costs,
            optimizer_state=options.optimizer_state(),
            pins={t: allowed.allows for t, allowed in pinned.items()},
            restriction=narrowed,
            limit=options.usable_memory,
            fusion=options.fusion,
            microbatches=options.microbatches,
            relays=behind,
            schedule=schedule,
        )
    return Lowered(
        given=given,
        program=program,
        mesh=mesh,
        options=options,
        rulebook=rulebook,
        costs=costs,
        relays=relays,
        pins=pins,
        pinned=pinned,
        restriction=narrowed,
        lowering=lowering,
    )


def _refined(program: Program, rulebook: Rulebook, mesh: Mesh, options: Options) -> Mesh:
    """The mesh with an axis split where the model's heads ask for it, unless the user decides; of a template, its tensor parallel axes."""
    if options.split != "auto" or options.conservative or mesh.whole != mesh:
        return mesh
    axes = tensor_axes(parse_template(options.template, mesh)) if options.template else None
    return split_where_needed(program, rulebook, mesh, axes)
