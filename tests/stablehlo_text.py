"""StableHLO as text: values, bodies that ops are added to, and attribute texts.

A ``Body`` is a function body or a region being written. An op takes operands from the values that are in sight, or asks for new
function arguments, and adds lines of text.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Val:
    """A value in the text."""

    name: str
    shape: Shape
    dtype: str

    @property
    def type(self) -> str:
        return tensor(self.shape, self.dtype)


def tensor(shape: Sequence[int], dtype: str = "f32") -> str:
    return f"tensor<{'x'.join([*map(str, shape), dtype])}>"


@dataclass
class Names:
    """Fresh names and the arguments of the function that all bodies inside it share."""

    prefix: str = "%v"
    count: int = 0
    arguments: list[Val] = field(default_factory=list)

    def fresh(self) -> str:
        self.count += 1
        return f"{self.prefix}{self.count}"


class Body:
    """A function body or region.

    Attributes:
        values: what ops may read.
        source: makes a value of a type that is not in sight, or None; without it, values come as new function arguments.
        annotate: attribute text (``sdy.sharding = ...``) for an op's results, or nothing.
        reuse: how likely a value in sight is read rather than a new one.
    """

    def __init__(
        self,
        rng: random.Random,
        names: Names | None = None,
        *,
        values: Sequence[Val] = (),
        source: Callable[[Shape, str], Val | None] | None = None,
        annotate: Callable[[Sequence[Val]], str] | None = None,
        reuse: float = 0.75,
        sizes: Sequence[int] = (1, 2, 3, 4, 6, 8, 12, 16),
    ) -> None:
        self.rng = rng
        self.names = names or Names()
        self.values: list[Val] = list(values)
        self.lines: list[str] = []
        self.source = source
        self.annotate = annotate
        self.reuse = reuse
        self.sizes = sizes

    def size(self) -> int:
        return self.rng.choice(self.sizes)

    def shape(self, low: int = 0, high: int = 4) -> Shape:
        return tuple(self.size() for _ in range(self.rng.randint(low, high)))

    def need(self, shape: Sequence[int], dtype: str = "f32", *, fresh: bool = False) -> Val:
        """A value of this type: one in sight, or a new argument (a constant where the region sees no arguments)."""
        shape = tuple(shape)
        known = [v for v in self.values if v.shape == shape and v.dtype == dtype]
        if known and not fresh and self.rng.random() < self.reuse:
            return self.rng.choice(known)
        if self.source is not None:
            found = self.source(shape, dtype)
            if found is None:
                return self.constant(shape, dtype)
            self.values.append(found)
            return found
        made = Val(f"%arg{len(self.names.arguments)}", shape, dtype)
        self.names.arguments.append(made)
        self.values.append(made)
        return made

    def pick(self, low: int = 0, high: int = 4, dtypes: Sequence[str] = ("f32",)) -> Val:
        """A value of any shape with so many dims."""
        known = [v for v in self.values if low <= len(v.shape) <= high and v.dtype in dtypes]
        if known and self.rng.random() < self.reuse:
            recent = known[-8:]
            return self.rng.choice(recent if self.rng.random() < 0.7 else known)
        return self.need(self.shape(low, high), self.rng.choice(list(dtypes)), fresh=True)

    def constant(self, shape: Sequence[int], dtype: str = "f32", value: str | None = None) -> Val:
        literal = value or {"f32": "1.0", "i1": "true", "complex<f32>": "(1.0, 0.0)"}.get(dtype, "1")
        made = Val(self.names.fresh(), tuple(shape), dtype)
        self.lines.append(f"{made.name} = stablehlo.constant dense<{literal}> : {made.type}")
        self.values.append(made)
        return made

    def op(
        self,
        name: str,
        operands: Sequence[Val],
        results: Sequence[tuple[Sequence[int], str]],
        properties: str = "",
        *,
        region: str = "",
    ) -> list[Val]:
        """Add an op in the generic form; region text includes its parentheses."""
        base = self.names.fresh()
        made = [Val(base if len(results) == 1 else f"{base}#{i}", tuple(shape), dtype) for i, (shape, dtype) in enumerate(results)]
        extra = self.annotate(made) if self.annotate else ""
        left = "" if not results else f"{base}{f':{len(results)}' if len(results) > 1 else ''} = "
        self.lines.append(
            f'{left}"{name}"({", ".join(v.name for v in operands)})'
            f"{f' <{{{properties}}}>' if properties else ''}{f' {region}' if region else ''}{f' {{{extra}}}' if extra else ''}"
            f" : ({', '.join(v.type for v in operands)}) -> ({', '.join(v.type for v in made)})"
        )
        self.values.extend(made)
        return made


def array(values: Sequence[int]) -> str:
    return "array<i64" + (": " if values else "") + ", ".join(map(str, values)) + ">"


def flags(values: Sequence[bool]) -> str:
    return "array<i1: " + ", ".join("true" if v else "false" for v in values) + ">"


def pairs(values: Sequence[tuple[int, int]]) -> str:
    return f"dense<[{', '.join(f'[{a}, {b}]' for a, b in values)}]> : tensor<{len(values)}x2xi64>"


def fold(kind: str, dtype: str, names: Names, count: int = 1) -> str:
    """A region that reduces ``count`` pairs of scalars with one op each."""
    scalar = tensor((), dtype)
    left = [names.fresh() for _ in range(count)]
    right = [names.fresh() for _ in range(count)]
    done = [names.fresh() for _ in range(count)]
    arguments = ", ".join(f"{v}: {scalar}" for v in (*left, *right))
    body = "\n".join(f"{r} = stablehlo.{kind} {a}, {b} : {scalar}" for a, b, r in zip(left, right, done, strict=True))
    return f"({{\n^bb0({arguments}):\n{body}\nstablehlo.return {', '.join(done)} : {', '.join([scalar] * count)}\n}})"


def keep_second(dtype: str, names: Names) -> str:
    """A region that is no reduction: it returns its second argument."""
    scalar = tensor((), dtype)
    a, b = names.fresh(), names.fresh()
    return f"({{\n^bb0({a}: {scalar}, {b}: {scalar}):\nstablehlo.return {b} : {scalar}\n}})"


def module_of(body: Body) -> str:
    """A module whose one function has this body and returns nothing."""
    arguments = ", ".join(f"{v.name}: {v.type}" for v in body.names.arguments)
    return f"func.func @main({arguments}) {{\n" + "\n".join(body.lines) + "\nreturn\n}\n"
