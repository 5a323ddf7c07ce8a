"""Configs and presets: the right class, sizes and inputs; clear words for anything else."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from traced_models import counts

from solver_shard.errors import InputError
from solver_shard.frontends import huggingface
from solver_shard.frontends.huggingface import PRESETS, load
from solver_shard.frontends.torch import trace

transformers = pytest.importorskip("transformers")

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 29,
}
PARAMETERS = {
    "bert-base": 109_514_298,  # with the masked-language head, without the pooler
    "gpt2": 124_439_808,
    "llama3-405b": 405_853_388_800,
    "llama3-70b": 70_553_706_496,
    "llama3-8b": 8_030_261_248,
    "mixtral-8x7b": 46_702_792_704,
    "vit-base": 86_567_656,
}
"""As published with the checkpoints."""


def write(path: Path, content: Any) -> str:
    file = path / "config.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(file)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_have_the_published_number_of_parameters(preset: str) -> None:
    model, inputs, name = load(preset, batch=2, seq=None if preset == "vit-base" else 16, dtype="bf16")
    assert name == preset
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[preset]
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.training
    assert {t.device.type for t in inputs.values()} == {"meta"}
    assert "labels" in inputs


def test_every_preset_file_is_a_preset() -> None:
    folder = Path(huggingface.__file__).parent / "presets"
    assert tuple(sorted(path.stem for path in folder.iterdir())) == PRESETS


def test_a_config_file_or_its_folder(tmp_path: Path) -> None:
    path = write(tmp_path, LLAMA)
    for source in (path, tmp_path):
        model, inputs, name = load(source, batch=3, seq=5)
        assert type(model).__name__ == "LlamaForCausalLM"
        assert {key: tuple(value.shape) for key, value in inputs.items()} == {"input_ids": (3, 5), "labels": (3, 5)}
        assert name == tmp_path.name
    assert "labels" not in load(path, batch=3, seq=5, labels=False)[1]


def test_causal_attention_needs_no_mask(tmp_path: Path) -> None:
    model, inputs, name = load(write(tmp_path, LLAMA), batch=3, seq=5)
    program = trace(model, inputs, name=name)
    (attention,) = {op.attributes["attn_mask"] for op in program.ops if op.name.endswith("_for_cpu.default")}
    assert attention is None
    assert all(op.attributes["is_causal"] for op in program.ops if op.name.endswith("_for_cpu.default"))
    assert not counts(program)["where"]


def test_a_window_keeps_its_mask(tmp_path: Path) -> None:
    config = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 3, "head_dim": 8}
    model, inputs, name = load(write(tmp_path, config), batch=3, seq=5)
    program = trace(model, inputs, name=name)
    assert all(op.attributes["attn_mask"] is not None for op in program.ops if op.name.endswith("_for_cpu.default"))


@pytest.mark.parametrize(
    ("architecture", "labels"),
    [("BertForMaskedLM", (3, 5)), ("BertForSequenceClassification", (3,)), (None, (3, 5))],
)
def test_labels_by_architecture(tmp_path: Path, architecture: str | None, labels: tuple[int, ...]) -> None:
    config = {key: LLAMA[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")}
    config |= {"model_type": "bert", **({"architectures": [architecture]} if architecture else {})}
    model, inputs, _ = load(write(tmp_path, config), batch=3, seq=5)
    assert tuple(inputs["labels"].shape) == labels
    program = trace(model, inputs, name="bert")
    assert program.tensors[program.outputs[0]].name == "loss"


def test_images(tmp_path: Path) -> None:
    config = {"architectures": ["ViTForImageClassification"], "model_type": "vit", "hidden_size": 32, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 4, "intermediate_size": 48, "image_size": 8, "patch_size": 4, "num_labels": 6}
    model, inputs, _ = load(write(tmp_path, config), batch=3, dtype="bf16")
    assert {key: (tuple(value.shape), value.dtype) for key, value in inputs.items()} == {
        "pixel_values": ((3, 3, 8, 8), torch.bfloat16),
        "labels": ((3,), torch.int64),
    }
    assert trace(model, inputs, name="vit").gradients


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ("no-such-preset", {}, "presets: bert-base, gpt2, llama3-405b"),
    ("{", {}, "is not JSON"),
    ("[" * 20_000, {}, "is not JSON"),
    ("[1]", {}, "one JSON object"),
    ({}, {}, "no 'model_type'"),
    ({"model_type": "llamma"}, {}, "does not know; similar ones: .*llama"),
    (" " * (1 << 20) + "{}", {}, "has more than 1,048,576 bytes"),
    (LLAMA | {"hidden_size": "wide"}, {}, "hidden_size"),
    (LLAMA | {"num_attention_heads": 5}, {}, "LlamaForCausalLM|llama"),
    (LLAMA, {"batch": 0}, "batch 0"),
    (LLAMA, {"batch": 10**12}, "tokens are supported in one step"),
    (LLAMA | {"num_hidden_layers": 10**9}, {}, "at most 4096"),
    (LLAMA, {"seq": None}, "--seq"),
    (LLAMA, {"dtype": "f8"}, "legal: f32, bf16, f16"),
    (LLAMA | {"architectures": ["LlamaModel"]}, {}, "computes no loss"),
    (
        LLAMA | {"architectures": ["NoSuchForCausalLM"]},
        {},
        "names the architecture 'NoSuchForCausalLM', which transformers .* does not have",
    ),
    (LLAMA | {"architectures": [3]}, {}, "names the architecture 3"),
    (LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 4}}, {}, "has a 'quantization_config'; .*take it out"),
    ("vit-base", {}, "seq 4 was asked, but 'vit-base' reads images"),
    ("gpt2", {"seq": 2048}, "at most 1024"),
    ("a" * 5000, {}, "neither a preset nor a config file"),
    ("a\0b", {}, "neither a preset nor a config file"),
]


@pytest.mark.parametrize(("content", "change", "message"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_what_cannot_be_loaded_is_said(tmp_path: Path, content: Any, change: dict[str, Any], message: str) -> None:
    source = content if content in ("no-such-preset", "gpt2", "vit-base", "a" * 5000, "a\0b") else write(tmp_path, content)
    with pytest.raises(InputError, match=message):
        load(source, **({"batch": 2, "seq": 4, "dtype": "f32"} | change))


def test_without_transformers_the_install_line_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"pip install 'solver-shard\[hf\]'"):
        load("gpt2", batch=1, seq=4, dtype="f32")
