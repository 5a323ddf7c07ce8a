"""The command line: exit codes, streams, and one clear message for everything that can go wrong."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from plan_examples import example

import solver_shard.api
from solver_shard.cli import main
from solver_shard.errors import InfeasibleError, InputError, InternalError
from solver_shard.plan.io import load_plan, plan_to_json, save_plan
from solver_shard.plan.plan import Plan


class Optimize:
    """Stands in for ``optimize``: records the call, then returns the plan or raises the error."""

    def __init__(self, result: Plan | BaseException) -> None:
        self.result: Plan | BaseException = result
        self.model: Any = None
        self.options: dict[str, Any] = {}

    def __call__(self, model: Any, **options: Any) -> Plan:
        self.model, self.options = model, options
        if options["progress"] is not None:
            options["progress"]("tracing the model")
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Optimize:
    stand_in = Optimize(example())
    monkeypatch.setattr(solver_shard.api, "optimize", stand_in)
    return stand_in


def test_solve_prints_the_report_and_progress(fake: Optimize, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["solve", "gpt2", "--batch", "16", "--seq", "1024", "--mesh", "8"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{example()}\n"
    assert "tracing the model" in err


def test_solve_hands_every_option_on(fake: Optimize, tmp_path: Path) -> None:
    words = "solve a.b:c --mesh dp=4,tp=2 --batch 64 --seq 128 --cluster a100 --memory 70GiB --dtype bf16 --optimizer sgd --forward-only"
    words += " --checkpoint --no-master-weights --state-bytes 4 --reserve 3GiB --template dp=zero3,tp=megatron --split tp=2x1"
    words += " --pin x=R,R --pin *.w=tp=S(0) --free --objective time --memory-weight 7 --overlap 0.5 --fusion"
    words += (
        " --gap 0.01 --time-limit 9 --work-limit 3 --microbatches 4 --reduce-dtype f32 --clip --rules a.toml --rules b.toml --conservative"
        " --trust-dtensor"
    )
    words += " --workers 3 --total-time-limit 20"
    assert main([*words.split(), "--seed", "5", "-q"]) == 0
    assert fake.model == "a.b:c"
    assert fake.options.pop("stop")() is False
    command = fake.options.pop("command")
    assert command == shlex.join(["solver-shard", *words.split(), "--seed", "5", "-q"])
    assert fake.options == {
        "mesh": "dp=4,tp=2",
        "cluster": "a100",
        "memory": "70GiB",
        "reserve": "3GiB",
        "batch": 64,
        "seq": 128,
        "dtype": "bf16",
        "forward_only": True,
        "checkpoint": True,
        "microbatches": 4,
        "optimizer": "sgd",
        "master_weights": False,
        "state_bytes": 4,
        "reduce_dtype": "f32",
        "clip": True,
        "pins": ("x=R,R", "*.w=tp=S(0)"),
        "split": "tp=2x1",
        "template": "dp=zero3,tp=megatron",
        "rules": (Path("a.toml"), Path("b.toml")),
        "conservative": True,
        "trust_dtensor": True,
        "overlap": 0.5,
        "fusion": True,
        "objective": "time",
        "memory_weight": 7,
        "tied": False,
        "gap": 0.01,
        "time_limit": 9.0,
        "work_limit": 3.0,
        "seed": 5,
        "workers": 3,
        "total_time_limit": 20.0,
        "progress": None,
        "incumbent": None,
    }


def test_solve_writes_the_plan_and_prints_json(fake: Optimize, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert main(["solve", "--config", "config.json", "--mesh", "8", "-o", str(path), "--json", "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert fake.model == "config.json"
    assert load_plan(path) == example()
    assert out == plan_to_json(example())
    assert err == ""


@pytest.mark.parametrize(
    "words",
    [
        ["solve"],
        ["solve", "gpt2"],
        ["solve", "--mesh", "8"],
        ["solve", "gpt2", "--config", "x.json", "--mesh", "8"],
        ["solve", "gpt2", "--mesh", "8", "--batch", "0"],
        ["solve", "gpt2", "--mesh", "8", "--batch", "many"],
        ["solve", "gpt2", "--mesh", "8", "--optimizer", "lion"],
        ["solve", "gpt2", "--mesh", "8", "--microbatches", "0"],
        ["solve", "gpt2", "--mesh", "8", "--reduce-dtype", "f64"],
        ["solve", "gpt2", "--mesh", "8", "--no-such-option"],
        ["solve", "gpt2", "--mesh", "8", "--workers", "0"],
        ["solve", "gpt2", "--mesh", "8", "--split", "d0=4x2", "--no-split"],
        ["solve", "gpt2", "--mesh", "8", "-o", "no/such/folder/plan.json"],
        ["solve", "gpt2", "--mesh", "8", "-o", "/dev/null"],
        ["solve", "gpt2", "--mesh", "8", "-o", "a" * 300],
        ["show"],
        ["paint"],
    ],
)
def test_wrong_usage_exits_with_2(words: list[str], fake: Optimize, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Usage" in err
    assert fake.model is None


@pytest.mark.parametrize(
    ("error", "code", "lines"),
    [
        (InputError("unknown cluster 'h200'; presets are a100, h100"), 1, ["error: unknown cluster 'h200'; presets are a100, h100"]),
        (InternalError("tables differ"), 1, ["error: tables differ", "This is a bug in solver-shard; please report it"]),
        (ValueError("odd"), 1, ["error: ValueError: odd", "--debug for a traceback"]),
        (
            InfeasibleError("no plan fits into 1 GiB", achieved_peak=2, peak_bound=1, details=("lm_head.weight  parameters  3 GiB",)),
            3,
            ["error: no plan fits into 1 GiB", "  lm_head.weight  parameters  3 GiB"],
        ),
    ],
)
def test_errors_are_one_message_and_a_code(
    error: Exception, code: int, lines: list[str], fake: Optimize, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.result = error
    assert main(["solve", "gpt2", "--mesh", "8", "-q"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    for line in lines:
        assert line in err


def test_an_interrupt_exits_with_130(fake: Optimize, capsys: pytest.CaptureFixture[str]) -> None:
    fake.result = KeyboardInterrupt()
    assert main(["solve", "gpt2", "--mesh", "8", "-q"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_debug_shows_the_traceback(fake: Optimize, capsys: pytest.CaptureFixture[str]) -> None:
    fake.result = ValueError("odd")
    assert main(["solve", "gpt2", "--mesh", "8", "-q", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mesh", "0"], "size 0; a size is a whole number of at least 1"),
        (["--mesh", "dp=x"], "cannot read mesh 'dp=x'"),
        (["--mesh", "8", "--memory", "70G B"], "cannot read memory size '70G B'"),
        (["--mesh", "8", "--cluster", "h1000"], "unknown cluster 'h1000'"),
        (["--mesh", "8", "--pin", "x=pp=R"], "unknown mesh axis 'pp'; this mesh has d0"),
        (["--mesh", "8", "--pin", "x"], "cannot read pin 'x'"),
        (["--mesh", "8", "--overlap", "2"], "overlap 2.0 is not legal"),
        (["--mesh", "8", "--state-bytes", "-1"], "-1 bytes of optimizer state per element is not legal"),
        (["--mesh", "8", "--state-bytes", "2", "--optimizer", "none"], "2 bytes of optimizer state were asked with optimizer none"),
        (["--mesh", "8", "--state-bytes", "2", "--forward-only"], "2 bytes of optimizer state were asked with a forward-only step"),
        (
            ["--mesh", "8", "--batch", "64", "--microbatches", "5"],
            "a batch of 64 cannot be run in 5 equal microbatches; give a number that ",
        ),
        (["--mesh", "8", "--batch", "4", "--microbatches", "8"], "that divides it, as 4 or 2"),
        (["--mesh", "8", "--batch", "9999", "--microbatches", "9999"], "microbatches 9999 is not legal; give a whole number, 1 to 4096"),
        (["--mesh", "8", "--microbatches", "2", "--forward-only"], "a forward-only step has no gradients to accumulate"),
        (["--mesh", "8", "--clip", "--optimizer", "none"], "clipping to a gradient norm was asked without an optimizer"),
        (["--mesh", "8", "--clip", "--forward-only"], "clipping was asked with a forward-only step"),
        (["--mesh", "8", "--reduce-dtype", "f32", "--forward-only"], "a reduce dtype of f32 was asked with a forward-only step"),
        (["--mesh", "8", "--gap", "-1"], "gap -1.0 is not legal"),
        (["--mesh", "8", "--time-limit", "0"], "time limit 0.0 is not legal"),
        (["--mesh", "8", "--work-limit", "-1"], "work limit -1.0 is not legal"),
        (["--mesh", "8", "--total-time-limit", "0"], "total time limit 0.0 is not legal"),
        (["--mesh", "8", "--workers", "999"], "999 workers are not legal"),
        (["--mesh", "8", "--objective", "memory", "--memory-weight", "3"], "a memory weight only makes sense with the time objective"),
        (["--mesh", "8"], "the batch size for 'gpt2' is missing"),
        (["--mesh", "8", "--batch", "8", "--dtype", ""], "dtype '' was asked; legal: f32, bf16, f16"),
    ],
)
def test_bad_values_are_refused_before_any_tracing(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["solve", "gpt2", *words, "-q"]) == 1
    assert message in capsys.readouterr().err


def test_show_prints_report_lookup_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    save_plan(example(), path)
    assert main(["show", str(path)]) == 0
    assert capsys.readouterr().out == f"{example()}\n"
    assert main(["show", str(path), "*.up.weight"]) == 0
    assert "layers.{0..2}.up.weight  bf16[128, 32]| S(1)S(0)" in capsys.readouterr().out
    assert main(["show", str(path), "x", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["name"] == "x"
    assert main(["show", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema_version"] == 1
    assert main(["show", str(path), "nothing"]) == 1
    assert "no tensor or module of this plan is called 'nothing'" in capsys.readouterr().err


def test_show_of_a_missing_plan_says_how_to_make_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(tmp_path / "none.json")]) == 1
    assert "solve ... -o none.json" in capsys.readouterr().err


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"solver-shard {solver_shard.__version__}\n"
    assert main(["solve", "--help"]) == 0
    assert "--memory-weight" in capsys.readouterr().out


def test_the_help_of_solve_fits_80_columns_under_headings(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["solve", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    headings = [line.strip("╭─╮ ") for line in lines if line.startswith("╭")]
    assert headings[2:] == ["Model", "Mesh and cluster", "Memory", "Optimizer and gradients", "Layouts", "Search", "Output"]
    assert not [line for line in lines if "…" in line], "every name is there in full"
    under_options = lines[next(i for i, line in enumerate(lines) if line.startswith("╭─ Options")) + 1 :]
    assert [line.split()[1] for line in under_options[: next(i for i, line in enumerate(under_options) if line.startswith("╰"))]] == [
        "--help"
    ]


def test_tensors_that_a_loss_closes_over_are_said_to_be_baked_in(capsys: pytest.CaptureFixture[str]) -> None:
    note = "baked in: constant.tensor_constant0 f32[128, 64]: made or closed over by the model, its loss or entry point"
    assert main(["solve", "entry_models:closing_over", "--mesh", "2"]) == 0
    out, err = capsys.readouterr()
    assert f"\n  {note}" in out
    assert f"note: {note}" in err
    assert main(["solve", "entry_models:mlp", "--mesh", "2"]) == 0
    out, err = capsys.readouterr()
    assert "baked in" not in out + err


def test_help_and_show_import_neither_torch_nor_the_solver(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save_plan(example(), path)
    code = (
        "import sys; from solver_shard.cli import main\n"
        f"assert main(['solve', '--help']) == 0 and main(['show', {str(path)!r}]) == 0\n"
        "heavy = {'torch', 'transformers', 'ortools', 'networkx'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
