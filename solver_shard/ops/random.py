"""Random ops whose draws depend on the seed, the op and the place of each element alone, not on who draws it.

>>> key, name = key_of(seed=1, step=0, number=3), "aten.native_dropout.default"
>>> whole = draw(name, {"input": x, "p": 0.5}, key=key, box=Box((0, 0), (8, 16)), shape=(8, 16), dtype=x.dtype)
>>> part = draw(name, {"input": x[4:], "p": 0.5}, key=key, box=Box((4, 0), (4, 16)), shape=(8, 16), dtype=x.dtype)
>>> torch.equal(part[1], whole[1][4:])
True

So replicas draw the same, shards draw their part of the unsharded mask, and an op that checkpointing executes again draws what it drew
before, in any layout. A draw is a hash of the element's position in the whole tensor with a key per (seed, step, op): no state is kept, no
device makes more than it holds. The unsharded model under the same seed is the model run under ``Unsharded``, which gives its random ops
the same draws:

>>> with Unsharded(seed=1):
...     loss = model(**inputs)

Hash: two rounds of Wellons' ``lowbias32`` finaliser family (constants 0x21f0aaad, 0x735a2d97; github.com/skeeto/hash-prospector), in 64-bit
integers that never overflow. Keys: BLAKE2b. Normal numbers: Box and Muller (1958). A permutation sorts one number per element. Classes
drawn by weight: the largest of weight over an exponential number each, as torch draws them (Efraimidis and Spirakis, 2006). Other
distributions invert their distribution function (Devroye, 1986, chapter 2).

An op of which no part can be drawn alone is drawn whole by torch's own kernel, whose generator gets the key as its seed; it has to be
replicated.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from solver_shard.errors import InputError
from solver_shard.ops import kernels
from solver_shard.ops.shards import Box
from solver_shard.program import Op, Program

Key = tuple[int, int]
Arguments = Mapping[str, Any]
"""Of an op, by name, with tensors in place of references."""

_MASK = 0xFFFFFFFF
_HALF_STEP = 2.0**-25
_DIGITS = 24
"""Binary digits of a draw; whole numbers without a bound have as many, or as the dtype holds where that is fewer."""


def is_random(name: str) -> bool:
    """Whether an op draws from a generator."""
    target: Any = torch.ops
    for part in name.split("."):
        target = getattr(target, part, None)
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def numbers(program: Program) -> dict[int, int]:
    """The random ops of a program, counted in order; those that are executed again have the number of the first time, and the backward
    pass of attention that of its forward pass, whose draws it needs."""
    found: dict[int, int] = {}
    first: dict[tuple[str, ...], int] = {}
    makers = program.producers()
    for i, op in enumerate(program.ops):
        if _is_still(op.name, op.attributes):
            continue
        if op.name in kernels.BACKWARD:
            found[i] = found[_maker(program, makers, op.operands[op.attributes["logsumexp"].operand])]
        elif is_random(op.name):
            key = (op.name, *op.raw) if op.raw else (op.name, str(i))
            found[i] = first.setdefault(key, len(first))
    return found


def draws(program: Program) -> list[tuple[int, ...]]:
    """The shapes of what a step draws, in order; what is executed again draws nothing new."""
    found: dict[int, tuple[int, ...]] = {}
    for i, number in numbers(program).items():
        found.setdefault(number, shape_of(program, i))
    return list(found.values())


def shape_of(program: Program, i: int) -> tuple[int, ...]:
    """The shape of what a random op of a program draws: of its result, or of the scores of attention."""
    op = program.ops[i]
    shape = program.tensors[op.results[0]].shape
    if op.name in kernels.FORWARD + kernels.BACKWARD:
        return (*shape[:3], program.tensors[op.operands[op.attributes["key"].operand]].shape[2])
    return shape


def drawn_box(op: Op, operands: Callable[[int], Box], result: Box) -> Box:
    """The part of what a random op draws that is made where this part of its first result is: of attention's scores, of which the
    op's part of the keys is the last dim; ``operands``: the parts of the operands by position."""
    if op.name not in kernels.FORWARD + kernels.BACKWARD:
        return result
    keys = operands(op.attributes["key"].operand)
    return Box((*result.start[:3], keys.start[2]), (*result.length[:3], keys.length[2]))


def _maker(program: Program, makers: Mapping[int, tuple[int, int]], t: int) -> int:
    """The op that made a tensor, whatever views lie between."""
    i, _ = makers[t]
    while program.ops[i].name in ("aten.view.default", "aten.permute.default"):
        i, _ = makers[program.ops[i].operands[0]]
    return i


def _is_still(name: str, arguments: Arguments) -> bool:
    """Whether a random op draws nothing, called like this."""
    still = arguments.get("dropout_p", 1.0) == 0.0 or (name == "aten.native_dropout.default" and arguments.get("train", True) is False)
    return still or (name.startswith("aten.rrelu_with_noise") and not arguments.get("training", False))


def key_of(seed: int, step: int, number: int) -> Key:
    """The key of one op in one step."""
    digest = hashlib.blake2b(f"{seed} {step} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def drawn_whole(op: Op) -> bool:
    """Whether a random op can only be drawn whole, so that it and what it reads must be replicated."""
    return op.name not in DRAWN


def refuse_cut(op: Op) -> None:
    """InputError for a random op that has to be drawn whole and is cut."""
    legal = ", ".join(sorted(name.removeprefix("aten.") for name in DRAWN))
    raise InputError(
        f"random op {op.name} ({op.module or 'model'}) cannot be drawn shard by shard, and the plan cuts what it reads or makes; pin its "
        f"operands to R on every axis, or draw it outside the model, and give it as an input. Random ops that can be cut: {legal}"
    )


def draw(
    name: str, a: Arguments, *, key: Key, box: Box, shape: Sequence[int], dtype: torch.dtype, device: Any = None
) -> tuple[torch.Tensor, ...]:
    """The results of a random op, in a part of the whole.

    Args:
        a: arguments by name, tensors the local ones.
        box: the part of what is drawn that this is (see ``drawn_box``); all of it for an op that can only be drawn whole.
        shape: of all that is drawn (see ``shape_of``).
        dtype: of the result.
    """
    function = DRAWN.get(name)
    if function is None:
        return _whole(name, a, key)
    tensors = [value for value in a.values() if isinstance(value, torch.Tensor)]
    part = PartDraw(key=key, box=box, shape=tuple(shape), dtype=dtype, device=tensors[0].device if tensors else device)
    return function(part, a)


def kept(a: Arguments, *, key: Key, box: Box, shape: Sequence[int]) -> torch.Tensor:
    """Which scores of attention its dropout leaves; box and shape are those of the scores."""
    return uniform(key, box, shape, a["query"].device) < 1.0 - float(a["dropout_p"])


class PartDraw:
    """Numbers for the elements of a part of a tensor."""

    def __init__(self, *, key: Key, box: Box, shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> None:
        self.key, self.box, self.shape, self.dtype, self.device = key, box, shape, dtype, device

    def uniform(self, salt: int = 0) -> torch.Tensor:
        """In [0, 1), f32; others for other salts."""
        key = self.key if not salt else (self.key[1], self.key[0] ^ (0x5BD1E995 * salt & _MASK))
        return uniform(key, self.box, self.shape, self.device)

    def inner(self) -> torch.Tensor:
        """In (0, 1), f64."""
        return self.uniform().double() + _HALF_STEP

    def normal(self) -> torch.Tensor:
        """Of mean 0 and deviation 1; of complex numbers both parts, of deviation sqrt(1/2)."""
        one, two = self.uniform(), self.uniform(1)
        size, angle = (-2 * (1 - one).log()).sqrt(), 2 * math.pi * two
        return torch.polar(size * math.sqrt(0.5), angle) if self.dtype.is_complex else size * angle.cos()

    def within(self, low: Any, high: int) -> torch.Tensor:
        """Whole numbers in [low, high)."""
        return ((self.uniform().double() * (high - low)).floor().to(torch.int64) + low).clamp(max=high - 1).to(self.dtype)

    def on(self, box: Box, shape: tuple[int, ...]) -> PartDraw:
        """For the elements of another tensor."""
        return PartDraw(key=self.key, box=box, shape=shape, dtype=self.dtype, device=self.device)


def _dropout(draw: PartDraw, a: Arguments) -> tuple[torch.Tensor, ...]:
    x, p = a["input"], float(a["p"])
    keep = draw.uniform() < 1.0 - p
    return x * keep * (0.0 if p == 1.0 else 1.0 / (1.0 - p)), keep


def _uniform(draw: PartDraw, a: Arguments) -> tuple[torch.Tensor, ...]:
    low, high = float(a.get("from", 0.0)), float(a.get("to", 1.0))
    found = torch.complex(draw.uniform(), draw.uniform(1)) if draw.dtype.is_complex else draw.uniform()
    return ((found * (high - low) + low).to(draw.dtype),)


def _normal(draw: PartDraw, a: Arguments) -> tuple[torch.Tensor, ...]:
    return ((draw.normal() * a.get("std", 1.0) + a.get("mean", 0.0)).to(draw.dtype),)


def _log_normal(draw: PartDraw, a: Arguments) -> tuple[torch.Tensor, ...]:
    return ((draw.normal() * a["std"] + a["mean"]).exp().to(draw.dtype),)


def _coins(draw: PartDraw, a: Arguments) -> tuple[torch.Tensor, ...]:
    return ((draw.uniform() < (a["p"] if "p" in a else a["self"])).to(draw.dtype),)


def _whole_numbers(draw: PartDraw, a: Arguments) -> tuple[torch.Tensor, ...]:
    return (draw.within(a.get("low", 0), int(a["high"])),)


def _any_number(draw: PartDraw, a: Arguments) -> tuple[torch.Tensor, ...]:
    """random_: from a bound, or zero, to another, or what the dtype holds."""
    high = a.get("to")
    if high is None and draw.dtype.is_floating_point:
        high = 2 ** min(_DIGITS, round(-math.log2(torch.finfo(draw.dtype).eps)) + 1) + 1
    elif high is None:
        high = 2 if draw.dtype == torch.bool else torch.iinfo(draw.dtype).max
    return (draw.within(a.get("from", 0), int(high)),)


def _exponential(draw: PartDraw, a: Arguments) -> tuple[torch.Tensor, ...]:
    return ((-(draw.inner().log()) / a.get("lambd", 1.0)).to(draw.dtype),)


def _geometric(draw: PartDraw, a: Arguments) -> tuple[torch.Tensor, ...]:
    return ((draw.inner().log() / math.log1p(-a["p"])).ceil().clamp(min=1).to(draw.dtype),)


def _cauchy(draw: PartDraw, a: Arguments) -> tuple[torch.Tensor, ...]:
    return (((math.pi * (draw.inner() - 0.5)).tan() * a.get("sigma", 1.0) + a.get("median", 0.0)).to(draw.dtype),)


def _leak(draw: PartDraw, a: Arguments) -> tuple[torch.Tensor, ...]:
    x, low, high = a["self"], float(a["lower"]), float(a["upper"])
    noise = torch.where(x <= 0, draw.uniform().to(x.dtype) * (high - low) + low, 1)
    return x * noise, noise


def _permutation(draw: PartDraw, a: Arguments) -> tuple[torch.Tensor, ...]:
    """The order of one number each, of which a part is cut."""
    whole = Box((0,), (int(a["n"]),))
    every = draw.on(whole, whole.length)
    order = torch.argsort(every.uniform().double() + every.uniform(1).double() * 2.0**-_DIGITS, stable=True)
    return (order[draw.box.inside(whole)].to(draw.dtype),)


def _classes(draw: PartDraw, a: Arguments) -> tuple[torch.Tensor, ...]:
    """Rows by themselves: one number for each class of a row, or for each sample of it where a class may be drawn twice."""
    weights, count = a["self"].double(), int(a["num_samples"])
    classes = weights.shape[-1]
    if a.get("replacement", False) and count > 1:
        bounds = weights.cumsum(-1)
        return (torch.searchsorted(bounds, draw.uniform().double() * bounds[..., -1:], right=True).clamp(max=classes - 1),)
    rows = draw.on(Box((*draw.box.start[:-1], 0), (*draw.box.length[:-1], classes)), (*draw.shape[:-1], classes))
    return (torch.topk(weights / -(rows.inner().log()), count).indices[..., draw.box.start[-1] : draw.box.start[-1] + draw.box.length[-1]],)


def _attention(draw: PartDraw, a: Arguments) -> tuple[torch.Tensor, ...]:
    """Attention, or its backward pass, whose dropout is that of the scores."""
    return kernels.run(a, keep=kept(a, key=draw.key, box=draw.box, shape=draw.shape))


def _whole(name: str, a: Arguments, key: Key) -> tuple[torch.Tensor, ...]:
    """By torch's own kernel, on whole operands."""
    namespace, base, overload = name.split(".")
    target = getattr(getattr(getattr(torch.ops, namespace), base), overload)
    given = {k: v.contiguous() if isinstance(v, torch.Tensor) else v for k, v in a.items()}
    known = {argument.name for argument in target._schema.arguments}
    with torch.random.fork_rng():
        torch.manual_seed(key[0] << 31 | key[1] >> 1)
        made = target(**{k: v for k, v in given.items() if k in known})
    return (made,) if isinstance(made, torch.Tensor) else tuple(made)


DRAWN: Mapping[str, Callable[[PartDraw, Arguments], tuple[torch.Tensor, ...]]] = {
    "aten.native_dropout.default": _dropout,
    **{f"aten.{name}.{form}": _uniform for name in ("rand", "rand_like") for form in ("default", "generator")},
    **{f"aten.{name}.{form}": _normal for name in ("randn", "randn_like") for form in ("default", "generator")},
    "aten.uniform.default": _uniform,
    "aten.normal_functional.default": _normal,
    **{f"aten.normal.{name}": _normal for name in ("Tensor_Tensor", "Tensor_float", "float_Tensor", "float_float")},
    **{f"aten.bernoulli.{name}": _coins for name in ("p", "default", "Tensor")},
    **{f"aten.randint.{form}": _whole_numbers for form in ("default", "low", "generator", "low_generator")},
    **{f"aten.randint_like.{form}": _whole_numbers for form in ("default", "low_dtype", "generator", "low_generator_dtype")},
    **{f"aten.random.{name}": _any_number for name in ("default", "to", "from")},
    "aten.exponential.default": _exponential,
    "aten.geometric.default": _geometric,
    "aten.cauchy.default": _cauchy,
    "aten.log_normal.default": _log_normal,
    "aten.rrelu_with_noise_functional.default": _leak,
    "aten.randperm.default": _permutation,
    "aten.randperm.generator": _permutation,
    "aten.multinomial.default": _classes,
    **dict.fromkeys((*kernels.FORWARD, *kernels.BACKWARD), _attention),
}
"""Random ops that can be drawn part by part."""


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

    What checkpointing executes again draws what it drew before: torch's generator, which checkpointing sets back, says which draw it is.
    Run the backward pass under it, too, where a model has checkpoints.

    Args:
        seed: the plan's; see ``solver_shard.runtime.apply.reseed``.
        step: how many forward passes the applied model has run since it was seeded.

    Attributes:
        drawn: the shapes of what was drawn, in order; see ``draws``.
    """

    def __init__(self, seed: int, step: int = 0) -> None:
        super().__init__()
        self.seed, self.step = seed, step
        self.drawn: list[tuple[int, ...]] = []
        self._numbers: dict[bytes, int] = {}

    def __torch_dispatch__(self, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        schema = function._schema.arguments
        named = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
        named |= dict(zip((argument.name for argument in schema), args, strict=False)) | kwargs
        draws = torch.Tag.nondeterministic_seeded in function.tags and isinstance(function._schema.returns[0].type, torch.TensorType)
        if not draws or _is_still(str(function), named):
            return function(*args, **kwargs)
        written = [argument.name for argument in schema if argument.alias_info is not None and argument.alias_info.is_write]
        name = _functional(function) if written else str(function)
        tensors = [value for value in named.values() if isinstance(value, torch.Tensor)]
        sizes = named["size"] if "size" in named else (named.get("n", 0),)
        shape = tuple(torch.broadcast_shapes(*(t.shape for t in tensors)) if tensors else sizes)
        if name == "aten.multinomial.default":
            shape = (*tensors[0].shape[:-1], named["num_samples"])
        asked = kwargs.get("dtype")
        dtype = asked or (tensors[0].dtype if tensors else torch.int64 if name in _WHOLE else torch.get_default_dtype())
        key = key_of(self.seed, self.step, self._number(shape))
        made = draw(name, named, key=key, box=Box((0,) * len(shape), shape), shape=shape, dtype=dtype)
        if not written:
            return made if len(made) > 1 else made[0]
        target: torch.Tensor = named[written[0]].copy_(made[-1])
        return target if len(made) == 1 else made[0]

    def _number(self, shape: tuple[int, ...]) -> int:
        """Of the next draw, or of the one that was made when torch's generator was where it is."""
        state = hashlib.blake2b(torch.get_rng_state().numpy().tobytes()).digest()
        torch.empty(()).uniform_()  # the generator moves on
        if state not in self._numbers:
            self._numbers[state] = len(self.drawn)
            self.drawn.append(shape)
        return self._numbers[state]


def _functional(function: Any) -> str:
    """The op that makes what one that writes in place writes."""
    namespace, base, overload = str(function).split(".")
    known = {"normal_": "normal_functional.default", "bernoulli_": "bernoulli.p" if overload == "float" else "bernoulli.Tensor"}
    known["rrelu_with_noise"] = known["rrelu_with_noise_"] = "rrelu_with_noise_functional.default"
    return f"{namespace}.{known.get(base, f'{base.removesuffix(chr(95))}.{overload}')}"


_WHOLE = frozenset(
    f"aten.{name}"
    for name in ("randint.default", "randint.low", "randint.generator", "randint.low_generator", "randperm.default", "randperm.generator")
)
"""Draws of whole numbers, unless they are asked for in another dtype."""
