"""Rule rows: TOML files with one row per op, and the table they make.

A row names a rule family and its settings, or writes the factors of every dim in einsum-like notation:

    "aten.mul.Tensor" = { family = "pointwise", linear = ["self", "other"] }
    "my.scaled_mm.default" = { dims = "... m k, k n -> ... m n", reduce = { k = "sum" }, linear = ["x", "w"], matmul = true }

Rows of later files replace rows of earlier ones, so that a user's file can correct a shipped row.

>>> table = load_table()
>>> table["aten.mul.Tensor"].family
'pointwise'
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from solver_shard.errors import RuleError
from solver_shard.layout import REDUCTIONS

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from solver_shard.rulebook.draft import Call, Draft

_OP = re.compile(r"[A-Za-z_]\w*(::|\.)\w+(\.\w+)?\Z")
_WHAT = re.compile(r"\s*(([A-Za-z_]\w*|\*)=(R|S(\(\d+\))?|P(\((sum|avg|max|min)\))?)\s*)+\Z")
_TABLE_FILE = "aten.toml"


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
class Row:
    """One row of a rules file.

    Attributes:
        op: ``aten.mm.default`` style name.
        family: the family that builds the rule.
        settings: the other keys of the row.
        file: the file it was read from, for messages.
        excludes: what ``rules check`` does not ask of it.
        instances: calls on small tensors that ``rules check`` runs, beside the shipped ones.
    """

    op: str
    family: str
    settings: Mapping[str, Any]
    file: str
    excludes: tuple[Exclusion, ...] = ()
    instances: tuple[str, ...] = ()

    def get(self, key: str, default: Any = None) -> Any:
        """A setting, or the default."""
        return self.settings.get(key, default)

    def linear(self) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
        """Sets of argument names that may be partial together, and in which reductions.

        ``"self other"`` is one set, a list has several; ``"self other: max"`` has reductions of its own, others pass what the
        row says for all: sums and averages by default.
        """
        value = self.settings.get("linear", ())
        found = []
        for text in (value,) if isinstance(value, str) else value:
            names, _, own = text.partition(":")
            reductions = own.strip() or self.settings.get("passes", "sum avg")
            found.append((tuple(names.split()), REDUCTIONS if reductions == "any" else tuple(reductions.split())))
        return tuple(found)

    def names(self, key: str) -> tuple[str, ...]:
        """A setting that is a list of names, written as one string."""
        return tuple(self.settings.get(key, "").split())


Check = Callable[[Any], str | None]
"""Says what is wrong with a setting's value, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A way to build rules: ``build`` drafts the rule of a call, ``keys`` are the settings that its rows may have.

    ``check`` says what is wrong with settings that are fine each alone, or None; ``excludes`` holds for all rows.
    """

    name: str
    build: Callable[[Call, Row], Draft]
    keys: Mapping[str, Check]
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
        return None
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


class RuleTable(Mapping[str, Row]):
    """Rows by op name; read-only."""

    def __init__(self, rows: Mapping[str, Row], families: Mapping[str, Family]) -> None:
        self._rows = dict(rows)
        self._families = dict(families)

    def __getitem__(self, op: str) -> Row:
        return self._rows[op]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def family(self, row: Row) -> Family:
        """The family a row names."""
        return self._families[row.family]


def load_table(extra: Sequence[Path] = ()) -> RuleTable:
    """The shipped rows and those of the user's own files, later files first in line.

    RuleError names the file, the row, what is wrong and what is legal.
    """
    from solver_shard.rulebook.families import FAMILIES

    rows: dict[str, Row] = {}
    rows.update(parse_rows(shipped(_TABLE_FILE).read_text(encoding="utf-8"), _TABLE_FILE, FAMILIES))
    for path in extra:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RuleError(f"cannot read rules file {str(path)!r}: {error}; give a TOML file with one row per op") from error
        rows.update(parse_rows(text, str(path), FAMILIES))
    return RuleTable(rows, FAMILIES)


def parse_rows(text: str, file: str, families: Mapping[str, Family]) -> dict[str, Row]:
    """Rows of one TOML text; RuleError as in ``load_table``."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RuleError(f"rules file {file}: not valid TOML: {error}") from error
    return {op: _row(op, value, file, families) for op, value in data.items()}


def _row(op: str, value: Any, file: str, families: Mapping[str, Family]) -> Row:
    def fault(what: str) -> RuleError:
        return RuleError(f"rules file {file}, row {op!r}: {what}")

    if not _OP.match(op):
        raise fault('an op name is namespace.name.overload in quotes, as in "aten.mm.default"')
    if not isinstance(value, dict):
        raise fault(f'a row is {{ family = "NAME", ... }} or {{ dims = "m k, k n -> m n", ... }}, got {value!r}')
    settings = {key: item for key, item in value.items() if key not in ("family", "excludes", "instances")}
    excludes = value.get("excludes", [])
    if not isinstance(excludes, list) or not all(isinstance(e, dict) and set(e) == {"what", "reason"} for e in excludes):
        raise fault('excludes must be a list such as [{ what = "bias=P(max)", reason = "parameters are never pending" }]')
    if any(is_text(text) for e in excludes for text in e.values()) or any(not _WHAT.match(e["what"]) for e in excludes):
        raise fault('what must name tensors and placements such as "bias=P(max)", "self=P", "*=S(0)", with a reason')
    instances = value.get("instances", [])
    if not isinstance(instances, list) or not all(isinstance(call, str) for call in instances):
        raise fault('instances must be a list of calls such as ["self=f64[8, 6]"]')
    name = value.get("family", "dims" if "dims" in value else None)
    family = families.get(name) if isinstance(name, str) else None
    if family is None:
        raise fault(f"unknown family {name!r}; legal: {', '.join(sorted(families))}")
    unknown = sorted(set(settings) - set(family.keys))
    if unknown:
        raise fault(f"family {name!r} has no setting {unknown[0]!r}; legal: {', '.join(sorted(family.keys)) or 'none'}")
    for key in family.required:
        if key not in settings:
            raise fault(f"family {name!r} needs the setting {key!r}")
    for key, item in settings.items():
        wrong = family.keys[key](item)
        if wrong is not None:
            raise fault(f"{key} = {item!r} {wrong}")
    wrong = family.check(settings) if family.check else None
    if wrong is not None:
        raise fault(wrong)
    return Row(
        op=op,
        family=family.name,
        settings=settings,
        file=file,
        excludes=tuple(Exclusion(what=e["what"], reason=e["reason"]) for e in excludes),
        instances=tuple(instances),
    )


def shipped(name: str) -> Traversable:
    """A shipped file: in the installed package ``solver_shard.rules``, or beside the package in a source checkout."""
    try:
        found = resources.files("solver_shard.rules").joinpath(name)
        if found.is_file():
            return found
    except ModuleNotFoundError:
        pass
    beside = Path(__file__).resolve().parents[2] / "rules" / name
    if not beside.is_file():
        raise RuleError(
            f"the shipped rules {name} are missing: neither in package solver_shard.rules nor at {beside}; reinstall solver-shard"
        )
    return beside
