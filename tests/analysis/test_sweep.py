"""Whole sweeps of a small model: what a point's plan is, what is shared, what survives a kill, and what is never written over."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import solver_shard
from solver_shard.analysis import sweep as sweeping
from solver_shard.analysis.sweep import run
from solver_shard.analysis.sweep.results import FILE, Row, Sweep, load_sweep, locked
from solver_shard.errors import InputError
from solver_shard.options import Options
from solver_shard.plan.io import load_plan, save_plan
from solver_shard.plan.plan import Plan
from solver_shard.tracing.load import traced_of

MODEL = "entry_models:mlp"
MESHES = ("4", "2,2", "d0=1,d1=4")
LIMITS: dict[str, Any] = {"work_limit": 0.5, "time_limit": 3000.0}
"""Of work only: on a busy machine the seconds would strike, and the plans differ."""


def sweep_of(folder: Path | None = None, **options: Any) -> Sweep:
    return sweeping.sweep(MODEL, **{"meshes": MESHES, "folder": folder, **LIMITS, "jobs": 1, **options})


def figures(rows: tuple[Row, ...]) -> list[Row]:
    """Rows without what depends on the machine."""
    return [dataclasses.replace(row, seconds=None) for row in rows]


def content(plan: Plan) -> Plan:
    """A plan without what depends on the machine and on how it was asked for."""
    history = tuple(dataclasses.replace(moment, seconds=0.0) for moment in plan.certificate.history)
    return dataclasses.replace(
        plan,
        certificate=dataclasses.replace(plan.certificate, stages={}, history=history),
        provenance=dataclasses.replace(plan.provenance, command="", date=""),
    )


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Sweep]:
    folder = tmp_path_factory.mktemp("sweeps") / "done"
    return folder, sweep_of(folder, command="by hand")


def copied(done: tuple[Path, Sweep], tmp_path: Path) -> Path:
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in done[0].iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], list[str]]:
    """The meshes of the points that were solved since the last call, by any process."""
    log, plan_program = tmp_path / "solved", run.plan_program
    log.touch()

    def logged(*arguments: Any, **options: Any) -> Plan:
        with log.open("a") as file:
            file.write(f"{options['mesh']}\n")
        return plan_program(*arguments, **options)

    monkeypatch.setattr(run, "plan_program", logged)

    def since() -> list[str]:
        text = log.read_text()
        log.write_text("")
        return text.splitlines()

    return since


def test_a_points_plan_is_the_one_that_optimize_finds(done: tuple[Path, Sweep]) -> None:
    folder, found = done
    assert sorted(path.name for path in folder.iterdir()) == sorted([FILE, *(f"{row.name}.json" for row in found.rows)])
    for row, mesh in zip(found.rows, MESHES, strict=True):
        plan = load_plan(folder / f"{row.name}.json")
        alone = solver_shard.optimize(MODEL, mesh=mesh, workers=1, **LIMITS)
        assert content(plan) == content(alone)
        assert plan.provenance.command == "by hand"
        assert (row.step_ns, row.peak, row.bound) == (plan.costs.total_ns, plan.memory.peak, plan.certificate.bound)


def test_the_file_says_what_was_returned(done: tuple[Path, Sweep]) -> None:
    folder, found = done
    assert load_sweep(folder) == load_sweep(folder / FILE) == found
    assert json.loads((folder / FILE).read_text())["rows"][0]["mesh"] == "d0=4"
    assert found.pending == 0


def test_the_model_is_traced_once_for_a_batch_whatever_else_is_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[tuple[int | None, int]] = []

    def counted(_model: str, options: Options, **_: Any) -> Any:
        traced.append((options.batch, options.microbatches))
        return traced_of(MODEL)

    monkeypatch.setattr(sweeping, "traced_step", counted)
    found = sweeping.sweep(
        "gpt2",
        meshes=["2", "4"],
        batches=[8, 16],
        memories=["10GiB", "20GiB"],
        clusters=["h100", "a100"],
        seq=16,
        microbatches=2,
        **{**LIMITS, "work_limit": 0.1},
        jobs=2,
    )
    assert traced == [(8, 2), (16, 2)]
    assert len(found.rows) == 16
    assert set(found.programs) == {"8", "16"}
    assert all(row.fits for row in found.rows)


def test_how_many_run_at_once_changes_nothing(done: tuple[Path, Sweep]) -> None:
    assert figures(sweep_of(jobs=3).rows) == figures(done[1].rows)


def test_what_is_there_is_not_solved_again(done: tuple[Path, Sweep], tmp_path: Path, solved: Callable[[], list[str]]) -> None:
    folder = copied(done, tmp_path)
    assert sweep_of(folder) == done[1]
    assert solved() == []
    (folder / f"{done[1].rows[1].name}.json").unlink()
    assert figures(sweep_of(folder).rows) == figures(done[1].rows)
    assert solved() == ["d0=2,d1=2"]


def test_more_points_can_be_asked_later_and_fewer_cannot(done: tuple[Path, Sweep], tmp_path: Path, solved: Callable[[], list[str]]) -> None:
    folder = copied(done, tmp_path)
    assert len(sweep_of(folder, meshes=("2", *MESHES)).rows) == 4
    assert solved() == ["d0=2"]
    with pytest.raises(InputError, match="it has the point d0=2_h100, which this one does not ask for"):
        sweep_of(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 1}, r"holds another sweep: seed is 0, here 1; give another folder, or the same arguments"),
        ({"optimizer": "sgd"}, "optimizer is adamw, here sgd"),
        ({"reserve": "1GiB"}, "reserve is default, here 1073741824"),
        ({"pins": ["x=R"], "meshes": ["4"]}, "pins is none, here x=R"),
    ],
)
def test_a_folder_of_another_sweep_is_refused(done: tuple[Path, Sweep], tmp_path: Path, options: dict[str, Any], message: str) -> None:
    folder = copied(done, tmp_path)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(InputError, match=message):
        sweep_of(folder, **options)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(InputError, match=r"holds 'thesis\.tex' but no sweep\.json"):
        sweep_of(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(InputError, match="whose parent exists"):
        sweep_of(tmp_path / "no" / "where")
    with pytest.raises(InputError, match="cannot use the folder"):
        sweep_of(tmp_path / "thesis.tex")


def test_a_model_that_is_none_leaves_nothing_in_the_way_of_the_right_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no_such_model"):
        sweeping.sweep("entry_models:no_such_model", meshes=MESHES, folder=tmp_path / "new", **LIMITS)
    assert list((tmp_path / "new").iterdir()) == []


def test_a_file_in_a_plans_place_is_never_written_over(done: tuple[Path, Sweep], tmp_path: Path) -> None:
    folder = copied(done, tmp_path)
    first, second, _ = (folder / f"{row.name}.json" for row in done[1].rows)
    whole = first.read_text()
    for text, message in ((whole[: len(whole) // 2], "not JSON"), ("{}", "no schema_version"), (second.read_text(), "is for the mesh")):
        first.write_text(text)
        with pytest.raises(InputError, match=rf"is not the plan of this sweep's point: .*{message}.*; move it away, and run again"):
            sweep_of(folder)
        assert first.read_text() == text
    plan = load_plan(second)
    for other, message in (
        (dataclasses.replace(plan, options=dataclasses.replace(plan.options, gap=0.5)), "other options"),
        (dataclasses.replace(plan, cluster=solver_shard.load_cluster("a100")), "another cluster"),
        (dataclasses.replace(plan, provenance=dataclasses.replace(plan.provenance, source="gpt2")), "of the model gpt2"),
        (dataclasses.replace(plan, provenance=dataclasses.replace(plan.provenance, tool="solver-shard 0.0.1")), "made by solver-shard 0"),
    ):
        first.write_text(whole)
        save_plan(other, second)
        with pytest.raises(InputError, match=message):
            sweep_of(folder)


def test_a_sweep_file_that_is_broken_is_refused(done: tuple[Path, Sweep], tmp_path: Path) -> None:
    folder = copied(done, tmp_path)
    data = json.loads((folder / FILE).read_text())
    for text, message in (
        ((folder / FILE).read_text()[:-20], "not a sweep: not JSON"),
        ("[]", "it has no rows"),
        (json.dumps({**data, "schema_version": 2}), "schema_version: expected 1, got 2"),
        (json.dumps({**data, "rows": [data["rows"][0]] * 2}), "is there twice"),
        (json.dumps({**data, "rows": [{**data["rows"][0], "step_ns": None}]}), "without all the figures of a plan"),
        (json.dumps({**data, "rows": [{**data["rows"][0], "peak": "1 GiB"}]}), "peak: expected a whole number"),
    ):
        (folder / FILE).write_text(text)
        with pytest.raises(InputError, match=message):
            sweep_of(folder)
        assert (folder / FILE).read_text() == text


def test_a_model_that_has_changed_is_refused(done: tuple[Path, Sweep], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copied(done, tmp_path)
    monkeypatch.setattr(sweeping, "traced_step", lambda _model, *_, **__: traced_of("gpt2", batch=1, seq=8))
    with pytest.raises(InputError, match="its step has changed"):
        sweep_of(folder)


def test_what_a_kill_leaves_of_a_file_is_tidied_away(done: tuple[Path, Sweep], tmp_path: Path) -> None:
    folder = copied(done, tmp_path)
    (folder / f".{done[1].rows[0].name}.json.0123abcd").write_text("{")
    (folder / ".notes.0123abcd").write_text("mine")
    sweep_of(folder)
    assert [path.name for path in folder.glob(".*")] == [".notes.0123abcd"]


def test_one_sweep_at_a_time_writes_to_a_folder(tmp_path: Path) -> None:
    with locked(tmp_path / "busy"), pytest.raises(InputError, match="another sweep runs in"):
        sweep_of(tmp_path / "busy")


def test_what_goes_wrong_at_one_point_is_that_points_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_program = run.plan_program

    def fails(*arguments: Any, **options: Any) -> Plan:
        if str(options["mesh"]) == "d0=2,d1=2":
            raise RuntimeError("not today")
        if str(options["mesh"]) == "d0=1,d1=4":
            os.kill(os.getpid(), signal.SIGKILL)
        return plan_program(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(run, "plan_program", fails)
        found = sweep_of(tmp_path / "new", jobs=2)
    assert [row.status for row in found.rows] == ["optimal", "error", "error"]
    assert found.rows[1].message == "not today"
    assert found.rows[2].message == "its process was ended by SIGKILL; was there memory for it? Try fewer --jobs"
    assert found.pending == 2
    assert [row.status for row in sweep_of(tmp_path / "new").rows] == ["optimal"] * 3


def test_a_limit_that_no_plan_keeps_is_a_row_with_what_is_needed(tmp_path: Path, solved: Callable[[], list[str]]) -> None:
    folder = tmp_path / "tight"
    found = sweep_of(folder, meshes=["4"], memories=["100KiB", "1GiB"], reserve="0")
    tight, loose = found.rows
    assert (tight.status, loose.status) == ("infeasible", "optimal")
    assert tight.peak is not None
    assert tight.peak_bound is not None
    assert 100 << 10 < tight.peak_bound <= tight.peak
    assert "no plan of" in tight.message
    solved()
    assert sweep_of(folder, meshes=["4"], memories=["100KiB", "1GiB"], reserve="0") == found
    assert solved() == []


def test_ctrl_c_leaves_what_is_done_and_no_process(tmp_path: Path) -> None:
    seen: list[Sweep] = []

    def press(sweep: Sweep) -> None:
        seen.append(sweep)
        if sweep.rows[0].done:
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background may have been told to ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            sweep_of(tmp_path / "new", watch=press)
    finally:
        signal.signal(signal.SIGINT, before)
    assert multiprocessing.active_children() == []
    assert load_sweep(tmp_path / "new") == seen[-1]
    assert [row.status for row in seen[-1].rows] == ["optimal", "pending", "pending"]
    assert sweep_of(tmp_path / "new").pending == 0


def test_a_sweep_that_was_killed_goes_on_from_what_it_has(
    done: tuple[Path, Sweep], tmp_path: Path, solved: Callable[[], list[str]]
) -> None:
    folder, script = tmp_path / "killed", Path(__file__).with_name("sweep_script.py")
    paths = os.pathsep.join([os.getcwd(), str(Path(__file__).parents[1])])
    process = subprocess.Popen([sys.executable, str(script), str(folder), MODEL], env={**os.environ, "PYTHONPATH": paths})
    try:
        _until(lambda: process.poll() is not None or any(tmp_path.glob("running-*")))
        assert process.poll() is None
        (marker,) = tmp_path.glob("running-*")
    finally:
        process.kill()
        process.wait()
    child = int(marker.name.removeprefix("running-"))
    _until(lambda: not _runs(child))
    assert [row.status for row in load_sweep(folder).rows] == ["optimal", "pending", "pending"]
    assert figures(sweep_of(folder).rows) == figures(done[1].rows)
    assert solved() == ["d0=2,d1=2", "d0=1,d1=4"]


def test_ray_finds_the_same(done: tuple[Path, Sweep], tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is optional: pip install 'solver-shard[ray]'")
    found = sweep_of(tmp_path / "ray", ray="local")
    assert figures(found.rows) == figures(done[1].rows)
    for row in found.rows:
        assert content(load_plan(tmp_path / "ray" / f"{row.name}.json")) == content(load_plan(done[0] / f"{row.name}.json"))


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1:70000"])
def test_a_ray_cluster_that_is_not_there_is_told_at_once(address: str) -> None:
    pytest.importorskip("ray")
    with pytest.raises(InputError, match="cannot reach a Ray cluster at"):
        sweep_of(ray=address)


def test_without_ray_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install 'solver-shard\[ray\]'"):
        sweep_of(ray="local")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 8}, "give one of devices"),
        ({"meshes": ()}, "give one of devices"),
        ({"jobs": 0}, "0 jobs are not legal"),
        ({"workers": 0}, "0 workers are not legal"),
        ({"propagation": None}, "a sweep has no argument 'propagation'"),
    ],
)
def test_arguments_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        sweep_of(**options)


def _until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 400  # a busy machine is slow
    while not true() and time.monotonic() < end:
        time.sleep(0.05)
    assert true()


def _runs(process: int) -> bool:
    """Whether a process is there and not just waiting for its parent to look."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
