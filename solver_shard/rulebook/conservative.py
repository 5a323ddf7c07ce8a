"""Conservative rules: without the strategies that could make shards uneven or cut a dim inside.

- Every factor is cut into equal shards only, so that all devices hold the same number of elements.
- Rows do not lie with their experts (``own-experts``), whose numbers differ.
- Nothing is cut below another factor (no strategy that needs sub-axes), and a factor that is a whole dim of no tensor is not cut: a
  view from [6, 4] to [4, 6] could be cut in two, but on both sides only inside a dim.

The counterpart in Shardy is ``conservative-propagation``, in which split axes never propagate and rules lose the factors that could
yield shards that do not divide. (Rules here never cut the dims of slices, pads, concatenations or convolution windows anyway.)
"""

from __future__ import annotations

from dataclasses import replace

from solver_shard.rulebook.rule import Implementation, Rule


def conservative(rule: Rule) -> Rule:
    """The rule without strategies that could lead to uneven or split shards."""
    split = _split(rule)
    factors = tuple(replace(factor, even=True, cut=factor.cut and index not in split) for index, factor in enumerate(rule.factors))
    explicit = None if rule.explicit is None else tuple(s for s in rule.explicit if not s.after and s.factor not in split)
    ways = tuple(way for way in rule.implementations if factors[way.factor].cut and _follows(rule, way))
    return replace(rule, factors=factors, explicit=explicit, implementations=ways)


def _follows(rule: Rule, way: Implementation) -> bool:
    """Whether an implementation cuts only dims that hold its factor: rows that lie with their experts are as many as are routed."""
    tensors = [*zip(rule.operands, way.operands, strict=True), *zip(rule.results, way.results, strict=True)]
    return all(way.factor in dims[place.dim] for dims, place in tensors if place.is_shard)


def _split(rule: Rule) -> set[int]:
    """Factors that are never a whole dim, or that lie below another one."""
    held = [[f for f in dim if rule.factors[f].size > 1] for dims in (*rule.operands, *rule.results) for dim in dims]
    inside = {f for factors in held for f in factors if len(factors) > 1}
    whole = {f for factors in held for f in factors if len(factors) == 1}
    minor = {f for factors in held for f in factors[1:]}
    return (inside - whole) | minor
