"""Random modules: what this library makes of them is what the reference makes of them, to the letter.

A small slice of what ``experiments/propagation.py`` runs; its record is ``experiments/propagation.md``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from shardy.all_ops import all_ops_module
from shardy.compare import VARIANTS, compare, draw
from shardy.random_modules import random_module
from shardy_oracle import Oracle

from solver_shard.shardy.passes import PropagationOptions, populate_rules, propagate
from solver_shard.shardy.stablehlo import StablehloModule
from solver_shard.shardy.stablehlo.rules import StablehloRules

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


def test_the_order_in_which_readers_are_visited_is_the_references(oracle: Oracle) -> None:
    """A module where the earliest reader first, instead of the latest, reaches another fixed point."""
    edged = oracle.run(random_module(200_072), "sdy-add-data-flow-edges").text
    assert edged is not None
    outcomes = compare(oracle, edged, [v for v in VARIANTS if v.name in ("basic", "aggressive") and not v.options.keep_rules])
    assert {outcome.kind for outcome in outcomes} == {"same"}


def test_a_difference_would_be_seen(oracle: Oracle) -> None:
    """The modules are dense enough for two passes to differ on some of them."""
    kinds = set()
    for seed in range(100_100, 100_110):
        text = random_module(seed, priorities=False)
        ours, theirs = (oracle.run(text, f"sdy-{name}-propagate").text for name in ("basic", "aggressive"))
        kinds.add(ours == theirs)
    assert False in kinds


@pytest.mark.parametrize("seed", range(100_200, 100_206))
def test_dumps_are_those_of_the_reference(seed: int, oracle: Oracle, tmp_path: Path) -> None:
    edged = oracle.run(random_module(seed), "sdy-add-data-flow-edges").text
    assert edged is not None
    if oracle.run(edged, f"sdy-user-priority-propagate{{module-dump-directory={tmp_path}}}").crashed:
        pytest.skip("the reference aborts on this module")
    theirs = {path.name: path.read_text().strip() for path in tmp_path.iterdir()}
    ours: dict[str, str] = {}
    module = StablehloModule.parse(edged)
    options = PropagationOptions(dump=lambda graph, name: ours.update({name: module.print(graph, verify=False).strip()}))
    propagate(module.graph, "user-priority", StablehloRules(), options)
    assert ours == theirs


@pytest.mark.parametrize("seed", range(100_300, 100_306))
@pytest.mark.parametrize("conservative", [False, True])
def test_rules_alone_are_those_of_the_reference(seed: int, conservative: bool, oracle: Oracle) -> None:
    text = all_ops_module(seed)
    theirs = oracle.run(text, f"func.func(sdy-populate-op-sharding-rules{{conservative-propagation={str(conservative).lower()}}})").text
    module = StablehloModule.parse(text)
    assert module.print(populate_rules(module.graph, StablehloRules(), conservative=conservative)) == theirs
