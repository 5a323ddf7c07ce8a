"""From a call to the way it runs: strategies looked up, fitted, searched, or expanded in full where the search does not reach.

>>> from solver_shard.costs.dtensor import DTensorCosts
>>> from solver_shard.expand.aten import call_of
>>> from solver_shard.expand.call import Operand, show
>>> from solver_shard.expand.pricing import DTensorPricing
>>> from solver_shard.mesh import Mesh
>>> mesh = Mesh.parse("dp=4,tp=2")
>>> expander = Expander(DTensorPricing(DTensorCosts(mesh_shape=mesh.shape, devices_per_host=8), mesh))
>>> inputs = [Operand.parse(text, mesh) for text in ("f32[512,1024]| S(0)S(1)", "f32[1024,512]| RS(0)")]
>>> found = expander.expand(call_of("aten.mm.default", inputs, mesh))
>>> show(found.results[0]), found.cost, found.how
('S(0)P(sum)', 0.0, 'match')
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from typing import Literal

from solver_shard.errors import InputError
from solver_shard.expand.aten import dtensor_strategies
from solver_shard.expand.call import Call, elements, is_list_op
from solver_shard.expand.dijkstra import search, searchable
from solver_shard.expand.exhaustive import Expansion, expand_exhaustively
from solver_shard.expand.pricing import Pricing
from solver_shard.expand.single_axis import USER_STRATEGIES, Prepared, SingleAxis, Strategies, of_rule, prepare
from solver_shard.program import Op, Tensor
from solver_shard.rulebook.build import build_rule
from solver_shard.rulebook.table import RuleTable, load_table

Source = Literal["auto", "user", "rules", "dtensor"]


class SearchExhaustedWarning(UserWarning):
    """The search found nothing, or held too many states, so every combination was looked at instead."""


class Expander:
    """Expands calls under one cost model; full expansions are kept, by what they depend on.

    ``source``: where single-axis strategies come from. ``auto`` takes what the user registered, else our rule, else DTensor's own,
    else the op is replicated.
    """

    def __init__(
        self, pricing: Pricing, *, source: Source = "auto", strategies: Strategies = USER_STRATEGIES, table: RuleTable | None = None
    ) -> None:
        self.pricing = pricing
        self._source, self._strategies = source, strategies
        self._table = load_table() if table is None else table
        self._kept: dict[Hashable, tuple[Expansion, ...]] = {}

    def expand(self, call: Call) -> Expansion:
        """The cheapest way to run one call.

        Raises:
            InputError: there is none, or the call is one of a list op (see ``expand_elements``).
            RuleError: strategies that do not fit the op.
        """
        if is_list_op(call):
            raise InputError(f"{call.op} runs on lists of tensors, each element its own way; expand its elements")
        prepared = self.prepare(call)
        if searchable(prepared):
            found = search(prepared, self.pricing)
            if found is not None:
                return found
            warnings.warn(f"{call.op}: the search found no strategy; all combinations are expanded", SearchExhaustedWarning, stacklevel=2)
        return self.ranked(call)[0]

    def expand_elements(self, call: Call) -> tuple[Expansion, ...]:
        """The cheapest way to run every element of a list op."""
        return tuple(self.expand(element) for element in elements(call))

    def ranked(self, call: Call) -> tuple[Expansion, ...]:
        """Every way to run a call, cheapest first."""
        registered = self._strategies.get(call.op) if self._source in ("auto", "user") else None
        try:
            key = call.key(registered.static_arguments if registered is not None else None)
        except TypeError:
            return expand_exhaustively(self.prepare(call), self.pricing)
        if key not in self._kept:
            self._kept[key] = expand_exhaustively(self.prepare(call), self.pricing)
        return self._kept[key]

    def prepare(self, call: Call) -> Prepared:
        """The strategies of a call, fitted to it."""
        return prepare(call, self.single_axis(call))

    def single_axis(self, call: Call) -> SingleAxis:
        """The strategies of a call, from the first source that has some."""
        sources: dict[str, Callable[[], SingleAxis | None]] = {
            "user": lambda: self._strategies.of(call) if self._strategies.get(call.op) is not None else None,
            "rules": lambda: rule_strategies(call, self._table) if call.op in self._table else None,
            "dtensor": lambda: dtensor_strategies(call),
        }
        for name, look in sources.items():
            if self._source in ("auto", name):
                found = look()
                if found is not None:
                    return found
        if self._source == "user":
            return self._strategies.of(call)
        return SingleAxis(strategies=())


def rule_strategies(call: Call, table: RuleTable) -> SingleAxis:
    """The single-axis strategies of our rule for the op."""
    tensors = [Tensor(name=f"x{i}", shape=operand.sizes, dtype=operand.dtype) for i, operand in enumerate(call.operands)]
    results = [Tensor(name=f"y{i}", shape=meta.sizes, dtype=meta.dtype) for i, meta in enumerate(call.results) if meta is not None]
    op = Op(name=call.op, operands=tuple(range(len(tensors))), results=tuple(range(len(results))), attributes=call.attributes)
    found = of_rule(build_rule(op, tensors, results, table), call.element_mesh.shape)
    if len(results) == len(call.results):
        return found
    present = iter(range(len(results)))
    place = [None if meta is None else next(present) for meta in call.results]
    rows = tuple((*(None if k is None else row[k] for k in place), *row[len(results) :]) for row in found.strategies)
    return SingleAxis(strategies=rows, allow_unbacked_sharding=found.allow_unbacked_sharding, legal=found.legal)
