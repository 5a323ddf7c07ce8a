"""What other layouts of a tensor would cost, as ``explain --json`` found it, for the page.

>>> asked = read_prices("explained.json")
>>> asked.about, [price.label for price in asked.prices]
(('model.layers.{0..31}.self_attn.k_proj.weight',), ['S(0)R', 'RS(0)'])
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from solver_shard.errors import InputError
from solver_shard.files import read_json, read_text
from solver_shard.plan.codec import MAX_INTEGER
from solver_shard.units import format_bytes, format_ns

MAX_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """One alternative: its layout or strategy, and its price in words."""

    label: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The alternatives of one question.

    Attributes:
        about: names of the tensors or ops, repeated layers folded.
        of: which decision: layout, state, forward, backward or strategy.
    """

    about: tuple[str, ...]
    of: str
    prices: tuple[Priced, ...]


def read_prices(path: str | os.PathLike[str]) -> Asked:
    """Read what ``explain --json`` wrote.

    Raises:
        InputError: no such file, too large, or not of this form.
    """
    path = Path(path)
    hint = "'solver-shard explain PLAN TENSOR --json > FILE' writes one"
    try:
        data = read_json(read_text(path, MAX_BYTES))
    except OSError as error:
        raise InputError(f"cannot read explanation {str(path)!r}: {error.strerror or error}; {hint}") from None
    except ValueError as error:
        raise InputError(f"{path}: not an explanation: not JSON ({error}); {hint}") from None
    try:
        objective = _whole(data["now"]["objective"])
        show = format_bytes if data["unit"] == "memory" else format_ns
        found = [data["instead"], *data["alternatives"], *data["others"]]
        prices = tuple(Priced(label=_text(p["label"]), text=_price(p, show, objective)) for p in found if p is not None)
        return Asked(about=tuple(_text(name) for name in data["about"]), of=_text(data["of"]), prices=prices)
    except (KeyError, TypeError) as error:
        raise InputError(f"{path}: not an explanation with prices: {type(error).__name__} {error}; {hint}") from None


def _price(price: Mapping[str, Any], show: Any, objective: int) -> str:
    """The price, between its bounds where it is not proven, and what the plan with it needs."""
    outcome, best = price["outcome"], price["best"]
    if best is None:
        if outcome == "too large":
            smallest = price["smallest"]
            return "no plan with it fits" + ("" if smallest is None else f"; the smallest peak found is {format_bytes(_whole(smallest))}")
        return "no op runs so" if outcome == "impossible" else "no plan with it was found within the limits"
    low, high = _whole(best["low"]), _whole(best["high"])
    share = f" ({100 * high / objective:+.2g}%)" if objective else ""
    cost = f"{_signed(high, show)}{share}" if low == high else f"between {_signed(low, show)} and {_signed(high, show)}{share}"
    return f"{cost}; then {format_ns(_whole(best['total_ns']))} and a peak of {format_bytes(_whole(best['peak']))}"


def _signed(value: int, show: Any) -> str:
    return f"{'-' if value < 0 else '+'}{show(abs(value))}"


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {type(value).__name__}")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or abs(value) >= MAX_INTEGER:
        raise TypeError(f"expected a whole number below 2^63, got a {'larger one' if type(value) is int else type(value).__name__}")
    return value


def prices_by_entry(asked: Sequence[Asked], entries: Sequence[Mapping[str, Any]]) -> dict[int, list[dict[str, str]]]:
    """Entry to the prices asked about its tensors, by the folded name or by one of the names that it stands for."""
    position = {name: entry["id"] for entry in entries for name in (*entry["members"], entry["name"])}
    found: dict[int, list[dict[str, str]]] = {}
    for question in asked:
        for entry in dict.fromkeys(position[name] for name in question.about if name in position):
            found.setdefault(entry, []).extend({"of": question.of, "label": p.label, "text": p.text} for p in question.prices)
    return found
