"""The examples in the cost modules' docstrings print what they say."""

from __future__ import annotations

import doctest
from types import ModuleType

import pytest

from solver_shard.costs import buckets, cluster, collectives, compute, kernels, layouts, memory, model, overlap, transitions


@pytest.mark.parametrize("module", [buckets, cluster, collectives, compute, kernels, layouts, memory, model, overlap, transitions])
def test_examples(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.failed == 0
    assert result.attempted > 0
