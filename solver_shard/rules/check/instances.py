"""Small op instances for the numeric checks, written like the call itself, and the tensors drawn for them.

    "aten.add.Tensor" = ["self=f64[8, 6], other=f64[6], alpha=2.5"]

A tensor is its dtype and sizes; ``x := f64[8, 6]`` names one that is read twice, as ``x``. What its values are is said
between the two:

    f64[8, 6]                    any numbers of both signs
    f64.positive[8, 6]           at least 0.5
    f64.within(-1, 1)[8, 6]      between two numbers
    f64.wild[8, 6]               infinities and not-a-numbers among them
    f64.burst[8, 6]              a single one is infinite, or none
    f64.signed(2)[8, 6]          whole numbers from -2 to 2
    bool.one[8, 6]               a single one is true, or none
    bool.but_one[8, 6]           a single one is false, or none
    i64.below(10)[8, 6]          indices from 0 to 9
    i64.labels(10)[8, 6]         the same, some of them -100
    i64.distinct(10)[8, 6]       indices that differ along the last dim
    i32.ends(12)[3]              ascending, the last is 12
    i64.starts(12)[3]            ascending, the first is 0, all are below 12
    i32.order[4, 6]              row changes of an elimination: each from its own row on, counted from 1
    f64.definite[4, 6, 6]        matrices that are symmetric and positive definite
    f64.triangle[4, 6, 6]        lower triangles far from singular

Arguments that are left out have their schema's default. The text is read as data: nothing in it is executed.
"""

from __future__ import annotations

import ast
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from solver_shard.errors import RuleError
from solver_shard.files import read_toml
from solver_shard.ops.run import DTYPES
from solver_shard.program import Op, Ref, Tensor
from solver_shard.rules.table import shipped_file

DRAWS = 3
"""How many sets of operands every combination has to hold on."""

_FILE = "instances.toml"
_LONGEST, _LARGEST = 2000, 1 << 16
_DROPPED = ("layout", "device", "pin_memory", "memory_format", "generator", "non_blocking")
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """An operand to be drawn: ``f64.within(-1, 1)[8, 6]``."""

    dtype: str
    shape: tuple[int, ...]
    kind: str = ""
    bounds: tuple[float, ...] = ()

    def draw(self, generator: torch.Generator, turn: int) -> torch.Tensor:
        """Values of one turn: plain, then with distinct offsets, then of the other sign."""
        maker = _KINDS[self.kind][1]
        return maker(self, generator, turn).to(DTYPES[self.dtype])


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One call of an op on small tensors.

    Attributes:
        op: the call, operands numbered in the order in which they are read.
        specs: of the operands.
        text: as written in the file.
    """

    op: Op
    specs: tuple[Spec, ...]
    text: str = field(default="")

    def operands(self) -> tuple[Tensor, ...]:
        """Shapes and dtypes of the operands."""
        return tuple(Tensor(name=f"x{i}", shape=s.shape, dtype=s.dtype) for i, s in enumerate(self.specs))

    def draw(self, turn: int) -> list[torch.Tensor]:
        """Operands of one turn, the same on every run."""
        turn_of_sign = 0 if turn == 2 else turn  # the third draw is the first with other signs
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.op.name} {self.text} {turn_of_sign}".encode()))
        return [spec.draw(generator, turn) for spec in self.specs]


def load_instances() -> Mapping[str, tuple[Instance, ...]]:
    """The shipped instances by op name; RuleError names the file, the op and the fault."""
    return parse_instances(shipped_file(_FILE).read_text(encoding="utf-8"), _FILE)


def parse_instances(text: str, file: str) -> dict[str, tuple[Instance, ...]]:
    """Instances of one TOML text: op name to a list of calls."""
    try:
        data = read_toml(text)
    except ValueError as error:
        raise RuleError(f"instances file {file}: not valid TOML: {error}") from error
    found = {}
    for op, calls in data.items():
        if not isinstance(calls, list) or not all(isinstance(call, str) for call in calls):
            raise RuleError(f'instances file {file}, op {op!r}: must be a list of calls such as ["self=f64[8, 6]"], got {calls!r}')
        found[op] = tuple(parse_instance(op, call, file) for call in calls)
    return found


def parse_instance(op: str, text: str, file: str = "") -> Instance:
    """Read one call.

    >>> made = parse_instance("aten.add.Tensor", "self=(x := f64[8, 6]), other=x")
    >>> made.op.attributes, made.specs[0].shape
    ({'self': Ref(operand=0), 'other': Ref(operand=0), 'alpha': 1}, (8, 6))

    Raises:
        RuleError: the text is no such call; it names the file, the op and what is legal.
    """
    reader = _CallReader(f"instances file {file}, op {op!r}" if file else f"instance of {op!r}", text)
    given = reader.arguments()
    attributes = {name: given.get(name, default) for name, default in _defaults(op, given, reader).items()} if _schema(op) else given
    made = Op(name=op, operands=tuple(range(len(reader.specs))), results=(), attributes=attributes)
    return Instance(op=made, specs=tuple(reader.specs), text=text)


class _CallReader:
    """Reads the arguments of one call; operands are collected on the way."""

    def __init__(self, where: str, text: str) -> None:
        self.where, self.text = where, text
        self.specs: list[Spec] = []
        self.named: dict[str, Ref] = {}

    def fault(self, what: str) -> RuleError:
        return RuleError(f"{self.where}: {what} in {self.text!r}; write arguments as in 'self=f64[8, 6], other=f64[6], alpha=2.5'")

    def arguments(self) -> dict[str, Any]:
        if len(self.text) > _LONGEST:
            raise RuleError(f"{self.where}: a call of {len(self.text)} characters; at most {_LONGEST} are read")
        try:
            call = ast.parse(f"f({self.text})", mode="eval").body
        except (SyntaxError, ValueError, RecursionError) as error:
            raise self.fault(f"cannot be read ({type(error).__name__})") from None
        if not isinstance(call, ast.Call) or call.args or any(word.arg is None for word in call.keywords):
            raise self.fault("arguments without a name")
        return {str(word.arg): self.value(word.value) for word in call.keywords}

    def value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, bool | int | float | str)):
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            inner = self.value(node.operand)
            if isinstance(inner, int | float):
                return -inner
        if isinstance(node, ast.Tuple | ast.List):
            return tuple(self.value(item) for item in node.elts)
        if isinstance(node, ast.NamedExpr) and isinstance(node.value, ast.Subscript):
            self.named[node.target.id] = self.tensor(node.value)
            return self.named[node.target.id]
        if isinstance(node, ast.Name) and node.id in self.named:
            return self.named[node.id]
        if isinstance(node, ast.Name) and node.id == "inf":
            return float("inf")
        if isinstance(node, ast.Subscript):
            return self.tensor(node)
        raise self.fault(f"{ast.unparse(node)!r} is neither a value nor a tensor")

    def tensor(self, node: ast.Subscript) -> Ref:
        head: ast.expr = node.value
        kind = ""
        bounds: tuple[Any, ...] = ()
        if isinstance(head, ast.Call) and not head.keywords:
            bounds = tuple(self.value(item) for item in head.args)
            head = head.func
        if isinstance(head, ast.Attribute):
            kind, head = head.attr, head.value
        sizes = self.value(node.slice)
        shape = sizes if isinstance(sizes, tuple) else (sizes,)
        if not isinstance(head, ast.Name) or head.id not in DTYPES:
            raise self.fault(f"{ast.unparse(node)!r} has no dtype (legal: {', '.join(DTYPES)})")
        if kind not in _KINDS or len(bounds) != _KINDS[kind][0] or not all(isinstance(b, int | float) for b in bounds):
            legal = ", ".join(f"{name}({count} numbers)" if count else name for name, (count, _) in _KINDS.items() if name)
            raise self.fault(f"{ast.unparse(node)!r} has no values of kind {kind!r} (legal: {legal})")
        total = 1
        for size in shape:
            if not isinstance(size, int) or isinstance(size, bool) or size < 0:
                raise self.fault(f"{ast.unparse(node)!r} has a size that is no whole number")
            total *= size
        if total > _LARGEST:
            raise self.fault(f"{ast.unparse(node)!r} has {total} elements, more than {_LARGEST}")
        self.specs.append(Spec(dtype=head.id, shape=shape, kind=kind, bounds=bounds))
        return Ref(len(self.specs) - 1)


def _schema(op: str) -> Any:
    """The registered schema, or None (ops of this library, ops whose library is not imported)."""
    target: Any = torch.ops
    for part in op.split("."):
        target = getattr(target, part, None)
    return getattr(target, "_schema", None)


def _defaults(op: str, given: Mapping[str, Any], reader: _CallReader) -> dict[str, Any]:
    """Every argument of the schema that programs keep, with its default."""
    arguments = _schema(op).arguments
    known = [a.name for a in arguments]
    unknown = [name for name in given if name not in known]
    if unknown:
        raise reader.fault(f"the op has no argument {unknown[0]!r} (legal: {', '.join(known)})")
    missing = [a.name for a in arguments if not a.has_default_value() and a.name not in given and not a.kwarg_only]
    if missing:
        raise reader.fault(f"the op needs its argument {missing[0]!r}")
    kept = [a for a in arguments if a.name in given or a.name not in _DROPPED]
    return {a.name: _plain(a.default_value) if a.has_default_value() else None for a in kept}


def _plain(value: Any) -> Any:
    """A default as programs write it: tuples, dtype names."""
    if isinstance(value, list | tuple):
        return tuple(_plain(item) for item in value)
    return _NAMES[value] if isinstance(value, torch.dtype) else value


def tensor_of(name: str, value: torch.Tensor) -> Tensor:
    """Shape and dtype of a real tensor."""
    return Tensor(name=name, shape=tuple(value.shape), dtype=_NAMES[value.dtype])


Maker = Callable[[Spec, torch.Generator, int], torch.Tensor]


def _numbers(spec: Spec, generator: torch.Generator, turn: int) -> torch.Tensor:
    if spec.dtype == "bool":
        return torch.randint(2, spec.shape, generator=generator) ^ (turn == 2)
    if DTYPES[spec.dtype].is_complex:
        parts = torch.randn((*spec.shape, 2), generator=generator, dtype=torch.float64)
        return torch.view_as_complex(parts * (1 + turn))
    if not DTYPES[spec.dtype].is_floating_point:
        return torch.randint(-9, 10, spec.shape, generator=generator) * (-1 if turn == 2 else 1)
    plain = torch.randn(spec.shape, generator=generator, dtype=torch.float64)
    ramp = torch.arange(plain.numel(), dtype=torch.float64).reshape(spec.shape)
    return (plain, plain * 2 + 0.37 * (ramp % 7) - 1, -1.5 * plain)[turn % 3]


def _positive(spec: Spec, generator: torch.Generator, turn: int) -> torch.Tensor:
    return torch.randn(spec.shape, generator=generator, dtype=torch.float64).abs() * (1 + turn) + 0.5


def _within(spec: Spec, generator: torch.Generator, turn: int) -> torch.Tensor:
    low, high = spec.bounds
    return torch.rand(spec.shape, generator=generator, dtype=torch.float64) * (high - low) + low


def _wild(spec: Spec, generator: torch.Generator, turn: int) -> torch.Tensor:
    plain = torch.randn(spec.shape, generator=generator, dtype=torch.float64)
    which = torch.randint(6, spec.shape, generator=generator)
    for number, value in enumerate((float("inf"), float("-inf"), float("nan"))):
        plain = plain.masked_fill(which == number, value)
    return plain


def _signed(spec: Spec, generator: torch.Generator, turn: int) -> torch.Tensor:
    most = int(spec.bounds[0])
    return torch.randint(-most, most + 1, spec.shape, generator=generator)


def _one(spec: Spec, generator: torch.Generator, turn: int) -> torch.Tensor:
    made = torch.zeros(spec.shape, dtype=torch.bool)
    if turn != 1:
        made.view(-1)[torch.randint(made.numel(), (), generator=generator)] = True
    return made


def _below(spec: Spec, generator: torch.Generator, turn: int) -> torch.Tensor:
    return torch.randint(int(spec.bounds[0]), spec.shape, generator=generator)


def _labels(spec: Spec, generator: torch.Generator, turn: int) -> torch.Tensor:
    ignored = torch.randint(4, spec.shape, generator=generator) == 0
    return _below(spec, generator, turn).masked_fill(ignored, -100)


def _distinct(spec: Spec, generator: torch.Generator, turn: int) -> torch.Tensor:
    rows = torch.rand((*spec.shape[:-1], int(spec.bounds[0])), generator=generator)
    return rows.argsort(-1)[..., : spec.shape[-1]]


def _ends(spec: Spec, generator: torch.Generator, turn: int) -> torch.Tensor:
    found = torch.randint(int(spec.bounds[0]) + 1, spec.shape, generator=generator).sort(-1).values
    found[..., -1] = int(spec.bounds[0])
    return found


def _starts(spec: Spec, generator: torch.Generator, turn: int) -> torch.Tensor:
    found = torch.randint(int(spec.bounds[0]), spec.shape, generator=generator).sort(-1).values
    found[..., 0] = 0
    return found


def _order(spec: Spec, generator: torch.Generator, turn: int) -> torch.Tensor:
    own = torch.arange(spec.shape[-1])
    drawn = torch.rand(spec.shape, generator=generator) * (spec.shape[-1] - own)
    return own + 1 + drawn.long()


def _definite(spec: Spec, generator: torch.Generator, turn: int) -> torch.Tensor:
    plain = torch.randn(spec.shape, generator=generator, dtype=torch.float64) * (1 + turn)
    return plain @ plain.mT + torch.eye(spec.shape[-1], dtype=torch.float64)


def _triangle(spec: Spec, generator: torch.Generator, turn: int) -> torch.Tensor:
    plain = torch.randn(spec.shape, generator=generator, dtype=torch.float64).tril()
    return plain + (2 + turn) * torch.eye(spec.shape[-1], dtype=torch.float64) * plain.diagonal(0, -2, -1).sign().unsqueeze(-1)


_KINDS: Mapping[str, tuple[int, Maker]] = {
    "": (0, _numbers),
    "positive": (0, _positive),
    "within": (2, _within),
    "wild": (0, _wild),
    "signed": (1, _signed),
    "burst": (0, lambda spec, generator, turn: _numbers(spec, generator, turn).masked_fill(_one(spec, generator, turn), float("inf"))),
    "one": (0, _one),
    "but_one": (0, lambda spec, generator, turn: ~_one(spec, generator, turn)),
    "below": (1, _below),
    "labels": (1, _labels),
    "distinct": (1, _distinct),
    "ends": (1, _ends),
    "starts": (1, _starts),
    "order": (0, _order),
    "definite": (0, _definite),
    "triangle": (0, _triangle),
}
