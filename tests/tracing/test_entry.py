"""Entry points: package.module:function."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from solver_shard.errors import InputError
from solver_shard.tracing.load import load_entry
from solver_shard.tracing.torch import trace

SOURCE = """
import torch
from torch import nn

constant = 3

def build():
    with torch.device("meta"):
        return nn.Linear(4, 2), (torch.empty(8, 4),)

def with_loss():
    return nn.Linear(4, 2), {"input": torch.zeros(8, 4)}, lambda y: y.sum()

def one_tensor():
    return nn.Linear(4, 2), torch.zeros(8, 4)

def nothing():
    return None

def no_model():
    return 1, 2

def bad_inputs():
    return nn.Linear(4, 2), 5

def bad_loss():
    return nn.Linear(4, 2), (torch.zeros(8, 4),), 5

def needs_argument(x):
    return x

def leaves():
    raise SystemExit(3)
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "entry_written.py").write_text(SOURCE, encoding="utf-8")
    (tmp_path / "entry_broken.py").write_text("1 / 0", encoding="utf-8")
    (tmp_path / "entry_leaves.py").write_text("import sys; sys.exit(0)", encoding="utf-8")
    (tmp_path / "entry_lacks.py").write_text("import no_such_library", encoding="utf-8")


def test_model_and_inputs() -> None:
    model, inputs, loss, name = load_entry("entry_written:build")
    assert isinstance(model, torch.nn.Linear)
    assert loss is None
    assert name == "Linear"
    assert trace(model, inputs, name=name, forward_only=True).outputs


@pytest.mark.parametrize("function", ["with_loss", "one_tensor"])
def test_loss_and_single_tensor(function: str) -> None:
    model, inputs, loss, name = load_entry(f"entry_written:{function}")
    assert trace(model, inputs, name=name, loss_fn=loss or torch.sum).gradients


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("entry_written:leaves", "entry point 'entry_written:leaves' raised SystemExit: 3"),
        ("entry_leaves:build", "importing 'entry_leaves' raised SystemExit: 0"),
        ("entry_written", "package.module:function"),
        ("entry-models:build", "package.module:function"),
        ("no_such_module:build", "cannot be found"),
        ("no_such.module:build", "no 'no_such'"),
        ("entry_written:missing", "functions it defines: bad_inputs"),
        ("entry_written:constant", "is a int"),
        ("entry_broken:build", "ZeroDivisionError"),
        ("entry_lacks:build", "needs 'no_such_library'"),
        ("entry_written:nothing", "returned NoneType"),
        ("entry_written:no_model", "not a torch.nn.Module"),
        ("entry_written:bad_inputs", "as example inputs"),
        ("entry_written:bad_loss", "as the loss"),
        ("entry_written:needs_argument", "called without arguments"),
    ],
)
def test_what_is_wrong_is_said(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_entry(text)
