"""``solve-graph``: the contest's example, solutions of any origin, and what is left on disk however the command ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_graphs import hard_graph, points, random_graph, some_limit

from solver_shard.cli import main
from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.graph.iopddl import read, write
from solver_shard.solve.integer_program import Proof

Nodes = list[tuple[tuple[int, int], list[int], list[int]]]
"""(interval, costs, usages) of each node."""

EXAMPLE: Nodes = [  # of the contest's own description: https://github.com/google/iopddl
    ((30, 70), [15], [10]),
    ((40, 70), [55, 65], [25, 25]),
    ((50, 120), [25, 45, 35], [15, 20, 15]),
    ((110, 140), [85, 75], [10, 10]),
    ((110, 150), [95], [15]),
]
EXAMPLE_EDGES = [
    ([0, 1], [30, 40]),
    ([0, 2], [50, 10, 40]),
    ([1, 3], [90, 10, 20, 80]),
    ([2, 4], [60, 20, 30]),
    ([3, 4], [70, 60]),
]


def problem(path: Path, nodes: Nodes, edges: list[tuple[list[int], list[int]]], limit: int | None) -> str:
    """A file of the contest's form."""
    intervals, costs, usages = zip(*nodes, strict=True)
    data: dict[str, Any] = {
        "name": "example",
        "nodes": {"intervals": intervals, "costs": costs, "usages": usages},
        "edges": {"nodes": [pair for pair, _ in edges], "costs": [table for _, table in edges]},
    }
    if limit is not None:
        data["usage_limit"] = limit
    path.write_text(json.dumps({"problem": data}))
    return str(path)


@pytest.fixture
def example(tmp_path: Path) -> str:
    return problem(tmp_path / "example.json", EXAMPLE, EXAMPLE_EDGES, 50)


def solved(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    """What ``--json`` prints."""
    assert main(["solve-graph", *words, "--json"]) == code
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def saved(path: Path, solution: object) -> str:
    path.write_text(json.dumps(solution))
    return str(path)


def test_the_example_of_the_contest(example: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "solution.json"
    assert main(["solve-graph", example, "-q", "-o", str(written)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{example}: 5 nodes, 9 strategies, 5 edges"
    assert [line.split() for line in lines[1:5]] == [
        ["status", "optimal:", "no", "solution", "has", "a", "smaller", "cost"],
        ["cost", "445"],
        ["peak", "50", "of", "50", "(100.00%)"],
        ["bound", "445", "on", "the", "cost,", "gap", "0%"],
    ]
    data = json.loads(written.read_text())
    assert (data["assignment"], data["cost"], data["bound"], data["gap"]) == ([0, 0, 2, 1, 0], 445, 445, 0.0)
    assert main(["solve-graph", example, "--check", str(written)]) == 0
    checked = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert checked[1:] == [["status", "feasible"], ["cost", "445"], ["peak", "50", "of", "50", "(100.00%)"]]


def test_what_is_printed_as_json_is_what_is_written(example: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "solution.json"
    printed = solved(capsys, example, "-o", str(written))
    assert {**json.loads(written.read_text()), "seconds": 0} == {**printed, "seconds": 0}
    assert set(printed) >= {"status", "cost", "peak", "limit", "bound", "gap", "assignment", "seed", "work", "seconds"}


def test_the_least_peak_can_be_asked_for(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = solved(capsys, example, "--objective", "memory", "--gap", "0")
    graph = read(example)
    assert found["peak"] == found["bound"] == min(graph.peak(point.assignment) for point in points(graph))


def test_verbose_lists_the_stages(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["solve-graph", example, "--verbose"]) == 0
    out, err = capsys.readouterr()
    assert "stages" in out
    assert "objective 445, bound 445, gap 0.00%" in err


def test_a_solution_above_the_limit_does_not_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tight = problem(tmp_path / "tight.json", EXAMPLE, EXAMPLE_EDGES, 49)
    solution = saved(tmp_path / "solution.json", [0, 0, 2, 1, 0])
    assert main(["solve-graph", tight, "--check", solution]) == 3
    assert "infeasible: 1 above the limit\n" in capsys.readouterr().out
    data = solved(capsys, tight, "--check", solution, code=3)
    assert (data["feasible"], data["cost"], data["peak"], data["limit"]) == (False, 445, 50, 49)


def test_forbidden_costs_count_as_themselves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    huge = FORBIDDEN
    nodes: Nodes = [((0, 5), [7, huge], [1, 2])] * 30
    path = problem(tmp_path / "huge.json", nodes, [([0, 1], [1, 2, 3, huge])], None)
    data = solved(capsys, path, "--check", saved(tmp_path / "solution.json", [1] * 30), code=3)
    assert (data["cost"], data["peak"], data["forbidden"], data["feasible"]) == (31 * huge, 60, 31, False)
    assert main(["solve-graph", path, "--check", str(tmp_path / "solution.json")]) == 3
    assert "infeasible: 31 of the chosen costs are 10^18" in capsys.readouterr().out


def test_an_edge_of_three_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes: Nodes = [((0, 5), [1, 2], [1, 2])] * 3
    path = problem(tmp_path / "three.json", nodes, [([0, 1, 2], [FORBIDDEN, 9, 9, 9, 9, 1, 9, 9])], None)
    written = tmp_path / "solution.json"
    found = solved(capsys, path, "-o", str(written), "--gap", "0")
    assert (found["status"], found["cost"], found["assignment"]) == ("optimal", 6, [1, 0, 1])
    assert solved(capsys, path, "--check", str(written))["cost"] == 6
    start = saved(tmp_path / "start.json", [0, 0, 1])
    assert solved(capsys, path, "--start", start, "--work-limit", "1e-9", "--gap", "0")["cost"] <= 13


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[0, 0, 2, 1]", "4 strategies; "),
        ("[0, 0, 3, 1, 0]", "strategy 3 for node 2; legal is an integer from 0 to 2"),
        ("[0, -1, 2, 1, 0]", "strategy -1 for node 1"),
        ("[0, 0, 2.0, 1, 0]", "the strategy of node 2 is 2.0"),
        ("[0, 0, true, 1, 0]", "the strategy of node 2 is True"),
        ("[0, 0, NaN, 1, 0]", "the strategy of node 2 is nan"),
        ("7", "is not a solution: expected a list"),
        ('{"cost": 445}', "is not a solution: expected a list"),
        ("[0, 0", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_what_is_no_solution_of_the_graph_is_refused(
    text: str, message: str, example: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "solution.json").write_text(text)
    for option in ("--check", "--start"):
        assert main(["solve-graph", example, "-q", option, str(tmp_path / "solution.json")]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert message in err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["none.json"], 1, "none.json: cannot be read"),
        (["{example}", "--check", "none.json"], 1, "cannot read solution 'none.json'"),
        (["{example}", "--gap", "nan"], 1, "gap nan is not legal"),
        (["{example}", "--time-limit", "0"], 1, "time limit 0.0 is not legal"),
        (["{example}", "--workers", "0"], 2, "--workers"),
        (["{example}", "--seed", "-1"], 2, "--seed"),
        (["{example}", "-o", "no/such/folder.json"], 2, "cannot write"),
        (["{example}", "-o", "{example}"], 2, "--output"),
        (["{example}", "--check", "a.json", "-o", "b.json"], 2, "--check solves nothing"),
        ([], 2, "FILE"),
    ],
)
def test_wrong_input_is_one_message_and_a_code(
    words: list[str], code: int, message: str, example: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["solve-graph", *(word.format(example=example) for word in words)]) == code
    assert message in capsys.readouterr().err


def test_a_problem_is_not_overwritten_by_its_solution(example: str, tmp_path: Path) -> None:
    before = Path(example).read_bytes()
    (tmp_path / "link.json").symlink_to(example)
    assert main(["solve-graph", example, "-q", "-o", str(tmp_path / "link.json")]) == 2
    assert Path(example).read_bytes() == before


@pytest.mark.parametrize("limit", [49, 10])
def test_a_limit_that_nothing_keeps_is_code_3(limit: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tight = problem(tmp_path / "tight.json", EXAMPLE, EXAMPLE_EDGES, limit)
    written = tmp_path / "solution.json"
    assert main(["solve-graph", tight, "-q", "-o", str(written)]) == 3
    assert f"has no solution within the limit of {limit}: the smallest peak found is 50, and none is below 50" in capsys.readouterr().err
    assert not written.exists()
    data = solved(capsys, tight, code=3)
    assert (data["status"], data["peak"], data["peak_bound"]) == ("infeasible", 50, 50)


def test_a_graph_whose_every_choice_is_forbidden_is_code_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = problem(tmp_path / "none.json", EXAMPLE, [([1, 3], [FORBIDDEN] * 4)], None)
    assert main(["solve-graph", path, "-q"]) == 3
    assert "has no solution: the costs of 10^18 leave none" in capsys.readouterr().err


def test_a_start_is_never_lost(example: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = saved(tmp_path / "best.json", {"assignment": [0, 0, 2, 1, 0]})
    assert solved(capsys, example, "--start", best, "--work-limit", "1e-9")["cost"] == 445
    graph = hard_graph(np.random.default_rng(0), 60)
    write(graph, tmp_path / "hard.json")
    some = np.random.default_rng(1).integers(0, graph.sizes())
    found = solved(
        capsys, str(tmp_path / "hard.json"), "--start", saved(tmp_path / "some.json", some.tolist()), "--work-limit", "1e-9", "--gap", "0"
    )
    assert found["cost"] <= graph.cost(some)


def test_what_ended_the_search_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "hard.json")
    write(hard_graph(np.random.default_rng(0), 60, room=3.0), path)
    assert main(["solve-graph", path, "--gap", "0", "--time-limit", "0.5", "-q"]) == 0
    assert "feasible: a limit struck before the gap asked for was proven" in capsys.readouterr().out
    monkeypatch.setattr("solver_shard.solve.search.prove", lambda *_arguments, **_options: Proof(large=True))
    monkeypatch.setattr("solver_shard.solve.parameters.IDLE_EPOCHS", 0)
    assert main(["solve-graph", path, "--gap", "0", "--time-limit", "600", "-q"]) == 0
    assert (
        "feasible: the gap asked for is not proven, and the solver has nothing left to try; another --seed may" in capsys.readouterr().out
    )


@pytest.mark.parametrize("room", [1.5, 3.0])
def test_workers_do_not_change_a_result_within_a_work_limit(room: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(hard_graph(np.random.default_rng(3), 40, room=room), tmp_path / "graph.json")
    results = []
    for workers in ("1", "2", "2"):
        words = ["solve-graph", str(tmp_path / "graph.json"), "--seed", "5", "--work-limit", "0.3", "--time-limit", "600", "--gap", "0"]
        code = main([*words, "--workers", workers, "--json"])
        data = json.loads(capsys.readouterr().out)
        assert data["status"] in ("feasible", "unknown"), "stopped by the limit, or this says little"
        results.append((code, {key: value for key, value in data.items() if key not in ("seconds", "stages")}))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("seed", range(15))
def test_the_optimum_of_small_graphs_is_found_and_passes_the_check(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, int(rng.integers(2, 7)), strategies=3)
    graph = replace(graph, limit=some_limit(rng, points(graph)))
    write(graph, tmp_path / "graph.json.gz")
    path, written = str(tmp_path / "graph.json.gz"), tmp_path / "solution.json"
    within = [p for p in points(graph) if graph.limit is None or p.peak <= graph.limit]
    code = main(["solve-graph", path, "-q", "--json", "--gap", "0", "-o", str(written)])
    data = json.loads(capsys.readouterr().out)
    if not within:
        assert code == 3
        assert data["status"] == "infeasible"
        assert not written.exists()
        return
    assert (code, data["status"], data["cost"]) == (0, "optimal", min(p.cost for p in within))
    checked = solved(capsys, path, "--check", str(written))
    assert (checked["cost"], checked["peak"], checked["forbidden"]) == (data["cost"], data["peak"], 0)


def test_the_command_loads_no_torch(example: str) -> None:
    code = (
        "import sys; from solver_shard.cli import main\n"
        f"assert main(['solve-graph', {example!r}, '-q']) == 0\n"
        "heavy = {'torch', 'transformers', 'jax', 'jaxlib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_however_it_ends_the_best_so_far_is_on_disk(sent: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, written = tmp_path / "hard.json", tmp_path / "solution.json"
    write(hard_graph(np.random.default_rng(0), 60, room=3.0), path)
    words = [sys.executable, "-m", "solver_shard", "solve-graph", str(path), "--gap", "0", "--json", "-o", str(written)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not written.exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        process.send_signal(sent)
        out, err = process.communicate(timeout=60)
    data = json.loads(written.read_text())
    assert solved(capsys, str(path), "--check", str(written))["cost"] == data["cost"]
    assert data["bound"] is None or data["bound"] <= data["cost"]  # the first one is on disk before any bound is
    if sent == signal.SIGINT:
        assert (process.returncode, err) == (0, "")
        assert data["status"] == "interrupted"
        assert json.loads(out)["cost"] == data["cost"]
    else:
        assert process.returncode == -signal.SIGKILL
