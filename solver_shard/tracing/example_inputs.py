"""The inputs of one step of a Hugging Face class: what its forward asks for, in the sizes of its config.

A class says by the names of its arguments what it reads (``input_ids``, ``pixel_values``, ``input_features``, ``labels``, ...), by
``main_input_name`` what it cannot do without, and by its own name which head it has. Each name has its ways to be made below, the
most usual first; where a class leaves open which one it means (mel bins before or after time), the first that it runs on is taken
(see :func:`solver_shard.tracing.huggingface.load`).

What a config does not say is taken as: pictures of 224 x 224 (800 x 800 where objects are found), 10 seconds of sound at 16 kHz or
in frames of 10 ms, 8 objects per picture (36 regions where a model reads those of a detector), 4 choices.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from solver_shard.errors import InputError
from solver_shard.tracing.values import Fixed

PICTURE, SCENE, LINE = 224, 800, (48, 320)
"""Pixels per side of a picture, of one in which objects are found, and height and width of a line of text, where the config does not say
them."""

SAMPLES, FRAMES = 160_000, 1000
"""Samples and frames of 10 seconds of sound."""

SAMPLES_PER_FRAME = 320
"""Where a model reads sound both as samples and as frames of them."""

OBJECTS, CHOICES, REGIONS, TOKENS_PER_SECOND = 8, 4, 36, 10
_TRANSCRIBED = ("CTC", "RNNT", "TDT")
"""Heads that write down what is said, at no given times."""

_TEXT = ("text", "decoder", "llm", "language", "thinker")
_VISION = ("vision", "image", "vit", "backbone", "encoder")
_SOUND = ("audio", "speech", "encoder")


_MERGES = ("spatial_merge_size", "merge_size", "downsample_factor", "pooling_kernel_size")
"""Settings that say how many patches, by rows and by columns, are made one."""


class LengthError(InputError):
    """The length of sequences is missing."""


@dataclass(slots=True, kw_only=True)
class StepRequest:
    """What one step is asked to have, and what the config says of it.

    Attributes:
        configs: the config and those inside it, with the path of each.
        counted: whether ``seq`` was needed.
    """

    model: Any
    name: str
    batch: int
    seq: int | None
    dtype: torch.dtype
    labels: bool
    arguments: Mapping[str, inspect.Parameter] = field(init=False)
    configs: list[tuple[str, Any]] = field(init=False)
    counted: bool = False

    def __post_init__(self) -> None:
        self.arguments = inspect.signature(self.model.forward).parameters
        self.configs = list(_configs(self.model.config, ""))

    @property
    def kind(self) -> str:
        return type(self.model).__name__

    def says(self, *names: str, of: Sequence[str] = ()) -> Any:
        """The first of these settings that the config has: in a part of this kind, in the config itself, in any other part."""
        parts = sorted(self.configs, key=lambda item: not any(word in item[0] for word in of) if item[0] else 0.5)
        for _, config in parts:
            for name in names:
                found = getattr(config, name, None)
                if found is not None:
                    return found
        return None

    def number(self, *names: str, of: Sequence[str] = (), usual: int = 1) -> int:
        """The first such setting that is a number, or the first number of one that is a list."""
        found = self.says(*names, of=of)
        while isinstance(found, list | tuple) and found:
            found = found[0]
        return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else usual

    def tokens(self) -> int:
        """Tokens per sequence."""
        self.counted = True
        if self.seq is None:
            raise LengthError(f"{self.name!r} reads text; give the tokens per sequence with --seq")
        limit = self.says("max_target_positions", "max_position_embeddings", "n_positions", of=_TEXT)
        relative = ("rope_theta", "rope_parameters", "rope_scaling", "relative_attention_num_buckets", "rotary_dim", "rotary", "alibi")
        learned = all(self.says(key, of=_TEXT) in (None, False) for key in relative)
        if learned and isinstance(limit, int) and 0 < limit < self.seq:
            raise InputError(f"--seq {self.seq} was asked, {self.name!r} has {limit} learned positions; give at most {limit}")
        return self.seq

    def has(self, part: str) -> bool:
        """Whether the config has this part: it has where it does not say that there is none."""
        return not any(part in vars(config) and vars(config)[part] is None for _, config in self.configs)

    def long(self, *shape: int) -> torch.Tensor:
        return torch.empty(self.batch, *shape, dtype=torch.int64, device="meta")

    def real(self, *shape: int) -> torch.Tensor:
        return torch.empty(self.batch, *shape, dtype=self.dtype, device="meta")

    def picture(self) -> tuple[int, int]:
        """Height and width of a picture."""
        found = self.says("image_size", "img_size", "input_size", "max_img_size", of=_VISION)
        if isinstance(found, Mapping):
            found = (found.get("height"), found.get("width"))
        if isinstance(found, list | tuple):
            found = tuple(found[:2]) if len(found) > 1 else found[0]
        usual = SCENE if any(word in self.kind for word in ("ObjectDetection", "Segmentation", "Detr")) else PICTURE
        if found is None and "TextRecognition" in self.kind:
            return LINE
        if ratios := self.says("scaled_images_ratios"):
            found = int(self.number("patch_size") / min(ratios))
        pair = found if isinstance(found, tuple) else (found, found)
        height, width = (side if isinstance(side, int) and side > 0 else usual for side in pair)
        if "prompt_masks" in self.arguments:  # the prompt goes above the picture
            height //= 2
        windows = self.number("num_windows", of=_VISION)
        if windows > 1 and min(height, width) > self.patch() * windows:
            height, width = (side - side % (self.patch() * windows) for side in (height, width))
        return height, width

    def channels(self) -> int:
        return self.number("num_channels", "in_channels", "in_chans", "image_num_channels", of=_VISION, usual=3)

    def patch(self) -> int:
        return self.number("patch_size", "vision_patch_size", of=_VISION, usual=16)

    def patches(self) -> tuple[int, int]:
        """Patches of a picture by rows and columns, such that neighbours can be merged."""
        merged = self.patch() * self.number(*_MERGES, of=_VISION, usual=2)
        each = merged // self.patch()
        height, width = self.picture()
        return max(1, height // merged) * each, max(1, width // merged) * each

    def frames(self) -> int:
        """Frames of sound."""
        if "input_values" in self.arguments and "input_features" in self.arguments:
            return self.samples() // SAMPLES_PER_FRAME
        positions = self.says("max_source_positions", of=_SOUND)
        if isinstance(positions, int) and positions > 0:
            halved = self.kind.startswith("Speech2Text")
            return positions if halved else 2 * positions
        return self._clip(FRAMES)

    def samples(self) -> int:
        return self._clip(SAMPLES)

    def _clip(self, usual: int) -> int:
        if self.seq is None or "input_ids" in self.arguments or "decoder_input_ids" in self.arguments:
            return usual
        self.counted = True
        return self.seq

    def mels(self) -> list[int]:
        """Values per frame, by what names configs have for them."""
        names = (
            "num_mel_bins",
            "feature_size",
            "n_mels",
            "input_feat_per_channel",
            "mel_bins",
            "input_feat_size",
            "feature_projection_input_dim",
            "input_dim",
            "input_size",
            "n_mel_channels",
        )
        return list(dict.fromkeys(n for name in names if (n := self.number(name, of=_SOUND, usual=0)))) or [80, 128]

    def mel(self) -> int:
        return self.mels()[0]

    def transcript(self) -> int:
        """Tokens that are said in a clip."""
        return max(
            1, self.samples() * TOKENS_PER_SECOND // 16_000 if "input_values" in self.arguments else self.frames() // TOKENS_PER_SECOND
        )

    def classes(self) -> int:
        return self.number("num_labels", usual=2)


Choice = Sequence[Mapping[str, Any]]
"""Ways to give one argument, or a few that belong together, the most usual first."""


def example_inputs(asked: StepRequest) -> list[list[Choice]]:
    """The inputs of a step, each with the ways to make it; where a class reads pictures or sound with its text, once more without.

    Raises:
        InputError: the class needs something that is not known here, a length is missing or too long, or there is no loss.
    """
    wanted = _wanted(asked)
    choices = [_choice(asked, name) for name in wanted]
    losses: list[Choice] = [_losses(asked)] if asked.labels else []
    if asked.seq is not None and not asked.counted:
        raise InputError(f"seq {asked.seq} was asked, but {asked.name!r} reads {_reads(wanted)} of the size in its config; leave --seq out")
    plain = _wanted(asked, text=True) if "input_ids" in wanted else wanted
    found = [choices + losses]
    if plain != wanted:
        found.append([_choice(asked, name) for name in plain] + losses)
    return found


def _choice(asked: StepRequest, name: str) -> Choice:
    return [{} if value is None else {name: value} for value in _MADE[name](asked)]


def _configs(config: Any, path: str) -> Iterator[tuple[str, Any]]:
    yield path, config
    for key, value in vars(config).items():
        if type(value).__name__.endswith("Config") and hasattr(value, "to_dict"):
            yield from _configs(value, f"{path}.{key}")


def _wanted(asked: StepRequest, *, text: bool = False) -> list[str]:
    """Names of the arguments to give.

    Args:
        text: leave out what is not text and need not be given.
    """
    if type(asked.model).forward is torch.nn.Module.forward:
        raise InputError(
            f"{asked.kind} (config of {asked.name!r}) has no forward: it holds models that run apart; name the class of one of them in "
            "'architectures', with its own config"
        )
    arguments = asked.arguments
    main = asked.model.main_input_name
    mains = [main] if isinstance(main, str) else list(main or ())
    needless = [name for name in MODALITIES if text and name in arguments and arguments[name].default is not inspect.Parameter.empty]
    found = [name for name in mains if name in arguments and name not in needless]
    for name, parameter in arguments.items():
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not variadic and name not in found:
            found.append(name)
    modal = [name for name, part in MODALITIES.items() if name in arguments and name not in (*found, *needless) and asked.has(part)]
    if "input_ids" in found or not found:
        found += modal[:1] if "input_ids" in found else (["input_ids"] if "input_ids" in arguments else modal[:1])
    elif "input_ids" in arguments and "inputs" not in found:
        found += ["input_ids", *(["pixel_values"] if "state" in found and "pixel_values" in arguments else [])]
    for name, needs in _COMPANIONS.items():
        if name in arguments and name not in found and any(need in found for need in needs):
            found.append(name)
    if asked.kind.startswith(_MASKED) and "attention_mask" in arguments:
        found.append("attention_mask")
    if "visual_embeds" in found and "labels" in arguments:
        found.append("attention_mask")
    if "image_grid_thw" in found and "mm_token_type_ids" in found:
        found.append("position_ids")
    spoken = any(word in asked.kind for word in _TRANSCRIBED)
    if spoken and "input_features" in found and "attention_mask" in arguments and "input_ids" not in arguments:
        found.append("attention_mask")
    if spoken and "decoder_input_ids" in arguments:
        found.append("decoder_input_ids")
    shifts = asked.labels and "labels" in arguments and not asked.kind.startswith("Dia")
    if "decoder_input_ids" in arguments and "decoder_input_ids" not in found and not shifts and asked.says("is_encoder_decoder"):
        found.append("decoder_input_ids")
    missing = [name for name in found if name not in _MADE]
    if missing:
        raise InputError(
            f"{asked.kind} (config of {asked.name!r}) reads {', '.join(map(repr, missing))}, which a config says nothing of; give your own "
            "model as package.module:function, which returns (model, inputs) with tensors of your sizes"
        )
    return found


MODALITIES = {
    "pixel_values": "vision_config",
    "pixel_values_videos": "vision_config",
    "input_features": "audio_config",
    "input_values": "audio_config",
}
"""What a model that reads text may read beside it, and the part of the config that says so."""

_MASKED = ("LongT5", "SwitchTransformers")
"""Classes that, while a trace is taken, cannot do without a mask."""

_COMPANIONS = {
    "bbox": ("input_ids",),
    "lengths": ("input_ids",),
    **dict.fromkeys(("actions", "rewards", "returns_to_go", "timesteps"), ("states",)),
    "image_grid_thw": ("pixel_values",),
    "image_grid_hw": ("pixel_values",),
    "grid_thw": ("hidden_states", "pixel_values"),
    "video_grid_thw": ("pixel_values_videos",),
    "image_sizes": ("pixel_values",),
    "spatial_shapes": ("pixel_values",),
    "pixel_attention_mask": ("pixel_values",),
    "high_res_pixel_values": ("pixel_values",),
    "image_embeds_position_mask": ("pixel_values",),
    "image_attention_mask": ("pixel_values",),
    "target_sizes": ("pixel_values",),
    "tgt_sizes": ("pixel_values",),
    "merge_sizes": ("pixel_values",),
    "image_merge_sizes": ("pixel_values",),
    "video_merge_sizes": ("pixel_values_videos",),
    "visual_feats": ("input_ids",),
    "visual_pos": ("input_ids",),
    "visual_embeds": ("input_ids",),
    "visual_attention_mask": ("visual_embeds",),
    "encoder_hidden_states": ("query_embeds",),
    "aspect_ratio_ids": ("pixel_values",),
    "aspect_ratio_mask": ("pixel_values",),
    "mm_token_type_ids": ("pixel_values", "pixel_values_videos", "input_features"),
    "input_features_mask": ("input_features",),
    "feature_attention_mask": ("input_features",),
    "past_time_features": ("past_values",),
    "past_observed_mask": ("past_values",),
    "static_categorical_features": ("past_values",),
    "static_real_features": ("past_values",),
    "future_time_features": ("past_values",),
}
"""What goes with other arguments."""


def _reads(wanted: Sequence[str]) -> str:
    return "images" if any("pixel" in name for name in wanted) else "inputs"


def _input_ids(asked: StepRequest) -> list[Any]:
    tokens = asked.tokens()
    if "MultipleChoice" in asked.kind:
        return [asked.long(CHOICES, tokens)]
    books = asked.number("num_codebooks", usual=0)
    return [asked.long(tokens), *([asked.long(tokens, books), asked.long(books, tokens), asked.long(tokens, books + 1)] if books else [])]


def _decoder_ids(asked: StepRequest) -> list[Any]:
    """Where what is said is predicted at all times, they begin with a blank."""
    if any(word in asked.kind for word in _TRANSCRIBED):
        return [asked.long(asked.transcript() + 1), asked.long(asked.transcript())]
    books = asked.number("num_channels", of=("decoder",), usual=0) if asked.kind.startswith("Dia") else 0
    return [asked.long(asked.tokens(), books)] if books else [asked.long(asked.tokens())]


def _pixels(asked: StepRequest) -> list[Any]:
    (height, width), channels, patch = asked.picture(), asked.channels(), asked.patch()
    frames = asked.number("num_frames", "frames_per_clip", "tubelet_size", of=_VISION, usual=0)
    plain = asked.real(channels, height, width)
    several = [asked.real(count, channels, height, width) for count in dict.fromkeys((max(1, frames), 1, 2))]
    rows, columns = asked.patches()
    each = channels * patch * patch
    over_time = asked.number("temporal_patch_size", of=_VISION, usual=1)
    packed = [asked.real(rows * columns, each).flatten(0, 1)]
    if over_time > 1:
        packed[:0] = [asked.real(rows * columns, each * over_time).flatten(0, 1), asked.real(rows * columns, each * over_time)]
    else:
        packed.append(asked.real(rows * columns, 2 * each).flatten(0, 1))
    packed.append(asked.real(rows * columns, channels, patch, patch).flatten(0, 1))
    packed.append(asked.real(rows * columns, each))
    if asked.kind.startswith("Inkling2"):  # whose grid counts tokens, each of several patches
        side = asked.number(*_MERGES, of=_VISION, usual=2) * patch
        packed.insert(0, asked.real(rows * columns, side, side, channels).flatten(0, 1))
    if any(name in asked.arguments for name in ("image_grid_thw", "grid_thw", "image_grid_hw")):
        return [*packed, plain]
    if "spatial_shapes" in asked.arguments:
        return [asked.real(rows * columns, each), *packed, plain]
    if "aspect_ratio_ids" in asked.arguments:
        tiles = asked.number("max_num_tiles", usual=4)
        return [asked.real(1, tiles, channels, height, width)]
    if "image_sizes" in asked.arguments and asked.says("image_grid_pinpoints") is not None:
        return [asked.real(1 + 2 * 2, channels, 2 * height // 2, 2 * width // 2), plain]
    return [*several, plain, *packed] if frames else [plain, *several, *packed]


def _videos(asked: StepRequest) -> list[Any]:
    (height, width), channels, patch = asked.picture(), asked.channels(), asked.patch()
    frames = asked.number("num_frames", "frames_per_clip", "max_num_frames", of=_VISION, usual=2)
    over_time = asked.number("temporal_patch_size", "tubelet_size", of=_VISION, usual=1)
    if "video_grid_thw" in asked.arguments:
        rows, columns = asked.patches()
        return [asked.real(rows * columns, channels * patch * patch * over_time).flatten(0, 1)]
    return [asked.real(frames, channels, height, width), asked.real(channels, frames, height, width)]


def _grid(asked: StepRequest) -> list[Any]:
    rows, columns = asked.patches()
    return [Fixed(torch.tensor([[1, rows, columns]]).repeat(asked.batch, 1))]


def _grid_flat(asked: StepRequest) -> list[Any]:
    return [Fixed(torch.tensor([list(asked.patches())]).repeat(asked.batch, 1))]


def _picture_sizes(asked: StepRequest) -> list[Any]:
    return [Fixed(torch.tensor([list(asked.picture())]).repeat(asked.batch, 1)), None]


def _picture_mask(asked: StepRequest) -> list[Any]:
    """Of patches where pictures come in patches; else of tiles, where a class cannot do without."""
    if "spatial_shapes" in asked.arguments:
        return [asked.long(math.prod(asked.patches()))]
    return [None, Fixed(torch.ones(asked.batch, 1, dtype=torch.bool))]


def _merge_sizes(asked: StepRequest) -> list[Any]:
    return [Fixed(torch.full((asked.batch,), asked.number("spatial_merge_size", "merge_size", usual=1)))]


def _features(asked: StepRequest) -> list[Any]:
    frames = asked.frames()
    first = [(asked.real(mel, frames), asked.real(frames, mel)) for mel in asked.mels()]
    if asked.kind.startswith("GraniteSpeech5"):  # four frames in one
        first = [(asked.real(4 * mel, frames), asked.real(frames, 4 * mel)) for mel in asked.mels()]
    over_time = asked.says("max_source_positions", of=_SOUND) and not asked.kind.startswith("Speech2Text")
    several = [asked.real(1, frames, asked.mel())] if "is_longer" in asked.arguments else []
    if asked.kind.startswith("VoxtralRealtime") and "input_ids" in asked.arguments:  # as many tokens as are heard
        frames = asked.tokens() * 2 * asked.number("downsample_factor", usual=4)
        first = [(asked.real(mel, frames), asked.real(frames, mel)) for mel in asked.mels()]
    return [*several, *(pair[0 if over_time else 1] for pair in first), *(pair[1 if over_time else 0] for pair in first)]


def _sound(asked: StepRequest) -> list[Any]:
    if asked.says("max_length") and asked.says("num_mel_bins", "frequency_stride"):
        return [asked.real(asked.number("max_length"), asked.mel())]
    return [asked.real(asked.samples()), asked.real(1, asked.samples()), asked.real(asked.frames(), asked.mel())]


def _spectrogram(asked: StepRequest) -> list[Any]:
    return [asked.real(asked.frames(), asked.mel()), asked.real(asked.mel(), asked.frames())]


def _whole_clips(asked: StepRequest) -> list[Any]:
    return [Fixed(torch.ones(asked.batch, asked.frames(), dtype=torch.int64))]


def _past(asked: StepRequest) -> list[Any]:
    length = asked.number("context_length", usual=64) + (max(asked.says("lags_sequence") or [0]))
    channels = asked.number("num_input_channels", "input_size", usual=1)
    return [asked.real(length, channels), asked.real(length)] if channels > 1 or asked.says("num_input_channels") else [asked.real(length)]


def _states(asked: StepRequest) -> list[Any]:
    width = asked.number("hidden_size", "embed_dim", "d_model", usual=64)
    if "grid_thw" in asked.arguments:
        return _pixels(asked)
    if "AcousticTokenizerEncoder" in asked.kind:
        return [asked.real(1, SAMPLES)]
    if "AcousticTokenizer" in asked.kind:
        return [asked.real(width, asked.tokens())]
    return [asked.real(asked.tokens(), width)]


def _mask_of_tokens(asked: StepRequest) -> list[Any]:
    return [asked.long(asked.tokens())]


def _time_features(name: str) -> Callable[[StepRequest], list[Any]]:
    def make(asked: StepRequest) -> list[Any]:
        count = asked.number("num_time_features", usual=0)
        length = asked.number("context_length", usual=64) + (max(asked.says("lags_sequence") or [0]))
        if name == "future":
            length = asked.number("prediction_length", usual=1)
        return [asked.real(length, count)]

    return make


_MADE: Mapping[str, Callable[[StepRequest], list[Any]]] = {
    "input_ids": _input_ids,
    "decoder_input_ids": lambda a: _decoder_ids(a),
    "attention_mask": lambda a: _mask_of_tokens(a) if "input_ids" in a.arguments else _whole_clips(a),
    "token_type_ids": _mask_of_tokens,
    "lengths": lambda a: [Fixed(torch.full((a.batch,), a.tokens()))],
    "mm_token_type_ids": _mask_of_tokens,
    "position_ids": lambda a: [torch.empty(kinds, a.batch, a.tokens(), dtype=torch.int64, device="meta") for kinds in (3, 4)],
    "qformer_input_ids": _mask_of_tokens,
    "bbox": lambda a: [a.long(a.tokens(), 4)],
    "pixel_values": _pixels,
    "pixel_values_videos": _videos,
    "image": _pixels,
    "flattened_patches": lambda a: [a.real(a.number("max_patches", "seq_len", of=_VISION, usual=1024), 2 + a.channels() * a.patch() ** 2)],
    "image_grid_thw": _grid,
    "video_grid_thw": _grid,
    "grid_thw": _grid,
    "image_grid_hw": _grid_flat,
    "spatial_shapes": _grid_flat,
    "image_sizes": _picture_sizes,
    "pixel_attention_mask": _picture_mask,
    "high_res_pixel_values": lambda a: [a.real(a.channels(), *[a.number("image_size", of=("high_res",), usual=SCENE)] * 2)],
    "image_embeds_position_mask": _mask_of_tokens,
    "image_attention_mask": lambda a: [None, *(a.long(a.tokens(), count) for count in (1, 2))],
    "target_sizes": _grid_flat,
    "tgt_sizes": _grid_flat,
    "merge_sizes": _merge_sizes,
    "image_merge_sizes": _merge_sizes,
    "video_merge_sizes": _merge_sizes,
    "visual_feats": lambda a: [a.real(REGIONS, a.number("visual_feat_dim", usual=2048))],
    "visual_pos": lambda a: [a.real(REGIONS, a.number("visual_pos_dim", usual=4))],
    "visual_embeds": lambda a: [a.real(REGIONS, a.number("visual_embedding_dim", usual=2048))],
    "visual_attention_mask": lambda a: [a.long(REGIONS)],
    "pixel_position_ids": lambda a: [Fixed(torch.cartesian_prod(*map(torch.arange, a.patches())).repeat(a.batch, 1, 1))],
    "prompt_pixel_values": _pixels,
    "prompt_masks": _pixels,
    "task_inputs": lambda a: [a.long(a.number("task_seq_len", usual=77))],
    "classes_input_ids": lambda a: [a.long(a.tokens())],
    "classes_attention_mask": lambda a: [a.long(a.tokens())],
    "tasks_input_ids": lambda a: [a.long(a.tokens())],
    "tasks_attention_mask": lambda a: [a.long(a.tokens())],
    "classes_structure": lambda a: [Fixed(torch.ones(a.batch, dtype=torch.int64))],
    "aspect_ratio_ids": lambda a: [Fixed(torch.full((a.batch, 1), 6))],
    "aspect_ratio_mask": lambda a: [a.long(1, a.number("max_num_tiles", usual=4))],
    "input_features": _features,
    "input_values": _sound,
    "audio_values": _sound,
    "input_features_mask": _whole_clips,
    "feature_attention_mask": _whole_clips,
    "spectrogram": _spectrogram,
    "past_values": _past,
    "past_observed_mask": _past,
    "past_time_features": _time_features("past"),
    "future_time_features": _time_features("future"),
    "future_values": lambda a: [a.real(a.number("prediction_length", "horizon_length", usual=1))],
    "static_categorical_features": lambda a: [a.long(n) if (n := a.number("num_static_categorical_features", usual=0)) else None],
    "static_real_features": lambda a: [a.real(n) if (n := a.number("num_static_real_features", usual=0)) else None],
    "freq": lambda a: [a.long(1)],
    "inputs": lambda a: [a.long(a.tokens()), a.real(a.samples()), a.real(a.frames(), a.mel())],
    "latents": lambda a: [a.real(a.number("hidden_size", usual=64), a.frames())],
    "audio_mel": _spectrogram,
    "audio_mel_mask": lambda a: [torch.empty(a.batch, a.frames(), dtype=torch.bool, device="meta")],
    "query_embeds": lambda a: [a.real(a.number("num_query_tokens", usual=32), a.number("hidden_size", usual=64))],
    "encoder_hidden_states": lambda a: [a.real(REGIONS, a.number("encoder_hidden_size", "hidden_size", usual=64))],
    "state": lambda a: [a.real(a.number("max_state_dim", usual=32))],
    "hidden_states": _states,
    "inputs_embeds": _states,
    "states": lambda a: [a.real(a.tokens(), a.number("state_dim"))],
    "actions": lambda a: [
        a.real(a.number("chunk_size"), a.number("max_action_dim")) if "state" in a.arguments else a.real(a.tokens(), a.number("act_dim"))
    ],
    "rewards": lambda a: [a.real(a.tokens(), 1)],
    "returns_to_go": lambda a: [a.real(a.tokens(), 1)],
    "timesteps": _mask_of_tokens,
}
"""By argument: ways to make it, the most usual first."""


def _losses(asked: StepRequest) -> list[dict[str, Any]]:
    """What makes the class return a loss."""
    kind, arguments = asked.kind, asked.arguments
    if "return_loss" in arguments and "labels" not in arguments:
        return [{"return_loss": True}]
    if "start_positions" in arguments and "QuestionAnswering" in kind:
        return [{"start_positions": asked.long(), "end_positions": asked.long()}]
    if "mask_labels" in arguments:
        height, width = asked.picture()
        masks = [torch.empty(OBJECTS, height, width, dtype=asked.dtype, device="meta") for _ in range(asked.batch)]
        classes = [torch.empty(OBJECTS, dtype=torch.int64, device="meta") for _ in range(asked.batch)]
        return [{"mask_labels": masks, "class_labels": classes}]
    if "spectrogram_labels" in arguments and "duration_labels" in arguments:
        one_each = Fixed(torch.ones(asked.batch, asked.tokens(), dtype=torch.int64))
        pitch = asked.real(asked.tokens(), 1)
        return [
            {"spectrogram_labels": asked.real(asked.tokens(), asked.mel()), "duration_labels": one_each, "pitch_labels": pitch}
            | {"energy_labels": pitch}
        ]
    if "state" in arguments and "actions" in arguments:
        return [{"actions": value} for value in _MADE["actions"](asked)]
    if "labels" in arguments:
        found = [{"labels": value} for value in _labels(asked)]
        for extra in ("next_sentence_label", "sentence_order_label"):
            if extra in arguments and kind.endswith("ForPreTraining"):
                found = [{**way, extra: asked.long()} for way in found]
        return found
    if "bool_masked_pos" in arguments and ("Masked" in kind or kind.endswith("ForPreTraining")):
        height, width = asked.picture()
        cells = (height // asked.patch()) * (width // asked.patch())
        return [{"bool_masked_pos": asked.long(cells).bool()}]
    if kind.endswith("ForPreTraining") and "input_ids" not in arguments:
        return [{}]  # masked reconstruction: what is lost is drawn inside
    for name in ("future_values", "target_values"):
        if name in arguments:
            return [{name: value} for value in _targets(asked)]
    raise InputError(
        f"{kind} (config of {asked.name!r}) computes no loss from labels; name a class with a head in 'architectures', or use "
        "--forward-only"
    )


def _targets(asked: StepRequest) -> list[Any]:
    """Numbers to predict from those past."""
    if "Classification" in asked.kind:
        return [asked.long()]
    length = asked.number("prediction_length", "horizon_length", usual=1)
    channels = asked.number("num_input_channels", "input_size", usual=1)
    if "Regression" in asked.kind:
        return [asked.real(asked.number("num_targets", usual=1))]
    return [asked.real(length, channels), asked.real(length)] if asked.says("num_input_channels") else [asked.real(length)]


_PER_EXAMPLE = (
    *("SequenceClassification", "ImageClassification", "VideoClassification", "AudioClassification", "MultipleChoice"),
    *("NextSentencePrediction", "XVector", "ImagesAndTextClassification"),
)


def _labels(asked: StepRequest) -> list[Any]:
    kind = asked.kind
    height, width = asked.picture()
    if any(word in kind for word in _PER_EXAMPLE):
        return [asked.real() if asked.classes() == 1 and "MultipleChoice" not in kind else asked.long()]
    if any(word in kind for word in _TRANSCRIBED):
        return [Fixed(torch.ones(asked.batch, asked.transcript(), dtype=torch.int64)), asked.long(asked.transcript())]
    if "SemanticSegmentation" in kind:
        return [asked.long(height, width)]
    if any(word in kind for word in ("ObjectDetection", "Segmentation", "DetrFor")):
        return [[_objects(asked, height, width, masks="Segmentation" in kind) for _ in range(asked.batch)]]
    if "prompt_masks" in asked.arguments:
        return [asked.real(asked.channels(), height, width)]
    if any(word in kind for word in ("DepthEstimation", "Matting", "ImageSuperResolution", "ImageToImage")):
        return [asked.real(height, width), asked.real(asked.channels(), height, width)]
    if "AudioFrameClassification" in kind:
        return [asked.long(asked.samples() // 320 - 1, asked.classes())]
    if asked.model.main_input_name == "pixel_values" and "input_ids" not in asked.arguments and "decoder_input_ids" not in asked.arguments:
        return [asked.long()]
    if kind.startswith("Vilt") and "QuestionAnswering" in kind:
        return [asked.real(asked.classes())]
    if kind.startswith("Perceiver"):
        return [asked.long(asked.number("max_position_embeddings"))]
    tokens = asked.tokens()
    if "visual_embeds" in asked.arguments:
        return [asked.long(tokens + REGIONS), asked.long(tokens), asked.long()]
    books = asked.number("num_codebooks", usual=0)
    if kind.startswith("Dia"):
        return [asked.long(asked.number("num_channels", of=("decoder",)) * tokens).flatten().unflatten(0, (-1, tokens))]
    return [asked.long(tokens), *([asked.long(tokens, books), asked.long(books, tokens)] if books else []), asked.long()]


def _objects(asked: StepRequest, height: int, width: int, *, masks: bool) -> dict[str, torch.Tensor]:
    """What is to be found in one picture."""
    found = {
        "class_labels": torch.empty(OBJECTS, dtype=torch.int64, device="meta"),
        "boxes": torch.empty(OBJECTS, 4, dtype=asked.dtype, device="meta"),
    }
    return {**found, **({"masks": torch.empty(OBJECTS, height, width, dtype=asked.dtype, device="meta")} if masks else {})}
