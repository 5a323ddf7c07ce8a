"""Names for people: globs, the closest names to one that does not exist, and one line for many numbered names.

>>> fold_names(["layers.0.w", "layers.1.w", "layers.2.w", "head.w"])
['layers.{0..2}.w', 'head.w']
"""

from __future__ import annotations

import difflib
import fnmatch
import itertools
import math
import re
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

Value = TypeVar("Value", bound=Hashable)

_NUMBER = re.compile(r"(?<![A-Za-z0-9])(?:0|[1-9][0-9]{0,17})(?![A-Za-z0-9_])")  # not 007, which is not the name with 7

_HOLE = "\0"


def matching(pattern: str, names: Sequence[str]) -> list[int]:
    """Positions of the names that a glob matches: ``*`` any text, ``?`` any character, all else itself (``split[0]``)."""
    glob = pattern.replace("[", "[[]")
    return [i for i, name in enumerate(names) if fnmatch.fnmatchcase(name, glob)]


def suggestion(pattern: str, names: Sequence[str]) -> str:
    """Help for a pattern that matches nothing: the same with stars around it, or the closest names."""
    for wider in (f"*{pattern}", f"{pattern}*", f"*{pattern}*"):
        count = len(matching(wider, names))
        if count:
            return f"{wider!r} matches {count} of them"
    plain = pattern.replace("*", "0")
    close = difflib.get_close_matches(plain, names, n=3, cutoff=0.5) or difflib.get_close_matches(plain, names, n=3, cutoff=0.2)
    return f"the closest names are {', '.join(close)}" if close else f"names look like {', '.join(names[:3])}"


def printable(text: str) -> str:
    """The text with control characters escaped, so that a name from a file cannot steer a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text)


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
    groups: dict[tuple[str, Value], dict[tuple[int, ...], str]] = {}
    for name, value in items:
        numbers = tuple(int(found) for found in _NUMBER.findall(name))
        groups.setdefault((_NUMBER.sub(_HOLE, name), value), {})[numbers] = name
    folded = []
    for (form, value), found in groups.items():
        for block in _blocks(list(found)):
            ranges = iter([_range(values) for values in block])
            name = re.sub(_HOLE, lambda _, ranges=ranges: next(ranges), form)  # type: ignore[misc]  # a default binds the loop variable
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
