"""A Hugging Face config made small, so that what a plan cuts can still be cut, and what it cannot still cannot.

>>> sizes = Sizes(mesh=Mesh.parse("dp=32,tp=8"), twin=Mesh.parse("dp=2,tp=2"))
>>> sizes.fit(14336, 200), sizes.fit(50257, 200)      # 14336 is a multiple of 256, 50257 is odd
(200, 199)

A size s of the model becomes the number nearest to its target that is a multiple of as many devices of the twin as s is of the plan's
mesh, for every set of axes. Heads of keys and queries, the width of a head and of the model stay in their proportions. Layers become
as many as there are kinds of them. Dropout inside attention is off, for which there is no kernel here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from solver_shard.mesh import Mesh
from solver_shard.plan.plan import Plan

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
_GROUPS = ("num_key_value_heads", "num_kv_heads")
_HEAD = ("head_dim", "d_kv")
_WIDTH = ("hidden_size", "n_embd", "d_model", "dim")
_INNER = (
    *("intermediate_size", "n_inner", "d_ff", "ffn_dim", "hidden_dim", "encoder_ffn_dim", "decoder_ffn_dim"),
    *("moe_intermediate_size", "shared_expert_intermediate_size"),
)
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_CHOSEN = ("num_experts_per_tok", "top_k")
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx")
_WORDS = 512
"""Of a twin's vocabulary at most, where no scale is given."""
_MODEL_WIDTH = 64
_SEQ, _BATCH, _PATCHES = 16, 2, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes on two meshes with the same axes."""

    mesh: Mesh
    twin: Mesh

    def fit(self, size: int, target: float, *, least: int = 1, multiple: int = 1) -> int:
        """The size of a twin that divides as ``size`` does, near the target.

        Args:
            least, multiple: what the answer must be besides; they come first.
        """
        pairs = [
            (math.prod(self.mesh.shape[a] for a in axes), math.prod(self.twin.shape[a] for a in axes))
            for count in range(1, len(self.mesh.axes) + 1)
            for axes in itertools.combinations(range(len(self.mesh.axes)), count)
        ]
        target = min(max(target, 1), size)

        def misfit(found: int) -> tuple[int, int, float, int]:
            lost = sum(size % n == 0 and found % m != 0 for n, m in pairs) + sum(n <= size and found < m for n, m in pairs)
            won = sum(size % n != 0 and found % m == 0 for n, m in pairs)
            return lost, won, abs(found - target), found

        reach = int(target) + 2 * max(self.twin.size, multiple) + least
        candidates = [found for found in range(max(least, 1), reach + 1) if found % multiple == 0] or [multiple]
        return min(candidates, key=misfit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk:
    """A small config, the sizes of a step, and what was changed, for a person to read."""

    config: Mapping[str, Any]
    batch: int
    seq: int | None
    labels: int
    words: int
    changes: tuple[str, ...]


def shrink(config: Mapping[str, Any], plan: Plan, twin: Mesh, scale: Fraction | None) -> Shrunk:
    """The config of a small twin of what a plan is for.

    Args:
        config: with all settings filled in.
        scale: of widths and vocabulary; None for what makes the model 64 wide, with at most 512 words.
    """
    sizes, made = Sizes(mesh=plan.mesh, twin=twin), dict(config)
    batch = sizes.fit((plan.options.batch or 1) // plan.options.microbatches, _BATCH, least=2 if (plan.options.batch or 1) > 1 else 1)
    seq = None if plan.options.seq is None else sizes.fit(plan.options.seq, _SEQ, least=min(8, plan.options.seq))
    _layers(made, config, plan)
    width = next((config[k] for k in _WIDTH if isinstance(config.get(k), int)), _MODEL_WIDTH)
    factor = scale if scale is not None else min(Fraction(1), Fraction(_MODEL_WIDTH, width))
    _heads(made, config, sizes, factor, width)
    for key in _INNER:
        if _is_size(config.get(key)):
            made[key] = sizes.fit(config[key], float(config[key] * factor), least=4)
    chosen = max((config[k] for k in _CHOSEN if _is_size(config.get(k))), default=1)
    for key in _EXPERTS:
        if _is_size(config.get(key)):
            made[key] = sizes.fit(config[key], 4, least=chosen)
    words = _words(made, config, sizes, factor, capped=scale is None)
    labels = _labels(made, config, sizes)
    stored = {tensor.shape[0] for tensor in plan.tensors if tensor.role == "parameter" and tensor.shape}
    for key in _POSITIONS:
        if _is_size(config.get(key)) and stored & {config[key], config[key] + 2}:  # a table of learned positions; some have two more
            made[key] = sizes.fit(config[key], 2 * (seq or 1), least=seq or 1)
    if _is_size(config.get("image_size")) and _is_size(config.get("patch_size")):
        made["patch_size"] = min(config["patch_size"], 4)
        made["image_size"] = made["patch_size"] * min(config["image_size"] // config["patch_size"], _PATCHES)
    dropped = [key for key, value in config.items() if "att" in key and "drop" in key and isinstance(value, float) and value > 0]
    made |= dict.fromkeys(dropped, 0.0)
    return Shrunk(
        config=made,
        batch=batch,
        seq=seq,
        labels=labels if config.get("image_size") else words,
        words=words,
        changes=_said(config, made, plan, batch, seq, twin, dropped),
    )


def kinds_of_layers(plan: Plan) -> int:
    """How many layers from the first on hold one of every kind: stacks are told by the first number in a module's path.

    >>> kinds_of_layers(plan)        # all layers of a Llama are alike; the first block of a T5 has position biases of its own
    1
    """
    ops: dict[str, dict[int, list[object]]] = {}
    for op in plan.ops:
        parts = op.module.split(".")
        at = next((k for k, part in enumerate(parts) if part.isdigit()), None)
        if at is not None and op.phase == "forward":
            held = ops.setdefault(".".join(parts[:at]), {}).setdefault(int(parts[at]), [])
            held.append((op.name, ".".join(parts[at + 1 :]), tuple(plan.tensors[t].shape for t in op.results)))
    least = 1
    for layers in ops.values():
        seen: set[tuple[object, ...]] = set()
        for number in sorted(layers):
            kind = tuple(layers[number])
            if kind not in seen:
                seen.add(kind)
                least = max(least, number + 1)
    return least


def _layers(made: dict[str, Any], config: Mapping[str, Any], plan: Plan) -> None:
    counts = {config[key] for key in _LAYERS if _is_size(config.get(key))}
    least = kinds_of_layers(plan)
    for key in _LAYERS:
        if _is_size(config.get(key)):
            made[key] = min(config[key], least)
    for key, value in config.items():
        if isinstance(value, list | tuple) and len(value) in counts and key != "architectures":
            made[key] = list(value[:least])


def _heads(made: dict[str, Any], config: Mapping[str, Any], sizes: Sizes, factor: Fraction, width: int) -> None:
    """Heads, their width, and the width of the model."""
    groups = next((config[k] for k in _GROUPS if _is_size(config.get(k))), None)
    few = sizes.fit(groups, 1) if groups is not None else None
    heads = next((config[k] for k in _HEADS if _is_size(config.get(k))), 1)
    many = few if few is not None and heads == groups else sizes.fit(heads, 1, least=2 * few if few else 1, multiple=few or 1)
    for key in _GROUPS:
        if few is not None and _is_size(config.get(key)):
            made[key] = few
    for key in _HEADS:
        if _is_size(config.get(key)):
            made[key] = many
    own = next((config[k] for k in _HEAD if _is_size(config.get(k))), width // heads)
    wide = sizes.fit(own, max(4, round(float(width * factor) / (many or 1))), least=min(4, own), multiple=2 if own % 2 == 0 else 1)
    for key in _HEAD:
        if _is_size(config.get(key)):
            made[key] = wide
    for key in _WIDTH:
        if _is_size(config.get(key)):
            made[key] = wide * (many or 1) if own * heads == width else sizes.fit(width, float(width * factor), least=4, multiple=2)


def _words(made: dict[str, Any], config: Mapping[str, Any], sizes: Sizes, factor: Fraction, *, capped: bool) -> int:
    """The vocabulary, and tokens with a meaning inside it."""
    if not _is_size(config.get("vocab_size")):
        return 1
    target = max(float(config["vocab_size"] * factor), 32.0)
    made["vocab_size"] = words = sizes.fit(config["vocab_size"], min(target, _WORDS) if capped else target, least=4)
    for key, value in config.items():
        if key.endswith("_token_id") and isinstance(value, int):
            made[key] = min(value, words - 1)
        elif key.endswith("_token_id") and isinstance(value, list):
            made[key] = [min(item, words - 1) for item in value]
    return words


def _labels(made: dict[str, Any], config: Mapping[str, Any], sizes: Sizes) -> int:
    """The classes that a classifier tells apart."""
    named = config.get("id2label")
    count = config.get("num_labels", len(named) if isinstance(named, Mapping) else 2)
    made.pop("id2label", None)
    made.pop("label2id", None)
    made["num_labels"] = sizes.fit(count, 10)
    return int(made["num_labels"])


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _said(
    config: Mapping[str, Any], made: Mapping[str, Any], plan: Plan, batch: int, seq: int | None, twin: Mesh, dropped: list[str]
) -> tuple[str, ...]:
    layers = [f"{key} {config[key]} -> {made[key]}" for key in _LAYERS if key in config and config[key] != made[key]]
    others = (*_WIDTH, *_HEADS, *_GROUPS, *_HEAD, *_INNER, *_EXPERTS, "vocab_size", *_POSITIONS, "image_size", "patch_size")
    widths = [f"{key} {config[key]} -> {made[key]}" for key in others if key in config and config[key] != made[key]]
    step = [f"batch {plan.options.batch} -> {batch * plan.options.microbatches}"]
    step += [f"seq {plan.options.seq} -> {seq}"] if seq is not None else []
    lines = [f"mesh {plan.mesh} -> {twin}"] if plan.mesh != twin else []
    lines += [", ".join([*layers, "one of each kind"])] if layers else []
    lines += [", ".join(widths)] if widths else []
    lines.append(", ".join(step))
    lines += [f"attention dropout off ({', '.join(dropped)})"] if dropped else []
    return tuple(lines)
