"""Random modules as in ``random_modules``, of every StableHLO op that ``stablehlo_ops`` can write.

>>> text = all_ops_module(7)
"""

from __future__ import annotations

import random

from shardy.random_modules import Generator, Scope, Shape
from stablehlo_ops import OPS
from stablehlo_text import Body, Names, Val

_SEVERAL = ("custom_call", "unary", "binary", "reshape", "dot_general", "gather", "scatter", "convolution", "concatenate")
"""Generators that are drawn more often: each stands for many ops or forms."""


def all_ops_module(seed: int, *, ops: int | None = None, priorities: bool = True) -> str:
    """A module's text; ``ops`` bounds the number of ops of the main body."""
    return AllOps(random.Random(seed), ops, priorities).module()


class AllOps(Generator):
    """A module most of whose ops come from ``stablehlo_ops``."""

    def __init__(self, rng: random.Random, ops: int | None, priorities: bool) -> None:
        super().__init__(rng, ops, priorities)
        self.names = Names(prefix="%w")

    def op(self, scope: Scope) -> None:
        if self.rng.random() < 0.35:
            super().op(scope)
        else:
            self.add(scope, self.rng.choice((*OPS, *_SEVERAL)))

    def select(self, scope: Scope) -> None:
        self.add(scope, "select")  # scalars too

    def add(self, scope: Scope, generator: str) -> None:
        """An op of ``stablehlo_ops``."""
        body = Body(
            self.rng,
            self.names,
            values=[Val(name, shape, "f32") for name, shape in scope.values],
            source=lambda shape, dtype: self._source(scope, shape, dtype),
            annotate=lambda made: self._annotation(scope, made),
            sizes=self.sizes,
        )
        known = set(scope.values)
        OPS[generator](body)
        scope.lines += [scope.indent + line for line in body.lines]
        scope.values += [pair for v in body.values if v.dtype == "f32" and (pair := (v.name, v.shape)) not in known]

    def _source(self, scope: Scope, shape: Shape, dtype: str) -> Val | None:
        """A new value from nowhere; numbers other than floats are constants."""
        if dtype != "f32":
            return None
        name, _ = self.source(scope, shape)
        return Val(name, shape, dtype)

    def _annotation(self, scope: Scope, made: list[Val]) -> str:
        return self.attr(scope, [v.shape for v in made], braces=False) if made else ""
