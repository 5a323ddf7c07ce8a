"""Products of two tensors as one matrix product, laid out once for their shapes.

>>> run = product("abc,cd->abd", [(8, 16, 32), (32, 96)])
>>> run(x, weight).shape        # one mm of (128, 32) by (32, 96)
torch.Size([8, 16, 96])

Letters that both operands and the result have are batch dims, letters of both that the result lacks are summed, the others are rows of the
left or columns of the right matrix. A block that lies transposed is read as such, and a result that wants its columns first is computed
with the sides exchanged, so that neither is copied. ``torch.einsum`` does the same work, and finds out how at each call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

Shape = tuple[int, ...]
Run = Callable[..., torch.Tensor]


def product(equation: str, shapes: Sequence[Shape]) -> Run:
    """The einsum as a function of its operands, which have these shapes; any equation that ``torch.einsum`` takes."""
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != 2 or not arrow or "." in equation or any(len(set(term)) != len(term) for term in (*terms, out)):
        return lambda *tensors: torch.einsum(equation, *tensors)
    left, right = terms
    size = dict(zip(left + right, (*shapes[0], *shapes[1]), strict=True))
    if any((letter in left) + (letter in right) + (letter in out) == 1 for letter in size) or _broadcasts(left, right, shapes):
        return lambda *tensors: torch.einsum(equation, *tensors)
    batch = [letter for letter in out if letter in left and letter in right]
    rows = [letter for letter in out if letter not in right]
    columns = [letter for letter in out if letter not in left]
    summed = [letter for letter in left if letter in right and letter not in out]
    one = _matrix(left, batch, rows, summed, size)
    two = _matrix(right, batch, summed, columns, size)
    swapped = list(out) == [*batch, *columns, *rows] and bool(rows) and bool(columns)
    made = [*batch, *(columns if swapped else rows), *(rows if swapped else columns)]
    multiply = torch.bmm if batch else torch.mm
    shape = tuple(size[letter] for letter in made)
    order = tuple(made.index(letter) for letter in out)
    plain = order == tuple(range(len(order)))

    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a, b = one(x), two(y)
        found = multiply(b.mT, a.mT) if swapped else multiply(a, b)
        return found.view(shape) if plain else found.view(shape).permute(order)

    return run


def _broadcasts(left: str, right: str, shapes: Sequence[Shape]) -> bool:
    """Whether one operand has a letter at size 1 and the other does not."""
    sizes = dict(zip(left, shapes[0], strict=True))
    return any(sizes.get(letter, n) != n for letter, n in zip(right, shapes[1], strict=True))


def _matrix(term: str, batch: Sequence[str], first: Sequence[str], second: Sequence[str], size: dict[str, int]) -> Run:
    """An operand as a matrix with ``first`` as its rows and ``second`` as its columns, or as a batch of them."""
    lead = [math.prod(size[letter] for letter in batch)] if batch else []
    rows, columns = (math.prod(size[letter] for letter in group) for group in (first, second))
    if list(term) == [*batch, *first, *second]:
        shape = (*lead, rows, columns)
        return lambda x: x.reshape(shape)
    if list(term) == [*batch, *second, *first]:
        turned = (*lead, columns, rows)
        return lambda x: x.reshape(turned).mT
    order = tuple(term.index(letter) for letter in (*batch, *first, *second))
    target = (*lead, rows, columns)
    return lambda x: x.permute(order).reshape(target)
