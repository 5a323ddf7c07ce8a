"""Text for people: globs, the closest names to one that does not exist, one line for many numbered names, units, tables.

>>> fold_names(["layers.0.w", "layers.1.w", "layers.2.w", "head.w"])
['layers.{0..2}.w', 'head.w']
"""

from __future__ import annotations

import difflib
import fnmatch
import itertools
import math
import numbers
import re
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from solver_shard.errors import InputError, printable

Value = TypeVar("Value", bound=Hashable)

MAX_NAME = 1000
"""Characters of a name or pattern that a file has; a module path of a hundred levels is shorter."""

MAX_RULES = 100_000
"""Patterns of one file."""

MAX_VISITS = 20_000_000
"""Names that the globs of one file are held against: seconds; a thousand of them over the tensors of a large model are fewer."""

_NUMBER = re.compile(r"(?<![A-Za-z0-9])(?:0|[1-9][0-9]{0,17})(?![A-Za-z0-9_])")  # not 007, which is not the name with 7


def matching(pattern: str, names: Sequence[str]) -> list[int]:
    """Positions of the names that a glob matches: ``*`` any text, ``?`` any character, all else itself (``split[0]``)."""
    if not is_glob(pattern):
        return [i for i, name in enumerate(names) if name == pattern]
    glob = pattern.replace("[", "[[]")
    return [i for i, name in enumerate(names) if fnmatch.fnmatchcase(name, glob)]


def is_glob(pattern: str) -> bool:
    """Whether a pattern stands for more than itself.

    >>> is_glob("split[0]"), is_glob("layers.*.up")
    (False, True)
    """
    return "*" in pattern or "?" in pattern


def check_patterns(patterns: Collection[str], what: str) -> None:
    """InputError where a file has more patterns, or longer ones, than are read; ``what`` names the file."""
    if len(patterns) > MAX_RULES:
        raise InputError(f"{what}: {len(patterns):,} rules were given; at most {MAX_RULES:,} are read")
    check_lengths(patterns, f"{what}: a pattern")


def check_lengths(names: Iterable[str], what: str) -> None:
    """InputError where a name is longer than any that is read."""
    for name in names:
        if len(name) > MAX_NAME:
            raise InputError(f"{what} has {len(name):,} characters, {name[:60]!r}...; at most {MAX_NAME:,} are read")


def check_visits(visits: int, pattern: str) -> None:
    """InputError where the patterns so far, this one the last, have been held against more names than is done."""
    if visits > MAX_VISITS:
        raise InputError(
            f"at {pattern!r} the patterns have been held against more than {MAX_VISITS:,} names: too many of them overlap; give one for "
            "all copies of a layer, as in 'layers.*.mlp.up_proj'"
        )


class Paths:
    """Names as a tree of their parts between dots, so that a pattern meets only what its first parts have let through.

    >>> Paths(["layers.0.up", "layers.1.up", "head"]).matching("layers.*.up")
    [0, 1]

    A part of a pattern is a glob (``fnmatch``) and never goes past a dot, as in ``torch.distributed.tensor.parallel.parallelize_module``.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._root = _NameNode()
        self._visits = 0
        for position, name in enumerate(names):
            node = self._root
            for part in name.split("."):
                node = node.children.setdefault(part, _NameNode())
            node.at.append(position)

    def matching(self, pattern: str) -> list[int]:
        """Positions of the names that a pattern matches, in order; InputError where the patterns so far have met too many names."""
        level = [self._root]
        for part in pattern.split("."):
            if is_glob(part) or "[" in part:
                self._visits += sum(len(node.children) for node in level)
                check_visits(self._visits, pattern)
                level = [child for node in level for name, child in node.children.items() if fnmatch.fnmatchcase(name, part)]
            else:
                level = [node.children[part] for node in level if part in node.children]
        return sorted(itertools.chain.from_iterable(node.at for node in level))


@dataclass(slots=True)
class _NameNode:
    children: dict[str, _NameNode] = field(default_factory=dict)
    at: list[int] = field(default_factory=list)


def suggestion(pattern: str, names: Sequence[str], ties: Mapping[str, str] | None = None) -> str:
    """Help for a pattern that matches nothing: what it is another name of, the same with stars around it, or the closest names.

    >>> suggestion("lm_head.weight", ["wte.weight"], {"lm_head.weight": "wte.weight"})
    "'lm_head.weight' is tied to 'wte.weight': one tensor, which has that name"
    """
    others = list(ties or ())
    for other in (others[i] for i in matching(pattern, others)):
        return f"{other!r} is tied to {(ties or {})[other]!r}: one tensor, which has that name"
    for wider in (f"*{pattern}", f"{pattern}*", f"*{pattern}*"):
        count = len(matching(wider, names))
        if count:
            return f"{wider!r} matches {count} of them"
    plain = pattern.replace("*", "0")
    close = difflib.get_close_matches(plain, names, n=3, cutoff=0.5) or difflib.get_close_matches(plain, names, n=3, cutoff=0.2)
    return f"the closest names are {', '.join(close)}" if close else f"names look like {', '.join(names[:3])}"


def text_of(lines: Iterable[str]) -> str:
    """Lines as the text of a report. They become one here alone, so that no name from a file ends its line or steers a terminal."""
    return "\n".join(map(printable, lines))


def template(name: str) -> str:
    """The name with its number components replaced by ``#``: copies of a repeated layer share it."""
    return _NUMBER.sub("#", name)


def number_parts(name: str) -> tuple[list[str], list[str]]:
    """The text around the number components of a name, and the numbers.

    >>> number_parts("layers.0.w")
    (['layers.', '.w'], ['0'])
    """
    return _NUMBER.split(name), _NUMBER.findall(name)


def fold_names(names: Iterable[str]) -> list[str]:
    """Names that differ only in numbers as one, in order of first appearance."""
    return [folded for folded, _, _ in fold_items((name, 0) for name in names)]


def fold_items(items: Iterable[tuple[str, Value]]) -> list[tuple[str, Value, int]]:
    """Fold (name, value) pairs of equal value whose names differ only in numbers: (folded name, value, how many)."""
    return [(name, value, len(members)) for name, value, members in fold_members(items)]


def fold_members(items: Iterable[tuple[str, Value]]) -> list[tuple[str, Value, tuple[str, ...]]]:
    """The same with the names that each folded one stands for, in the order of their numbers.

    >>> fold_members([("l.1.w", "a"), ("l.0.w", "a")])
    [('l.{0,1}.w', 'a', ('l.0.w', 'l.1.w'))]
    """
    groups: dict[tuple[tuple[str, ...], Value], dict[tuple[int, ...], str]] = {}
    for name, value in items:
        texts, numbers = number_parts(name)
        groups.setdefault((tuple(texts), value), {})[tuple(map(int, numbers))] = name
    folded = []
    for ((first, *rest), value), found in groups.items():
        for block in _blocks(list(found)):
            name = first + "".join(_range(values) + text for values, text in zip(block, rest, strict=True))
            folded.append((name, value, tuple(found[numbers] for numbers in itertools.product(*block))))
    return folded


def _blocks(numbers: list[tuple[int, ...]]) -> list[list[list[int]]]:
    """Cover tuples of numbers by full products of value lists."""
    width = len(numbers[0])
    columns = [sorted({row[i] for row in numbers}) for i in range(width)]
    if width < 2 or math.prod(len(column) for column in columns) == len(numbers):
        return [columns]
    rest: dict[tuple[int, ...], list[int]] = {}
    for row in numbers:
        rest.setdefault(row[1:], []).append(row[0])
    return [[sorted(first), *([value] for value in tail)] for tail, first in rest.items()]


def _range(values: list[int]) -> str:
    if len(values) == 1:
        return str(values[0])
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]},{run[1]}" if len(run) == 2 else f"{run[0]}..{run[-1]}" for run in runs]
    return "{" + ",".join(texts if len(texts) <= 6 else [*texts[:5], "...", texts[-1]]) + "}"


# Numbers with units, as people write and read them: bytes and nanoseconds.
#
# >>> parse_bytes("70GiB"), format_bytes(70 * 2**30), format_ns(1_234_567)
# (75161927680, '70.0 GiB', '1.23 ms')

_DECIMAL = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS = {**_DECIMAL, **_BINARY}
MAX_BYTES = 2**60
_SIZE = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)\s*\Z")


def parse_bytes(text: str | int, *, least: int = 1) -> int:
    """Read ``70GiB``, ``70GB``, ``1.5 TiB`` or a plain number of bytes; rounded down to a whole byte.

    Raises:
        InputError: the text is not a number with one of the units, or not between ``least`` and 2^60 bytes.
    """
    if isinstance(text, numbers.Integral) and not isinstance(text, bool):
        text = str(text)
    found = _SIZE.match(text) if isinstance(text, str) else None
    if found is None or found[2].upper() not in _UNITS:
        raise InputError(
            f"cannot read memory size {text!r}; write a number and one unit, without blanks inside the unit: "
            "'70GiB' (2^30 bytes), '70GB' (10^9 bytes), KiB, MiB, TiB, KB, MB, TB, or a plain number of bytes"
        )
    scale = _UNITS[found[2].upper()]
    whole, _, fraction = found[1].partition(".")
    nbytes: int = (int(whole + fraction) * scale) // 10 ** len(fraction)
    if nbytes < least:
        raise InputError(f"memory size {text!r} is less than one byte; write a positive size, as in '70GiB'")
    if nbytes > MAX_BYTES:
        raise InputError(f"memory size {text!r} is more than 2^60 bytes; write the memory of one device, as in '70GiB'")
    return nbytes


def format_bytes(nbytes: int) -> str:
    """Three or so significant digits with a binary unit: ``1.50 MiB``."""
    if abs(nbytes) < 1024:
        return f"{nbytes} B"
    value = float(nbytes)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if abs(value) < 999.5:
            return f"{_digits(value)} {unit}"
    return f"{_digits(value / 1024)} TiB"


def format_ns(nanoseconds: int) -> str:
    """Three or so significant digits with a unit from ns to s: ``1.23 ms``."""
    if abs(nanoseconds) < 1000:
        return f"{nanoseconds} ns"
    value = float(nanoseconds)
    for unit in ("us", "ms"):
        value /= 1000
        if abs(value) < 999.5:
            return f"{_digits(value)} {unit}"
    return f"{_digits(value / 1000)} s"


def _digits(value: float) -> str:
    return f"{value:.{2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0}f}"


# Aligned plain-text tables.


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), indent: int = 2, header: bool = False) -> list[str]:
    """Lines with aligned columns, two blanks apart.

    >>> table([("kind", "count"), ("all_gather", "12")], right=(1,), header=True)
    ['  kind        count', '  ----------  -----', '  all_gather     12']

    Args:
        rows: equally long rows of cells, which are escaped.
        right: columns to align on the right.
        indent: blanks before each line.
        header: the first row is a header, to be underlined.
    """
    if not rows:
        return []
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for i, row in enumerate(rows):
        cells = [cell.rjust(width) if k in right else cell.ljust(width) for k, (cell, width) in enumerate(zip(row, widths, strict=True))]
        lines.append((" " * indent + "  ".join(cells)).rstrip())
        if header and i == 0:
            lines.append(" " * indent + "  ".join("-" * width for width in widths))
    return lines


def shorten(names: Sequence[str], width: int) -> str:
    """As many of the names as fit into the width, at least one, and how many more there are."""
    shown = 1
    while shown < len(names) and len(", ".join(names[: shown + 1])) <= width:
        shown += 1
    return ", ".join(names[:shown]) + (f", +{len(names) - shown} more" if len(names) > shown else "")
