"""A plan in real processes: the same verdict as simulated, and an end for all of them whatever one does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lowered import lowered
from points import random_point
from traced_models import MLP, squares

from solver_shard.errors import InputError, SolverShardError
from solver_shard.graph.nodes import OpNode
from solver_shard.plan.plan import Plan
from solver_shard.tracing.huggingface import load
from solver_shard.verification import check, processes
from solver_shard.verification.subject import Subject, of_program, subject_of

pytestmark = pytest.mark.usefixtures("one_thread")


class Unwilling(MLP):
    """A model that refuses to be known in another process."""

    def __setstate__(self, state: Any) -> None:
        raise InputError("not here")


def case(model: type[MLP] = MLP) -> tuple[Plan, Subject]:
    """Odd sizes, a random plan on two devices, clipped."""
    torch.manual_seed(0)
    subject = subject_of(model(7, 9), {"x": torch.zeros(6, 7)}, name="mlp", loss_fn=squares)
    made = lowered(subject.program, "2", clip=True)
    return made.plan(random_point(made.graph, 5)), subject


def test_a_plan_holds_in_real_processes() -> None:
    plan, subject = case()
    simulated, real = check(plan, subject), check(plan, subject, processes=True, timeout=240)
    assert simulated.holds, str(simulated)
    assert real.holds, str(real)
    assert "each in a process of its own (gloo)" in real.run
    assert real.collectives == simulated.collectives
    assert {c.kind for c in real.collectives} >= {"all_gather", "all_reduce"}
    names = [(d.kind, d.name, d.reference) for d in real.differences]
    assert names == [(d.kind, d.name, d.reference) for d in simulated.differences]


def test_experts_that_a_plan_cuts_compute_the_same_in_real_processes() -> None:
    """Every product per expert is one of a device's own experts, whose rows are brought to it by collectives that no plan lists."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {
        **sizes, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_key_value_heads": 2, "num_local_experts": 3,
        "num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "max_position_embeddings": 16,
    }  # fmt: skip
    model, inputs, _ = load(config, batch=2, seq=5, weights=True)
    subject = subject_of(model, inputs, name="mixtral", labels=32, words=32)
    made = lowered(subject.program, "2")
    fixed = {}
    for i, op in enumerate(subject.program.ops):
        if op.name.startswith("shard.grouped_mm"):
            column = made.lowering.strategies[i]
            fixed[made.lowering.index[OpNode, i, 0]] = next(
                k for k in range(len(column.axis_choice)) if column.implementation(k) == "own-experts"
            )
    plan = made.plan(random_point(made.graph, 0, fixed))
    assert sum(op.implementation == "own-experts" for op in plan.ops) == len(fixed) == 6
    verdict = check(plan, subject, processes=True, timeout=240)
    assert verdict.holds, str(verdict)
    assert {d.name for d in verdict.differences if d.kind == "gradient"} == set(plan.gradients)


def test_what_one_process_refuses_is_told_and_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*args, **options))
        return started[-1]

    monkeypatch.setattr(processes.subprocess, "Popen", start)
    plan, subject = case(Unwilling)
    with pytest.raises(InputError, match=r"process \d: not here"):
        check(plan, subject, processes=True, timeout=240)
    assert len(started) == 2
    assert all(process.returncode is not None for process in started)


def test_processes_that_do_not_answer_are_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(processes, "_GRACE", 0.2)
    sleeper = tmp_path / "python"
    sleeper.write_text(f"#!{sys.executable}\nimport signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)\n")
    sleeper.chmod(0o755)
    monkeypatch.setattr(processes.sys, "executable", str(sleeper))
    started: list[int] = []
    popen = subprocess.Popen

    def start(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        process = popen(*args, **options)
        started.append(process.pid)
        return process

    monkeypatch.setattr(processes.subprocess, "Popen", start)
    plan, subject = case()
    with pytest.raises(SolverShardError, match=r"processes 0, 1 of 2 gave no answer within 1 s; give more --timeout"):
        check(plan, subject, processes=True, timeout=1.0)
    time.sleep(0.1)
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, signal.SIG_DFL)


def test_a_process_that_falls_is_told_with_its_last_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    faller = tmp_path / "python"
    faller.write_text(f"#!{sys.executable}\nraise SystemExit('no such luck')\n")
    faller.chmod(0o755)
    monkeypatch.setattr(processes.sys, "executable", str(faller))
    plan, subject = case()
    with pytest.raises(SolverShardError, match=r"process \d of 2 ended with code 1: no such luck"):
        check(plan, subject, processes=True, timeout=60)


def test_a_program_alone_and_what_cannot_be_handed_over_are_refused() -> None:
    plan, subject = case()
    with pytest.raises(InputError, match="real processes need the model itself"):
        check(plan, of_program(subject.program), processes=True)

    class Local(MLP):
        """Not at the top level of a module."""

    plan, subject = case(Local)
    with pytest.raises(InputError, match=r"cannot be handed to another process: .*Local"):
        check(plan, subject, processes=True)
