"""Arguments of public functions, held against their annotations before anything else is done.

>>> @checked
... def price(plan: Plan, *, names: Several[str] = (), gap: float = 0.0) -> int: ...
>>> price(plan, names=[1])
Traceback (most recent call last):
solver_shard.errors.InputError: price: names=[1] is not legal; give a text or a list of texts

An annotation is the one place that says what a function takes: type checkers, help and this check read it. Numbers of numpy are handed on
as Python's, truth values are no numbers. What more is legal of a value (a range, a name that exists) its function checks.
"""

from __future__ import annotations

import ast
import collections.abc
import functools
import inspect
import numbers
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar, get_args, get_origin

from solver_shard.errors import InputError

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])

Several: TypeAlias = T | Sequence[T]
"""One value, or some; ``each`` makes a tuple of either."""


def each(values: Several[Any]) -> tuple[Any, ...]:  # a text is a sequence of texts to type checkers
    """One value as a tuple, or some.

    >>> each("zero3"), each(["zero3", "ddp"])
    (('zero3',), ('zero3', 'ddp'))
    """
    if isinstance(values, Sequence) and not isinstance(values, str | bytes):
        return tuple(values)
    return (values,)


def checked(function: Function) -> Function:
    """The function, for arguments that are of its annotations' types; InputError for any other."""
    parameters = inspect.signature(function).parameters
    names = [p.name for p in parameters.values() if p.kind is not p.VAR_KEYWORD]

    @functools.cache
    def kinds() -> dict[str, Kind]:
        known = function.__globals__
        annotations = {name: parameters[name].annotation for name in names}
        return {name: _ANY if note is inspect.Parameter.empty else kind_of(str(note), known) for name, note in annotations.items()}

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        places = dict(zip(names, given, strict=False))
        if len(given) <= len(names):  # else Python says what is too much
            given = tuple(kinds()[name].read(f"{function.__name__}: {name}", value) for name, value in places.items())
            named = {
                name: kinds()[name].read(f"{function.__name__}: {name}", value) if name in kinds() else value
                for name, value in named.items()
            }
        return function(*given, **named)

    return call  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Kind:
    """What an annotation takes.

    Attributes:
        words: for a message; ``many``: of several.
        takes: whether it takes a value.
        plain: makes Python's own of it.
    """

    words: str
    many: str
    takes: Callable[[Any], bool]
    plain: Callable[[Any], Any] = lambda value: value

    def read(self, name: str, value: Any, example: str = "") -> Any:
        """The value; InputError says what is legal."""
        if not self.takes(value):
            raise InputError(f"{name}={shown(value)} is not legal; give {self.words}{example}")
        return self.plain(value)


def shown(value: object) -> str:
    """A value in a message, cut where it is long; of one that cannot even show itself, its type."""
    try:
        text = repr(value)
    except Exception:
        return f"a {type(value).__name__}"
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def kind_of(annotation: str, known: Mapping[str, Any]) -> Kind:
    """What an annotation takes, as written; ``known``: the names of its module."""
    return _kind(ast.parse(annotation, mode="eval").body, known)


def _is_whole(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_truth(value: object) -> bool:
    return isinstance(value, bool) or (type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"))


def _pythons(value: Any) -> Any:
    return value.item() if type(value).__module__ == "numpy" else value


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


_PATH = Kind("a path", "paths", lambda value: isinstance(value, os.PathLike))
_ANY = Kind("anything", "anything", lambda value: True)
_NAMED = {
    "str": Kind("a text", "texts", lambda value: isinstance(value, str)),
    "int": Kind("a whole number", "whole numbers", _is_whole, _pythons),
    "float": Kind("a number", "numbers", _is_real, _pythons),
    "bool": Kind("True or False", "truth values", _is_truth, bool),
    "PathLike": _PATH,
    "Path": _PATH,
    "Any": _ANY,
    "Callable": Kind("a function", "functions", callable),
}


def _kind(node: ast.expr, known: Mapping[str, Any]) -> Kind:
    if isinstance(node, ast.BinOp):
        return _union([_kind(node.left, known), _kind(node.right, known)])
    if isinstance(node, ast.Constant):
        return Kind("None", "None", lambda value: value is None)
    if not isinstance(node, ast.Subscript):
        return _by_name(ast.unparse(node), known)
    name, inside = ast.unparse(node.value), node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if name == "Literal":
        return _one_of([ast.literal_eval(item) for item in inside])
    if name == "Several":
        one = _kind(inside[0], known)
        return _union([one, _list_of(one)])
    if name in ("Sequence", "tuple", "list"):
        return _list_of(_kind(inside[0], known))
    if name == "Iterable":
        return Kind("a list", "lists", lambda value: isinstance(value, collections.abc.Iterable))
    if name == "Mapping":
        return _mapping_of(*(_kind(item, known) for item in inside))
    return _by_name(name, known)


def _by_name(name: str, known: Mapping[str, Any]) -> Kind:
    last = name.rpartition(".")[2]
    if last in _NAMED:
        return _NAMED[last]
    alias = known.get(name)
    if get_origin(alias) is Literal:
        return _one_of(get_args(alias))
    if get_origin(alias) is collections.abc.Callable:
        return _NAMED["Callable"]
    if alias is not None and not isinstance(alias, type):
        return _ANY  # another alias, which its function checks
    article = "an" if last[0] in "AEIOU" else "a"
    return Kind(f"{article} {last}", f"{last}s", lambda value: any(base.__name__ == last for base in type(value).__mro__))


def _union(kinds: Sequence[Kind]) -> Kind:
    def plain(value: Any) -> Any:
        return next(kind for kind in kinds if kind.takes(value)).plain(value)

    left, right = kinds
    return Kind(
        f"{left.words} or {right.words}".replace(" or ", ", ", (left.words.count(" or "))),
        f"{left.many} or {right.many}".replace(" or ", ", ", (left.many.count(" or "))),
        lambda value: any(kind.takes(value) for kind in kinds),
        plain,
    )


def _one_of(values: Sequence[Any]) -> Kind:
    words = ", ".join(map(str, values))
    return Kind(words, words, lambda value: isinstance(value, str | int | None) and value in values)


def _list_of(one: Kind) -> Kind:
    words = "a list" if one is _ANY else f"a list of {one.many}"
    return Kind(words, words.replace("a list", "lists"), lambda value: _is_list(value) and all(map(one.takes, value)), _plain_list(one))


def _plain_list(one: Kind) -> Callable[[Any], Any]:
    def plain(values: Any) -> Any:
        made = [one.plain(value) for value in values]
        return values if all(a is b for a, b in zip(made, values, strict=True)) else made

    return plain


def _mapping_of(key: Kind, item: Kind) -> Kind:
    def takes(value: Any) -> bool:
        return isinstance(value, Mapping) and all(map(key.takes, value)) and all(map(item.takes, value.values()))

    words = "a mapping" if item is _ANY else f"a mapping of {key.many} to {item.many}"
    return Kind(words, words.replace("a mapping", "mappings"), takes)
