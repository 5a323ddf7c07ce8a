"""Small models of all kinds, and a law: no pin, set of pins or template is below the bound of the problem without it.

It is held twice: the plan that is found with pins costs no less than the bound without them, and it is a point of the graph without them,
of the same price and the same peak.

>>> draw(7).check()
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from points import plan_of, random_point
from torch import nn
from torch.nn import functional as F

from solver_shard.analysis.reopen import point_of
from solver_shard.clock import StageClock
from solver_shard.costs.cluster import Cluster, load_cluster
from solver_shard.errors import InfeasibleError, InputError, InternalError
from solver_shard.graph.build import Lowered, lower_program
from solver_shard.graph.nodes import ReshardNode, ResultNode, SourceNode
from solver_shard.graph.transient_memory import Transients
from solver_shard.layout import Layout
from solver_shard.mesh import Mesh
from solver_shard.options import Options
from solver_shard.pipeline import solve_lowered
from solver_shard.plan.decode import PlanWriter, provenance
from solver_shard.plan.plan import Plan
from solver_shard.program import AS_MADE, BEFORE, IDENTITY, Program
from solver_shard.tracing.load import traced_of

MESHES = ("2", "3", "4", "8", "dp=2,tp=2", "dp=2,tp=4")
CLUSTERS = ("h100", str(Path(__file__).parent / "toy.toml"))
WORK, PINNED_WORK = 1.0, 0.05
"""Of a problem without pins, whose bound is to be as high as can be; and with them: any plan will do to see whether it is in the graph."""
IN_A_ROW = 32
POINTS = 2
"""Points of the graph with pins, at random, that are looked for in the one without."""


class Step(nn.Module):
    """A model of some parameters and a function of them and the inputs."""

    def __init__(self, function: Callable[..., torch.Tensor], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        return self.function(self, **inputs)


def _floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def _ints(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape)


def _many(s: Any, x: torch.Tensor) -> torch.Tensor:
    h = torch.relu(x @ s.a) @ s.b
    return (torch.sin(h) + torch.tanh(h) + torch.sigmoid(h) + torch.exp(-h * h)).square().mean()


def _residual(s: Any, x: torch.Tensor) -> torch.Tensor:
    for w in (s.a, s.b):
        x = x + torch.tanh(x @ w)
    return x.square().mean()


def _attention(s: Any, x: torch.Tensor) -> torch.Tensor:
    q, k, v = (x @ s.a).view(2, 8, 3, 2, 4).permute(2, 0, 3, 1, 4)
    return (F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 8, 8) @ s.b).square().mean()


def _experts(s: Any, x: torch.Tensor) -> torch.Tensor:
    gates = torch.softmax(x @ s.g, dim=-1)
    return torch.einsum("te,tef->tf", gates, torch.einsum("tc,ecf->tef", x, s.a)).square().mean()


def _shared(s: Any, x: torch.Tensor) -> torch.Tensor:
    both = torch.tanh(x @ s.a) + torch.tanh(x.flip(0) @ s.a).flip(0)
    return (both @ s.b).square().mean() + both.mean()


def _tied(s: Any, i: torch.Tensor) -> torch.Tensor:
    h = torch.tanh(F.embedding(i, s.e) @ s.a)
    return F.cross_entropy(h @ s.e.t(), i)


def _unrolled(s: Any, x: torch.Tensor) -> torch.Tensor:
    h = torch.zeros_like(x[0])
    for step in x:
        h = torch.tanh(step @ s.a + h @ s.b)
    return h.square().mean()


def _two_ways(s: Any, x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(())
    for steps in (x, x.flip(0)):
        h = torch.zeros_like(x[0])
        for step in steps:
            h = torch.tanh(step @ s.a + h @ s.b)
        total = total + h.square().mean()
    return total


def _bf16(s: Any, x: torch.Tensor) -> torch.Tensor:
    h = torch.relu(x @ s.a.bfloat16()) @ s.b.bfloat16()
    return h.float().square().mean()


def _convolution(s: Any, x: torch.Tensor) -> torch.Tensor:
    return F.relu(F.conv2d(x, s.a, padding=1)).mean(dim=(2, 3)).matmul(s.b).square().mean()


def _messages(s: Any, x: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    h = x @ s.a
    return torch.zeros_like(h).index_add(0, j, torch.relu(h[i])).matmul(s.b).square().mean()


def _norms(s: Any, x: torch.Tensor) -> torch.Tensor:
    h = F.layer_norm(x, (16,), s.g, s.h)
    return (h + torch.tanh(h @ s.a)).square().mean()


def _losses(s: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = torch.tanh(x @ s.a)
    return F.cross_entropy(h @ s.b, y) + 0.1 * h.square().mean() + h.abs().mean()


def _gated(s: Any, x: torch.Tensor) -> torch.Tensor:
    one, two = (x @ s.a).chunk(2, dim=-1)
    return (F.silu(one) * two @ s.b).square().mean()


def _views(s: Any, x: torch.Tensor) -> torch.Tensor:
    h = (x @ s.a).view(4, 4, 4, 4)
    return (h.permute(0, 2, 1, 3).reshape(4, 64).sum(dim=1) + torch.tanh(h).flatten(1).mean(dim=1)).square().mean()


def _whole(s: Any, x: torch.Tensor) -> torch.Tensor:
    q = torch.linalg.qr(x)[0].detach()
    return (torch.sigmoid(x @ s.a) * q @ s.b).square().mean()


def _rows(s: Any, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    rows = F.embedding(i, s.e)
    return (rows[i % 8] * (rows @ s.a)).sum(dim=-1).square().mean() + x.mean()


def _gathered(s: Any, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    h = x @ s.a
    return (torch.gather(h, 1, i) + torch.tanh(h)[:, :4]).square().mean()


def _scattered(s: Any, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    h = torch.tanh(x @ s.a)
    return torch.zeros_like(h).scatter_add(1, i, h).matmul(s.b).square().mean()


def _bag(s: Any, i: torch.Tensor) -> torch.Tensor:
    return torch.tanh(F.embedding(i, s.e).mean(dim=1) @ s.a).square().mean()


def _contrast(s: Any, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    one, two = F.normalize(x @ s.a, dim=-1), F.normalize(z @ s.b, dim=-1)
    logits = one @ two.t()
    return -(torch.log_softmax(logits, dim=0).diagonal() + torch.log_softmax(logits, dim=1).diagonal()).mean()


def _trunk(s: Any, x: torch.Tensor) -> torch.Tensor:
    h = torch.relu(x @ s.a)
    return (h @ s.b).square().mean() + (h @ s.c).abs().mean() + h.mean()


def _outer(s: Any, x: torch.Tensor) -> torch.Tensor:
    h = x @ s.a
    return torch.softmax(h.unsqueeze(0) - h.unsqueeze(1), dim=-1).square().mean()


def _steps(count: int) -> Callable[..., torch.Tensor]:
    def function(s: Any, x: torch.Tensor) -> torch.Tensor:
        for k in range(count):
            x = torch.tanh(x @ s.a) + (x if k % 2 else x.square())
        return x.mean()

    return function


WIDE = {"a": (16, 32), "b": (32, 16)}
SQUARE = {"a": (16, 16), "b": (16, 16)}

MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]]] = {
    "many readers": lambda: (Step(_many, **WIDE), {"x": _floats(24, 16)}),
    "many readers, wide": lambda: (Step(_many, a=(64, 256), b=(256, 64)), {"x": _floats(64, 64)}),
    "residual": lambda: (Step(_residual, **SQUARE), {"x": _floats(24, 16)}),
    "attention": lambda: (Step(_attention, a=(8, 24), b=(8, 8)), {"x": _floats(2, 8, 8)}),
    "experts": lambda: (Step(_experts, g=(16, 4), a=(4, 16, 8)), {"x": _floats(24, 16)}),
    "shared weights": lambda: (Step(_shared, **SQUARE), {"x": _floats(8, 16)}),
    "tied embedding": lambda: (Step(_tied, e=(24, 16), a=(16, 16)), {"i": _ints(24, 12)}),
    "unrolled": lambda: (Step(_unrolled, **SQUARE), {"x": _floats(3, 8, 16)}),
    "two ways": lambda: (Step(_two_ways, **SQUARE), {"x": _floats(3, 8, 16)}),
    "bf16": lambda: (Step(_bf16, a=(64, 256), b=(256, 64)), {"x": _floats(32, 64).bfloat16()}),
    "convolution": lambda: (Step(_convolution, a=(8, 4, 3, 3), b=(8, 8)), {"x": _floats(8, 4, 6, 6)}),
    "messages": lambda: (Step(_messages, a=(16, 8), b=(8, 8)), {"x": _floats(12, 16), "i": _ints(12, 20), "j": _ints(12, 20)}),
    "norms": lambda: (Step(_norms, g=(16,), h=(16,), a=(16, 16)), {"x": _floats(4, 8, 16)}),
    "several losses": lambda: (Step(_losses, a=(16, 16), b=(16, 8)), {"x": _floats(24, 16), "y": _ints(8, 24)}),
    "gated": lambda: (Step(_gated, a=(16, 32), b=(16, 16)), {"x": _floats(24, 16)}),
    "views": lambda: (Step(_views, a=(16, 16)), {"x": _floats(16, 16)}),
    "whole operand": lambda: (Step(_whole, **SQUARE), {"x": _floats(64, 16)}),
    "indexed rows": lambda: (Step(_rows, e=(32, 16), a=(16, 16)), {"x": _floats(4), "i": _ints(32, 8)}),
    "gather": lambda: (Step(_gathered, a=(16, 8)), {"x": _floats(12, 16), "i": _ints(8, 12, 4)}),
    "scatter": lambda: (Step(_scattered, a=(16, 8), b=(8, 8)), {"x": _floats(12, 16), "i": _ints(8, 12, 8)}),
    "bag": lambda: (Step(_bag, e=(32, 16), a=(16, 16)), {"i": _ints(32, 8, 4)}),
    "contrast": lambda: (Step(_contrast, a=(16, 8), b=(12, 8)), {"x": _floats(16, 16), "z": _floats(16, 12)}),
    "trunk": lambda: (Step(_trunk, a=(16, 32), b=(32, 8), c=(32, 4)), {"x": _floats(24, 16)}),
    "outer": lambda: (Step(_outer, a=(16, 8)), {"x": _floats(12, 16)}),
    "steps": lambda: (Step(_steps(3), a=(16, 16)), {"x": _floats(24, 16)}),
    "fft": lambda: (Step(lambda s, x: torch.fft.rfft(x @ s.a).abs().square().mean(), a=(16, 16)), {"x": _floats(12, 16)}),
    "distances": lambda: (Step(lambda s, x: torch.cdist(x @ s.a, x).mean(), a=(8, 8)), {"x": _floats(12, 8)}),
    "product": lambda: (Step(lambda s, x: (x @ s.a).square().mean(), a=(16, 8)), {"x": _floats(24, 16)}),
    "two products": lambda: (Step(lambda s, x: (x @ s.a @ s.b).mean(), **WIDE), {"x": _floats(24, 16)}),
    "powers": lambda: (Step(lambda s, x: torch.linalg.matrix_power(x @ s.a, 2).mean(), a=(8, 8)), {"x": _floats(8, 8)}),
    "softmax": lambda: (Step(lambda s, x: torch.softmax(x @ s.a, 0).square().mean(), a=(16, 8)), {"x": _floats(24, 16)}),
    "maximum": lambda: (Step(lambda s, x: (x @ s.a).amax(dim=0).square().mean(), a=(16, 8)), {"x": _floats(24, 16)}),
    "cumulative": lambda: (Step(lambda s, x: (x @ s.a).cumsum(0).square().mean(), a=(16, 8)), {"x": _floats(24, 16)}),
    "sorted": lambda: (Step(lambda s, x: (x @ s.a).sort(dim=0)[0][:4].mean(), a=(16, 8)), {"x": _floats(24, 16)}),
    "batched": lambda: (Step(lambda s, x: torch.bmm(x, torch.tanh(x @ s.a)).mean(), a=(8, 8)), {"x": _floats(4, 8, 8)}),
    "bilinear": lambda: (Step(lambda s, x: torch.einsum("ab,bcd,ad->c", x, s.a, x).square().mean(), a=(8, 6, 8)), {"x": _floats(12, 8)}),
    "concatenated": lambda: (
        Step(lambda s, x: torch.cat([x @ s.a, x @ s.b], dim=-1).square().mean(), a=(16, 8), b=(16, 8)),
        {"x": _floats(24, 16)},
    ),
    "padded": lambda: (Step(lambda s, x: F.pad(x @ s.a, (1, 1)).square().mean(), a=(16, 8)), {"x": _floats(24, 16)}),
    "where": lambda: (Step(lambda s, x: torch.where(x > 0, x @ s.a, x).square().mean(), a=(16, 16)), {"x": _floats(24, 16)}),
    "scalar": lambda: (Step(lambda s, x: (x * s.a.exp()).square().mean() / (1 + s.a.square()), a=()), {"x": _floats(24, 16)}),
    "group norm": lambda: (
        Step(lambda s, x: F.group_norm(x @ s.a, 2, s.g, s.h).square().mean(), a=(8, 8), g=(8,), h=(8,)),
        {"x": _floats(12, 8)},
    ),
    "low rank": lambda: (
        Step(lambda s, x: (x @ s.w.detach() + x @ s.a @ s.b).square().mean(), w=(16, 16), a=(16, 4), b=(4, 16)),
        {"x": _floats(24, 16)},
    ),
}


@functools.cache
def program(name: str) -> Program:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    return traced_of(model, inputs, batch=None, seq=None, dtype=None, loss_fn=None, forward_only=False, checkpoint=False)[0]


@functools.cache
def _cluster(name: str) -> Cluster:
    return load_cluster(name)


def _asked(**more: Any) -> Options:
    return Options(**{"memory_limit": 2**40, "split": "off", "tied": False, "gap": 0.0, "work_limit": WORK, **more})


def lowered(name: str, mesh: str, cluster: str, options: Options) -> Lowered:
    return lower_program(program(name), mesh=Mesh.parse(mesh), cluster=_cluster(cluster), options=options, relays="everywhere")


@functools.lru_cache(maxsize=8)
def graph(name: str, mesh: str, cluster: str, fusion: bool) -> Lowered:
    """Without pins; prices and bytes depend on neither objective nor limit."""
    return lowered(name, mesh, cluster, _asked(fusion=fusion))


def solved(made: Lowered) -> Plan:
    """As ``optimize`` does, but that no baseline is tried where the work does not suffice for a proof; held against the evaluator."""
    clock, options = StageClock(), made.options
    with clock.stage("solve", ""):
        clock.bound_solver(options.time_limit)
        solution, problem = solve_lowered(made.lowering, made.costs, options, clock, workers=1)
    if not solution.feasible:
        raise InfeasibleError("no plan")
    writer = PlanWriter(
        lowering=made.lowering,
        costs=made.costs,
        cluster=made.costs.cluster,
        options=options,
        origin=provenance("", ""),
    )
    return writer.plan(solution, problem, clock)


@functools.lru_cache(maxsize=64)
def free(name: str, mesh: str, cluster: str, objective: str, tight: float, fusion: bool = False) -> tuple[Plan | None, dict[str, Any]]:
    """The plan without pins, if so little work finds one, and its options.

    ``tight``: where between the least peak and the fastest plan's the limit is, 1 for none.
    """
    options: dict[str, Any] = {"objective": "memory"} if objective == "memory" else {}
    options["fusion"] = fusion
    if objective == "weight":
        fast = _loose(name, mesh, cluster, "time", fusion)
        options["memory_weight"] = max(1, fast.costs.total_ns * 2**20 // fast.memory.peak)
    if tight < 1.0:
        most, least = (_loose(name, mesh, cluster, x, fusion).memory.peak for x in ("time", "memory"))
        options["memory_limit"] = int(least + tight * max(0, most - least))
    for work in (WORK, 3 * WORK):
        try:
            return solved(lowered(name, mesh, cluster, _asked(work_limit=work, **options))), options
        except InfeasibleError:
            continue
    return None, options


def _loose(name: str, mesh: str, cluster: str, objective: str, fusion: bool) -> Plan:
    plan, _ = free(name, mesh, cluster, objective, 1.0, fusion)
    assert plan is not None, "without a limit there is a plan"
    return plan


def is_there(plan: Plan, made: Lowered) -> bool:
    """Whether a plan with pins or of a template is a point of the graph without, of the same price and peak."""
    places = tuple(
        op.operands[0] for op in plan.ops if op.name == IDENTITY and plan.tensors[op.operands[0]].name.endswith((BEFORE, AS_MADE))
    )
    try:
        point = point_of(dataclasses.replace(plan, relays=places), made.lowering)
    except InputError:
        return False
    price = made.lowering.graph.cost(point), Transients(made.lowering, made.costs).peak(point)
    return price == (plan.costs.total_ns, plan.memory.peak)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A problem, and pins or a template for it."""

    name: str
    mesh: str
    cluster: str
    objective: str
    tight: float
    fusion: bool
    pins: tuple[str, ...]
    template: str | None = None

    def check(self) -> str:
        """What came of it: below or outside (faults), equal or above, or none where there is no such plan, it is refused or not found."""
        plan, options = free(self.name, self.mesh, self.cluster, self.objective, self.tight, self.fusion)
        more: dict[str, Any] = {"template": self.template} if self.template else {}
        asked = _asked(pins=self.pins, work_limit=PINNED_WORK, **options, **more)
        known = graph(self.name, self.mesh, self.cluster, self.fusion)
        try:
            made = lowered(self.name, self.mesh, self.cluster, asked)
            points = [random_point(made.lowering.graph, seed) for seed in range(POINTS)]  # any, whatever they cost
        except (InputError, InternalError):  # refused, or nothing is left
            return "none"
        if not all(is_there(plan_of(made.lowering, point, made.costs, asked), known) for point in points):
            return "outside"
        try:
            pinned = solved(made)
        except InfeasibleError:
            return "none within the limit"
        if not is_there(pinned, known):
            return "outside"
        if plan is None:
            return "none without"
        found, bound = pinned.certificate.objective, plan.certificate.bound
        if found <= bound:
            return "equal" if found == bound else "below"
        return "above" if plan.certificate.status == "optimal" else "above, not proven without"


def draw(seed: int) -> Case:
    """A random case; the same seed gives the same."""
    draws = random.Random(f"pins {seed // IN_A_ROW}")  # they ask the same problem
    name, mesh, cluster = list(MODELS)[seed // IN_A_ROW % len(MODELS)], draws.choice(MESHES), draws.choice(CLUSTERS)
    objective, tight = draws.choice(("time", "time", "memory", "weight")), draws.choice((1.0, 0.15, 0.3, 0.6))
    tight = 1.0 if objective == "memory" else tight
    fusion = draws.random() < 0.25
    draws = random.Random(f"pins {seed}")
    case = Case(name=name, mesh=mesh, cluster=cluster, objective=objective, tight=tight, fusion=fusion, pins=())
    if seed % 8 == 7:
        return Case(**{**case.__dict__, "template": _template(draws, mesh)})
    known = layouts(name, mesh, cluster)
    names = draws.sample(sorted(known), min(len(known), draws.choice((1, 1, 2, 3, 4))))
    return Case(**{**case.__dict__, "pins": tuple(f"{x}={','.join(map(str, draws.choice(known[x])))}" for x in names)})


@functools.lru_cache(maxsize=16)
def layouts(name: str, mesh: str, cluster: str) -> dict[str, tuple[Layout, ...]]:
    """What every tensor may be pinned to, by its name."""
    lowering = graph(name, mesh, cluster, False).lowering
    found: dict[str, tuple[Layout, ...]] = {}
    for node in lowering.nodes:
        if isinstance(node, (SourceNode, ResultNode)):
            found[lowering.program.tensors[node.tensor].name] = node.layouts
        if isinstance(node, ReshardNode) and lowering.lives.groups[node.tensor][node.group].purpose in ("optimizer", "output"):
            found[lowering.program.tensors[node.tensor].name] = node.layouts[node.aliases :]
    return {x: y for x, y in found.items() if "=" not in x and not x.endswith(AS_MADE)}


def _template(draws: random.Random, mesh: str) -> str:
    axes = Mesh.parse(mesh).names
    kinds = [draws.choice(("ddp", "zero1", "zero2", "zero3")) for _ in axes]
    return ",".join(f"{axis}={kind}" for axis, kind in zip(axes, kinds, strict=True))


def pinned_to_itself(name: str, mesh: str, cluster: str, objective: str, tight: float) -> tuple[Plan, Plan]:
    """A plan, and the one with every layout of it pinned."""
    plan, options = free(name, mesh, cluster, objective, tight)
    if plan is None:
        raise InfeasibleError("no plan")
    names = {tensor.name: k for k, tensor in enumerate(plan.tensors)}
    relayed = {plan.tensors[t].name for t in plan.relays}
    pins = tuple(f"{x}={','.join(map(str, plan.tensors[k].layout))}" for x, k in names.items() if x not in relayed and "=" not in x)
    return plan, solved(lowered(name, mesh, cluster, _asked(pins=pins, **options)))


def problems(count: int) -> list[tuple[str, str, str, str, float]]:
    """Different problems, at random but always the same."""
    every = list(itertools.product(MODELS, MESHES, CLUSTERS, ("time", "memory", "weight")))
    every.sort(key=lambda key: zlib.crc32(repr((*key[:2], Path(key[2]).name, key[3])).encode()))  # wherever the checkout is
    return [(*key, 1.0 if key[3] == "memory" or k % 2 else 0.3) for k, key in enumerate(every[:count])]
