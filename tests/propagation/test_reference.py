"""Random modules: what this library makes of them is what the reference makes of them, to the letter.

A small slice of what ``experiments/propagation.py`` runs; its record is ``experiments/propagation.md``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from propagation.all_ops import all_ops_module
from propagation.compare import compare, draw
from propagation.random_modules import random_module
from shardy_oracle import Oracle

pytest.importorskip("jaxlib", reason="the reference comes with jaxlib: pip install 'solver-shard[jax]'")


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    oracle = Oracle()
    yield oracle
    oracle.close()


@pytest.mark.parametrize("seed", range(100_000, 100_024))
def test_random_modules_are_propagated_as_by_the_reference(seed: int, oracle: Oracle) -> None:
    text = all_ops_module(seed) if seed % 2 else random_module(seed)
    if seed % 8:
        edged = oracle.run(text, "sdy-add-data-flow-edges").text
        assert edged is not None
        text = edged
    outcomes = compare(oracle, text, draw(random.Random(seed), 4))
    assert [outcome for outcome in outcomes if outcome.kind == "different"] == []
    assert any(outcome.kind == "same" for outcome in outcomes)


def test_a_difference_would_be_seen(oracle: Oracle) -> None:
    """The comparison itself: sections propagated by one pass here and another there."""
    kinds = set()
    for seed in range(100_100, 100_110):
        text = random_module(seed, priorities=False)
        ours, theirs = (oracle.run(text, f"sdy-{name}-propagate").text for name in ("basic", "aggressive"))
        kinds.add(ours == theirs)
    assert False in kinds
