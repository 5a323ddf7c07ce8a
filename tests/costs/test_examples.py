"""The examples in the cost modules' docstrings print what they say."""

from __future__ import annotations

import doctest
from types import ModuleType

import pytest

from solver_shard.costs import buckets, cluster, collectives, layouts, memory, model, transitions
from solver_shard.rules import rule


@pytest.mark.parametrize("module", [buckets, cluster, collectives, layouts, memory, model, rule, transitions])
def test_examples(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.failed == 0
    assert result.attempted > 0
