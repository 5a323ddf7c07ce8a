"""Plans made by hand for the tests of everything that reads a plan: a deep two-matrix network, cut like Megatron."""

from __future__ import annotations

import dataclasses

from solver_shard.costs.cluster import load_cluster
from solver_shard.layout import Layout
from solver_shard.mesh import Mesh
from solver_shard.options import Options
from solver_shard.plan.plan import (
    Certificate,
    Costs,
    MemoryEntry,
    MemoryTimeline,
    Plan,
    PlannedOp,
    PlannedTensor,
    Provenance,
    Reshard,
    ReshardStep,
    SavedTensor,
    SearchEvent,
)

MESH = Mesh.parse("dp=4,tp=2")


def layout(text: str) -> Layout:
    return Layout.parse(text)


def example(layers: int = 3, source: str = "table") -> Plan:
    """``layers`` blocks of up and down projection, forward only; one all-reduce per block, weights gathered over dp."""
    tensors = [PlannedTensor(name="x", shape=(64, 32), dtype="bf16", role="input", layout=layout("S(0)R"))]
    ops: list[PlannedOp] = []
    reshards: list[Reshard] = []
    hidden = 0
    for i in range(layers):
        module = f"layers.{i}"
        up, mid, down, out = range(len(tensors), len(tensors) + 4)
        last = i == layers - 1
        tensors += [
            PlannedTensor(
                name=f"{module}.up.weight", shape=(128, 32), dtype="bf16", role="parameter", layout=layout("S(1)S(0)"), trainable=True
            ),
            PlannedTensor(name=f"mid_{i}", shape=(64, 128), dtype="bf16", role="activation", layout=layout("S(0)S(1)")),
            PlannedTensor(
                name=f"{module}.down.weight", shape=(32, 128), dtype="bf16", role="parameter", layout=layout("S(0)S(1)"), trainable=True
            ),
            PlannedTensor(
                name="output" if last else f"out_{i}",
                shape=(64, 32),
                dtype="bf16",
                role="output" if last else "activation",
                layout=layout("S(0)R" if last else "S(0)P(sum)"),
            ),
        ]
        n = len(ops)
        for k, (name, weight, a, b, read, result) in enumerate(
            (("up", up, hidden, mid, "RS(0)", "S(0)S(1)"), ("down", down, mid, out, "RS(1)", "S(0)P(sum)"))
        ):
            ops.append(
                PlannedOp(
                    name="aten.einsum.default",
                    module=f"{module}.{name}",
                    phase="forward",
                    operands=(a, weight),
                    results=(b,),
                    strategy=("a", "c" if k == 0 else "b"),
                    operand_layouts=(layout("S(0)R" if k == 0 else "S(0)S(1)"), layout(read)),
                    result_layouts=(layout(result),),
                    nanoseconds=5000,
                    source=source,  # type: ignore[arg-type]
                )
            )
            stored = tensors[weight].layout
            step = ReshardStep(kind="all_gather", axes=("dp",), nbytes=4096, nanoseconds=7000, before=stored, after=layout(read))
            reshards.append(
                Reshard(
                    tensor=weight,
                    purpose="forward",
                    family="matmul",
                    readers=((n + k, 1),),
                    source=stored,
                    layout=layout(read),
                    copy=True,
                    steps=(step,),
                    bucket=2,
                    nanoseconds=3500,
                    start=n + k,
                    stop=n + k + 1,
                    nbytes=4096,
                )
            )
        source_layout, target = layout("S(0)P(sum)"), layout("S(0)R")
        reduce = ReshardStep(kind="all_reduce", axes=("tp",), nbytes=1024, nanoseconds=9000, before=source_layout, after=target)
        reshards.append(
            Reshard(
                tensor=out,
                purpose="output" if last else "forward",
                family="output" if last else "matmul",
                readers=() if last else ((n + 2, 0),),
                source=source_layout,
                layout=target,
                copy=True,
                steps=(reduce,),
                nanoseconds=9000,
                start=n + 2,
                stop=n + 3,
                nbytes=1024,
            )
        )
        hidden = out
    times = len(ops) + 1
    memory = MemoryTimeline.build(
        {
            "parameters": [2048 * layers] * times,
            "inputs": [1024] * times,
            "activations": [2048 + 64 * (t == 3) for t in range(times)],
            "copies": [0] * times,
        },
        limit=20_000,
        ops=ops,
        holders=[
            *(
                MemoryEntry(name=f"layers.{i}.{kind}.weight", category="parameters", nbytes=1024)
                for i in range(layers)
                for kind in ("up", "down")
            ),
            MemoryEntry(name="x", category="inputs", nbytes=1024),
            MemoryEntry(name="mid_0", category="activations", nbytes=2112 if times > 3 else 2048),
        ],
    )
    communication = sum(reshard.nanoseconds for reshard in reshards)
    compute = sum(op.nanoseconds for op in ops)
    return Plan(
        name="deep mlp",
        mesh=MESH,
        cluster=load_cluster("h100"),
        options=Options(
            batch=64, seq=1, dtype="bf16", forward_only=True, overlap=0.5, memory_limit=24_000, reserve=4_000, pins=("x=S(0),R",)
        ),
        tensors=tuple(tensors),
        ops=tuple(ops),
        outputs=(len(tensors) - 1,),
        gradients={},
        reshards=tuple(reshards),
        holds=(),
        memory=memory,
        costs=Costs(
            compute_ns=compute,
            update_ns=0,
            communication_ns=communication,
            hidden_ns=7000 * layers,
            total_ns=compute + communication,
            objective=compute + communication,
            by_kind_ns={"all_gather": 14000 * layers, "all_reduce": 9000 * layers},
        ),
        certificate=Certificate(
            objective=compute + communication,
            bound=compute + communication,
            gap=0.0,
            status="optimal",
            problem="tied",
            seed=0,
            work=1.5,
            stages={"trace": 0.1, "solve": 0.3, "solve: presolve": 0.2},
            versions={"ortools": "9.15"},
            history=(
                SearchEvent(seconds=0.1, objective=None, bound=0, source="presolve"),
                SearchEvent(seconds=0.2, objective=compute + communication, bound=compute + communication, source="kernel"),
            ),
        ),
        provenance=Provenance(
            tool="solver-shard 0.1.0",
            versions={"torch": "2.13.0"},
            command="solver-shard solve deep:mlp --mesh dp=4,tp=2",
            date="2026-01-02T03:04:05Z",
            source="deep:mlp",
        ),
    )


def stepped(plan: Plan) -> Plan:
    """The plan with an optimizer: the state of every parameter cut once more than it, and each gather kept for a backward pass."""
    tensors, reshards, holds = list(plan.tensors), list(plan.reshards), []
    for t, tensor in enumerate(plan.tensors):
        if tensor.role == "parameter":
            state = layout("S(0)S(0)")
            tensors[t] = dataclasses.replace(tensor, state=state)
            step = ReshardStep(kind="all_to_all", axes=("dp",), nbytes=512, nanoseconds=2000, before=state, after=tensor.layout)
            reshards.append(
                Reshard(
                    tensor=t,
                    purpose="update",
                    family="update",
                    readers=(),
                    source=state,
                    layout=tensor.layout,
                    copy=True,
                    steps=(step,),
                    nanoseconds=1000,
                    start=len(plan.ops),
                    stop=len(plan.ops),
                )
            )
            k = next(k for k, reshard in enumerate(reshards) if reshard.tensor == t)
            kept = reshards[k]
            holds.append(SavedTensor(tensor=t, reshard=k, layout=kept.layout, start=kept.stop, stop=len(plan.ops) + 1, nbytes=kept.nbytes))
        elif tensor.name.startswith("mid"):
            holds.append(SavedTensor(tensor=t, reshard=None, layout=tensor.layout, start=2, stop=len(plan.ops) + 1, nbytes=2048))
    updates = [reshard for reshard in reshards if reshard.purpose == "update"]
    paid, full = sum(reshard.nanoseconds for reshard in updates), sum(step.nanoseconds for r in updates for step in r.steps)
    costs, certificate = plan.costs, plan.certificate
    total = costs.total_ns + paid
    return dataclasses.replace(
        plan,
        tensors=tuple(tensors),
        reshards=tuple(reshards),
        holds=tuple(holds),
        options=dataclasses.replace(plan.options, forward_only=False),
        costs=dataclasses.replace(
            costs,
            communication_ns=costs.communication_ns + paid,
            hidden_ns=costs.hidden_ns + full - paid,
            total_ns=total,
            objective=total,
            by_kind_ns={**costs.by_kind_ns, "all_to_all": full},
        ),
        certificate=dataclasses.replace(
            certificate, objective=total, bound=total, history=(dataclasses.replace(certificate.history[-1], objective=total, bound=total),)
        ),
    )
