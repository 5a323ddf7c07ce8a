"""Plans for the tests of the HTML report: a small Llama's training step, and one whose names would run if the page let them."""

from __future__ import annotations

import dataclasses
import functools

import tiny_llama

from solver_shard.plan.plan import Plan

HOSTILE = (
    "</script><script>window.hacked='script'</script>",
    "<img src=x onerror=window.hacked='image'>",
    "'\"><svg onload=window.hacked='svg'>",
    "{{ 7 * 191 }}{% raw %}",
    "<!--<script>window.hacked='comment'",
)
"""Names of tensors."""


@functools.cache
def llama() -> Plan:
    """Two layers, fully sharded over dp, Megatron with sequence parallelism over tp: every kind of collective but all-to-all."""
    return tiny_llama.planned("dp=2,tp=2", template="dp=zero3,tp=megatron-sp", time_limit=60)


@functools.cache
def hostile() -> Plan:
    """The same, with names, modules, text of the certificate and of the origin that are HTML."""
    plan = llama()
    evil = HOSTILE[1]
    tensors = list(plan.tensors)
    parameters = [t for t, tensor in enumerate(tensors) if tensor.role == "parameter"]
    others = [t for t, tensor in enumerate(tensors) if tensor.role == "activation"]
    renamed = dict(zip([*parameters[:2], *others[:3]], HOSTILE, strict=True))
    for t, name in renamed.items():
        tensors[t] = dataclasses.replace(tensors[t], name=name)
    names = {plan.tensors[t].name: name for t, name in renamed.items()}
    ops = [dataclasses.replace(op, module=f"{op.module}.{evil}" if i % 7 == 0 else op.module) for i, op in enumerate(plan.ops)]
    ops[3] = dataclasses.replace(ops[3], name=f"aten.{evil}.default", implementation=evil)
    holders = tuple(dataclasses.replace(holder, name=names.get(holder.name, holder.name)) for holder in plan.memory.holders)
    series = {**plan.memory.series, evil: plan.memory.series["activations"]}
    return dataclasses.replace(
        plan,
        name=HOSTILE[2],
        tensors=tuple(tensors),
        ops=tuple(ops),
        gradients={names.get(name, name): t for name, t in plan.gradients.items()},
        reshards=tuple(dataclasses.replace(reshard, family=evil) for reshard in plan.reshards),
        options=dataclasses.replace(plan.options, pins=(evil,)),
        memory=dataclasses.replace(plan.memory, holders=holders, series=series, peak_op=evil),
        certificate=dataclasses.replace(
            plan.certificate, history=tuple(dataclasses.replace(moment, source=evil) for moment in plan.certificate.history)
        ),
        provenance=dataclasses.replace(plan.provenance, command=HOSTILE[0], versions={evil: evil}),
    )
