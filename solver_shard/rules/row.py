"""Rows of a rules file, the families that build rules from them, and the checks of their settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from solver_shard.layout import REDUCTIONS

if TYPE_CHECKING:
    from solver_shard.rules.draft import RuleDraft


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    """True combinations that a row or a family leaves out, and why.

    Attributes:
        what: tensors and placements, as in ``"bias=P(max)"``, ``"self=P"`` (any reduction), ``"input=S mat2=S"``, ``"*=P(avg)"``
            (any operand), ``"result=P(sum)"``; several must hold together.
        reason: for the reader of the report.
    """

    what: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleRow:
    """One row of a rules file.

    Attributes:
        op: ``aten.mm.default`` style name.
        family: the family that builds the rule.
        settings: the other keys of the row.
        file: the file it was read from, for messages.
        user: the file is one of the user's own.
        excludes: what ``rules check`` does not ask of it.
        instances: calls on small tensors that ``rules check`` runs, beside the shipped ones.
    """

    op: str
    family: str
    settings: Mapping[str, Any]
    file: str
    user: bool = False
    excludes: tuple[Exclusion, ...] = ()
    instances: tuple[str, ...] = ()

    def get(self, key: str, default: Any = None) -> Any:
        """A setting, or the default."""
        return self.settings.get(key, default)

    def linear(self) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
        """What its setting ``linear`` says; see ``linear_sets``."""
        return linear_sets(self.get("linear", ()), self.get("passes", DEFAULT_PASSES))

    def names(self, key: str) -> tuple[str, ...]:
        """A setting that is a list of names, written as one string."""
        return tuple(self.settings.get(key, "").split())


DEFAULT_PASSES = "sum avg"
"""The reductions that linear arguments pass where a row does not say."""


def linear_sets(linear: str | Sequence[str], passes: str = DEFAULT_PASSES) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
    """Sets of argument names that may be partial together, and in which reductions.

    ``"self other"`` is one set, a list has several; ``"self other: max"`` has reductions of its own, others pass what the row says for
    all.

    >>> linear_sets(["self other", "bias: max"])
    ((('self', 'other'), ('sum', 'avg')), (('bias',), ('max',)))
    """
    sets = []
    for text in (linear,) if isinstance(linear, str) else linear:
        names, _, own = text.partition(":")
        reductions = own.strip() or passes
        sets.append((tuple(names.split()), REDUCTIONS if reductions == "any" else tuple(reductions.split())))
    return tuple(sets)


Check = Callable[[Any], str | None]
"""Says what is wrong with a setting's value, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A way to build rules.

    Attributes:
        build: drafts the rule of a call; a row's settings are its keyword arguments.
        keys: the settings that rows may have, each with what is wrong with its value.
        required: those that rows must have.
        check: what is wrong with settings that are fine each alone, or None.
        excludes: what ``rules check`` does not ask of any of its rows.
    """

    name: str
    build: Callable[..., RuleDraft]
    keys: Mapping[str, Check] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    check: Callable[[Mapping[str, Any]], str | None] | None = None
    excludes: tuple[Exclusion, ...] = ()


def is_text(value: Any) -> str | None:
    """A string."""
    return None if isinstance(value, str) and value.strip() else "must be a non-empty string"


def is_flag(value: Any) -> str | None:
    """true or false."""
    return None if isinstance(value, bool) else "must be true or false"


def is_sets(value: Any) -> str | None:
    """Linear sets: a string of argument names, or a list of such strings."""
    texts = [value] if isinstance(value, str) else value
    for text in texts if isinstance(texts, list) else ():
        names = text.partition(":")[0].split() if isinstance(text, str) else []
        if len(set(names)) < len(names):
            return f"names an argument twice in {text!r}; name each once in a set"
    if isinstance(texts, list) and texts and all(isinstance(text, str) and text.partition(":")[0].strip() for text in texts):
        own = [text.partition(":")[2] for text in texts if ":" in text]
        return next((wrong for wrong in map(is_reductions, own) if wrong), None)
    return 'must name arguments: "self other" for one set that is partial together, "self other: max" in one reduction, or a list of these'


def is_reductions(value: Any) -> str | None:
    """``any`` or some of the reductions in one string."""
    if isinstance(value, str) and value.strip() == "any":
        return None
    if isinstance(value, str) and value.strip() and set(value.split()) <= set(REDUCTIONS):
        return None
    return f'must be "any" or some of: {" ".join(REDUCTIONS)}'


def is_reduction(value: Any) -> str | None:
    """One reduction."""
    return None if value in REDUCTIONS else f"must be one of {', '.join(REDUCTIONS)}"


def is_number(value: Any) -> str | None:
    """A positive integer."""
    return None if isinstance(value, int) and not isinstance(value, bool) and value > 0 else "must be a positive whole number"


def is_dims(value: Any) -> str | None:
    """The name of an argument that holds dims, or a list of dims."""
    if isinstance(value, str) and value.strip():
        return None
    if isinstance(value, list) and value and all(isinstance(d, int) and not isinstance(d, bool) for d in value):
        return None if len(set(value)) == len(value) else "names a dim twice; name each once"
    return "must be the name of the argument that holds the dims, or a list of dims such as [-2, -1]"


_TERM = re.compile(r"-?([A-Za-z_]\w*\*)?[A-Za-z_]\w*\Z")


def is_monotone(value: Any) -> str | None:
    """Arguments, each alone: ``"self -other"``, or ``"alpha*other"`` with the sign of a number."""
    if isinstance(value, str) and value.strip() and all(_TERM.match(term) for term in value.split()):
        return None
    return 'must name arguments, a minus before those that the result falls with: "self -other", or with a number\'s sign "alpha*other"'


def is_bound(value: Any) -> str | None:
    """The reduction whose parts stay where the op is defined."""
    return None if value in ("max", "min") else "must be max or min"


LINEAR: Mapping[str, Check] = {
    "linear": is_sets,
    "passes": is_reductions,
    "sum_if_zero": is_text,
    "monotone": is_monotone,
    "only": is_bound,
    "truth": is_flag,
}
"""The settings of families whose rows say what is linear."""
