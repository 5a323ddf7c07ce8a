"""Configs and presets: the right class, sizes and inputs; clear words for anything else."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from traced_models import counts, values_of

from solver_shard.errors import InputError, TraceError
from solver_shard.ops.run import run
from solver_shard.tracing import huggingface
from solver_shard.tracing.clean import clean
from solver_shard.tracing.huggingface import PRESETS, load
from solver_shard.tracing.torch import trace, trace_raw

PATH = list(sys.path)
sys.path.append(str(Path(__file__).resolve().parents[2] / "experiments"))
model_types = importlib.import_module("model_types")
sys.path[:] = PATH  # a study of propagation would hide the tests' modules of that name

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


def published(name: str, **sizes: Any) -> dict[str, Any]:
    """The config of a class at its published widths, with few layers."""
    cls = getattr(transformers, name)
    made = cls.config_class(**sizes)
    return {**json.loads(made.to_json_string()), "model_type": made.model_type, "architectures": [name]}


WIDE: list[tuple[str, dict[str, Any], int | None, dict[str, tuple[int, ...]]]] = [
    (
        "WhisperForConditionalGeneration",  # large-v3
        {"d_model": 1280, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 20, "decoder_attention_heads": 20,
         "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120, "num_mel_bins": 128, "vocab_size": 51866},
        448, {"input_features": (2, 128, 3000), "labels": (2, 448)},
    ),
    (
        "CLIPModel",  # ViT-L/14
        {"projection_dim": 768,
         "text_config": {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 1},
         "vision_config": {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 1,
                           "patch_size": 14}},
        77, {"input_ids": (2, 77), "pixel_values": (2, 3, 224, 224)},
    ),
    ("XLNetLMHeadModel", {"n_layer": 1}, 512, {"input_ids": (2, 512), "labels": (2, 512)}),  # large
    (
        "FalconForCausalLM",  # 40B
        {"hidden_size": 8192, "num_attention_heads": 128, "num_kv_heads": 8, "num_hidden_layers": 1, "new_decoder_architecture": True,
         "vocab_size": 65024, "bias": False, "alibi": False},
        2048, {"input_ids": (2, 2048), "labels": (2, 2048)},
    ),
    (
        "DetrForObjectDetection",  # ResNet-50
        {"backbone_config": {"model_type": "resnet", "depths": [1, 1, 1, 1], "out_features": ["stage4"]}, "use_timm_backbone": False,
         "encoder_layers": 1, "decoder_layers": 2},
        None, {"pixel_values": (2, 3, 800, 800)},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "sizes", "seq", "shapes"), WIDE, ids=[row[0] for row in WIDE])
def test_published_configs_of_many_kinds_trace(
    tmp_path: Path, architecture: str, sizes: dict[str, Any], seq: int | None, shapes: dict[str, tuple[int, ...]]
) -> None:
    dtype = "f32" if architecture.startswith("XLNet") else "bf16"  # its positions are f32, which do not go with bf16 weights
    model, inputs, name = load(write(tmp_path, published(architecture, **sizes)), batch=2, seq=seq, dtype=dtype)
    assert {key: tuple(value.shape) for key, value in inputs.items() if isinstance(value, torch.Tensor)} == shapes
    program = trace(model, inputs, name=name)
    assert program.tensors[program.outputs[0]].name == "loss"


def test_a_model_that_mixes_dtypes_says_which_to_ask_for(tmp_path: Path) -> None:
    model, inputs, name = load(write(tmp_path, published("XLNetLMHeadModel", n_layer=1)), batch=2, seq=8, dtype="bf16")
    with pytest.raises(TraceError, match=r"at modeling_xlnet\.py:\d+: .*the model mixes dtypes; ask for f32, as in --dtype f32"):
        trace(model, inputs, name=name)


KINDS = {
    "bert": {"input_ids"},
    "blip-2": {"pixel_values", "input_ids"},  # without an id for pictures' tokens in its config
    "canine": {"input_ids"},
    "data2vec-vision": {"pixel_values"},
    "flaubert": {"input_ids", "lengths"},
    "idefics": {"input_ids", "pixel_values", "image_attention_mask"},  # several arguments, each with ways of its own
    "idefics3": {"input_ids", "pixel_values"},  # leaves pictures out that are all 0
    "informer": {"past_values", "past_time_features", "past_observed_mask", "future_time_features", "future_values"},
    "layoutlm": {"input_ids", "bbox"},
    "llava": {"input_ids", "pixel_values"},
    "longt5": {"input_ids", "attention_mask"},
    "maskformer": {"pixel_values", "mask_labels", "class_labels"},
    "omniasr": {"input_ids", "input_values"},  # leaves layers out by chance
    "qwen2_vl": {"input_ids", "pixel_values", "image_grid_thw", "mm_token_type_ids", "position_ids"},
    "sarvam_mla": {"input_ids"},  # a class of another type
    "segformer": {"pixel_values"},
    "speech_to_text": {"input_features"},
    "videomae": {"pixel_values"},
    "wav2vec2": {"input_values"},  # a loss of alignments
    "yolos": {"pixel_values"},
}
"""Model types of many kinds, and what their steps read beside labels."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_every_kind_of_model_runs(kind: str) -> None:
    row = model_types.study(kind, "run")  # the table of all types is experiments/model_types.md
    assert row["result"] == "plans", row
    assert set(row["inputs"]) - {"labels"} == KINDS[kind]


FORWARD = {
    "gemma4_vision": {"pixel_values", "pixel_position_ids"},  # reads which patches only fill up
    "mimi_encoder": {"input_values"},  # reads strides, which it holds as buffers
    "vibevoice_acoustic_tokenizer_encoder": {"hidden_states"},
}
"""Model types without a loss, and what their steps read."""


@pytest.mark.parametrize("kind", FORWARD)
def test_a_forward_pass_of_every_kind_of_model_runs(kind: str) -> None:
    row = model_types.study(kind, "run")
    assert row["result"] == "plans forward only", row
    assert set(row["inputs"]) == FORWARD[kind]
    assert row["training"].endswith("computes no loss from labels; name a class with a head in 'architectures', or use --forward-only")


STOPPED = {
    "superpoint": (
        r"SuperPointForKeypointDetection has no training step in module .* at modeling_superpoint\.py:\d+: SuperPoint does not support "
        r"training for now; use --forward-only, or give a model of your own with a loss: package\.module:function",
        r"at modeling_superpoint\.py:\d+: it decides by the values of a tensor .* as package\.module:function",
    ),
    "jev": (
        r"reads 'marks', 'num_options', 'question_type_ids', which a config says nothing of; give your own model as package",
        r"reads 'marks', 'num_options', 'question_type_ids', which a config says nothing of; give your own model as package",
    ),
    "tvp": (
        r"TvpModel .* computes no loss from labels",
        r"TvpModel does not run on inputs made from its config \(input_ids \[4, 32\], .*\) in module .* at modeling_tvp\.py:\d+: .*; "
        r"correct the config, or give it with its inputs as package\.module:function, which returns \(model, inputs\)$",
    ),
}
"""Model types that no config makes run: what is said of training, and of forward."""


@pytest.mark.parametrize("kind", STOPPED)
def test_what_does_not_run_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(model_types, "LAYERS", (1,))
    row = model_types.study(kind, "run")
    assert row["result"] == "refused", row
    for reason, pattern in zip((row["training"], row["forward"]), STOPPED[kind], strict=True):
        assert re.search(pattern, reason)
        assert "\n" not in reason


def test_text_alone_is_planned_only_where_pictures_do_not_go_and_said(caplog: pytest.LogCaptureFixture) -> None:
    config = model_types.config_of("musicflamingo", 1)
    assert set(load(config, batch=2, seq=8)[1]) == {"input_ids", "labels"}
    assert "'musicflamingo' is planned without input_features" in caplog.text


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


SMALL = {
    "vocab_size": 31, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 3, "attention_dropout": 0.0, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
OF_FLEX = {
    "gemma2": {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 4},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 64},
}


@pytest.mark.parametrize("kind", OF_FLEX)
def test_soft_caps_sinks_and_windows_are_in_the_fused_op_with_the_classs_own_numbers(kind: str) -> None:
    torch.manual_seed(0)
    model, inputs, name = load({"model_type": kind, **SMALL, **OF_FLEX[kind]}, batch=2, seq=8, weights=True)
    raw = trace_raw(model, inputs, name=name)
    program = clean(raw)
    found = counts(program)
    assert (found["attention"], found["attention_backward"]) == (2, 2)
    assert not [op for op in program.ops if op.name.startswith("aten._softmax") and "self_attn" in op.module]
    given = {key: torch.randint(31, value.shape) for key, value in inputs.items()}
    values = values_of(program, model, {**raw.constants, **given})
    made = run(program, values)
    model.set_attn_implementation("eager")
    loss = model(**given).loss
    loss.backward()
    torch.testing.assert_close(made[program.outputs[0]], loss.detach(), rtol=1e-5, atol=1e-6)
    for p, gradient in program.gradients.items():
        own = model.get_parameter(program.tensors[p].name).grad
        torch.testing.assert_close(made[gradient], own, rtol=1e-3, atol=1e-5, msg=program.tensors[p].name)
