"""Templates: what they are called, what they communicate by the literature's accounting, and that the solver is never dearer."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from traced_models import MLP, squares

import solver_shard.pipeline
from solver_shard.api import optimize
from solver_shard.baselines import hints
from solver_shard.baselines.candidates import Candidate, candidates
from solver_shard.clock import StageClock
from solver_shard.costs.cluster import load_cluster
from solver_shard.errors import InputError
from solver_shard.graph.build import lower_program
from solver_shard.graph.symmetry import node_classes
from solver_shard.graph.templates import TEMPLATES, block_cut, parse_template, restriction, restrictions
from solver_shard.graph.transient_memory import Transients
from solver_shard.layout import Layout
from solver_shard.mesh import Mesh
from solver_shard.options import Options
from solver_shard.pipeline import plan_program, solve_lowered
from solver_shard.plan.io import plan_from_json, plan_to_json
from solver_shard.plan.plan import Plan
from solver_shard.plan.summary import lookup
from solver_shard.program import Program, Role
from solver_shard.tracing.huggingface import load
from solver_shard.tracing.torch import trace

LAYERS = 2
BATCH, SEQ = 16, 512
COUNT = 4


def configured(name: str, config: dict[str, Any]) -> Program:
    """The step of a model that a Hugging Face configuration describes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        model, inputs, _ = load(str(path), batch=BATCH, seq=SEQ, dtype="bf16")
    return trace(model, inputs, name=name)


@functools.cache
def llama() -> Program:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096,
        "num_hidden_layers": LAYERS, "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 8192,
        "max_position_embeddings": 1024, "tie_word_embeddings": False,
    }  # fmt: skip
    return configured("llama", config)


@functools.cache
def mixtral() -> Program:
    config = {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 512, "intermediate_size": 1024,
        "num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 4096,
        "max_position_embeddings": 1024, "num_local_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": False,
    }  # fmt: skip
    return configured("mixtral", config)


@functools.cache
def gpt2() -> Program:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 1024, "n_embd": 256, "n_layer": LAYERS, "n_head": 4, "n_positions": 64}
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False, loss_type="ForCausalLMLoss"))
    ids = torch.zeros(16, 64, dtype=torch.int64)
    return trace(model, {"input_ids": ids, "labels": ids}, name="gpt2")


class Hybrid(nn.Module):
    """A layer of a gated recurrence, in steps one after the other as in Mamba, and one of attention and a feed-forward block."""

    def __init__(self, width: int = 256, hidden: int = 1024) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(512, width), nn.Linear(width, 512, bias=False)
        self.into, self.decay, self.out = nn.Linear(width, 2 * width), nn.Linear(width, width), nn.Linear(width, width)
        self.qkv, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        value, gate = self.into(x).chunk(2, -1)
        decay, state, states = torch.sigmoid(self.decay(x)), torch.zeros_like(value[:, 0]), []
        for t in range(value.shape[1]):
            state = decay[:, t] * state + value[:, t]
            states.append(state)
        x = x + self.out(torch.stack(states, 1) * torch.sigmoid(gate))
        q, k, v = (part.unflatten(-1, (8, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        x = x + self.mixed(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return self.head(x + self.down(torch.relu(self.up(x))))


@functools.cache
def hybrid() -> Program:
    with torch.device("meta"):
        return trace(Hybrid(), {"tokens": torch.zeros(64, 4, dtype=torch.long)}, name="hybrid", loss_fn=squares)


@functools.cache
def planned(template: str | None, mesh: str = "dp=4,tp=2", pins: tuple[str, ...] = ()) -> Plan:
    options = Options(memory_limit=1 << 40, template=template, pins=pins, gap=0.0 if template is None else 1e-4)
    return plan_program(llama(), mesh=Mesh.parse(mesh), cluster=load_cluster("h100"), options=options)


def collectives(plan: Plan, axis: str) -> Counter[tuple[str, str]]:
    """Steps on exactly this axis by (purpose, kind), the loss's scalars left out."""
    return Counter(
        (r.purpose, s.kind)
        for r in plan.reshards
        for s in r.steps
        if s.axes == (axis,) and s.kind != "slice" and plan.tensors[r.tensor].shape
    )


def parameters(plan: Plan) -> int:
    return sum(t.role == "parameter" for t in plan.tensors)


@pytest.mark.parametrize(
    ("text", "mesh", "names"),
    [
        ("zero3", "dp=2,tp=2", ("zero3", "zero3")),
        ("dp=zero3,tp=megatron", "dp=2,tp=2", ("zero3", "megatron")),
        ("tp=megatron-sp, dp=ddp", "dp=2,tp=2", ("ddp", "megatron-sp")),
        ("hsdp", "a=2,b=2,c=2", ("ddp", "zero3", "zero3")),
        ("hsdp", "a=2,b=4x2", ("ddp", "zero3", "zero3")),
        ("dp=zero3,tp=megatron", "dp=2,tp=4x2", ("zero3", "megatron", "megatron")),
    ],
)
def test_templates_are_read_by_axis(text: str, mesh: str, names: tuple[str, ...]) -> None:
    assert parse_template(text, Mesh.parse(mesh)) == names


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zero4", "did you mean 'zero3'"),
        ("dp=zero3", "says nothing of axis tp"),
        ("dp=zero3,dp=ddp,tp=ddp", "names axis 'dp' twice"),
        ("pp=ddp,dp=ddp,tp=ddp", "unknown mesh axis 'pp'"),
        ("dp=zero3,megatron", "AXIS=TEMPLATE"),
    ],
)
def test_wrong_templates_say_what_is_legal(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_template(text, Mesh.parse("dp=2,tp=2"))


def test_hybrid_sharding_needs_two_axes() -> None:
    with pytest.raises(InputError, match="needs two mesh axes"):
        parse_template("hsdp", Mesh.parse("8"))


def test_blocks_are_cut_by_columns_then_rows() -> None:
    program = llama()
    cut = {
        program.tensors[t].name.removeprefix("model.layers.0."): d
        for t, d in block_cut(program).items()
        if ".layers.0." in program.tensors[t].name
    }
    rows = {"self_attn.o_proj.weight": 1, "mlp.down_proj.weight": 1}
    columns = dict.fromkeys([f"self_attn.{x}_proj.weight" for x in "qkv"] + ["mlp.gate_proj.weight", "mlp.up_proj.weight"], 0)
    assert cut == rows | columns


SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
    "vocab_size": 256, "max_position_embeddings": 256, "tie_word_embeddings": False, "pad_token_id": 0,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 1,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, int | None]]] = {
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        SMALL | LATENT,
        {"q_a_proj": None, "q_b_proj": 0, "kv_a_proj_with_mqa": None, "kv_b_proj": 0, "o_proj": 1, "gate_proj": 0, "down_proj": 1},
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", SMALL, {"query_key_value": 0, "attention.dense": 1, "h_to_4h": 0, "4h_to_h": 1}),
    "olmo2": ("Olmo2ForCausalLM", SMALL, {"q_proj": 0, "q_norm": 0, "k_norm": 0, "v_proj": 0, "o_proj": 1, "up_proj": 0, "down_proj": 1}),
    "phi3": ("Phi3ForCausalLM", SMALL, {"qkv_proj": None, "o_proj": 1, "gate_up_proj": None, "down_proj": 1}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_tensor_parallelism_carries_through_a_family_and_cuts_its_matrices_as_experts_do(family: str) -> None:
    """The down-projections of latent attention stay whole; a norm over all heads is cut with its matrix; parts of a fused projection
    that lie head by head are cut, those that lie one after the other stay whole."""
    architecture, config, expected = FAMILIES[family]
    program = configured(family, {"architectures": [architecture], "model_type": family, **config})
    cut = {tensor.name: block_cut(program).get(t) for t, tensor in enumerate(program.tensors) if tensor.role is Role.PARAMETER}
    assert {part: next(dim for name, dim in cut.items() if f"{part}.weight" in name) for part in expected} == expected
    options = Options(memory_limit=1 << 40, template="megatron-sp")
    plan = plan_program(program, mesh=Mesh.parse("2"), cluster=load_cluster("h100"), options=options)
    stored = {tensor.name: tensor.layout for tensor in plan.tensors}
    assert all(stored[name][0] == (-1 if dim is None else dim) for name, dim in cut.items() if name in stored)


def test_data_parallel_all_reduces_every_gradient_once() -> None:
    plan = planned("ddp", "dp=8")
    assert collectives(plan, "dp") == {("optimizer", "all_reduce"): parameters(plan)}


@pytest.mark.parametrize("template", ["zero1", "zero2"])
def test_cut_states_reduce_scatter_gradients_and_gather_parameters_after_the_step(template: str) -> None:
    """Megatron-LM's distributed optimizer and ZeRO-2; the two differ where gradients are accumulated."""
    plan = planned(template, "dp=8")
    n = parameters(plan)
    assert collectives(plan, "dp") == {("optimizer", "reduce_scatter"): n, ("update", "all_gather"): n}


def test_zero3_gathers_every_parameter_in_each_pass_and_reduce_scatters_its_gradient() -> None:
    """One gather forward, one backward, one reduce-scatter per parameter; the embedding's backward pass does not read its weight."""
    plan = planned("zero3", "dp=8")
    n = parameters(plan)
    assert collectives(plan, "dp") == {
        ("forward", "all_gather"): n,
        ("backward", "all_gather"): n - 1,
        ("optimizer", "reduce_scatter"): n,
    }


COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def test_fully_sharded_over_tensor_parallel_cuts_the_rows_of_one_matrix_by_both() -> None:
    """What ``fully_shard`` makes of a model that ``parallelize_module`` has cut: tp first, then dp, on dim 0 (PyTorch's tutorial
    "Large Scale Transformer model training with Tensor Parallel"). Gathers and reductions of parameters stay on dp."""
    plan = planned("dp=zero3,tp=megatron", pins=tuple(f"*{name}.weight=_S(0),S(0)" for name in COLUMNS))
    columns = [t for t, tensor in enumerate(plan.tensors) if tensor.name.endswith(tuple(f"{name}.weight" for name in COLUMNS))]
    columns += [plan.gradients[plan.tensors[t].name] for t in columns]
    moves = Counter((r.purpose, s.kind, s.axes) for r in plan.reshards if r.tensor in columns for s in r.steps if s.kind != "slice")
    n = len(COLUMNS) * LAYERS
    assert moves == {
        ("forward", "all_gather", ("dp",)): n,
        ("backward", "all_gather", ("dp",)): n,
        ("optimizer", "reduce_scatter", ("dp",)): n,
    }
    assert plan.costs.total_ns == planned("dp=zero3,tp=megatron").costs.total_ns  # as S(1) on dp, there where it is legal


def test_a_vector_that_tensor_parallelism_cuts_is_cut_again_by_fully_sharding() -> None:
    """The bias of a column-parallel layer has one dim for both axes."""
    plan = plan_program(
        gpt2(),
        mesh=Mesh.parse("dp=4,tp=2"),
        cluster=load_cluster("h100"),
        options=Options(memory_limit=1 << 40, template="dp=zero3,tp=megatron"),
    )
    found = {tensor.name: tensor for tensor in plan.tensors if tensor.name.endswith("c_fc.bias")}
    assert found
    for name, tensor in found.items():
        assert (str(tensor.layout), str(tensor.state)) == ("_S(0)S(0)", "_S(0)S(0)")
        t, gradient = next(t for t, x in enumerate(plan.tensors) if x.name == name), plan.gradients[name]
        steps = {(s.kind, s.axes) for r in plan.reshards if r.tensor in (t, gradient) for s in r.steps if s.kind != "slice"}
        assert steps == {("all_gather", ("dp",)), ("reduce_scatter", ("dp",))}


@pytest.mark.parametrize(
    ("layout", "allowed"), [("_S(0)RS(0)", True), ("R_S(0)S(0)", True), ("S(0)RS(0)", True), ("RRS(0)", False), ("_S(0)S(0)R", False)]
)
def test_fully_sharding_leaves_an_axis_alone_only_where_the_others_leave_too_little(layout: str, allowed: bool) -> None:
    """1,024 elements on 16 x 16 x 8 devices."""
    program = gpt2()
    bias = next(t for t, tensor in enumerate(program.tensors) if tensor.name.endswith("c_fc.bias"))
    assert restriction(program, Mesh.parse("a=16,b=16,tp=8"), ("zero3", "zero3", "megatron")).source(bias, Layout.parse(layout)) is allowed


def test_hybrid_sharding_gathers_inside_and_all_reduces_across() -> None:
    plan = planned("hsdp", "nodes=2,gpus=4")
    assert collectives(plan, "gpus")["forward", "all_gather"] == parameters(plan)
    assert collectives(plan, "nodes")["forward", "all_gather"] == 0
    assert collectives(plan, "nodes")["optimizer", "all_reduce"] > 0


def test_megatron_all_reduces_twice_per_layer_and_pass() -> None:
    """Shoeybi et al. 2019, figure 4: two all-reduces forward and two backward per layer; one more around embedding and head."""
    found = collectives(planned("dp=ddp,tp=megatron"), "tp")
    assert {kind for purpose, kind in found if purpose in ("forward", "backward")} == {"all_reduce"}
    assert 2 * LAYERS <= found["forward", "all_reduce"] <= 2 * LAYERS + 1
    assert 2 * LAYERS <= found["backward", "all_reduce"] <= 2 * LAYERS + 1


def test_sequence_parallelism_replaces_them_by_gathers_and_reduce_scatters() -> None:
    """Korthikanti et al. 2023, section 4.2.2: four all-gathers and four reduce-scatters per layer.

    The embedding's output is whole on every device: the first layer slices it instead of gathering its input, and the
    embedding's backward pass gathers the gradient instead. Gathered inputs are kept for the weight gradients.
    """
    found = collectives(planned("dp=ddp,tp=megatron-sp"), "tp")
    for kind in ("all_gather", "reduce_scatter"):
        assert found["forward", kind] + found["backward", kind] == 4 * LAYERS
    assert found["forward", "reduce_scatter"] == found["backward", "reduce_scatter"] == 2 * LAYERS


def test_vocabulary_parallelism_all_reduces_at_the_embedding_and_behind_the_head() -> None:
    """Shoeybi et al. 2019, section 3: the embedding's output forward and the head's input gradient backward; the loss
    exchanges statistics of its rows only, inside the named implementation of the cross entropy."""
    plan = planned("dp=ddp,tp=vocab-parallel")
    found = collectives(plan, "tp")
    assert found["backward", "all_reduce"] == 1
    assert 1 <= found["forward", "all_reduce"] <= 2
    assert {name: str(plan.layouts[name]) for name in ("model.embed_tokens.weight", "lm_head.weight")} == {
        "model.embed_tokens.weight": "RS(0)",
        "lm_head.weight": "RS(0)",
    }


def test_context_parallelism_gathers_keys_and_values_and_reduce_scatters_their_gradients() -> None:
    """Two gathers per layer forward (and one of the labels, which are shifted by one token), two reduce-scatters backward."""
    found = collectives(planned("dp=ddp,tp=context-parallel"), "tp")
    assert found["forward", "all_gather"] == 2 * LAYERS + 1
    assert found["backward", "reduce_scatter"] == 2 * LAYERS
    assert {key for key in found if key[0] in ("forward", "backward")} == {("forward", "all_gather"), ("backward", "reduce_scatter")}


def test_ulysses_exchanges_what_attention_reads_and_makes() -> None:
    """Jacobs et al. 2023, section 3.2: queries, keys, values and results from sequence to heads or back, an all-to-all each; their
    gradients likewise. The labels are gathered, for they are shifted by one token."""
    found = collectives(planned("dp=ddp,tp=ulysses"), "tp")
    assert found == {("forward", "all_to_all"): 4 * LAYERS, ("backward", "all_to_all"): 4 * LAYERS, ("forward", "all_gather"): 1}


def test_ulysses_stores_over_all_axes_what_data_parallelism_does() -> None:
    plan = planned("dp=zero3,tp=zero3+ulysses")
    assert all(t.layout.shards((4, 2)) == 8 for t in plan.tensors if t.role == Role.PARAMETER.value)
    assert {t.layout[1] for t in plan.tensors if t.role == Role.INPUT.value} == {1}


@pytest.mark.parametrize("template", ["dp=ddp,tp=expert-parallel", "dp=zero3,tp=expert-parallel", "dp=ddp,tp=zero3+expert-parallel"])
def test_expert_parallelism_exchanges_tokens_twice_per_layer_and_pass(template: str) -> None:
    """Lepikhin et al. 2021, section 2: tokens go to their experts and back, an all-to-all each; gradients take the same ways.

    Forward, devices also tell each other how many tokens each expert gets. Gradients of the experts stay on their axis.
    """
    options = Options(memory_limit=1 << 40, template=template)
    plan = plan_program(mixtral(), mesh=Mesh.parse("dp=4,tp=2"), cluster=load_cluster("h100"), options=options)
    found = collectives(plan, "tp")
    assert found["forward", "all_to_all"] == found["backward", "all_to_all"] == 2 * LAYERS
    experts = [t for t in plan.tensors if t.role == Role.PARAMETER.value and "experts" in t.name]
    assert len(experts) == 2 * LAYERS
    assert all(t.layout[1] == 0 and t.state is not None and t.state[1] == 0 for t in experts)
    moved = {s.axes for r in plan.reshards if r.purpose == "optimizer" and "experts" in plan.tensors[r.tensor].name for s in r.steps}
    assert moved == {("dp",)}
    assert {kind for purpose, kind in found if purpose in ("forward", "backward")} <= {"all_to_all", "all_gather"}
    others = sum(t.role == Role.PARAMETER.value and t not in experts for t in plan.tensors) if "tp=zero3" in template else 0
    assert found["forward", "all_gather"] == LAYERS + others


def test_context_parallelism_gathers_the_sequence_around_experts_too() -> None:
    """Beside keys, values and labels: the hidden states for router and experts forward, and backward what the experts hand back."""
    options = Options(memory_limit=1 << 40, template="dp=ddp,tp=context-parallel")
    plan = plan_program(mixtral(), mesh=Mesh.parse("dp=4,tp=2"), cluster=load_cluster("h100"), options=options)
    found = collectives(plan, "tp")
    assert found["forward", "all_gather"] == (2 + 2) * LAYERS + 1
    assert found["backward", "all_gather"] == LAYERS
    assert found["backward", "reduce_scatter"] == 2 * LAYERS


@pytest.mark.parametrize(
    ("template", "what"),
    [("dp=ddp,tp=expert-parallel", "no experts"), ("dp=zero3+expert-parallel,tp=replicate", "no experts")],
)
def test_a_template_with_nothing_to_cut_is_refused(template: str, what: str) -> None:
    with pytest.raises(InputError, match=f"has nothing to cut: llama has {what}"):
        planned(template)


def test_tensor_and_vocabulary_parallelism_need_blocks_and_a_vocabulary() -> None:
    program, mesh = trace(MLP(), {"x": torch.zeros(4, 8)}, name="mlp", loss_fn=squares), Mesh.parse("dp=2,tp=2")
    for name in ("vocab-parallel", "megatron+vocab-parallel"):
        with pytest.raises(InputError, match="mlp has no vocabulary"):
            restriction(program, mesh, ("ddp", name))


def test_states_follow_the_stage() -> None:
    names = [t.name for t in planned("zero1", "dp=8").tensors if t.role == Role.PARAMETER.value and t.shape]
    for template, stored, gradient, state in (("ddp", 1, 1, 1), ("zero1", 1, 8, 8), ("zero2", 1, 8, 8), ("zero3", 8, 8, 8)):
        plan = planned(template, "dp=8")
        by_name = {t.name: t for t in plan.tensors}
        for name in names:
            assert by_name[name].layout.shards((8,)) == stored
            assert by_name[f"grad({name})"].layout.shards((8,)) == gradient
            assert by_name[name].state is not None
            assert by_name[name].state.shards((8,)) == state


@pytest.mark.parametrize(
    "template",
    [
        *(name for name in TEMPLATES if name != "expert-parallel"),
        "hsdp",
        "dp=zero3,tp=megatron",
        "dp=zero2,tp=megatron-sp",
        "dp=ddp,tp=zero1",
        "dp=zero3,tp=megatron-sp+vocab-parallel",
    ],
)
def test_the_solver_is_never_dearer_than_a_template(template: str) -> None:
    assert planned(None).certificate.bound <= planned(template).certificate.objective
    assert planned(None).certificate.objective <= planned(template).certificate.objective


CASES = {"llama": (llama, "dp=4,tp=2"), "hybrid": (hybrid, "tp=2")}


@functools.cache
def had(model: str = "llama") -> dict[str, Candidate | None]:
    """The plan of every template, of the graph that is lowered without one."""
    program, mesh = CASES[model]
    options = Options(memory_limit=1 << 40)
    made = lower_program(program(), mesh=Mesh.parse(mesh), cluster=load_cluster("h100"), options=options)
    problem = Transients(made.lowering, made.costs, node_classes(made.lowering))
    return dict(candidates(problem, restrictions(made.program, made.mesh), objective="time", memory_weight=0, gap=0.0, seed=0))


@pytest.mark.parametrize(
    "template",
    [
        *("replicate", "ddp", "zero2", "zero3", "megatron", "megatron-sp", "vocab-parallel", "context-parallel", "ulysses", "hsdp"),
        *("dp=zero3,tp=megatron", "dp=zero2,tp=megatron-sp", "dp=zero3,tp=megatron-sp+vocab-parallel"),
    ],
)
def test_a_template_costs_the_same_in_the_graph_of_all_layouts_as_by_itself(template: str) -> None:
    """Or less: there, one reshard may serve several readers, which vocabulary parallel makes use of."""
    plan, alone = had()[template], planned(template).certificate
    assert plan is not None
    assert plan.objective <= alone.objective
    if "vocab-parallel" not in template:
        assert plan.objective >= alone.bound


@pytest.mark.parametrize("model", CASES)
@pytest.mark.parametrize(("limits", "part"), [({"time_limit": 1e-6}, 1.0), ({"work_limit": 1e-6}, 1.05)], ids=str)
def test_however_short_the_limit_no_plan_is_dearer_than_replication_or_a_template(
    model: str, limits: dict[str, float], part: float
) -> None:
    limit = 1 << 40 if part == 1.0 else int(part * min(plan.peak for plan in had(model).values() if plan is not None))
    program, mesh = CASES[model]
    options = Options(memory_limit=limit, **limits)
    plan = plan_program(program(), mesh=Mesh.parse(mesh), cluster=load_cluster("h100"), options=options)
    assert plan.memory.peak <= limit
    within = [plan for plan in had(model).values() if plan is not None and plan.peak <= limit]
    assert within
    assert plan.certificate.objective <= min(plan.objective for plan in within)


def test_where_the_work_ends_the_plan_does_not_depend_on_how_long_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(memory_limit=1 << 40, work_limit=1e-6)
    first = plan_program(hybrid(), mesh=Mesh.parse("tp=2"), cluster=load_cluster("h100"), options=options)
    hours = itertools.count(step=3600.0)
    monkeypatch.setattr(hints, "time", SimpleNamespace(monotonic=lambda: next(hours)))
    second = plan_program(hybrid(), mesh=Mesh.parse("tp=2"), cluster=load_cluster("h100"), options=options)
    assert first.certificate.baseline is not None
    assert (second.certificate.objective, second.certificate.baseline) == (first.certificate.objective, first.certificate.baseline)
    assert second.layouts == first.layouts


def test_a_search_of_a_very_large_graph_starts_from_a_template_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver_shard.pipeline, "MANY", 0)
    fits = [plan for plan in had().values() if plan is not None]
    options = Options(memory_limit=int(1.05 * min(plan.peak for plan in fits)), work_limit=1e-6)
    made = lower_program(llama(), mesh=Mesh.parse("dp=4,tp=2"), cluster=load_cluster("h100"), options=options)
    clock = StageClock(solver_seconds=600.0)
    found, _ = solve_lowered(made.lowering, made.costs, options, clock)
    assert found.history[0].source.startswith("warm start of template ")
    assert found.assignment is not None
    assert made.lowering.graph.allowed(found.assignment)
    assert found.peak is not None
    assert found.peak <= options.usable_memory


def test_templates_that_have_nothing_to_cut_are_left_out() -> None:
    names = restrictions(llama(), Mesh.parse("dp=4,tp=2"))
    assert next(iter(names)) == "replicate"
    assert not any("expert" in name for name in names)
    assert {"hsdp", "dp=zero3,tp=megatron-sp"} <= set(names)
    assert "dp=zero3,ep=zero3+expert-parallel,tp=megatron-sp" in restrictions(mixtral(), Mesh.parse("dp=2,ep=2,tp=2"))
    assert list(restrictions(llama(), Mesh.parse("8")))[:2] == ["replicate", "ddp"]


@functools.cache
def accumulated(template: str | None, mesh: str = "dp=8", **changes: Any) -> Plan:
    """A step of ``COUNT`` microbatches of the same size as that of ``planned``."""
    options = Options(memory_limit=1 << 40, template=template, microbatches=COUNT, gap=0.0 if template is None else 1e-4, **changes)
    return plan_program(llama(), mesh=Mesh.parse(mesh), cluster=load_cluster("h100"), options=options)


def runs(plan: Plan, axis: str) -> Counter[tuple[str, str]]:
    """How often a step runs collectives on exactly this axis by (purpose, kind), the loss's scalars left out."""
    found: Counter[tuple[str, str]] = Counter()
    for r in plan.reshards:
        for s in r.steps:
            if s.axes == (axis,) and s.kind != "slice" and plan.tensors[r.tensor].shape:
                found[r.purpose, s.kind] += plan.runs(r)
    return found


def accumulators(plan: Plan) -> set[str]:
    """Layouts of the accumulators of matrices."""
    return {str(r.layout) for r in plan.reshards if r.purpose == "accumulate" and len(plan.tensors[r.tensor].shape) > 1}


def test_accumulating_data_parallel_all_reduces_once() -> None:
    """DDP's no_sync (Li et al. 2020, section 3.2.4): gradients stay local in all microbatches but the last."""
    plan = accumulated("ddp")
    assert runs(plan, "dp") == {("optimizer", "all_reduce"): parameters(plan)}
    assert accumulators(plan) == {"P(sum)"}


def test_accumulating_zero1_reduce_scatters_and_gathers_once() -> None:
    """Whole local gradients until the end, as Megatron-LM's distributed optimizer has them."""
    plan = accumulated("zero1")
    n = parameters(plan)
    assert runs(plan, "dp") == {("optimizer", "reduce_scatter"): n, ("update", "all_gather"): n}
    assert accumulators(plan) == {"P(sum)"}


def test_accumulating_zero2_reduce_scatters_in_every_microbatch() -> None:
    """Rajbhandari et al. 2020, section 5.2: a device keeps only its part of the gradients, so none may wait."""
    plan = accumulated("zero2")
    n = parameters(plan)
    assert runs(plan, "dp") == {("accumulate", "reduce_scatter"): COUNT * n, ("update", "all_gather"): n}
    assert accumulators(plan) <= {"S(0)", "S(1)"}


def test_accumulating_zero3_gathers_parameters_and_reduce_scatters_in_every_microbatch() -> None:
    """Zhao et al. 2023 (arXiv:2304.11277), section 3.3.4: accumulation with communication."""
    plan = accumulated("zero3")
    n = parameters(plan)
    assert runs(plan, "dp") == {
        ("forward", "all_gather"): COUNT * n,
        ("backward", "all_gather"): COUNT * (n - 1),
        ("accumulate", "reduce_scatter"): COUNT * n,
    }


def test_accumulating_hybrid_sharding_reduce_scatters_inside_each_time_and_all_reduces_across_once() -> None:
    """FSDP2's set_requires_all_reduce(False) in all microbatches but the last."""
    plan = accumulated("hsdp", "nodes=2,gpus=4")
    n = parameters(plan)
    assert runs(plan, "gpus")["accumulate", "reduce_scatter"] == COUNT * n
    assert runs(plan, "nodes") == {("optimizer", "all_reduce"): n}


@pytest.mark.parametrize(("template", "whole", "cut"), [("ddp", 18, 0), ("zero1", 6, 12), ("zero2", 2, 16), ("zero3", 0, 18)])
def test_bytes_per_parameter_are_those_of_megatron_and_zero(template: str, whole: int, cut: int) -> None:
    """Megatron-LM's table for bf16 parameters and f32 main gradients: 18 bytes, with its distributed optimizer 6 + 12/d; ZeRO's
    stages 2 and 3 (section 3.1 and figure 1, with gradients of 4 bytes) cut the gradients, then the parameters too."""
    plan = accumulated(template, reduce_dtype="f32", optimizer="adamw-fused")  # the update's temporaries are no part of these tables
    count = sum(math.prod(t.shape) for t in plan.tensors if t.role == Role.PARAMETER.value)
    stored = sum(plan.memory.series[category][-1] for category in ("parameters", "optimizer", "gradients"))
    buffers = sum(math.prod(t.shape) * 4 for t in plan.tensors if t.role == Role.BUFFER.value)
    assert stored - buffers == pytest.approx(count * (whole + cut / 8), rel=1e-9)


@pytest.mark.parametrize("template", ["ddp", "zero1", "zero2", "zero3"])
def test_the_solver_is_never_dearer_than_a_template_that_accumulates(template: str) -> None:
    assert accumulated(None).certificate.bound <= accumulated(template).certificate.objective
    assert accumulated(None).certificate.objective <= accumulated(template).certificate.objective


class Gated(nn.Module):
    """A block whose results a gate of one row weighs, as the shared expert of a mixture; the head and a buffer are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 64, bias=False)
        self.up, self.gate, self.down = nn.Linear(16, 32), nn.Linear(16, 1, bias=False), nn.Linear(32, 16)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(16))
        self.norm = nn.LayerNorm(16)
        self.norm.register_buffer("again", self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x) * self.scale
        hidden = hidden + torch.sigmoid(self.gate(hidden)) * self.down(torch.relu(self.up(hidden)))
        return self.head(self.norm(hidden) * self.norm.again)


TOKENS = {"x": torch.zeros(4, 8, dtype=torch.long)}


@functools.cache
def gated(template: str, mesh: str) -> Plan:
    return optimize(Gated(), mesh=mesh, inputs=TOKENS, loss_fn=squares, template=template, time_limit=60)


@pytest.mark.parametrize(("template", "mesh"), [("megatron", "4"), ("megatron-sp", "2"), ("megatron+vocab-parallel", "2")])
def test_a_gate_of_one_row_is_kept_whole_and_what_it_weighs_is_cut_by_rows(template: str, mesh: str) -> None:
    layouts = gated(template, mesh).layouts
    assert [str(layouts[f"{name}.weight"]) for name in ("gate", "up", "down")] == ["R", "S(0)", "S(1)"]


def test_the_gate_of_shared_experts_is_kept_whole_and_a_pin_of_the_tied_head_names_its_tie() -> None:
    config = {
        "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 512,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
        "tie_word_embeddings": True,
    }  # fmt: skip
    program, options = configured("qwen2-moe", config), Options(memory_limit=1 << 40, template="megatron", time_limit=30)
    plan = plan_program(program, mesh=Mesh.parse("2"), cluster=load_cluster("h100"), options=options)
    names = ("shared_expert_gate", "shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj")
    assert [str(plan.layouts[f"model.layers.0.mlp.{name}.weight"]) for name in names] == ["R", "S(0)", "S(0)", "S(1)"]
    pinned = dataclasses.replace(options, template=None, pins=("lm_head.weight=S(0)",))
    with pytest.raises(InputError, match=r"'lm_head.weight' is tied to 'model.embed_tokens.weight'"):
        plan_program(program, mesh=Mesh.parse("2"), cluster=load_cluster("h100"), options=pinned)


def test_branches_that_are_added_before_the_residual_are_cut_by_rows_alike() -> None:
    """As in GPT-J, NeoX, Phi and Falcon, whose attention and feed-forward blocks run side by side."""

    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = (nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + (self.left(x) + self.right(x))

    program = trace(Beside(), {"x": torch.zeros(4, 8, 16)}, name="beside", loss_fn=squares)
    cut = {program.tensors[t].name: dim for t, dim in block_cut(program).items() if program.tensors[t].name.endswith("weight")}
    assert cut == {"left.0.weight": 0, "left.2.weight": 1, "right.0.weight": 0, "right.2.weight": 1}


def test_a_matrix_is_cut_by_as_many_tensor_axes_as_it_has_rows_for() -> None:
    program = trace(Gated(), TOKENS, name="gated", loss_fn=squares)
    mesh = Mesh.parse("tp=4,sp=8")
    narrow = restriction(program, mesh, ("megatron", "megatron"))
    up = next(t for t, tensor in enumerate(program.tensors) if tensor.name == "up.weight")
    gate = next(t for t, tensor in enumerate(program.tensors) if tensor.name == "gate.weight")
    assert narrow.source(up, Layout.parse("S(0)S(0)"))
    assert not narrow.source(up, Layout.parse("S(0)R"))
    assert narrow.source(gate, Layout.parse("RR"))
    wide = restriction(program, Mesh.parse("tp=8,sp=8"), ("megatron", "megatron"))
    assert wide.source(up, Layout.parse("S(0)R"))


def test_a_tied_tensor_is_looked_up_by_its_other_names_with_a_hint() -> None:
    plan = gated("megatron", "4")
    assert plan.ties == {"head.weight": "embed.weight", "norm.again": "scale"}
    assert plan_from_json(plan_to_json(plan)).ties == plan.ties
    for name, first in plan.ties.items():
        with pytest.raises(InputError, match=f"{name!r} is tied to {first!r}"):
            lookup(plan, name)
        with pytest.raises(InputError, match=f"{name!r} is tied to {first!r}"):
            optimize(Gated(), mesh="2", inputs=TOKENS, loss_fn=squares, pins=[f"{name}=R"])
