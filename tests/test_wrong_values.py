"""Whatever is given to a public function in place of an argument: it is taken, or refused with an error of ours that says what is legal."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plan_examples import example
from programs import mlp
from torch import nn

import solver_shard
from solver_shard.api import read_request
from solver_shard.codec import encode
from solver_shard.options import OPTIONS

WRONG: Mapping[str, Any] = {
    "None": None,
    "whole": 5,
    "negative": -1,
    "huge": 10**30,
    "real": 2.5,
    "nan": float("nan"),
    "infinite": float("inf"),
    "truth": True,
    "text": "no such thing",
    "empty": "",
    "null character": "a\0b",
    "bytes": b"x",
    "path": Path("no/such/file"),
    "list": [],
    "nested": [["a", [1]]],
    "numbers": [1, None],
    "mapping": {"a": [1]},
    "set": {1},
    "object": object(),
    "class": dict,
    "function": len,
    "array": np.zeros(2),
    "numpy whole": np.int64(3),
    "numpy real": np.float32(0.5),
    "numpy truth": np.bool_(True),
    "tensor": torch.ones(2),
    "complex": 1j,
}


class Applied(nn.Module):
    """A module that was never applied."""


def calls(folder: Path) -> dict[str, dict[str, Any]]:
    """Legal arguments of every public function, as far as nothing is traced, solved or executed: no preset has the model's name."""
    plan, program = example(), mlp()
    file = folder / "plan.json"
    solver_shard.save_plan(plan, file)
    graph = folder / "graph.json"
    graph.write_text(
        json.dumps(
            {
                "problem": {
                    "name": "x",
                    "nodes": {"intervals": [[0, 1]], "costs": [[1, 2]], "usages": [[0, 0]]},
                    "edges": {"nodes": [], "costs": []},
                }
            }
        )
    )
    return {
        "apply": {"model": Applied(), "plan": file, "device_mesh": None, },
        "chrome_trace": {"line": solver_shard.timeline(plan), "plan": file},
        "clip_grad_norm_": {"sharded": Applied(), "max_norm": 1.0},
        "compare": {"plan": file, "model": "no such preset"},
        "expand": {"op": "aten.mm.default", "inputs": ["f32[4,4]| R", "f32[4,4]| R"], "mesh": "2"},
        "explain": {"plan": file, "pattern": "layers.0.up.weight", "model": "no such preset"},
        "export": {"plan": file, "to": "dtensor-script"},
        "load_cluster": {"name_or_path": "h100"},
        "load_plan": {"path": file},
        "load_sweep": {"path": folder},
        "measure": {"plan": file, "model": "no such preset"},
        "optimize": {"model": "no such preset", "mesh": "2", "batch": 2},
        "propagate": {"model": "no such preset", "mesh": "2", "batch": 2},
        "propagate_module": {"path": folder / "no.mlir"},
        "read_parallelize": {"text": "", "name": "mine"},
        "read_pins": {"text": '{"up": "colwise"}', "form": "hf", "program": program},
        "read_tp_plan": {"text": "{}", "name": "mine"},
        "recorded_collectives": {"sharded": Applied()},
        "register_single_axis_strategy": {"op": "my.op.default"},
        "report": {"plan": file},
        "save_plan": {"plan": plan, "path": folder / "saved.json"},
        "solve_graph": {"file": graph, "time_limit": 1.0, "workers": 1},
        "sweep": {"model": "no such preset", "meshes": "2", "batches": 2},
        "timeline": {"plan": file},
        "trace": {"model": Applied(), "inputs": {}, "name": "x"},
        "verify": {"plan": file, "model": "no such preset"},
        "write_trace": {"text": "{}", "path": folder / "trace.json"},
    }  # fmt: skip


FUNCTIONS = [name for name in solver_shard.__all__ if name[0].islower()]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_value_is_taken_or_refused_in_words(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    legal, function = calls(tmp_path)[name], getattr(solver_shard, name)
    parameters = {p.name: str(p.annotation) for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD}
    wrong = []
    for parameter, annotation in parameters.items():
        for kind, value in WRONG.items():
            if callable(value) and any(called in annotation for called in ("Callable", "Progress")):
                continue  # what a function of the caller's raises is the caller's
            said = outcome(function, legal | {parameter: value})
            if said is not None:
                wrong.append(f"{parameter} <- {kind}: {said}")
    assert wrong == []


def outcome(function: Callable[..., Any], arguments: Mapping[str, Any]) -> str | None:
    """None where a call returns or is refused as it should be; else what was raised."""
    try:
        function(**arguments)
    except solver_shard.InternalError as error:
        return f"InternalError: {error}"
    except solver_shard.SolverShardError as error:
        return None if str(error).strip() else "an error without words"
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return None


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "rules"])
def test_what_an_option_takes_is_recorded_as_plain_values(name: str, kind: str) -> None:
    """JSON has no numbers of numpy."""
    try:
        request = read_request("gpt2", **{"mesh": "2", "workers": 1, name: WRONG[kind]})
    except solver_shard.InputError:
        return
    assert json.dumps(encode(request.options))
