"""Every op of small public models has a rule and something to shard; of four of them all strategies give the unsharded numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import model_zoo
import pytest
import torch

from solver_shard.ops.run import call, run
from solver_shard.program import Program
from solver_shard.rules.check.shards import verify
from solver_shard.rules.families import FAMILIES
from solver_shard.rules.rulebook import OpUsage, Rulebook, signature, usage
from solver_shard.rules.table import RuleTable, load_table
from solver_shard.tracing.torch import trace

transformers = pytest.importorskip("transformers")

TOKENS = {"input_ids": torch.zeros(4, 8, dtype=torch.long), "labels": torch.zeros(4, 8, dtype=torch.long)}
IMAGES = {"pixel_values": torch.zeros(4, 3, 16, 16), "labels": torch.zeros(4, dtype=torch.long)}


def step(family: str) -> Program:
    """A cleaned joint step of two layers (one for ViT), traced on the meta device."""
    tf = transformers
    rest = {"num_attention_heads": 4, "hidden_size": 16, "intermediate_size": 24}
    with torch.device("meta"):
        if family == "llama":
            model = tf.LlamaForCausalLM(tf.LlamaConfig(**rest, num_hidden_layers=2, num_key_value_heads=2, vocab_size=32))
        elif family == "gpt2":
            config = tf.GPT2Config(n_embd=16, n_layer=2, n_head=4, vocab_size=32, n_positions=16, bos_token_id=0, eos_token_id=0)
            model = tf.GPT2LMHeadModel(config)
        elif family == "bert":
            model = tf.BertForMaskedLM(tf.BertConfig(**rest, num_hidden_layers=1, vocab_size=32, max_position_embeddings=16))
        else:
            config = tf.ViTConfig(**rest, num_hidden_layers=1, image_size=16, patch_size=4, num_labels=6)
            model = tf.ViTForImageClassification(config)
    return trace(model.eval(), TOKENS if family != "vit" else IMAGES, name=family)


FORMS = ("training", "eager attention", "half precision", "forward only")
REASONS: Mapping[str, str] = {}
"""Ops over 1% of a step that can only be replicated, and why nothing else exists. None."""


def used(family: str, form: str) -> tuple[OpUsage, ...]:
    """The ops of one step of a family of the zoo."""
    dtype = torch.bfloat16 if form == "half precision" else torch.float32
    attention = "eager" if form == "eager attention" else None
    model, inputs = model_zoo.make(family, attention=attention, training=form != "forward only", dtype=dtype)
    return usage(trace(model, inputs, name=family, forward_only=form == "forward only"), Rulebook())


@pytest.mark.parametrize("family", model_zoo.LISTED)
def test_every_op_of_a_listed_model_has_a_rule_and_something_to_shard(family: str) -> None:
    for form in FORMS:
        rows = used(family, form)
        assert not [row.op for row in rows if row.source == "fallback"], form
        whole = [row.op for row in rows if max(row.replicated_flops, row.replicated_nbytes) > 0.01 and row.op not in REASONS]
        assert not whole, form
        assert sum(row.flops for row in rows) == pytest.approx(1)


@pytest.mark.parametrize("family", ["deepseek-v3", "gpt-oss", "llama4", "swin"])
def test_every_op_of_other_families_has_a_rule(family: str) -> None:
    rows = used(family, "training")
    assert not [row.op for row in rows if row.source == "fallback"]
    assert not [row.op for row in rows if max(row.replicated_flops, row.replicated_nbytes) > 0.01]


def test_an_op_without_a_row_shows_in_the_usage() -> None:
    program = step("bert")
    table = dict(load_table())
    del table["aten.native_layer_norm.default"]
    short = Rulebook(RuleTable(table, FAMILIES))
    (found,) = (row for row in usage(program, short) if row.op == "aten.native_layer_norm.default")
    assert found.source in ("dtensor", "fallback")
    assert {row.op for row in usage(program, Rulebook()) if row.op.endswith("layer_norm.default")} == {found.op}


def values(program: Program) -> Mapping[int, torch.Tensor]:
    """A value for every tensor, as in an unsharded step."""
    generator = torch.Generator().manual_seed(3)
    sources = {}
    for t in program.sources():
        tensor = program.tensors[t]
        if tensor.dtype == "i64":
            sources[t] = torch.arange(tensor.numel).reshape(tensor.shape) % (2 if "type" in tensor.name else 6)
        else:
            sources[t] = torch.randn(tensor.shape, generator=generator)
    return run(program, sources)


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "vit"])
def test_every_op_of_a_step_is_sharded_soundly(family: str) -> None:
    program = step(family)
    book = Rulebook()
    assert not book.fallbacks(program)
    made = values(program)
    seen, failures, strategies = set(), [], 0
    for i, op in enumerate(program.ops):
        key = signature(op, program.tensors)
        if key in seen:
            continue
        seen.add(key)
        local = dataclasses.replace(op, operands=tuple(range(len(op.operands))))
        shapes = [program.tensors[t].shape for t in op.results]
        for mesh in ((2,), (3,)):
            checked = verify(local, [made[t] for t in op.operands], book.rule(program, i), call, result_shapes=shapes, mesh_shape=mesh)
            strategies += checked.strategies
            failures += map(str, checked.failures)
    assert not failures, "\n".join(failures)
    assert strategies > len(seen)
