"""Rule rows: TOML files with one row per op, and the table they make.

A row names a rule family and its settings, or writes the factors of every dim in einsum-like notation:

    "aten.mul.Tensor" = { family = "pointwise", linear = ["self", "other"] }
    "my.scaled_mm.default" = { dims = "... m k, k n -> ... m n", reduce = { k = "sum" }, linear = ["x", "w"], matmul = true }

Rows of later files replace rows of earlier ones, so that a user's file can correct a shipped row. Everything in a file is checked
when it is read; that the ops exist, when the model is known (``check_ops``), for a model's module brings its custom ops.

>>> table = load_table()
>>> table["aten.mul.Tensor"].family
'pointwise'
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from solver_shard.errors import RuleError
from solver_shard.files import RulesFile, read_toml
from solver_shard.rules.row import Exclusion, Family, RuleRow, is_text

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable


_OP = re.compile(r"[A-Za-z_]\w*(::|\.)[\w-]+(\.\w+)?(@\S+)?\Z")
_WHAT = re.compile(r"\s*(([A-Za-z_]\w*|\*)=(R|S(\(\d+\))?|P(\((sum|avg|max|min)\))?)\s*)+\Z")
_KEY = re.compile(r"""\s*("[^"]*"|'[^']*'|[\w.-]+)\s*=""")
ATEN, STABLEHLO = "aten.toml", "stablehlo.toml"
"""The shipped files."""
_FOREIGN = ("shard", "stablehlo", "sdy")
"""Namespaces of ops that are not torch's."""
MAX_RULES_BYTES = 1 << 18
"""Plans keep the files whole."""


class RuleTable(Mapping[str, RuleRow]):
    """Rows by op name; read-only. ``replaced`` has the rows that a later file's row replaced, oldest first."""

    def __init__(self, rows: Mapping[str, RuleRow], families: Mapping[str, Family], replaced: Sequence[RuleRow] = ()) -> None:
        self._rows = dict(rows)
        self._families = dict(families)
        self.replaced = tuple(replaced)

    def __getitem__(self, op: str) -> RuleRow:
        return self._rows[op]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def family(self, row: RuleRow) -> Family:
        """The family a row names."""
        return self._families[row.family]


def load_table(extra: Sequence[str | os.PathLike[str] | RulesFile] = (), *, shipped: str = ATEN) -> RuleTable:
    """The rows of a shipped file and those of the user's own files; a row of a later file replaces one of an earlier file.

    RuleError names the file, the row, what is wrong and what is legal.
    """
    from solver_shard.rules.families import FAMILIES

    rows = parse_rows(shipped_file(shipped).read_text(encoding="utf-8"), shipped, FAMILIES)
    replaced = []
    for item in extra:
        file = item if isinstance(item, RulesFile) else read_rules(item)
        found = parse_rows(file.text, file.name, FAMILIES, user=True)
        replaced += [rows[op] for op in found if op in rows]
        rows.update(found)
    return RuleTable(rows, FAMILIES, replaced)


def read_rules(path: str | os.PathLike[str]) -> RulesFile:
    """A rules file as text, at most ``MAX_RULES_BYTES`` of it; RuleError where it cannot be read."""
    name = os.fspath(path)
    how = 'give a TOML file with one row per op, as in "my.op.default" = { dims = "m k, k n -> m n", reduce = { k = "sum" } }'
    try:
        with open(name, "rb") as file:
            data = file.read(MAX_RULES_BYTES + 1)
        if len(data) > MAX_RULES_BYTES:
            raise RuleError(f"rules file {name} is larger than {MAX_RULES_BYTES} bytes, which is all that is read; {how}")
        return RulesFile(name=name, text=data.decode("utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RuleError(f"cannot read rules file {name!r}: {reason}; {how}") from None


def parse_rows(text: str, file: str, families: Mapping[str, Family], *, user: bool = False) -> dict[str, RuleRow]:
    """Rows of one TOML text; RuleError as in ``load_table``."""
    try:
        data = read_toml(text)
    except ValueError as error:
        raise RuleError(f"rules file {file}: {_not_toml(text, error)}") from None
    rows: dict[str, RuleRow] = {}
    for key, value in data.items():
        row = _row(key, value, file, families, user)
        if row.op in rows:
            raise RuleError(f"rules file {file}, row {key!r}: {row.op} has two rows; keep one of them")
        rows[row.op] = row
    return rows


def _not_toml(text: str, error: Exception) -> str:
    """What is wrong with a text that is no TOML; a row that is there twice is named."""
    message = str(error)
    at = re.search(r"line (\d+)", message)
    line = text.splitlines()[int(at[1]) - 1] if at is not None and int(at[1]) <= len(text.splitlines()) else ""
    seen: set[str] = set()
    for number, key in ((n, found[1]) for n, entry in enumerate(text.splitlines(), start=1) if (found := _KEY.match(entry))):
        if key in seen and "overwrite" in message:
            return f"row {key} is there twice (line {number}); keep one of them"
        seen.add(key)
    return f"not valid TOML: {message}{f': {line.strip()[:80]!r}' if line.strip() else ''}; write one row per line, the op's name in quotes"


def check_ops(table: RuleTable, known: Collection[str] = ()) -> None:
    """Check that the ops and arguments that the user's rows name exist, in ``known`` ops of a program or in torch.

    RuleError names file and row, and similar ops.
    """
    for op, row in table.items():
        if row.user and op.split(".")[0] not in _FOREIGN:
            _check_op(op, row, op in known)


def _check_op(op: str, row: RuleRow, known: bool) -> None:
    import torch

    from solver_shard.rules.variants import overload_of

    overload = overload_of(op)
    if overload is None and known:
        return
    if overload is None:
        names = [name.replace("::", ".") for name in torch._C._dispatch_get_all_op_names()]
        names = sorted(name if name.count(".") > 1 else f"{name}.default" for name in names)
        close = difflib.get_close_matches(op, names, n=3, cutoff=0.75)
        raise RuleError(
            f"rules file {row.file}, row {op!r}: no op of this name exists in torch {torch.__version__} or in a library that is imported"
            f"{'; similar ones: ' + ', '.join(close) if close else ''}; correct the name (namespace.name.overload), or import the "
            "library that defines it where the model is built"
        )
    arguments = [argument.name for argument in overload._schema.arguments]
    whole = row.get("whole") if row.family == "along" else None
    named = [name for names, _ in row.linear() for name in names] + list(row.names("unread"))
    named += [part for term in row.names("monotone") for part in term.removeprefix("-").split("*")]
    named += [name for name in (row.get("sum_if_zero"), whole) if isinstance(name, str)]
    for name in named:
        if name not in arguments:
            raise RuleError(
                f"rules file {row.file}, row {op!r}: the op has no argument {name!r}; legal: {', '.join(arguments) or 'none'}; "
                "correct the row"
            )


def _row(name: str, value: Any, file: str, families: Mapping[str, Family], user: bool) -> RuleRow:
    def fault(what: str) -> RuleError:
        return RuleError(f"rules file {file}, row {name!r}: {what}; correct the row")

    if not _OP.match(name):
        raise fault('an op name is namespace.name.overload in quotes, as in "aten.mm.default"')
    op = name.replace("::", ".")
    if op.count(".") == 1 and op.split(".")[0] not in _FOREIGN:
        op += ".default"
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
    asked = value.get("family", "dims" if "dims" in value else None)
    family = families.get(asked) if isinstance(asked, str) else None
    if asked is None:
        raise fault(f'a row needs dims or family, this one has {", ".join(map(repr, value)) or "neither"}; write dims = "m k, k n -> m n"')
    if family is None:
        raise fault(f"unknown family {asked!r}; legal: {', '.join(sorted(families))}")
    unknown = sorted(set(settings) - set(family.keys))
    if unknown:
        raise fault(f"family {asked!r} has no setting {unknown[0]!r}; legal: {', '.join(sorted(family.keys)) or 'none'}")
    for key in family.required:
        if key not in settings:
            raise fault(f"family {asked!r} needs the setting {key!r}")
    for key, item in settings.items():
        wrong = family.keys[key](item)
        if wrong is not None:
            raise fault(f"{key} = {item!r} {wrong}")
    wrong = family.check(settings) if family.check else None
    if wrong is not None:
        raise fault(wrong)
    return RuleRow(
        op=op,
        family=family.name,
        settings=settings,
        file=file,
        user=user,
        excludes=tuple(Exclusion(what=e["what"], reason=e["reason"]) for e in excludes),
        instances=tuple(instances),
    )


def shipped_file(name: str) -> Traversable:
    """A rules file that comes with the package."""
    shipped = resources.files("solver_shard.rules").joinpath(name)
    if not shipped.is_file():
        raise RuleError(f"the shipped rules {name} are missing from package solver_shard.rules; reinstall solver-shard")
    return shipped
