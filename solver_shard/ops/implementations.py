"""Named implementations of ops, as each device runs them on its shard, with the collectives inside.

An implementation is a generator: it gets the op's arguments with local tensors, and its *part* of the factor that the rule
cuts. Where it needs its group it yields a reduction and a buffer, and is given the reduced buffer back:

    def sum_of_rows(a, part):
        total = yield "sum", a["self"].sum(-1, keepdim=True)
        return (total,)

``perform`` runs all devices in lockstep, so that every yield is one all-reduce in every group. Parts may be uneven or empty.

Two reductions are free (``FREE``), for what a real run has in place already: ``offset`` is the sum over the devices before
this one, and ``exchange`` a sum. Rows cut by expert (``own-experts``) lie with their experts in a real run, however many they
are; here they lie in even chunks as their layout says, and are brought to where they would be.

Reductions along a cut dim that no pending sum or maximum can say go by small statistics of every row:

    log-sum-exp          maximum, then sum of exponentials                       class-statistics
    variance, deviation  sum, then squares around the mean                       moment-statistics
    norm of order 2      sum of squares                                          square-statistics
    maximum and where    maximum, then the first position that has it            extreme-statistics

Sources: statistics of a cut normalised dim and the losses of a cut vocabulary are those of Megatron-LM (Shoeybi et al.,
arXiv:1909.08053, section 3, "parallel cross entropy", and its masked embedding); attention with cut queries and gathered keys
and values is the context parallelism of Llama 3 (arXiv:2407.21783, section 3.3.2), here with contiguous queries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from solver_shard.errors import InternalError
from solver_shard.ops import kernels
from solver_shard.ops.run import DTYPES, Shapes, arguments_of, call_with
from solver_shard.program import Op
from solver_shard.tracing.attention import ATTENTION, ATTENTION_BACKWARD

Results = tuple[torch.Tensor, ...]
Running = Generator[tuple[str, torch.Tensor], torch.Tensor, Results]


def log_sum_exp(_op: Op, a: dict[str, Any], _part: Part) -> Running:
    """The maximum keeps the exponentials in range, as in a softmax."""
    x, dim = a["self"], _dim(a)
    wide = x.to(_accumulation_dtype(x))
    bottom = wide.new_full([1 if d == dim else n for d, n in enumerate(x.shape)], float("-inf"))
    top = yield "max", torch.cat([wide, bottom], dim).amax(dim, keepdim=True)
    shift = top.masked_fill(top.isinf(), 0)
    total = yield "sum", (wide - shift).exp().sum(dim, keepdim=True)
    result = total.log() + shift
    return ((result if a.get("keepdim") else result.squeeze(dim)).to(x.dtype),)


def moments(op: Op, a: dict[str, Any], part: Part) -> Running:
    """The mean first, then the squares around it: sums of plain squares lose the variance of numbers far from zero."""
    x, dim = a["self"], _dim(a)
    wide = x.to(_accumulation_dtype(x))
    mean = (yield "sum", wide.sum(dim, keepdim=True)) / part.size
    squares = yield "sum", (wide - mean).square().sum(dim, keepdim=True)
    correction = a.get("correction", 1 if a.get("unbiased", True) else 0)
    found = squares / max(part.size - (1 if correction is None else correction), 0)
    found = found.sqrt() if ".std" in op.name else found
    made = (found, mean) if "var_mean" in op.name else (found,)
    return tuple((t if a.get("keepdim") else t.squeeze(dim)).to(x.dtype) for t in made)


def root_of_squares(_op: Op, a: dict[str, Any], _part: Part) -> Running:
    """Of one dim, or of several."""
    x, dims = a["self"], _dims(a)
    total = yield "sum", x.to(_accumulation_dtype(x)).square().sum(dims, keepdim=True)
    result = total.sqrt()
    return ((result if a.get("keepdim") else result.squeeze(dims)).to(x.dtype),)


def extreme(op: Op, a: dict[str, Any], part: Part) -> Running:
    """The largest (or smallest) value of every row, and the first position that has it; positions win as smaller numbers do."""
    x, dim = a["self"], _dim(a)
    sign = -1 if "min" in op.name else 1
    shape = [1 if d == dim else n for d, n in enumerate(x.shape)]
    lowest = float("-inf") if x.is_floating_point() else torch.iinfo(x.dtype).min + 1
    best = yield "max", torch.cat([sign * x, x.new_full(shape, lowest)], dim).amax(dim, keepdim=True)
    position = torch.arange(part.start, part.start + x.shape[dim]).reshape([-1 if d == dim else 1 for d in range(x.ndim)])
    here = torch.where(sign * x == best, -position, -part.size)
    none = torch.full(shape, -part.size)
    where = -(yield "max", torch.cat([here, none], dim).amax(dim, keepdim=True))
    made = (where,) if "arg" in op.name else (sign * best, where)
    return tuple(t if a.get("keepdim") else t.squeeze(dim) for t in made)


def _dim(a: dict[str, Any]) -> int:
    """The one dim, from the front."""
    dim = a["dim"][0] if isinstance(a["dim"], tuple | list) else a["dim"]
    return int(dim) % int(a["self"].ndim)


def _dims(a: dict[str, Any]) -> tuple[int, ...]:
    """The reduced dims, from the front."""
    rank, dim = a["self"].ndim, a.get("dim")
    return tuple(d % rank for d in dim) if dim else tuple(range(rank))


def _accumulation_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


AllReduce = Callable[[str, Sequence[torch.Tensor]], Sequence[torch.Tensor]]
"""``(reduction, buffer per device) -> reduced buffer per device``, within the groups that share the cut; see ``FREE``."""


FREE = ("offset", "exchange")
"""Reductions that stand for no collective."""


def free(kind: str, buffers: Sequence[torch.Tensor], teams: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """One of ``FREE`` within teams of devices, each in the order of the cut."""
    made = list(buffers)
    for team in teams:
        total = torch.zeros_like(buffers[team[0]])
        for device in team:
            made[device] = total
            total = total + buffers[device]
        if kind == "exchange":
            for device in team:
                made[device] = total
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one device has of the factor: ``[start, start + length)`` of ``size``."""

    start: int
    length: int
    size: int

    def own(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Which positions lie in the part, and where in it (0 for those that do not)."""
        here = (index >= self.start) & (index < self.start + self.length)
        return here, torch.where(here, index - self.start, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How to run an implementation of an op, and which dim it cuts: of this argument, or of the first result.

    ``run`` gets the op's arguments, and among them ``shapes``, those of the local results, and where it may write into its operand 0
    (``program.in_place``) ``inside``.
    """

    run: Callable[[Op, dict[str, Any], Part], Running | Results]
    argument: str | None
    dim: int | str
    """Counted from either end, or the argument that says it; of ``indices`` the first that is indexed."""

    def cut(self, op: Op, ranks: Sequence[int], rank: int) -> tuple[int | None, int]:
        """The operand (None: the first result) and its dim that is cut; from the ranks of operands and first result."""
        dim = op.attributes.get(self.dim) if isinstance(self.dim, str) else self.dim
        if self.dim == "indices":
            dim = next(d for d, index in enumerate(op.attributes["indices"]) if index is not None)
        if not isinstance(dim, int):
            dim = dim[0] if dim else 0  # reductions over several dims do not ask for their part
        if self.argument is None:
            return None, dim % rank
        operand = op.attributes[self.argument].operand
        return operand, dim % ranks[operand]


def way_of(name: str, op: Op) -> Way:
    """What runs under this name; InternalError where an op has no such implementation."""
    found = WAYS.get((name.partition(":")[0], op.name))
    if found is None:
        raise InternalError(f"{op.name} has no implementation {name!r} that runs here")
    return found


def perform(
    name: str,
    op: Op,
    operands: Sequence[Sequence[torch.Tensor]],
    parts: Sequence[Part],
    shapes: Sequence[Shapes],
    dtypes: Sequence[torch.dtype],
    all_reduce: AllReduce,
) -> list[Results]:
    """Run an implementation on all devices.

    Args:
        name: of the implementation.
        operands: by device, the local tensors.
        parts: by device, its part of the dim that is cut.
        shapes: by device, the local shapes of the results.
        dtypes: of the results (kernels differ in that of statistics).
        all_reduce: does the collectives inside.

    Returns:
        By device, the results.

    Raises:
        InternalError: there is no such implementation, devices differ in their collectives, or a result has another shape.
    """
    way = way_of(name, op)
    given = zip(operands, parts, shapes, strict=True)
    states = [way.run(op, arguments_of(op, local) | {"shapes": wanted}, part) for local, part, wanted in given]
    made = [state for state in states if isinstance(state, tuple)]
    running = [state for state in states if not isinstance(state, tuple)]
    reduced: Sequence[torch.Tensor | None] = [None] * len(running)
    while len(made) < len(states):
        asked = []
        for state, buffer in zip(running, reduced, strict=True):
            try:
                asked.append(state.send(buffer) if buffer is not None else next(state))
            except StopIteration as end:
                made.append(end.value)
        if asked:
            kinds = {reduction for reduction, _ in asked}
            if len(asked) < len(states) or len(kinds) > 1:
                raise InternalError(f"devices differ in the collectives of {name!r}")
            reduced = all_reduce(kinds.pop(), [buffer.contiguous() for _, buffer in asked])
    for results, wanted in zip(made, shapes, strict=True):
        found = [tuple(result.shape) for result in results]
        if found != [tuple(shape) for shape in wanted]:
            raise InternalError(f"{name!r} of {op.name} gave results of shapes {found}, expected {[tuple(shape) for shape in wanted]}")
    return [tuple(result.to(dtype) for result, dtype in zip(results, dtypes, strict=True)) for results in made]


# Picking and placing rows of a cut vocabulary.


def _masked_lookup(_op: Op, a: dict[str, Any], part: Part) -> Results:
    weight = a["weight"]
    if not part.length:
        return (weight.new_zeros((*a["indices"].shape, weight.shape[1])),)
    here, index = part.own(a["indices"])
    return (torch.where(here.unsqueeze(-1), weight[index], 0),)


def _own_rows(op: Op, a: dict[str, Any], part: Part) -> Results:
    """What belongs to others is gathered in one row more, which is dropped."""
    here, index = part.own(a["indices"])
    padding = a["padding_idx"] - part.start
    changed = {
        "indices": torch.where(here, index, part.length),
        "num_weights": part.length + 1,
        "padding_idx": padding if 0 <= padding < part.length else -1,
    }
    (gradient,) = call_with(op, a | changed, ((part.length + 1, a["grad_output"].shape[-1]),))
    return (gradient[: part.length],)


def _masked_bags(_op: Op, a: dict[str, Any], part: Part) -> Results:
    """Rows of others count as zeros; which indices are padding, and how many each bag has, is known to all."""
    shapes, weight = a["shapes"], a["weight"]
    here, own = part.own(a["indices"])
    padded = a["indices"] == a["padding_idx"]
    rows = torch.cat([weight, weight.new_zeros((2, weight.shape[1]))])
    index = torch.where(padded, part.length + 1, torch.where(here, own, part.length))
    changed = a | {"weight": rows, "indices": index, "padding_idx": part.length + 1}
    count = shapes[0][0]
    return kernels.embedding_bag(changed, count), *kernels.bag_results(a, count, shapes)


def _own_bags(_op: Op, a: dict[str, Any], part: Part) -> Results:
    """Every device looks at all indices, and adds up the rows of its own bags."""
    made = kernels.embedding_bag(a, part.size, part.own, part.length)
    return made, *kernels.bag_results(a, part.size, a["shapes"])


def _own_bag_rows(_op: Op, a: dict[str, Any], part: Part) -> Results:
    """What belongs to others is gathered in one row more, which is dropped."""
    padded = a["indices"] == a["padding_idx"]
    here, own = part.own(a["indices"])
    if a["scale_grad_by_freq"]:
        often = torch.bincount(a["indices"], minlength=part.size)[a["indices"]]
        a = a | {"per_sample_weights": 1.0 / often.to(a["grad"].dtype), "scale_grad_by_freq": False}
    index = torch.where(here & ~padded, own, part.length)
    changed = a | {"indices": torch.where(padded, part.length + 1, index), "num_weights": part.length + 2, "padding_idx": part.length + 1}
    return (kernels.embedding_bag_backward(changed, a["bag_size"].shape[0])[: part.length],)


def _own_bag_gradients(_op: Op, a: dict[str, Any], part: Part) -> Results:
    return (kernels.embedding_bag_backward(a, part.size, part.own),)


def _masked_take(_op: Op, a: dict[str, Any], part: Part) -> Results:
    source, index = a["self"], a["index"]
    here, own = part.own(index)
    if not part.length or not source.numel():
        return (source.new_zeros((*index.shape, *source.shape[2:])),)
    return (torch.where(here.reshape(*here.shape, *(1,) * (source.ndim - 2)), kernels.take(source, own), 0),)


def _masked_gather(op: Op, a: dict[str, Any], part: Part) -> Results:
    """gather and index_select along a cut dim."""
    x, dim = a["self"], _dim(a)
    here, index = part.own(a["index"])
    if "index_select" in op.name:
        here = here.reshape([-1 if d == dim else 1 for d in range(x.ndim)])
        if not part.length:
            return (x.new_zeros([index.numel() if d == dim else n for d, n in enumerate(x.shape)]),)
        return (torch.where(here, x.index_select(dim, index), 0),)
    return (torch.where(here, x.gather(dim, index), 0) if part.length else x.new_zeros(index.shape),)


def _own_places(op: Op, a: dict[str, Any], part: Part) -> Results:
    """scatter along a cut dim: what belongs to others is left out."""
    dim, (here, index) = _dim(a), part.own(a["index"])
    x = _target(a)
    if "reduce" in op.name:  # what belongs to others is gathered in one row more, which is dropped
        more = torch.cat([x, x.new_zeros([1 if d == dim else n for d, n in enumerate(x.shape)])], dim)
        (made,) = call_with(op, a | {"self": more, "index": torch.where(here, index, part.length)}, (more.shape,))
        return (made.narrow(dim, 0, part.length),)
    at = list(here.nonzero(as_tuple=True))
    at[dim] = index[here]
    source = a.get("src")
    values = torch.as_tensor(a["value"], dtype=x.dtype) if source is None else source[tuple(slice(n) for n in index.shape)][here]
    return (x.index_put_(at, values, accumulate="add" in op.name),)


def _own_copies(op: Op, a: dict[str, Any], part: Part) -> Results:
    """index_copy and index_add along a cut dim."""
    dim, (here, index) = _dim(a), part.own(a["index"].reshape(-1))
    x, rows = _target(a), here.nonzero().squeeze(-1)
    source = a["source"].index_select(dim, rows)
    if "add" in op.name:
        return (x.index_add_(dim, index[rows], source, alpha=a.get("alpha", 1)),)
    return (x.index_copy_(dim, index[rows], source),)


def _own_puts(_op: Op, a: dict[str, Any], part: Part) -> Results:
    """index_put of one index, whose dim is cut."""
    dim = next(d for d, given in enumerate(a["indices"]) if given is not None)
    here, index = part.own(a["indices"][dim])
    x, values = _target(a), a["values"]
    shape = (*x.shape[:dim], *index.shape, *x.shape[dim + 1 :])
    chosen = values.expand(shape).movedim(tuple(range(dim, dim + index.ndim)), tuple(range(index.ndim)))[here]
    x.movedim(dim, 0).index_put_((index[here],), chosen, accumulate=bool(a.get("accumulate")))
    return (x,)


def _own_masked_rows(_op: Op, a: dict[str, Any], part: Part) -> Results:
    """masked_scatter along a cut dim 0: how many elements come before is counted in the whole mask."""
    x, source = a["self"], a["source"]
    here, place, tail = _places(a["mask"], x, part)
    rows = source.reshape(-1, *x.shape[x.ndim - tail :])
    if not rows.shape[0]:
        return (x.clone(),)
    return (torch.where(here.reshape(*here.shape, *(1,) * tail), rows[place.clamp(0, len(rows) - 1)], x),)


def _own_masked_gradients(_op: Op, a: dict[str, Any], part: Part) -> Results:
    gradient, shape = a["grad_output"], a["shapes"][0]
    here, place, tail = _places(a["mask"], gradient, part)
    rows = gradient.new_zeros(shape).reshape(-1, *gradient.shape[gradient.ndim - tail :])
    here = here & (place < len(rows))
    return (rows.index_add_(0, place[here], gradient[here]).reshape(shape),)


def _places(mask: torch.Tensor, over: torch.Tensor, part: Part) -> tuple[torch.Tensor, torch.Tensor, int]:
    """This device's part of a mask, which element of the source stands at each place, and how many dims an element has."""
    tail = 0
    while tail < min(mask.ndim, over.ndim) and mask.shape[-1 - tail] == 1 and over.shape[-1 - tail] != 1:
        tail += 1
    lead = over.shape[1 : over.ndim - tail]
    whole = mask.reshape(mask.shape[: mask.ndim - tail]).expand(part.size, *lead)
    places = whole.flatten().cumsum(0).reshape(whole.shape) - 1
    own = slice(part.start, part.start + part.length)
    return whole[own], places[own], tail


def _own_diagonal(_op: Op, a: dict[str, Any], part: Part) -> Results:
    return (a["self"].diagonal(part.start).sum(),)


def _own_columns_diagonal(_op: Op, a: dict[str, Any], part: Part) -> Results:
    return (a["self"].diagonal(-part.start).sum(),)


def _target(a: dict[str, Any]) -> torch.Tensor:
    """What is written into: the operand itself where nothing else needs it (``inside``), else a copy."""
    x: torch.Tensor = a["self"]
    return x if a.get("inside") else x.clone()


# Products of a device's own experts.


def _own_experts(op: Op, a: dict[str, Any], part: Part) -> Running:
    """Rows that lie with other devices are brought here; those of own experts are multiplied and brought back."""
    left, right, ends = a["self"], a["mat2"], a["offs"]
    flat = op.name == "aten._grouped_mm.default"
    weights = right.ndim == 2 if flat else "weights" in op.name
    if flat:
        left, right, ends = (left.T if weights else left).unsqueeze(0), right.unsqueeze(0) if weights else right, ends.unsqueeze(0)
    start, left = yield from _all_rows(left, ends)
    if weights:
        _, right = yield from _all_rows(right, ends)
        return (kernels.weight_products(left, right, ends, part.start, part.length),)
    length = a["self"].shape[-2]
    full = yield "exchange", kernels.row_products(left, right, ends, part.start)
    made = full[:, start : start + length]
    return (made.squeeze(0) if flat else made,)


def _all_rows(own: torch.Tensor, ends: torch.Tensor) -> Generator[tuple[str, torch.Tensor], torch.Tensor, tuple[int, torch.Tensor]]:
    """Where the rows of this device begin, and those of all devices."""
    length = own.shape[1]
    offset = yield "offset", torch.tensor(length)
    total = yield "exchange", torch.tensor(length)
    start = int(offset)
    full = own.new_zeros((own.shape[0], int(total), own.shape[2]))
    full[:, start : start + length] = own
    rows = yield "exchange", full
    return start, rows


# Softmax and losses over cut classes.


def _softmax(op: Op, a: dict[str, Any], _part: Part) -> Running:
    """As few tensors of the scores' size at once as its kernel has: what was made here is written over."""
    x, dim = a["self"], a["dim"]
    made = torch.float32 if a.get("half_to_float") else DTYPES[a["dtype"]] if a.get("dtype") else x.dtype
    wide = x.to(_statistics(x))
    bottom = wide.new_full([1 if d == dim % x.ndim else n for d, n in enumerate(x.shape)], float("-inf"))
    top = yield "max", wide.amax(dim, keepdim=True) if x.shape[dim] else bottom
    top = top.masked_fill(top == float("-inf"), 0) if "safe" in op.name else top
    wide = wide - top
    total = yield "sum", wide.exp().sum(dim, keepdim=True)
    if "log" in op.name:
        return (wide.sub_(total.log()).to(made),)
    result = wide.exp_().div_(total)
    return ((result.masked_fill_(total == 0, 0) if "safe" in op.name else result).to(made),)


def _softmax_backward(op: Op, a: dict[str, Any], _part: Part) -> Running:
    gradient, output, dim = a["grad_output"], a["output"], a["dim"]
    wide, known = gradient.to(_statistics(gradient)), output.to(_statistics(gradient))
    log = "log" in op.name
    total = yield "sum", (wide if log else wide * known).sum(dim, keepdim=True)
    if log:
        scaled = known.exp().mul_(total)
        result = torch.sub(wide, scaled, out=scaled)
    else:
        result = (wide - total).mul_(known)
    return (result.to(DTYPES[a["input_dtype"]]),)


def _own_losses(_op: Op, a: dict[str, Any], part: Part) -> Results:
    """The weights come from all targets; the losses from those in the part, the others are ignored."""
    target, scores = a["target"], a["self"]
    counted = target != a["ignore_index"]
    weight = a["weight"]
    weights = counted.to(scores.dtype) if weight is None else torch.where(counted, weight[target.clamp(0, part.size - 1)], 0)
    here, index = part.own(target)
    picked = scores.gather(-1, index.unsqueeze(-1)).squeeze(-1) if part.length else scores.new_zeros(target.shape)
    return -torch.where(here & (weights != 0), picked * weights, 0).sum(), weights.sum()


def _own_loss_gradients(op: Op, a: dict[str, Any], part: Part) -> Results:
    target, scores = a["target"], a["self"]
    if not part.length:
        return (torch.zeros_like(scores),)
    here, index = part.own(target)
    counted = here & (target != a["ignore_index"])
    changed = {
        "target": torch.where(counted, index, -1),
        "ignore_index": -1,
        "weight": None if a["weight"] is None else a["weight"][part.start : part.start + part.length],
    }
    return call_with(op, a | changed, (scores.shape,))


# Norms of a cut dim.


def _norm(op: Op, a: dict[str, Any], part: Part) -> Running:
    x, weight, bias = a["input"], a["weight"], a.get("bias")
    wide = x.to(_statistics(x))
    squares = (wide * wide).sum(-1, keepdim=True)
    centred = "rms_norm" not in op.name
    sums = yield "sum", torch.cat([wide.sum(-1, keepdim=True), squares], -1) if centred else squares
    mean = sums[..., :1] / part.size if centred else torch.zeros_like(sums)
    epsilon = a["eps"] if a["eps"] is not None else torch.finfo(x.dtype).eps
    rstd = (sums[..., -1:] / part.size - mean * mean + epsilon).rsqrt()
    result = (wide - mean) * rstd
    result = result if weight is None else result * weight
    result = result if bias is None else result + bias
    return (result.to(x.dtype), mean, rstd) if centred else (result.to(x.dtype), rstd)


def _norm_backward(op: Op, a: dict[str, Any], part: Part) -> Running:
    x, weight, gradient, rstd = a["input"], a["weight"], a["grad_out"], a["rstd"]
    centred = "rms_norm" not in op.name
    kind = _statistics(x)
    normal = (x.to(kind) - (a["mean"] if centred else 0)) * rstd
    wide = gradient.to(kind)
    scaled = wide if weight is None else wide * weight
    wanted = list(a["output_mask"])
    made: list[torch.Tensor] = []
    if wanted[0]:
        along = (scaled * normal).sum(-1, keepdim=True)
        sums = yield "sum", torch.cat([scaled.sum(-1, keepdim=True), along], -1) if centred else along
        middle = sums[..., :1] / part.size if centred else 0
        made.append(((scaled - middle - normal * sums[..., -1:] / part.size) * rstd).to(x.dtype))
    rows = tuple(range(x.ndim - 1))
    like = x if weight is None else weight
    for on, value in zip(wanted[1:], (wide * normal, wide), strict=False):
        if on:
            made.append((value.sum(rows) if rows else value).to(like.dtype))
    return tuple(made)


# Batch norms of a cut batch.


def _batch_norm(_op: Op, a: dict[str, Any], _part: Part) -> Running:
    """Sum, sum of squares and count of every channel; running statistics move as the unsharded op moves them."""
    x = a["input"]
    wide, dims = x.to(_statistics(x)), [d for d in range(x.ndim) if d != 1]
    count = torch.full((x.shape[1],), math.prod(x.shape[d] for d in dims), dtype=wide.dtype)
    total, squares, number = (yield "sum", torch.stack([wide.sum(dims), (wide * wide).sum(dims), count])).unbind(0)
    mean = total / number
    variance = squares / number - mean * mean
    inverse = (variance + a["eps"]).rsqrt()
    normal = (wide - _wide(mean, x)) * _wide(inverse, x)
    for name, function in (("weight", torch.mul), ("bias", torch.add)):
        normal = normal if a[name] is None else function(normal, _wide(a[name], x))
    made = [normal.to(x.dtype), mean, inverse]
    if a.get("running_mean") is not None:
        unbiased = variance * number / (number - 1)
        made += [old + a["momentum"] * (new - old) for old, new in ((a["running_mean"], mean), (a["running_var"], unbiased))]
    return tuple(made)


def _batch_norm_backward(_op: Op, a: dict[str, Any], part: Part) -> Running:
    """Sums of the gradient and of its product with the normalised input."""
    x, gradient = a["input"], a["grad_out"]
    wide, dims = gradient.to(_statistics(x)), [d for d in range(x.ndim) if d != 1]
    normal = (x - _wide(a["save_mean"], x)) * _wide(a["save_invstd"], x)
    plain, along = (yield "sum", torch.stack([wide.sum(dims), (wide * normal).sum(dims)])).unbind(0)
    number = part.size * math.prod(x.shape[2:])
    scale = a["save_invstd"] if a["weight"] is None else a["save_invstd"] * a["weight"]
    data = (wide - _wide(plain, x) / number - normal * _wide(along, x) / number) * _wide(scale, x)
    made = (data.to(x.dtype), along.to(scale.dtype), plain.to(scale.dtype))
    return tuple(value for value, on in zip(made, a["output_mask"], strict=True) if on)


def _wide(channels: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
    """A vector over channels, to be broadcast over an image."""
    return channels.reshape(-1, *(1,) * (image.ndim - 2))


# Attention from cut queries.


def _cut_queries(op: Op, a: dict[str, Any], part: Part) -> Results:
    """The same kernel, with the causal mask of these queries written out."""
    query, key = a["query"], a["key"]
    if not part.length or not query.numel():
        return _nothing(op, a)
    mask = a.get("attn_mask")
    if a["is_causal"]:
        rows = torch.arange(part.start, part.start + part.length).unsqueeze(-1)
        ahead = torch.arange(key.shape[2]) > rows
        mask = torch.zeros(ahead.shape, dtype=query.dtype).masked_fill(ahead, float("-inf"))
    changed = a | {"is_causal": False, "attn_mask": mask}
    value, lead = a["value"].shape, query.shape[:3]
    return call_with(op, changed, [query.shape, key.shape, value] if "backward" in op.name else [(*lead, value[3]), lead])


def _own_queries(op: Op, a: dict[str, Any], part: Part) -> Results:
    """Attention that is told where its queries begin."""
    return tuple(kernels.run(a | {"start": part.start}, a.get("keep")))


def _nothing(op: Op, a: dict[str, Any]) -> Results:
    query = a["query"]
    if "backward" in op.name:
        return tuple(torch.zeros_like(a[name]) for name in ("query", "key", "value"))
    lead, wide = query.shape[:3], query.dtype if query.dtype == torch.float64 else torch.float32
    return query.new_zeros((*lead, a["value"].shape[3])), query.new_zeros(lead, dtype=wide)


def _statistics(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


_SOFTMAX = ("aten._softmax.default", "aten._safe_softmax.default", "aten._log_softmax.default")
_SOFTMAX_BACKWARD = ("aten._softmax_backward_data.default", "aten._log_softmax_backward_data.default")
_EXTREMES = ("max.dim", "min.dim", "argmax.default", "argmin.default")
_MOMENTS = ("var.dim", "var.correction", "std.dim", "std.correction", "var_mean.dim", "var_mean.correction")
_BATCH_NORMS = ("aten._native_batch_norm_legit_functional.default", "aten._native_batch_norm_legit.no_stats")
_NORMS = ("native_layer_norm", "_fused_rms_norm")
_FLASH = "aten._scaled_dot_product_flash_attention_for_cpu"

_SCATTERS = ("scatter.src", "scatter.value", "scatter_add.default", "scatter_reduce.two")

WAYS: Mapping[tuple[str, str], Way] = {
    ("masked-lookup", "aten.embedding.default"): Way(run=_masked_lookup, argument="weight", dim=0),
    ("masked-lookup", "aten._embedding_bag.default"): Way(run=_masked_bags, argument="weight", dim=0),
    ("own-bags", "aten._embedding_bag.default"): Way(run=_own_bags, argument=None, dim=0),
    ("own-rows", "aten._embedding_bag_backward.default"): Way(run=_own_bag_rows, argument=None, dim=0),
    ("own-bags", "aten._embedding_bag_backward.default"): Way(run=_own_bag_gradients, argument="grad", dim=0),
    ("own-rows", "aten.masked_scatter.default"): Way(run=_own_masked_rows, argument="self", dim=0),
    ("own-rows", "aten.masked_scatter_backward.default"): Way(run=_own_masked_gradients, argument="grad_output", dim=0),
    ("own-rows", "aten.trace.default"): Way(run=_own_diagonal, argument="self", dim=0),
    ("own-columns", "aten.trace.default"): Way(run=_own_columns_diagonal, argument="self", dim=1),
    ("masked-lookup", "shard.take.default"): Way(run=_masked_take, argument="self", dim=1),
    ("masked-lookup", "aten.gather.default"): Way(run=_masked_gather, argument="self", dim="dim"),
    ("masked-lookup", "aten.index_select.default"): Way(run=_masked_gather, argument="self", dim="dim"),
    **{("own-rows", f"aten.{name}"): Way(run=_own_places, argument="self", dim="dim") for name in _SCATTERS},
    **{("own-rows", f"aten.{name}.default"): Way(run=_own_copies, argument="self", dim="dim") for name in ("index_add", "index_copy")},
    **{
        ("own-rows", f"aten.{name}.default"): Way(run=_own_puts, argument="self", dim="indices")
        for name in ("index_put", "_unsafe_index_put")
    },
    ("own-experts", "aten._grouped_mm.default"): Way(run=_own_experts, argument="mat2", dim=0),
    ("own-experts", "shard.grouped_mm.default"): Way(run=_own_experts, argument="mat2", dim=0),
    ("own-experts", "shard.grouped_mm_weights.default"): Way(run=_own_experts, argument=None, dim=0),
    ("own-rows", "aten.embedding_dense_backward.default"): Way(run=_own_rows, argument=None, dim=0),
    **{("class-statistics", name): Way(run=_softmax, argument="self", dim="dim") for name in _SOFTMAX},
    **{("class-statistics", name): Way(run=_softmax_backward, argument="output", dim="dim") for name in _SOFTMAX_BACKWARD},
    ("class-statistics", "aten.logsumexp.default"): Way(run=log_sum_exp, argument="self", dim="dim"),
    **{("moment-statistics", f"aten.{name}"): Way(run=moments, argument="self", dim="dim") for name in _MOMENTS},
    **{("extreme-statistics", f"aten.{name}"): Way(run=extreme, argument="self", dim="dim") for name in _EXTREMES},
    ("square-statistics", "aten.linalg_vector_norm.default"): Way(run=root_of_squares, argument="self", dim="dim"),
    ("own-classes", "shard.nll_loss_forward"): Way(run=_own_losses, argument="self", dim=-1),
    ("own-classes", "shard.nll_loss_backward"): Way(run=_own_loss_gradients, argument="self", dim=-1),
    **{("norm-statistics", f"aten.{name}.default"): Way(run=_norm, argument="input", dim=-1) for name in _NORMS},
    **{("norm-statistics", f"aten.{name}_backward.default"): Way(run=_norm_backward, argument="input", dim=-1) for name in _NORMS},
    **{("batch-statistics", name): Way(run=_batch_norm, argument="input", dim=0) for name in _BATCH_NORMS},
    ("batch-statistics", "aten.native_batch_norm_backward.default"): Way(run=_batch_norm_backward, argument="input", dim=0),
    ("cut-queries", f"{_FLASH}.default"): Way(run=_cut_queries, argument="query", dim=2),
    ("cut-queries", f"{_FLASH}_backward.default"): Way(run=_cut_queries, argument="query", dim=2),
    ("cut-queries", ATTENTION): Way(run=_own_queries, argument="query", dim=2),
    ("cut-queries", ATTENTION_BACKWARD): Way(run=_own_queries, argument="query", dim=2),
}
"""What runs under the name of an implementation, by op."""
