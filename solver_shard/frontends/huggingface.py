"""A Hugging Face model from its config.json or a preset name, on the meta device, with the inputs of one training step.

>>> model, inputs, name = load("gpt2", batch=16, seq=1024, dtype="f32")
>>> type(model).__name__, sorted(inputs), tuple(inputs["labels"].shape)
('GPT2LMHeadModel', ['input_ids', 'labels'], (16, 1024))

Nothing is downloaded: a config names its architecture, and the library holds the code of all it knows.
"""

from __future__ import annotations

import importlib.resources
import inspect
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from solver_shard.errors import InputError
from solver_shard.files import read_json, read_text

PRESETS = ("bert-base", "gpt2", "llama3-405b", "llama3-70b", "llama3-8b", "mixtral-8x7b", "vit-base")
"""Names of the configs that ship with this package."""

MAX_CONFIG_BYTES = 1 << 20
MAX_TOKENS = 1 << 40
MAX_LAYERS = 4096
_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
_INSTALL = "pip install 'solver-shard[hf]'"
_ATTENTION = "solver_shard_sdpa"


def load(
    source: str | Path | Mapping[str, Any],
    *,
    batch: int,
    seq: int | None = None,
    dtype: str = "f32",
    labels: bool = True,
    checkpoint: bool = False,
    weights: bool = False,
) -> tuple[nn.Module, dict[str, torch.Tensor], str]:
    """Model (in training mode, on the meta device), inputs by argument name (meta tensors) and a name.

    Args:
        source: one of ``PRESETS``, a config.json, a directory that holds one, or what ``read_config`` returned.
        batch: sequences or images in the whole step, over all devices.
        seq: tokens per sequence; text models need it, image models take their size from the config.
        dtype: f32, bf16 or f16, of parameters and images.
        labels: add labels, so that the model returns a loss.
        checkpoint: checkpoint the activations of every layer, as ``gradient_checkpointing_enable`` does.
        weights: make the model on the CPU, with weights drawn as its class draws them.

    Raises:
        InputError: no such preset or file, not a config, an unknown model type, sizes that do not fit, transformers missing,
            or a model without checkpointing.
    """
    raw, name = (dict(source), str(source.get("model_type"))) if isinstance(source, Mapping) else read_config(source)
    if dtype not in _DTYPES:
        raise InputError(f"dtype {dtype!r} was asked; legal: {', '.join(_DTYPES)}")
    for label, number in (("batch", batch), ("seq", seq)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise InputError(f"{label} {number!r} was asked; give a whole number of at least 1")
    if batch * (seq or 1) > MAX_TOKENS:
        raise InputError(f"batch {batch} of {seq or 1} tokens was asked; at most {MAX_TOKENS} tokens are supported in one step")
    transformers = _transformers()
    with _quiet():
        config = _config(transformers, raw, name)
        model = _model(transformers, config, raw, name, _DTYPES[dtype], weights)
        model.train()
        if checkpoint:
            _checkpoint(model, name)
    return model, _inputs(model, name, batch, seq, _DTYPES[dtype], labels), name


def reads_text(source: str | Path) -> bool:
    """Whether a preset or config is of a model that reads tokens: one without an image size."""
    raw, _ = read_config(source)
    return "image_size" not in raw


def filled_config(source: str | Path) -> dict[str, Any]:
    """The config of a preset, a config.json or its directory, with the settings that it leaves to its model type.

    Raises:
        InputError: as ``load``.
    """
    raw, name = read_config(source)
    with _quiet():
        found = _config(_transformers(), raw, name).to_dict()
    found["architectures"] = raw.get("architectures")
    return {key: value for key, value in found.items() if key not in ("transformers_version", "dtype", "torch_dtype")}


def _checkpoint(model: Any, name: str) -> None:
    """Every layer a checkpointed region."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable  # renamed between releases
    try:
        enable({"use_reentrant": False})
    except ValueError:
        raise InputError(
            f"{type(model).__name__} (config of {name!r}) does not support activation checkpointing; leave --checkpoint out"
        ) from None


def read_config(source: str | Path) -> tuple[dict[str, Any], str]:
    """The config of a preset, a config.json or its directory as a dict, and what to call the model.

    Raises:
        InputError: no such preset or file, or no JSON object.
    """
    text = str(source)
    if text in PRESETS:
        content = importlib.resources.files("solver_shard.frontends").joinpath("presets", f"{text}.json").read_text(encoding="utf-8")
        found: dict[str, Any] = json.loads(content)
        return found, text
    path = Path(source)
    if os.path.isdir(path):
        path = path / "config.json"
    if not os.path.exists(path):
        raise InputError(
            f"{text!r} is neither a preset nor a config file; presets: {', '.join(PRESETS)}; or give the path of a config.json"
        )
    try:
        parsed = read_json(read_text(path, MAX_CONFIG_BYTES))
    except OSError as error:
        raise InputError(f"config {text!r} cannot be read: {error.strerror}; give the path of a readable config.json") from None
    except ValueError as error:
        raise InputError(f"config {text!r} is not JSON: {error}; give a model's config.json") from None
    if not isinstance(parsed, dict):
        raise InputError(f"config {text!r} holds a {type(parsed).__name__}; a config.json is one JSON object with a 'model_type'")
    return parsed, path.resolve().parent.name if path.name == "config.json" else path.stem


def _transformers() -> ModuleType:
    try:
        import transformers
    except ImportError:
        raise InputError(
            f"models from a Hugging Face config need the transformers library, which is not installed; run: {_INSTALL}"
        ) from None
    return transformers


@contextmanager
def _quiet() -> Iterator[None]:
    """Advice that transformers prints about token ids and losses does not concern a plan."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _config(transformers: ModuleType, raw: dict[str, Any], name: str) -> Any:
    kind = raw.get("model_type")
    if not isinstance(kind, str):
        raise InputError(f"config of {name!r} has no 'model_type'; give the config.json of a Hugging Face model")
    known_kinds = list(transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES)
    if kind not in known_kinds:
        close = [known for known in known_kinds if known[:3] == kind[:3]][:8]
        hint = f"; similar ones: {', '.join(close)}" if close else ""
        raise InputError(
            f"config of {name!r} has model_type {kind!r}, which transformers {transformers.__version__} does not know{hint}; code that "
            "ships with a checkpoint is not run; give a config of a known type, or your own model as package.module:function"
        )
    if raw.get("quantization_config") is not None:
        raise InputError(
            f"config of {name!r} has a 'quantization_config'; quantized weights are not planned; take it out to plan the model in --dtype"
        )
    try:
        config = transformers.AutoConfig.for_model(**raw)
    except Exception as error:
        raise InputError(f"config of {name!r} is not a valid {kind!r} config: {type(error).__name__}: {error}; correct it") from None
    layers = getattr(config, "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > MAX_LAYERS:
        raise InputError(f"config of {name!r} has {layers} layers; at most {MAX_LAYERS} are supported")
    if hasattr(config, "use_cache"):
        config.use_cache = False
    return config


_AUTO = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSequenceClassification", "AutoModelForImageClassification")


def _model(transformers: ModuleType, config: Any, raw: dict[str, Any], name: str, dtype: torch.dtype, weights: bool) -> nn.Module:
    """The class that the config names; where it names none, the first of the usual heads that its type has."""
    named = raw.get("architectures") or []
    if named:
        first = named[0] if isinstance(named, list) else named
        cls: Any = getattr(transformers, first, None) if isinstance(first, str) else None
        if not (inspect.isclass(cls) and issubclass(cls, transformers.PreTrainedModel)):
            raise InputError(
                f"config of {name!r} names the architecture {first!r}, which transformers {transformers.__version__} does not have; "
                f"name one of its classes, or take 'architectures' out to get the usual one for {raw['model_type']!r}"
            )
    else:
        for auto in _AUTO:
            mapping = getattr(transformers, auto)._model_mapping
            if type(config) in mapping:
                cls = mapping[type(config)]
                break
        else:
            raise InputError(
                f"config of {name!r} names no architecture with a loss (architectures: {named!r}); give one of its classes in "
                "'architectures', for instance a ...ForCausalLM, or your own model as package.module:function"
            )
    try:
        with torch.device("cpu" if weights else "meta"), nullcontext() if weights else _no_init():
            model = cls._from_config(config, dtype=dtype)
    except Exception as error:
        raise InputError(
            f"building {cls.__name__} from the config of {name!r} failed: {type(error).__name__}: {error}; correct it"
        ) from None
    model.tie_weights()
    _plain_attention(model.config)
    getattr(model, "loss_function", None)  # says once, while nobody listens, that it takes the default
    found: nn.Module = model
    return found


@contextmanager
def _no_init() -> Iterator[None]:
    """Weights on the meta device have no values to set."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:  # moved between releases
        yield
        return
    with no_init_weights():
        yield


def _plain_attention(config: Any) -> None:
    """No mask tensor where none is needed: every token of a step is real, so causal attention is the fused op's own flag.

    While compiling, transformers builds a mask of [batch, 1, query, key] elements for each step because it may not look
    at the values of one; training on full sequences never makes it. Windows and chunks need their mask and keep it.
    """
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    window = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    if getattr(config, "_attn_implementation", None) != "sdpa" or kinds or window or getattr(config, "attention_chunk_size", None):
        return
    know_attention()
    config._attn_implementation_internal = _ATTENTION


def know_attention() -> None:
    """Let models that were made here, in this process or another, find the attention that they name."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    _transformers().AttentionInterface.register(_ATTENTION, sdpa_attention_forward)


def _inputs(model: Any, name: str, batch: int, seq: int | None, dtype: torch.dtype, labels: bool) -> dict[str, torch.Tensor]:
    """One step's inputs, by what the model's class computes."""
    config, kind = model.config, type(model).__name__
    arguments = inspect.signature(model.forward).parameters
    if model.main_input_name == "pixel_values":
        size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", 3)
        if size is None:
            raise InputError(f"config of {name!r} does not say its image_size; add it")
        if seq is not None:
            raise InputError(f"seq {seq} was asked, but {name!r} reads images of the size in its config; leave --seq out")
        height, width = (size, size) if isinstance(size, int) else (size[0], size[1])
        found = {"pixel_values": torch.empty(batch, channels, height, width, dtype=dtype, device="meta")}
    elif model.main_input_name == "input_ids":
        if seq is None:
            raise InputError(f"{name!r} reads text; give the tokens per sequence with --seq")
        limit = getattr(config, "max_position_embeddings", None)
        learned = not any(
            hasattr(config, key) for key in ("rope_theta", "rope_parameters", "rope_scaling", "relative_attention_num_buckets")
        )
        if learned and isinstance(limit, int) and seq > limit:
            raise InputError(f"--seq {seq} was asked, {name!r} has {limit} learned positions; give at most {limit}")
        found = {"input_ids": torch.empty(batch, seq, dtype=torch.int64, device="meta")}
    else:
        raise InputError(f"{kind} reads {model.main_input_name!r}, which is not supported; give your own model as package.module:function")
    if labels:
        if "labels" not in arguments:
            raise InputError(
                f"{kind} (config of {name!r}) computes no loss from labels; name a class with a head in 'architectures', or use "
                "--forward-only"
            )
        per_sequence = found.keys() == {"pixel_values"} or "SequenceClassification" in kind or "MultipleChoice" in kind
        real = per_sequence and getattr(config, "num_labels", 2) == 1
        shape = (batch,) if per_sequence else (batch, seq or 1)
        found["labels"] = torch.empty(shape, dtype=dtype if real else torch.int64, device="meta")
    return found
