"""The examples in the cost modules' docstrings print what they say."""

from __future__ import annotations

import doctest
from types import ModuleType

import pytest

from solver_shard.costs import cluster, collectives, layouts, memory, model, schedule, transitions
from solver_shard.rules import rule


@pytest.mark.parametrize("module", [cluster, collectives, layouts, memory, model, rule, schedule, transitions])
def test_examples(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.failed == 0
    assert result.attempted > 0
