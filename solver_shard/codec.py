"""Dataclasses as JSON, read back with checks, and described by a JSON Schema: all three from the type annotations.

Known types: bool, int, float, str, None, Literal, unions of these, ``tuple[X, ...]``, fixed tuples, ``Mapping[str, X]``,
dataclasses and :class:`Layout` (as text). Reading builds data and nothing else; whatever does not fit is an InputError
with its place in the file:

>>> decode(Axis, {"name": "tp", "size": "8"}, "mesh.axes[0]")
Traceback (most recent call last):
InputError: mesh.axes[0].size: expected a whole number, got '8'
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union

from solver_shard.errors import InputError, InternalError, SolverShardError
from solver_shard.layout import Layout

MAY_LACK: Mapping[str, bool] = {"may_lack": True}
"""Metadata of a field that files of this schema version may be without, because it came later; its default is then its value."""


Decoder = Callable[[Any, str], Any]
_LAYOUT = r"^((R|_?S\([0-9]+\)|P\((sum|avg|max|min)\)))*$"
_LAYOUT_TEXT = re.compile(r"(?:R|_?S\([0-9]{1,2}\)|P\((?:sum|avg|max|min)\))*\Z")
MAX_INTEGER = 2**63


def encode(value: Any) -> Any:
    """JSON-able form of a dataclass value: fields in order, layouts as text, tuples as lists."""
    if value is None or isinstance(value, str | bool | float):
        return value
    if isinstance(value, Layout):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: encode(getattr(value, name)) for name in _field_names(type(value))}
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if hasattr(value, "item"):
        return encode(value.item())
    raise InternalError(f"a plan cannot hold {type(value).__name__} {value!r}")


def decode(kind: Any, data: Any, where: str = "") -> Any:
    """Build a value of the annotated type from JSON data; InputError names the place that does not fit."""
    return _decoder(kind)(data, where)


def json_schema(kind: type, *, title: str, identifier: str) -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a dataclass and all that it holds."""
    definitions: dict[str, Any] = {}
    root = _schema(kind, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": identifier,
        "title": title,
        **root,
        "$defs": dict(sorted(definitions.items())),
    }


@functools.cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(kind))


@functools.cache
def _decoder(kind: Any) -> Decoder:
    if kind is Layout:
        return _decode_layout
    if kind in (bool, int, float, str, type(None)):
        return functools.partial(_decode_plain, kind)
    if dataclasses.is_dataclass(kind):
        return _dataclass_decoder(typing.cast(type, kind))
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return functools.partial(_decode_literal, arguments)
    if origin in (Union, types.UnionType):
        return _union_decoder(arguments)
    if origin is tuple:
        return _tuple_decoder(arguments)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        item = _decoder(arguments[1])
        return functools.partial(_decode_mapping, item)
    raise InternalError(f"a plan cannot hold the type {kind!r}")


def _decode_plain(kind: Any, data: Any, where: str) -> Any:
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        data = float(data) if abs(data) < MAX_INTEGER else data
    fits = type(data) is kind
    if fits and kind is float:
        fits = math.isfinite(data)
    if fits and kind is int:
        fits = abs(data) < MAX_INTEGER
    if not fits:
        raise InputError(f"{where}: expected {_name(kind)}, got {_short(data)}")
    return data


def _decode_literal(values: tuple[Any, ...], data: Any, where: str) -> Any:
    for value in values:
        if type(value) is type(data) and value == data:
            return value
    raise InputError(f"{where}: expected {' or '.join(map(repr, values))}, got {_short(data)}")


def _decode_layout(data: Any, where: str) -> Layout:
    if not isinstance(data, str):
        raise InputError(f"{where}: expected a layout as text, as in 'S(0)R', got {_short(data)}")
    return _layout(data, where)


@functools.lru_cache(maxsize=4096)
def _known_layout(text: str) -> Layout | None:
    return Layout.parse(text) if _LAYOUT_TEXT.match(text) else None


def _layout(text: str, where: str) -> Layout:
    try:
        layout = _known_layout(text) if len(text) < 200 else None
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    if layout is None:
        raise InputError(
            f"{where}: unknown placement in layout {_short(text)}; "
            "a layout is one of R, S(dim), _S(dim), P(sum|avg|max|min) per mesh axis, as in 'S(0)R'"
        )
    return layout


def _union_decoder(kinds: tuple[Any, ...]) -> Decoder:
    decoders = [_decoder(kind) for kind in kinds if kind is not type(None)]
    optional = len(decoders) < len(kinds)

    def read(data: Any, where: str) -> Any:
        if data is None and optional:
            return None
        for decoder in decoders[:-1]:
            with contextlib.suppress(InputError):
                return decoder(data, where)
        return decoders[-1](data, where)

    return read


def _tuple_decoder(arguments: tuple[Any, ...]) -> Decoder:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        item = _decoder(arguments[0])

        def read(data: Any, where: str) -> Any:
            if type(data) is not list:
                raise InputError(f"{where}: expected a list, got {_short(data)}")
            return tuple([item(entry, f"{where}[{i}]") for i, entry in enumerate(data)])

        return read
    items = [_decoder(kind) for kind in arguments]

    def read_fixed(data: Any, where: str) -> Any:
        if type(data) is not list or len(data) != len(items):
            raise InputError(f"{where}: expected a list of {len(items)}, got {_short(data)}")
        return tuple([item(entry, f"{where}[{i}]") for i, (item, entry) in enumerate(zip(items, data, strict=True))])

    return read_fixed


def _decode_mapping(item: Decoder, data: Any, where: str) -> Any:
    if type(data) is not dict:
        raise InputError(f"{where}: expected an object, got {_short(data)}")
    return {key: item(entry, f"{where}.{key}" if where else key) for key, entry in data.items()}


def _dataclass_decoder(kind: type) -> Decoder:
    hints = typing.get_type_hints(kind)
    fields = {f.name: _decoder(hints[f.name]) for f in dataclasses.fields(kind)}
    optional = _may_lack(kind)

    def read(data: Any, where: str) -> Any:
        if type(data) is not dict:
            raise InputError(f"{where or kind.__name__}: expected an object, got {_short(data)}")
        prefix = f"{where}." if where else ""
        values = {}
        for name, decoder in fields.items():
            if name in data:
                values[name] = decoder(data[name], f"{prefix}{name}")
            elif name not in optional:
                raise InputError(f"{prefix}{name} is missing")
        if len(data) != len(values):
            unknown = sorted(set(data) - set(fields))
            raise InputError(f"{prefix}{_short(unknown[0])[1:-1]} is not known; {where or kind.__name__} has {', '.join(fields)}")
        try:
            return kind(**values)
        except SolverShardError as error:
            raise InputError(f"{where or kind.__name__}: {error}") from None

    return read


def _may_lack(kind: Any) -> frozenset[str]:
    """Fields that a file may be without: those with ``may_lack`` in their metadata, which came after files of the same version."""
    return frozenset(f.name for f in dataclasses.fields(kind) if f.metadata.get("may_lack"))


def _name(kind: type) -> str:
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}[kind]


def _short(data: Any) -> str:
    text = repr(data)
    return text if len(text) <= 60 else text[:57] + "..."


def _schema(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    if kind is Layout:
        return {"type": "string", "pattern": _LAYOUT, "description": "one placement per mesh axis, outermost first"}
    if kind in (bool, int, float, str, type(None)):
        return {"type": {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}[kind]}
    if dataclasses.is_dataclass(kind):
        name = typing.cast(type, kind).__name__
        if name not in definitions:
            definitions[name] = {}
            hints = typing.get_type_hints(kind)
            names, optional = [f.name for f in dataclasses.fields(kind)], _may_lack(kind)
            summary = (inspect.getdoc(kind) or name).split("\n\n")[0].replace("\n", " ")
            definitions[name].update(
                description=summary,
                type="object",
                properties={n: _schema(hints[n], definitions) for n in names},
                required=[n for n in names if n not in optional],
                additionalProperties=False,
            )
        return {"$ref": f"#/$defs/{name}"}
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return {"const": arguments[0]} if len(arguments) == 1 else {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(argument, definitions) for argument in arguments]}
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return {"type": "array", "items": _schema(arguments[0], definitions)}
    if origin is tuple:
        return {"type": "array", "prefixItems": [_schema(a, definitions) for a in arguments], "items": False, "minItems": len(arguments)}
    return {"type": "object", "additionalProperties": _schema(arguments[1], definitions)}
