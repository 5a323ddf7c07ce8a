"""Every numbered section of the specification, by hand; the reference is asked to confirm what is expected."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from shardy.sections import CASES, Case
from shardy_oracle import Oracle

from solver_shard.shardy.graph import PropagationGraph
from solver_shard.shardy.passes import propagate
from solver_shard.shardy.sharding import format_sharding
from solver_shard.shardy.stablehlo import StablehloModule
from solver_shard.shardy.stablehlo.rules import StablehloRules

pytest.importorskip("jaxlib", reason="StableHLO modules are read through jaxlib: pip install 'solver-shard[jax]'")


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    oracle = Oracle()
    yield oracle
    oracle.close()


def shardings(graph: PropagationGraph) -> dict[str, str | None]:
    """Per value and per result of the main function, its sharding without the mesh."""
    found = {value.name: value.sharding for value in reversed(graph.values)}
    main = next(function for function in graph.functions if function.name == "main")
    found |= {f"result {i}": sharding for i, sharding in enumerate(main.result_shardings)}
    return {
        name: None if sharding is None else format_sharding(sharding, graph.meshes).partition(", ")[2].removesuffix(">")
        for name, sharding in found.items()
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"section {case.section}: {case.says}")
def test_section(case: Case, oracle: Oracle) -> None:
    module = StablehloModule.parse(case.text)
    made = propagate(module.graph, case.name, StablehloRules(), case.options).graph
    found = shardings(made)
    assert {name: found[name] for name in case.expected} == case.expected
    assert module.print(made) == oracle.run(case.text, case.reference).text
