"""Two-layer language and vision models: same loss and gradients as the model, and the form the solver needs."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from traced_models import check, counts

from solver_shard.program import Phase, Program, Role

transformers = pytest.importorskip("transformers")

B, T, HEADS, WORDS = 3, 5, 4, 29
IDS = torch.randint(0, WORDS, (B, T))
LABELS = IDS.clone()
LABELS[1, 2] = -100
TEXT = {"input_ids": IDS, "labels": LABELS}
IMAGES = {"pixel_values": torch.randn(B, 3, 8, 8), "labels": torch.tensor([0, 3, 1])}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": HEADS}
DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def build(family: str, **changes: Any) -> torch.nn.Module:
    """A small model of the family in training mode, dropout off."""
    t = transformers
    common = {"vocab_size": WORDS, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    torch.manual_seed(0)
    if family == "gpt2":
        dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
        config = t.GPT2Config(n_layer=2, n_embd=32, n_head=HEADS, n_positions=8, **common, **dropout, **changes)
        model = t.GPT2LMHeadModel(config)
    elif family == "llama":
        model = t.LlamaForCausalLM(t.LlamaConfig(**(SIZES | common | {"num_key_value_heads": 2} | changes)))
    elif family == "bert":
        model = t.BertForMaskedLM(t.BertConfig(**SIZES, **DROPOUT, vocab_size=WORDS, max_position_embeddings=16, **changes))
    else:
        model = t.ViTForImageClassification(t.ViTConfig(**SIZES, **DROPOUT, image_size=8, patch_size=4, num_labels=6, **changes))
    found: torch.nn.Module = model.train()
    return found


def inputs(family: str) -> dict[str, torch.Tensor]:
    return IMAGES if family == "vit" else TEXT


def rows_apart(program: Program) -> None:
    """No tensor has batch and sequence, or batch and heads, in one dim."""
    merged = [t.name for t in program.tensors if B * T in t.shape or B * HEADS in t.shape]
    assert not merged


@functools.cache
def checked(family: str, attention: str) -> Program:
    """The program of the family, after it computed the model's own loss and gradients."""
    return check(build(family, attn_implementation=attention), inputs(family))


@pytest.mark.parametrize(
    ("family", "attention"),
    [("gpt2", "sdpa"), ("llama", "sdpa"), ("bert", "sdpa"), ("vit", "sdpa"), ("llama", "eager"), ("bert", "eager")],
)
def test_loss_and_gradients_are_the_models_own(family: str, attention: str) -> None:
    rows_apart(checked(family, attention))


def test_multi_query_attention() -> None:
    rows_apart(check(build("llama", num_key_value_heads=1, num_hidden_layers=1), TEXT))


def test_grouped_attention_reads_its_few_heads_as_they_are() -> None:
    model = build("llama", num_hidden_layers=1)
    program = check(model, TEXT)
    rows_apart(program)
    (attention,) = (op for op in program.ops if op.name == "aten._scaled_dot_product_flash_attention_for_cpu.default")
    assert [program.tensors[t].shape[1] for t in attention.operands] == [HEADS, 2, 2]
    assert attention.attributes["is_causal"]
    assert not counts(program)["expand"]


def test_mixture_of_experts() -> None:
    config = transformers.MixtralConfig(**SIZES, num_key_value_heads=2, vocab_size=WORDS, use_cache=False, num_local_experts=4)
    config.num_hidden_layers = 1
    torch.manual_seed(0)
    ops = counts(check(transformers.MixtralForCausalLM(config).train(), TEXT, tolerance=1e-5))
    assert ops["topk"] == 1


def test_experts_with_biases() -> None:
    rest = {"num_local_experts": 4, "pad_token_id": 0, "sliding_window": 16, "max_position_embeddings": 64, "use_cache": False}
    config = transformers.GptOssConfig(**SIZES, num_key_value_heads=2, vocab_size=WORDS, head_dim=8, **rest)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    program = check(transformers.GptOssForCausalLM(config).train(), TEXT, tolerance=1e-5)
    rows_apart(program)
    assert counts(program)["grouped_mm"] == 2 * 4  # two products forward, two for the gradients of rows
    assert counts(program)["embedding"] == 1 + 2 * 2  # tokens, and the biases of both products by expert


def test_a_batch_of_one_keeps_its_dim() -> None:
    program = check(build("llama"), {name: value[:1] for name, value in TEXT.items()})
    assert {op.attributes["equation"] for op in program.ops if op.phase is Phase.FORWARD and op.name == "aten.einsum.default"} == {
        "abc,dc->abd"
    }


def test_no_view_stands_between_an_activation_and_a_product_but_heads() -> None:
    for family in ("gpt2", "llama", "bert"):
        program = checked(family, "sdpa")
        for op in program.ops:
            if op.name == "aten.view.default" and len(program.tensors[op.operands[0]].shape) > 2:
                before, after = program.tensors[op.operands[0]].shape, program.tensors[op.results[0]].shape
                head = 32 // HEADS
                split = before[-1] % head == 0 and after == (*before[:-1], before[-1] // head, head)
                merge = after[-1] % head == 0 and before == (*after[:-1], after[-1] // head, head)
                repeats = len(after) == 5 or len(before) == 5
                units = [n for n in before if n != 1] == [n for n in after if n != 1]
                assert split or merge or repeats or units, (family, before, after)


def test_products_of_a_llama_layer() -> None:
    ops = counts(checked("llama", "sdpa"))
    linears = 2 * 7 + 1
    assert ops["einsum"] == 3 * linears
    assert ops["_scaled_dot_product_flash_attention_for_cpu"] == 2
    assert ops["nll_loss_forward"] == ops["nll_loss_backward"] == ops["_log_softmax"] == 1


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_layers_have_equal_ops_and_paths(family: str) -> None:
    program = checked(family, "sdpa")
    stem = {"llama": "model.layers", "bert": "bert.encoder.layer"}[family]
    first, second = (
        Counter(
            (op.name, op.phase, op.module.removeprefix(f"{stem}.{i}"))
            for op in program.ops
            if op.module == f"{stem}.{i}" or op.module.startswith(f"{stem}.{i}.")
        )
        for i in (0, 1)
    )
    assert sum(first.values()) > 20
    assert not second - first
    # what all layers share is written once, in the first: the additive mask and views of rotary tables
    assert {name for name, _, _ in first - second} <= {"aten.view.default", "aten.full.default", "aten.where.self", "aten.expand.default"}


def test_gpt2_ties_its_head() -> None:
    program = checked("gpt2", "sdpa")
    names = [t.name for t in program.tensors if t.role is Role.PARAMETER]
    assert "transformer.wte.weight" in names
    assert "lm_head.weight" not in names
    assert len(program.gradients) == len(names)


def test_dropout_stays_in_training_mode() -> None:
    from solver_shard.tracing.torch import trace

    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=HEADS, n_positions=8, vocab_size=WORDS, bos_token_id=0, eos_token_id=0)
    program = trace(transformers.GPT2LMHeadModel(config).train(), TEXT, name="gpt2")
    ops = counts(program)
    assert ops["native_dropout"] == ops["native_dropout_backward"] == 1 + 2 * 2
    assert {op.attributes["dropout_p"] for op in program.ops if "attention" in op.name} == {0.1}
    rows_apart(program)


def test_other_families_trace() -> None:
    t = transformers
    common = {**SIZES, "num_key_value_heads": 2, "vocab_size": WORDS, "use_cache": False, "head_dim": 8}
    common["num_hidden_layers"] = 1
    common |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    for model in (t.Qwen3ForCausalLM(t.Qwen3Config(**common)), t.Gemma2ForCausalLM(t.Gemma2Config(**common))):
        rows_apart(check(model.train(), TEXT, tolerance=1e-5))
