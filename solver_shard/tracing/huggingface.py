"""A Hugging Face model from its config.json or a preset name, on the meta device, with the inputs of one training step.

>>> model, inputs, name = load("gpt2", batch=16, seq=1024, dtype="f32")
>>> type(model).__name__, sorted(inputs), tuple(inputs["labels"].shape)
('GPT2LMHeadModel', ['input_ids', 'labels'], (16, 1024))

Nothing is downloaded: a config names its architecture, and the library holds the code of all it knows.
"""

from __future__ import annotations

import importlib
import importlib.resources
import inspect
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from solver_shard.errors import InputError
from solver_shard.files import read_json, read_text
from solver_shard.tracing.example_inputs import Choice, LengthError, StepRequest, example_inputs
from solver_shard.tracing.values import Constants, hold

PRESETS = ("bert-base", "gpt2", "llama3-405b", "llama3-70b", "llama3-8b", "mixtral-8x7b", "vit-base")
"""Names of the configs that ship with this package."""

MAX_CONFIG_BYTES = 1 << 20
MAX_TOKENS = 1 << 40
MAX_LAYERS = 4096
_LOG = logging.getLogger(__name__)
_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
_INSTALL = "pip install 'solver-shard[hf]'"


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
    """Model (in training mode, on the meta device), inputs by argument name and a name.

    Inputs are meta tensors, lists of them, flags, or ``Fixed`` ones where the model reads their values.

    Args:
        source: one of ``PRESETS``, a config.json, a directory that holds one, or what ``read_config`` returned.
        batch: sequences or images in the whole step, over all devices.
        seq: tokens per sequence, which models of text need, or samples or frames of sound where a model only hears; the sizes of
            pictures and the like are the config's, or those that :mod:`solver_shard.tracing.example_inputs` says.
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
    """Whether a preset or config is of a model that reads tokens, so that the length of sequences has to be given."""
    try:
        load(source, batch=1, labels=False)
    except LengthError:
        return True
    return False


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
        content = importlib.resources.files("solver_shard.tracing").joinpath("presets", f"{text}.json").read_text(encoding="utf-8")
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
    decode = getattr(transformers.PretrainedConfig, "_decode_special_floats", None)  # infinity, as JSON has it
    try:
        config = transformers.AutoConfig.for_model(**(raw if decode is None else decode(raw)))
    except Exception as error:
        raise InputError(f"config of {name!r} is not a valid {kind!r} config: {type(error).__name__}: {error}; correct it") from None
    layers = getattr(config, "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > MAX_LAYERS:
        raise InputError(f"config of {name!r} has {layers} layers; at most {MAX_LAYERS} are supported")
    _settle(config)
    return config


def _settle(config: Any) -> None:
    """A step keeps no cache, and leaves no layer out by chance: it is planned with all that it can be asked to compute.

    Which token starts, fills or stands for a picture makes no difference to a plan, where a class cannot do without one it is the first.
    """
    if getattr(config, "is_encoder_decoder", False):
        for part in filter(None, (config, getattr(config, "decoder", None))):
            for name in ("decoder_start_token_id", "pad_token_id"):
                if getattr(part, name, None) is None:
                    setattr(part, name, 0)
    for name, value in list(vars(config).items()):
        if name == "use_cache":
            config.use_cache = False
        elif value is None and name in _PLACES:
            setattr(config, name, 0)
        elif name.endswith("layerdrop") and isinstance(value, float):
            setattr(config, name, 0.0)
        elif type(value).__name__.endswith("Config") and hasattr(value, "to_dict"):
            _settle(value)


_PLACES = tuple(f"{kind}_token_{end}" for kind in ("image", "video", "audio", "speech") for end in ("id", "index"))
"""Tokens in whose place something else is read."""

_HEADS = (
    *("ForCausalLM", "ForMaskedLM", "ForSeq2SeqLM", "ForSpeechSeq2Seq", "ForCTC", "ForImageTextToText", "ForZeroShotImageClassification"),
    *("ForSequenceClassification", "ForImageClassification", "ForAudioClassification", "ForVideoClassification", "ForObjectDetection"),
    *("ForSemanticSegmentation", "ForUniversalSegmentation", "ForInstanceSegmentation", "ForZeroShotObjectDetection"),
    *("ForQuestionAnswering", "ForTokenClassification", "ForTextToWaveform", "ForTextToSpectrogram", "ForDepthEstimation"),
    *("ForMaskGeneration", "ForMaskedImageModeling", "ForPreTraining", "ForMultimodalLM", "ForTimeSeriesPrediction", "ForImageToImage"),
    "ForTimeSeriesClassification",
)
"""Heads in the order in which a config without architectures gets them."""


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
        return _built(cls, config, name, dtype, weights)
    first_error = None
    for cls in _usual(transformers, config):
        try:
            return _built(cls, config, name, dtype, weights)
        except _OtherConfigError as error:
            first_error = first_error or error
    if first_error is not None:
        raise first_error
    raise InputError(
        f"config of {name!r} names no architecture, and no class is usual for it; give one of its classes in 'architectures', "
        "for instance a ...ForCausalLM, or your own model as package.module:function"
    )


class _OtherConfigError(InputError):
    """The class is made from a part of the config, or of one with other settings, which it only says when it is built."""


def _built(cls: Any, config: Any, name: str, dtype: torch.dtype, weights: bool) -> nn.Module:
    """A model of this class."""
    try:
        with torch.device("cpu" if weights else "meta"), nullcontext() if weights else _no_init():
            model = _with_constants(cls, config, dtype, "cpu" if weights else "meta")
    except ImportError as error:
        raise _needs(cls.__name__, name, error) from None
    except Exception as error:
        other = isinstance(error, AttributeError | AssertionError)
        raise (_OtherConfigError if other else InputError)(
            f"building {cls.__name__} from the config of {name!r} failed: {type(error).__name__}: {error}; correct it"
        ) from None
    model.tie_weights()
    _know_boxes(cls)
    getattr(model, "loss_function", None)  # says once, while nobody listens, that it takes the default
    found: nn.Module = model
    return found


def _needs(kind: str, name: str, error: ImportError) -> InputError:
    missing = " ".join(str(error).split()).split(" library")[0].split()[-1].replace("PIL", "pillow")
    return InputError(
        f"{kind} (config of {name!r}) needs the library {missing!r}, which is not installed; run: pip install {missing}; or give a config "
        "without it"
    )


def _with_constants(cls: Any, config: Any, dtype: torch.dtype, device: str) -> Any:
    """The model with its constants of whole numbers, where these go together with what else it makes."""
    kind = {"attn_implementation": "flex_attention"} if _needs_flex(cls, config) else {}
    try:
        with Constants():
            model = cls._from_config(config, dtype=dtype, **kind)
    except (RuntimeError, NotImplementedError):
        return cls._from_config(config, dtype=dtype, **kind)
    hold(model, device)
    return model


def _needs_flex(cls: Any, config: Any) -> bool:
    """Whether flex_attention is what the class has of fused attention: with soft caps and sinks, and no dropout of weights."""
    asked = getattr(config, "_attn_implementation_internal", None)
    drops = [value for name, value in vars(config).items() if name.endswith(("attention_dropout", "attn_dropout", "attn_pdrop"))]
    return asked is None and not getattr(cls, "_supports_sdpa", True) and getattr(cls, "_supports_flex_attn", False) and not any(drops)


def _know_boxes(cls: Any) -> None:
    """Losses of boxes need one function of the library that it imports only where pictures can be read, too."""
    name = "center_to_corners_format"
    convert = getattr(importlib.import_module("transformers.image_transforms"), name)
    for key, module in list(sys.modules.items()):
        if key == cls.__module__ or key.startswith("transformers.loss."):
            vars(module).setdefault(name, convert)


def _usual(transformers: ModuleType, config: Any) -> Iterator[Any]:
    """Classes of this config's type, the most usual head first; those that are made from a part of the config are none."""
    others = sorted(name.removeprefix("AutoModel") for name in dir(transformers) if name.startswith("AutoModelFor"))
    heads = sorted(
        dict.fromkeys((*_HEADS, *others)), key=lambda head: not (getattr(config, "is_encoder_decoder", False) and "Seq2Seq" in head)
    )
    parts = {type(value) for value in vars(config).values() if type(value).__name__.endswith("Config")}
    for auto in (*(f"AutoModel{head}" for head in heads), "AutoModel", "AutoBackbone"):
        mapping = getattr(getattr(transformers, auto, None), "_model_mapping", {})
        try:
            found = mapping.get(type(config), ())
        except ValueError:  # the library lists a class that it does not have
            continue
        for cls in found if isinstance(found, list | tuple) else (found,):
            try:
                made_from = cls.config_class
            except ImportError as error:  # stands for a class that needs another library
                raise _needs(cls.__name__, config.model_type, error) from None
            if made_from not in parts:
                yield cls


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


def _inputs(model: nn.Module, name: str, batch: int, seq: int | None, dtype: torch.dtype, labels: bool) -> dict[str, Any]:
    """One step's inputs: of the ways to make them, one that the model runs on; where it runs on none, one that gets furthest.

    Arguments are settled one after the other, each by how far the model comes.
    """
    from solver_shard.tracing.torch import BY_VALUE

    asked = StepRequest(model=model, name=name, batch=batch, seq=seq, dtype=dtype, labels=labels)
    sets = example_inputs(asked)
    first = _together([choice[0] for choice in sets[0]])
    if len(sets) == 1 and all(len(choice) == 1 for choice in sets[0]):
        return first
    furthest = first, -1
    for choices in sets:
        found, reached, stopped = _settled(model, name, choices, labels)
        if stopped is None:
            if left := sorted({name for choice in sets[0] for name in choice[0]} - found.keys()):
                _LOG.warning("%r is planned without %s: the class does not run on any that its config says of", name, ", ".join(left))
            return found
        if furthest[1] < 0 or (isinstance(stopped.__cause__, BY_VALUE) and furthest[1] < reached):
            furthest = found, reached
    return furthest[0]


def _settled(model: nn.Module, name: str, choices: Sequence[Choice], labels: bool) -> tuple[dict[str, Any], int, Exception | None]:
    """The ways that get furthest, how far that is, and what stops them."""
    from solver_shard.tracing.torch import progress

    taken = [choice[0] for choice in choices]
    stopped, reached = progress(model, _together(taken), name=name, forward_only=not labels)
    for _ in range(_ROUNDS):
        before = reached
        for i, choice in enumerate(choices):
            for way in choice if stopped is not None else ():
                if way is taken[i]:
                    continue
                tried = [*taken[:i], way, *taken[i + 1 :]]
                error, count = progress(model, _together(tried), name=name, forward_only=not labels)
                if error is None or count > reached:
                    taken, stopped, reached = tried, error, count
                if error is None:
                    break
        if stopped is None or reached == before:
            break
    return _together(taken), reached, stopped


_ROUNDS = 3


def _together(ways: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for way in ways for name, value in way.items()}
