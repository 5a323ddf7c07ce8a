"""Modules propagated by this library and by the reference, held against each other as printed text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from shardy_oracle import Oracle

from solver_shard.errors import InputError
from solver_shard.shardy.passes import PassName, PropagationOptions, propagate
from solver_shard.shardy.stablehlo import StablehloModule
from solver_shard.shardy.stablehlo.rules import StablehloRules


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A pass with options, and the same for the reference."""

    name: PassName
    options: PropagationOptions

    @property
    def reference(self) -> str:
        said = {
            "conservative-propagation": str(self.options.conservative).lower(),
            "keep-sharding-rules": str(self.options.keep_rules).lower(),
        }
        if self.name != "basic":
            said["propagation-strategy"] = self.options.strategy
        if self.name in ("op-priority", "user-priority"):
            said["run-op-priority-propagation"] = str(self.options.run_op_priority).lower()
        return f"sdy-{self.name}-propagate{{{' '.join(f'{key}={value}' for key, value in said.items())}}}"


def _variants() -> tuple[Variant, ...]:
    found = [
        Variant(name="basic", options=PropagationOptions(conservative=conservative, keep_rules=keep))
        for conservative in (False, True)
        for keep in (False, True)
    ]
    for name in ("aggressive", "op-priority", "user-priority"):
        for strategy in ("basic", "aggressive", "basic-then-aggressive"):
            for conservative in (False, True):
                for levels in (True,) if name == "aggressive" else (True, False):
                    for keep in (False, True):
                        options = PropagationOptions(conservative=conservative, strategy=strategy, run_op_priority=levels, keep_rules=keep)
                        found.append(Variant(name=name, options=options))
    return tuple(found)


VARIANTS = _variants()
"""Every pass with every combination of its options: 64."""


def draw(rng: random.Random, count: int) -> list[Variant]:
    """Some variants, one of every pass at least where there is room, in a fixed order of draws."""
    passes: Sequence[PassName] = ("basic", "aggressive", "op-priority", "user-priority")
    first = rng.sample(passes, min(count, len(passes)))
    found = [rng.choice([v for v in VARIANTS if v.name == name]) for name in first]
    return found + rng.sample(VARIANTS, max(0, count - len(found)))


PATIENCE = 20.0
"""Seconds that the reference is given where we find that propagation never settles."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one comparison.

    ``same``, ``different``, ``aborted`` (the reference did), ``refused`` (by both), or ``endless`` (we refuse, it never returns).
    """

    kind: str
    variant: Variant
    detail: str = ""


def compare(oracle: Oracle, text: str, variants: Sequence[Variant]) -> list[Outcome]:
    """Run every variant over the module on both sides."""
    found = []
    module = StablehloModule.parse(text)
    rules = StablehloRules()
    for variant in variants:
        try:
            ours = module.print(propagate(module.graph, variant.name, rules, variant.options).graph)
        except InputError as error:  # a sharding that a manual computation, or what is inside, must not have
            endless = "never settles" in str(error)
            theirs = oracle.run(text, variant.reference, seconds=PATIENCE if endless else None)
            kind = "different" if theirs.text is not None else "refused" if theirs.error else "endless" if endless else "aborted"
            found.append(Outcome(kind=kind, variant=variant, detail=f"we refuse: {error}"))
            continue
        theirs = oracle.run(text, variant.reference)
        if theirs.crashed:
            found.append(Outcome(kind="aborted", variant=variant))
        elif theirs.text is None:
            found.append(Outcome(kind="different", variant=variant, detail=f"the reference refuses: {theirs.error}"))
        elif theirs.text == ours:
            found.append(Outcome(kind="same", variant=variant))
        else:
            found.append(Outcome(kind="different", variant=variant, detail=first_difference(theirs.text, ours)))
    return found


def first_difference(theirs: str, ours: str) -> str:
    """The first line that differs."""
    for a, b in zip(theirs.splitlines(), ours.splitlines(), strict=False):
        if a != b:
            return f"reference: {a.strip()}\nours:      {b.strip()}"
    return f"{len(theirs.splitlines())} lines by the reference, {len(ours.splitlines())} by us"
