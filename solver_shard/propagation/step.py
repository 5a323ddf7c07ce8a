"""One step on one op: from the shardings of its operands and results to those that change.

A step is a pure function of shardings, so a ``Stepper`` remembers what it has computed: repeated layers and repeated sweeps ask
for the same steps over and over. It keeps shardings by number (equal shardings have one number), 0 for none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from solver_shard.annotations import MeshSpec, TensorSharding
from solver_shard.propagation.graph import Direction
from solver_shard.propagation.projection import project, unproject
from solver_shard.propagation.rule import ShardingRule
from solver_shard.propagation.strategies import Setting, Strategy, aggressive, basic

StrategyName = Literal["basic", "aggressive"]
Changes = tuple[tuple[int, int], ...]
"""Positions of tensors (operands first, then results) with the numbers of their new shardings, in order."""

NO_SHARDING = 0
_STRATEGIES: Mapping[StrategyName, Strategy] = {"basic": basic, "aggressive": aggressive}


class Stepper:
    """Steps, and the numbers of shardings, for the modules whose mesh symbols are given."""

    def __init__(self, meshes: Mapping[str, MeshSpec]) -> None:
        self._meshes = meshes
        self._shardings: list[TensorSharding | None] = [None]
        self._numbers: dict[TensorSharding | None, int] = {None: NO_SHARDING}
        self._steps: dict[tuple[object, ...], Changes] = {}
        self._rules: dict[ShardingRule, int] = {}

    def number(self, sharding: TensorSharding | None) -> int:
        """The number of a sharding; equal ones have the same."""
        found = self._numbers.get(sharding)
        if found is None:
            found = self._numbers[sharding] = len(self._shardings)
            self._shardings.append(sharding)
        return found

    def sharding(self, number: int) -> TensorSharding | None:
        """The sharding with this number."""
        return self._shardings[number]

    def rule(self, rule: ShardingRule) -> int:
        """A number for a rule, to be given to ``step``."""
        return self._rules.setdefault(rule, len(self._rules))

    def mesh(self, symbol: str | MeshSpec) -> MeshSpec:
        """What a sharding's mesh stands for."""
        return self._meshes[symbol] if isinstance(symbol, str) else symbol

    def step(
        self,
        rule: ShardingRule,
        rule_number: int,
        shardings: tuple[int, ...],
        *,
        directions: tuple[Direction, ...],
        strategy: StrategyName,
        elementwise: bool = False,
        conservative: bool = False,
    ) -> Changes:
        """What one step changes; ``shardings`` are those of the operands, then of the results, by number."""
        if not any(shardings):
            return ()
        key = (rule_number, shardings, directions, strategy, elementwise, conservative)
        found = self._steps.get(key)
        if found is None:
            found = self._steps[key] = self._compute(rule, shardings, directions, strategy, elementwise, conservative)
        return found

    def _compute(
        self,
        rule: ShardingRule,
        numbers: tuple[int, ...],
        directions: tuple[Direction, ...],
        strategy: StrategyName,
        elementwise: bool,
        conservative: bool,
    ) -> Changes:
        shardings = [self._shardings[n] for n in numbers]
        symbol = self.common_mesh(shardings)
        if symbol is None:
            return ()
        mesh = self.mesh(symbol)
        if mesh.is_maximal:
            return ()
        dims = (*rule.operands, *rule.results)
        tensors = [project(sharding, held, rule.sizes) for sharding, held in zip(shardings, dims, strict=True)]
        setting = Setting(
            sizes=rule.sizes,
            operands=len(rule.operands),
            directions=directions,
            mesh=mesh,
            elementwise=elementwise,
            conservative=conservative,
        )
        changes = []
        for position in sorted(_STRATEGIES[strategy](tensors, setting)):
            new = unproject(tensors[position], dims[position], rule.sizes, symbol)
            old = shardings[position]
            if new != old if old is not None else _has_axes(new):
                changes.append((position, self.number(new)))
        return tuple(changes)

    def common_mesh(self, shardings: Sequence[TensorSharding | None]) -> str | MeshSpec | None:
        """The mesh symbol that all shardings can be bound to; None if there are none, or two meshes differ."""
        found: str | MeshSpec | None = None
        for sharding in shardings:
            if sharding is None:
                continue
            if found is None:
                found = sharding.mesh
                continue
            known, other = self.mesh(found), self.mesh(sharding.mesh)
            if known.is_empty and not other.is_empty:
                found = sharding.mesh
            elif not known.is_empty and not other.is_empty and known != other:
                return None
        return found


def _has_axes(sharding: TensorSharding) -> bool:
    return bool(sharding.replicated or sharding.unreduced or any(dim.axes for dim in sharding.dims))
