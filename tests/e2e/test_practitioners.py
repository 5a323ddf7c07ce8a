"""Any plan of the small models of ``experiments/practitioners.py`` computes what the model computes; each of their ops has a rule."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from lowered import agrees, lowered, random_assignment

from solver_shard.verification import check
from solver_shard.verification.subject import subject_of

SCRIPT = Path(__file__).resolve().parents[2] / "experiments" / "practitioners.py"


def script() -> ModuleType:
    """The script as a module; its folder on the path would hide tests of the same names."""
    spec = importlib.util.spec_from_file_location("practitioners", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made  # where dataclasses look for what annotations name
    spec.loader.exec_module(made)
    return made


practitioners = script()

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("case", practitioners.CASES, ids=lambda case: case.name)
def test_any_plan_computes_what_the_model_does(case: Any) -> None:
    torch.manual_seed(0)
    forward = bool(case.options.get("forward_only", False))
    model, inputs = case.make(True)
    found = subject_of(model, inputs, name="small", forward_only=forward)
    made = lowered(found.program, "2,2")
    for seed in range(2):
        plan = agrees(made, random_assignment(made.graph, seed))
        assert not [op.name for op in plan.ops if op.source == "fallback"]
        plan = dataclasses.replace(plan, options=dataclasses.replace(plan.options, forward_only=forward))
        verdict = check(plan, found)
        assert verdict.holds, str(verdict)
