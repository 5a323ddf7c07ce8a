"""Small models of many public families, on the meta device, with the inputs of one step.

>>> model, inputs = make("llama", attention="eager")
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

WIDTH, HEADS, LAYERS, WORDS, POSITIONS = 64, 8, 2, 512, 64
BATCH, SEQ, IMAGE = 4, 32, 32

_TEXT = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
_BODY = {"hidden_size": WIDTH, "intermediate_size": 128, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
_LONG = {"max_position_embeddings": POSITIONS}
_DECODER = {**_TEXT, **_BODY, **_LONG, "num_key_value_heads": 2, "head_dim": 8, "use_cache": False}
_PICTURE = {"image_size": IMAGE, "patch_size": 8, "num_channels": 3}
_DENSE = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
_T5 = {"d_model": WIDTH, "d_ff": 128, "d_kv": 8, "num_heads": HEADS, "num_layers": LAYERS, "decoder_start_token_id": 0}
_BART = {
    "d_model": WIDTH, "encoder_layers": LAYERS, "decoder_layers": LAYERS, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "decoder_start_token_id": 0,
}  # fmt: skip
_MLA = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}

CONFIGS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {**_TEXT, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": POSITIONS}),
    "llama": ("LlamaForCausalLM", _DECODER),
    "qwen3": ("Qwen3ForCausalLM", _DECODER),
    "gemma2": ("Gemma2ForCausalLM", {**_DECODER, "sliding_window": 16}),
    "mixtral": ("MixtralForCausalLM", {**_DECODER, "num_local_experts": 4}),
    "bert": ("BertForMaskedLM", {**_TEXT, **_BODY, **_LONG}),
    "t5": ("T5ForConditionalGeneration", {**_TEXT, **_T5}),
    "vit": ("ViTForImageClassification", {**_BODY, **_PICTURE, "num_labels": 8}),
    "mistral": ("MistralForCausalLM", {**_DECODER, "sliding_window": 16}),
    "phi3": ("Phi3ForCausalLM", _DECODER),
    "phi": ("PhiForCausalLM", _DECODER),
    "gemma": ("GemmaForCausalLM", _DECODER),
    "gemma3": ("Gemma3ForCausalLM", {**_DECODER, "sliding_window": 16}),
    "olmo2": ("Olmo2ForCausalLM", _DECODER),
    "cohere": ("CohereForCausalLM", _DECODER),
    "stablelm": ("StableLmForCausalLM", _DECODER),
    "starcoder2": ("Starcoder2ForCausalLM", _DECODER),
    "glm4": ("Glm4ForCausalLM", _DECODER),
    "granite": ("GraniteForCausalLM", _DECODER),
    "qwen2-moe": ("Qwen2MoeForCausalLM", {**_DECODER, **_DENSE, "num_experts": 4, "shared_expert_intermediate_size": 64}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {**_DECODER, **_DENSE, "num_experts": 4}),
    "olmoe": ("OlmoeForCausalLM", {**_DECODER, **_DENSE, "num_experts": 4}),
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        {**_DECODER, **_DENSE, **_MLA, "num_key_value_heads": HEADS, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
         "first_k_dense_replace": 1},
    ),
    "gpt-oss": ("GptOssForCausalLM", {**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16}),
    "llama4": (
        "Llama4ForCausalLM",
        {**_DECODER, "intermediate_size_mlp": 128, "num_local_experts": 4, "num_experts_per_tok": 1, "attention_chunk_size": 16,
         "interleave_moe_layer_step": 2},
    ),
    "gpt-neox": ("GPTNeoXForCausalLM", {**_TEXT, **_BODY, **_LONG}),
    "gptj": ("GPTJForCausalLM", {**_TEXT, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": POSITIONS, "rotary_dim": 4}),
    "opt": ("OPTForCausalLM", {**_TEXT, **_LONG, "hidden_size": WIDTH, "ffn_dim": 128, "num_hidden_layers": LAYERS,
                               "num_attention_heads": HEADS, "word_embed_proj_dim": WIDTH}),
    "falcon": ("FalconForCausalLM", {**_TEXT, **_BODY, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "bloom": ("BloomForCausalLM", {**_TEXT, "hidden_size": WIDTH, "n_layer": LAYERS, "n_head": HEADS}),
    "roberta": ("RobertaForMaskedLM", {**_TEXT, **_BODY, **_LONG}),
    "electra": ("ElectraForMaskedLM", {**_TEXT, **_BODY, **_LONG, "embedding_size": 32}),
    "distilbert": ("DistilBertForMaskedLM", {**_TEXT, **_LONG, "dim": WIDTH, "hidden_dim": 128, "n_layers": LAYERS, "n_heads": HEADS}),
    "albert": ("AlbertForMaskedLM", {**_TEXT, **_BODY, **_LONG, "embedding_size": 32}),
    "deberta-v2": ("DebertaV2ForMaskedLM", {**_TEXT, **_BODY, **_LONG, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "bart": ("BartForConditionalGeneration", {**_TEXT, **_BART, **_LONG}),
    "whisper": (
        "WhisperForConditionalGeneration", {**_TEXT, **_BART, "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 64},
    ),
    "clip": ("CLIPModel", {"text_config": {**_TEXT, **_BODY, **_LONG}, "vision_config": {**_BODY, **_PICTURE}, "projection_dim": 32}),
    "swin": ("SwinForImageClassification", {"image_size": 64, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4],
                                            "window_size": 4, "num_labels": 8}),
    "convnext": ("ConvNextForImageClassification", {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "num_labels": 8,
                                                    "image_size": 64}),
    "dinov2": ("Dinov2ForImageClassification", {**_BODY, **_PICTURE, "num_labels": 8}),
    "mamba": ("MambaForCausalLM", {**_TEXT, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4, "use_cache": False}),
    "mamba2": ("Mamba2ForCausalLM", {**_TEXT, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 8, "num_heads": 8, "head_dim": 8,
                                     "n_groups": 2, "chunk_size": 16, "use_cache": False}),
}  # fmt: skip
"""Name of a family to the class that computes its loss, and the config's settings."""

LISTED = ("gpt2", "llama", "qwen3", "gemma2", "mixtral", "bert", "t5", "vit", "resnet-50")
"""Families that must need no fallback."""

FAMILIES = (*LISTED, *sorted(CONFIGS.keys() - set(LISTED)))


def make(
    family: str, *, attention: str | None = None, training: bool = True, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model and the inputs of one step, labels included; dropout is on in training; ``attention`` instead of the family's usual one."""
    if family == "resnet-50":
        with torch.device("meta"):
            return Resnet().train(training), {"pixels": torch.empty(BATCH, 3, 64, 64), "labels": torch.empty(BATCH, dtype=torch.long)}
    import transformers

    architecture, settings = CONFIGS[family]
    cls = getattr(transformers, architecture)
    config = cls.config_class(**settings)
    if attention is not None:
        config._attn_implementation = attention
    with torch.device("meta"):
        model = cls._from_config(config, dtype=dtype)
    return model.train(training), _inputs(family, model, dtype)


USUAL = (
    "big_bird", "codegen", "ernie4_5", "exaone4", "gpt_bigcode", "granitemoe", "lfm2", "mbart", "minimax", "mpt", "olmo3", "pegasus",
    "persimmon", "phimoe", "roformer", "smollm3", "xlm-roberta", "xlnet", "zamba2", "deberta", "fnet", "funnel", "mpnet", "nystromformer",
    "squeezebert", "yoso", "beit", "bit", "data2vec-vision", "deit", "dinov2_with_registers", "efficientnet", "focalnet", "levit",
    "mobilenet_v2", "mobilevit", "poolformer", "pvt", "regnet", "resnet", "segformer", "jetmoe", "longformer",
)  # fmt: skip
"""Model types that are tried at the sizes of their default config, with two layers."""


def usual(kind: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model of a type's default config with the usual head, in training."""
    import transformers

    for auto in ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForImageClassification", "AutoModelForSeq2SeqLM"):
        for config_class, cls in getattr(transformers, auto)._model_mapping.items():
            if config_class.model_type == kind:
                return _usual(config_class(), cls)
    raise ValueError(f"transformers has no model of type {kind!r} with one of the usual heads")


def _usual(config: Any, cls: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers"):
        if isinstance(getattr(config, name, None), int):
            with contextlib.suppress(NotImplementedError, AttributeError):  # some count their layers in another way
                setattr(config, name, 2)
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, 4)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    config.use_cache = False
    with torch.device("meta"):
        model = (cls[0] if isinstance(cls, list | tuple) else cls)._from_config(config)
        if model.main_input_name == "pixel_values":
            size = getattr(config, "image_size", 224)
            size = size if isinstance(size, int) else size[0]
            pixels = torch.empty(BATCH, getattr(config, "num_channels", 3), size, size)
            return model.train(), {"pixel_values": pixels, "labels": torch.empty(BATCH, dtype=torch.long)}
        tokens = torch.empty(BATCH, 64, dtype=torch.long)
        return model.train(), {"input_ids": tokens, "labels": tokens}


def _inputs(family: str, model: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    tokens = torch.empty(BATCH, SEQ, dtype=torch.long, device="meta")
    if family == "clip":
        images = torch.empty(BATCH, 3, IMAGE, IMAGE, dtype=dtype, device="meta")
        return {"input_ids": tokens, "pixel_values": images, "return_loss": True}  # type: ignore[dict-item]
    if family == "whisper":
        return {"input_features": torch.empty(BATCH, 16, 64, dtype=dtype, device="meta"), "labels": tokens}
    if model.main_input_name == "pixel_values":
        size = model.config.image_size
        images = torch.empty(BATCH, 3, size, size, dtype=dtype, device="meta")
        return {"pixel_values": images, "labels": torch.empty(BATCH, dtype=torch.long, device="meta")}
    return {"input_ids": tokens, "labels": tokens}


class Resnet(nn.Module):
    """The shape of a ResNet-50: bottlenecks of 1x1, 3x3 and 1x1 convolutions, batch norms, a strided stem with max pooling."""

    def __init__(self, blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 16, classes: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(_unit(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        stages: list[nn.Module] = []
        inputs = width
        for stage, count in enumerate(blocks):
            inner = width << stage
            for block in range(count):
                stages.append(Bottleneck(inputs, inner, 2 if stage and not block else 1))
                inputs = 4 * inner
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(inputs, classes)

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        features = self.pool(self.stages(self.stem(pixels))).flatten(1)
        return nn.functional.cross_entropy(self.head(features), labels)


class Bottleneck(nn.Module):
    """A residual block."""

    def __init__(self, inputs: int, inner: int, stride: int) -> None:
        super().__init__()
        self.one, self.two, self.three = _unit(inputs, inner, 1), _unit(inner, inner, 3, stride), _unit(inner, 4 * inner, 1)
        self.short: Callable[..., torch.Tensor] = _unit(inputs, 4 * inner, 1, stride) if inputs != 4 * inner else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.three(torch.relu(self.two(torch.relu(self.one(x))))) + self.short(x))


def _unit(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))
