"""Families of neural-network ops: norms, softmax, losses."""

from __future__ import annotations

from solver_shard.layout import P, R
from solver_shard.rulebook.draft import Call, Draft, Held
from solver_shard.rulebook.rule import Inside
from solver_shard.rulebook.table import Family, Row


def layer_norm(call: Call, row: Row) -> Draft:
    """Rows can be cut; statistics are ``[*rows, 1, ...]``.

    ``norm-statistics`` cuts the normalised dim, where it is one: sums and sums of squares per row are all-reduced (the root
    mean square norm needs only the latter).
    """
    del row
    draft = Draft(call)
    rows, normal = _norm_dims(draft, "input", reduction=None)
    draft.put("input", [*rows, *normal])
    draft.put("weight", normal)
    draft.put("bias", normal)
    draft.result(0, [*rows, *normal])
    for index in range(1, len(call.results)):
        draft.result(index, [*rows, *(() for _ in normal)])
    draft.flops = 8 * call.tensor("input").numel
    for held in normal:
        draft.implement("norm-statistics", held, _statistics(draft, rows))
    return draft


def layer_norm_backward(call: Call, row: Row) -> Draft:
    """Rows can be cut: the gradients of weight and bias are then partial sums; linear in the incoming gradient.

    ``norm-statistics`` cuts the normalised dim: two sums per row are all-reduced (one for the root mean square norm) where
    the input's gradient is wanted; the gradients of weight and bias are cut along it.
    """
    del row
    draft = Draft(call)
    count = len(call.attribute("output_mask", (True,) * 3))
    made = call.present("output_mask", count)
    rows, normal = _norm_dims(draft, "input", reduction="sum")
    for name in ("grad_out", "input"):
        draft.put(name, [*rows, *normal])
    for name in ("mean", "rstd"):
        draft.put(name, [*rows, *(() for _ in normal)])
    draft.put("weight", normal)
    draft.put("bias", normal)
    if "bias" in call.names:
        draft.ignore("bias")
    draft.result(made[0], [*rows, *normal])
    for index in made[1:]:
        draft.result(index, normal)
    draft.linear(("grad_out",), ("sum", "avg"))
    draft.flops = 16 * call.tensor("input").numel
    wanted = tuple(bool(m) for m in call.attribute("output_mask", (True,) * count))
    if sum(wanted) == len(call.results):
        for held in normal:
            draft.implement("norm-statistics", held, *([_statistics(draft, rows)] if wanted[0] else []))
    else:
        draft.restrict(tuple(f for held in normal for f in held), cut=False)
    return draft


def _norm_dims(draft: Draft, name: str, *, reduction: str | None) -> tuple[list[Held], list[Held]]:
    """Factors of rows and of normalised dims; the latter can be cut where they are one."""
    shape = draft.call.shape(name)
    split = len(shape) - len(draft.call.attributes["normalized_shape"])
    rows = [draft.factor(f"row{d}", size, reduction=reduction) for d, size in enumerate(shape[:split])]
    return rows, [draft.factor(f"norm{d}", size, cut=len(shape) - split == 1) for d, size in enumerate(shape[split:])]


def _statistics(draft: Draft, rows: list[Held]) -> Inside:
    return draft.all_reduce(rows, 1 if "rms_norm" in draft.call.name else 2, draft.call.tensor("input").dtype)


def nll_sums(call: Call, row: Row) -> Draft:
    """Sums over rows of the weighted losses and of the weights: rows can be cut.

    ``own-classes`` cuts the classes: every device adds up the losses of the targets among its own, a pending sum; the weights
    follow from the targets alone, so that every device has all of their sum.
    """
    del row
    draft = Draft(call)
    rows, classes = _class_rows(draft, reduction="sum")
    draft.put("self", [*rows, classes])
    draft.put("target", rows)
    draft.put("weight", [classes])
    for index in range(len(call.results)):
        draft.result(index, ())
    draft.flops = 2 * call.tensor("target").numel
    draft.restrict(classes, cut=True)
    draft.implement("own-classes", classes, arguments={"weight": R}, results={0: P("sum")}, share="whole")
    return draft


def nll_loss(call: Call, row: Row) -> Draft:
    """The raw loss op: rows can be cut without a reduction and for a sum; a mean needs all rows at once."""
    del row
    draft = Draft(call)
    kind = _reduction(call)
    rows, classes = _class_rows(draft, reduction="sum")
    if kind == "mean":
        draft.restrict(tuple(f for held in rows for f in held), cut=False)
    draft.put("self", [*rows, classes])
    draft.put("target", rows)
    draft.put("weight", [classes])
    draft.result(0, rows if kind == "none" else ())
    if len(call.results) > 1:
        draft.result(1, ())
        if kind == "none":
            draft.alike.append(1)
    draft.flops = 2 * call.tensor("target").numel
    return draft


def nll_loss_backward(call: Call, row: Row) -> Draft:
    """Rows of the result can be cut; the log-probabilities give only the shape.

    ``own-classes`` (of the op that takes a loss apart) cuts the classes: every device fills in the targets among its own.
    """
    del row
    draft = Draft(call)
    rows, classes = _class_rows(draft, reduction=None)
    draft.put("self", [*rows, classes])
    draft.put("target", rows)
    draft.put("weight", [classes])
    if call.slot("grad_output") is not None:
        draft.put("grad_output", rows if call.shape("grad_output") else ())
    draft.put("total_weight", ())
    draft.ignore("self")
    draft.result(0, [*rows, classes])
    if call.name.startswith("shard."):
        draft.restrict(classes, cut=True)
        draft.implement("own-classes", classes, arguments={"weight": R}, share="whole")
    return draft


def _class_rows(draft: Draft, *, reduction: str | None) -> tuple[list[Held], Held]:
    shape = draft.call.shape("self")
    rows = [draft.factor(f"row{d}", size, reduction=reduction) for d, size in enumerate(shape[:-1])]
    return rows, draft.factor("classes", shape[-1], cut=False)


def _reduction(call: Call) -> str:
    value = call.attributes.get("reduction", 1)
    return ("none", "mean", "sum")[value] if isinstance(value, int) else str(value)


def softmax(call: Call, row: Row) -> Draft:
    """Every dim but ``dim`` passes, for softmax and log-softmax alike.

    ``class-statistics`` cuts ``dim``: the maximum and the sum of the exponentials of every row are all-reduced.
    """
    del row
    draft, rows, classes = _softmax_dims(call, "self")
    dtype = call.results[0].dtype
    draft.flops = 5 * call.tensor("self").numel
    draft.implement("class-statistics", classes, *(draft.all_reduce(rows, 1, dtype) for _ in range(2)))
    return draft


def softmax_backward(call: Call, row: Row) -> Draft:
    """As ``softmax``, linear in the incoming gradient; ``class-statistics`` all-reduces one sum per row."""
    del row
    draft, rows, classes = _softmax_dims(call, "grad_output")
    draft.linear(("grad_output",), ("sum", "avg"))
    draft.flops = 5 * call.tensor("grad_output").numel
    draft.implement("class-statistics", classes, draft.all_reduce(rows, 1, call.tensor("grad_output").dtype))
    return draft


def _softmax_dims(call: Call, name: str) -> tuple[Draft, list[Held], Held]:
    """All tensors of one shape; the factors of the rows, and the one along ``dim``."""
    draft = Draft(call)
    shape = call.shape(name)
    held = draft.letters(shape)
    for slot in range(len(call.slots)):
        draft.put_slot(slot, held)
    draft.result(0, held)
    dim = call.dim(call.attributes["dim"], len(shape))
    return draft, [factor for d, factor in enumerate(held) if d != dim], held[dim] if shape else ()


FAMILIES = (
    Family(name="layer_norm", build=layer_norm, keys={}),
    Family(name="layer_norm_backward", build=layer_norm_backward, keys={}),
    Family(name="softmax", build=softmax, keys={}),
    Family(name="softmax_backward", build=softmax_backward, keys={}),
    Family(name="nll_sums", build=nll_sums, keys={}),
    Family(name="nll_loss", build=nll_loss, keys={}),
    Family(name="nll_loss_backward", build=nll_loss_backward, keys={}),
)
