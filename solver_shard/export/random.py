"""Random ops whose draws depend on the seed, the op and the place of each element alone, not on who draws it.

>>> whole = draw(op, (x,), key=key_of(seed=1, step=0, number=3), box=Box((0, 0), (8, 16)), shape=(8, 16))
>>> part = draw(op, (x[4:],), key=key_of(seed=1, step=0, number=3), box=Box((4, 0), (4, 16)), shape=(8, 16))
>>> torch.equal(part[1], whole[1][4:])
True

So replicas draw the same, shards draw their part of the unsharded mask, and an op that checkpointing executes again draws what it drew
before, in any layout. A draw is a hash of the element's position in the whole tensor with a key per (seed, step, op): no state is kept, no
device makes more than it holds. The unsharded model under the same seed is the model run under ``Unsharded``, which gives its random ops
the same draws:

>>> with Unsharded(seed=1):
...     loss = model(**inputs)

Hash: two rounds of Wellons' ``lowbias32`` finaliser family (constants 0x21f0aaad, 0x735a2d97; github.com/skeeto/hash-prospector), in 64-bit
integers that never overflow. Keys: BLAKE2b. Normal numbers: Box and Muller (1958).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from solver_shard.errors import InputError
from solver_shard.export.shards import Box
from solver_shard.program import Op, Program

Key = tuple[int, int]

_MASK = 0xFFFFFFFF
_UNIFORM = ("rand.default", "rand_like.default", "uniform.default")
_NORMAL = ("randn.default", "randn_like.default", "normal_functional.default")
_COINS = ("bernoulli.p", "bernoulli.default")
_WHOLE_NUMBERS = ("randint.default", "randint.low", "randint_like.default", "randint_like.low_dtype")
DRAWN = frozenset(f"aten.{name}" for name in ("native_dropout.default", *_UNIFORM, *_NORMAL, *_COINS, *_WHOLE_NUMBERS))
"""Random ops that can be drawn part by part."""


def is_random(name: str) -> bool:
    """Whether an op draws from a generator."""
    target: Any = torch.ops
    for part in name.split("."):
        target = getattr(target, part, None)
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def numbers(program: Program) -> dict[int, int]:
    """The random ops of a program, counted in order; those that are executed again have the number of the first time."""
    found: dict[int, int] = {}
    first: dict[tuple[str, ...], int] = {}
    for i, op in enumerate(program.ops):
        if is_random(op.name) and not _is_still(op.name, op.attributes):
            key = (op.name, *op.raw) if op.raw else (op.name, str(i))
            found[i] = first.setdefault(key, len(first))
    return found


def _is_still(name: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a random op draws nothing, called like this."""
    return arguments.get("dropout_p", 1.0) == 0.0 or (name == "aten.native_dropout.default" and not arguments.get("train", True))


def key_of(seed: int, step: int, number: int) -> Key:
    """The key of one op in one step."""
    digest = hashlib.blake2b(f"{seed} {step} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def check_drawn(op: Op) -> None:
    """InputError for a random op that cannot be drawn part by part."""
    if op.name not in DRAWN:
        legal = ", ".join(sorted(name.removeprefix("aten.") for name in DRAWN))
        raise InputError(
            f"random op {op.name} ({op.module or 'model'}) cannot be drawn shard by shard; random ops that can: {legal}. Draw it outside "
            "the model, and give it as an input"
        )


def draw(
    op: Op, operands: Sequence[torch.Tensor], *, key: Key, box: Box, shape: Sequence[int], dtype: torch.dtype, device: Any = None
) -> tuple[torch.Tensor, ...]:
    """The results of a random op, in a part of the whole.

    Args:
        operands: local tensors.
        box: the part of the (first) result that this is.
        shape: of the whole result.
        dtype: of the result.
    """
    a = op.attributes
    name = op.name.removeprefix("aten.")
    if name == "native_dropout.default":
        x, p = operands[0], float(a["p"])
        keep = uniform(key, box, shape, x.device) < 1.0 - p
        scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
        return x * keep * scale, keep
    where = operands[0].device if operands else device
    if name in _NORMAL:
        mean, deviation = float(a.get("mean", 0.0)), float(a.get("std", 1.0))
        one, two = uniform(key, box, shape, where), uniform((key[1], key[0] ^ 0x5BD1E995), box, shape, where)
        made = (-2 * (1 - one).log()).sqrt() * (2 * math.pi * two).cos()
        return ((made * deviation + mean).to(dtype),)
    found = uniform(key, box, shape, where)
    if name == "bernoulli.p":
        return ((found < float(a["p"])).to(dtype),)
    if name == "bernoulli.default":
        return ((found < operands[0]).to(dtype),)
    if name in _WHOLE_NUMBERS:
        low, high = int(a.get("low", 0)), int(a["high"])
        return (((found.double() * (high - low)).floor().to(torch.int64) + low).clamp(max=high - 1).to(dtype),)
    low_, high_ = float(a.get("from", 0.0)), float(a.get("to", 1.0))
    return ((found * (high_ - low_) + low_).to(dtype),)


def uniform(key: Key, box: Box, shape: Sequence[int], device: Any = None) -> torch.Tensor:
    """Numbers in [0, 1), f32 of 24 bits, for the elements of a part of a tensor of this shape."""
    position = torch.zeros((), dtype=torch.int64, device=device)
    for d, (start, length) in enumerate(zip(box.start, box.length, strict=True)):
        stride = math.prod(shape[d + 1 :])
        along = torch.arange(start, start + length, device=device) * stride
        position = position + along.view(-1, *(1,) * (len(shape) - 1 - d))
    position = position.expand(box.length).clone()
    high = position >> 32
    mixed = _hashed((position & _MASK) ^ key[0])
    mixed = _hashed(mixed ^ ((high + key[1]) & _MASK))
    return (mixed >> 8).to(torch.float32).mul_(2.0**-24)


def _hashed(x: torch.Tensor) -> torch.Tensor:
    """A mixing of 32 bits; the constants are below 2^31, so products stay below 2^63."""
    x = x ^ (x >> 16)
    x = x.mul_(0x21F0AAAD).bitwise_and_(_MASK)
    x = x ^ (x >> 15)
    x = x.mul_(0x735A2D97).bitwise_and_(_MASK)
    return x ^ (x >> 15)


class Unsharded(TorchDispatchMode):  # type: ignore[misc]  # torch is not checked
    """Gives the random ops of an unsharded model, in the order in which they run, the draws that an applied plan makes of them.

    Args:
        seed: the plan's; see ``solver_shard.export.dtensor.reseed``.
        step: how many forward passes the applied model has run since it was seeded.
    """

    def __init__(self, seed: int, step: int = 0) -> None:
        super().__init__()
        self.seed, self.step, self.number = seed, step, 0

    def __torch_dispatch__(self, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        name = str(function)
        in_place = {"aten.bernoulli_.float": "aten.bernoulli.p", "aten.uniform_.default": "aten.uniform.default"}
        known = in_place.get(name, name)
        schema = function._schema.arguments
        named = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
        named |= dict(zip((argument.name for argument in schema), args, strict=False)) | kwargs
        if known not in DRAWN or _is_still(known, named):
            return function(*args, **kwargs)
        key = key_of(self.seed, self.step, self.number)
        self.number += 1
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        shape = tuple(tensors[0].shape) if tensors else tuple(named["size"])
        dtype = kwargs.get("dtype") or (tensors[0].dtype if tensors else torch.get_default_dtype())
        op = Op(name=known, operands=(), results=(), attributes=named)
        made = draw(op, tensors, key=key, box=Box((0,) * len(shape), shape), shape=shape, dtype=dtype)
        if known != name:
            return tensors[0].copy_(made[0])
        return made if len(made) > 1 else made[0]
