"""IOPDDL files: what is read, what is refused and how, and that writing loses nothing."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import points, random_graph

from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.errors import InputError
from solver_shard.graph import iopddl
from solver_shard.graph.choice_graph import ChoiceGraph
from solver_shard.graph.iopddl import evaluate, read, write


def example() -> dict[str, Any]:
    return {
        "problem": {
            "name": "small",
            "nodes": {"intervals": [[0, 3], [1, 4], [2, 2]], "costs": [[1], [2, 3], [4, 5]], "usages": [[10], [20, 30], [40, 50]]},
            "edges": {"nodes": [[0, 1], [1, 2], [2, 1]], "costs": [[6, 7], [0, 1, FORBIDDEN, 3], [0, 1, FORBIDDEN, 3]]},
            "usage_limit": 45,
        }
    }


def stored(folder: Path, problem: Any, name: str = "problem.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(problem))
    return path


def same(left: ChoiceGraph, right: ChoiceGraph) -> bool:
    arrays = ("offsets", "costs", "usages", "interval_offsets", "intervals", "edges")
    tables = [[graph.tables[t].tolist() for t in graph.edge_tables.tolist()] for graph in (left, right)]
    return all(np.array_equal(getattr(left, a), getattr(right, a)) for a in arrays) and tables[0] == tables[1] and left.limit == right.limit


def test_a_problem_is_read_as_it_is_written(tmp_path: Path) -> None:
    graph = read(stored(tmp_path, example()))
    assert graph.sizes().tolist() == [1, 2, 2]
    assert graph.node_intervals(1).tolist() == [[1, 4]]
    assert graph.limit == 45
    assert graph.edges.tolist() == [[0, 1], [1, 2], [2, 1]]
    assert graph.edge_tables.tolist() == [0, 1, 1], "equal tables are stored once"
    assert graph.cost((0, 0, 1)) == 1 + 2 + 5 + 6 + 1 + FORBIDDEN
    assert graph.profile((0, 1, 0)).tolist() == [10, 40, 40, 30]


def test_a_node_with_itself_and_alone_is_a_node_cost(tmp_path: Path) -> None:
    problem = example()
    problem["problem"]["edges"]["nodes"] += [[1, 1], [2]]
    problem["problem"]["edges"]["costs"] += [[100, 0, 0, FORBIDDEN], [7, 8]]
    graph = read(stored(tmp_path, problem))
    assert graph.node_costs(1).tolist() == [102, FORBIDDEN]
    assert graph.node_costs(2).tolist() == [11, 13]
    assert len(graph.edges) == 3


def test_a_limit_and_edges_may_be_left_out(tmp_path: Path) -> None:
    problem = example()
    del problem["problem"]["usage_limit"], problem["problem"]["edges"]
    graph = read(stored(tmp_path, problem))
    assert graph.limit is None
    assert len(graph.edges) == 0


@pytest.mark.parametrize("name", ["again.json", "again.json.gz"])
def test_writing_and_reading_gives_the_same(tmp_path: Path, name: str) -> None:
    graph = read(stored(tmp_path, example()))
    write(graph, tmp_path / name)
    assert same(read(tmp_path / name), graph)
    assert (tmp_path / name).read_bytes()[:2] == (b"\x1f\x8b" if name.endswith("gz") else b'{"')


def test_compressed_files_are_told_by_content(tmp_path: Path) -> None:
    path = tmp_path / "problem.json"
    path.write_bytes(gzip.compress(json.dumps(example()).encode()))
    assert same(read(path), read(stored(tmp_path, example(), "plain.json")))


@pytest.mark.parametrize("seed", range(10))
def test_further_intervals_become_tied_nodes_of_the_same_cost_and_peak(tmp_path: Path, seed: int) -> None:
    graph = random_graph(np.random.default_rng(seed), 4, 3)
    write(graph, tmp_path / "graph.json")
    again = read(tmp_path / "graph.json")
    extra = [v for v in range(graph.size) for _ in range(len(graph.node_intervals(v)) - 1)]
    assert again.size == graph.size + len(extra)
    for point in points(graph):
        full = point.assignment + tuple(point.assignment[v] for v in extra)
        assert again.allowed(full)
        assert (again.cost(full), again.peak(full)) == (point.cost, point.peak)


def broken(change: str, value: Any) -> dict[str, Any]:
    problem = example()
    at: Any = problem
    *path, last = change.split(".")
    for part in path:
        at = at[int(part)] if isinstance(at, list) else at[part]
    at[int(last) if isinstance(at, list) else last] = value
    return problem


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        ([1, 2], "not an IOPDDL problem"),
        ({"nodes": {}}, "has no 'problem'"),
        ({"problem": {}}, "has no 'nodes'"),
        (broken("problem.nodes.costs", 3), r"nodes\.costs is not a list"),
        (broken("problem.nodes.costs", [[1]]), "one each per node"),
        (broken("problem.nodes.costs.0", []), "node 0 has 0 costs"),
        (broken("problem.nodes.costs.1", [2, 3, 4]), "node 1 has 3 costs and 2 usages"),
        (broken("problem.nodes.costs.1", [2, 3.5]), "3.5.* is not an integer"),
        (broken("problem.nodes.costs.1", [2, True]), "True.* is not an integer"),
        (broken("problem.nodes.costs.1", [2, -3]), "-3.* is not an integer from 0"),
        (broken("problem.nodes.costs.1", [2, 10**30]), "is not an integer from 0 to"),
        (broken("problem.nodes.intervals.2", [3, 2]), r"interval \[3, 2\]"),
        (broken("problem.nodes.intervals.2", [3]), r"interval \[3\]"),
        (broken("problem.nodes.intervals.2", [0, 2**50]), "start <= stop <="),
        (broken("problem.edges.nodes.0", [0, 9]), "must list nodes from 0 to 2"),
        (broken("problem.edges.nodes.0", "01"), "must list nodes"),
        (broken("problem.edges.nodes.0", [0, True]), "must list nodes"),
        (broken("problem.edges.nodes.0", []), "edge 0 has 0 nodes"),
        (broken("problem.edges.nodes.0", [0] * 31), "edge 0 has 31 nodes"),
        (broken("problem.edges.nodes.0", [0, 1, 2]), "table of 2 costs.*1 x 2 x 2"),
        (broken("problem.edges.nodes", [[0, 1]]), "1 edges but 3 tables"),
        (broken("problem.edges.costs.0", [6]), "table of 1 costs.*1 x 2"),
        (broken("problem.edges.costs.1", [0, 1, float("nan"), 3]), "table of edge 1.*nan.* is not an integer"),
        (broken("problem.edges.costs.1", [0, 1, float("inf"), 3]), "inf.* is not an integer"),
        (broken("problem.edges.costs.1", [0, 1, None, 3]), "None.* is not an integer"),
        (broken("problem.edges.costs.1", [0, 1, [2], 3]), "list of 1.* is not an integer"),
        (broken("problem.edges.costs.1", [0, 1, 10**18 + 1, 3]), "table of edge 1.*is not an integer from 0 to"),
        (broken("problem.edges.costs.1", [0, 1, False, 3]), "False.* is not an integer"),
        (broken("problem.edges.costs.1", "0123"), "0123.* is not an integer"),
        (broken("problem.edges", 3), r"edges\.nodes is not a list"),
        (broken("problem.nodes.usages.1", [20, -1]), "usages of node 1.*-1"),
        (broken("problem.nodes.usages.1", 20), "usages of node 1"),
        (broken("problem.nodes.intervals.1", [1, 4, 5]), r"node 1 has interval \[1, 4, 5\]"),
        (broken("problem.nodes.intervals.1", [1.0, 4]), "interval of node 1.*1.0"),
        (broken("problem.nodes.intervals.1", [-1, 4]), "interval of node 1.*-1"),
        (broken("problem.usage_limit", -1), "usage_limit"),
        (broken("problem.usage_limit", 45.0), "usage_limit"),
        (broken("problem.usage_limit", "45"), "usage_limit"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, problem: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read(stored(tmp_path, problem))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(b"{", "is not JSON", id="cut off"),
        pytest.param(b"\xff\xfe", "is not JSON", id="not text"),
        pytest.param(b"\x1f\x8bxx", "gzip|cannot be read", id="damaged gzip"),
        pytest.param(gzip.compress(b'{"problem": {}}')[:-4], "gzip|cannot be read", id="cut off gzip"),
        pytest.param(b"[" * 100_000, "is not JSON", id="deep"),
        pytest.param(b'{"problem": ' * 100_000, "is not JSON", id="deep objects"),
        pytest.param(b'{"problem": ' + b"9" * 100_000 + b"}", "is not JSON|not an IOPDDL problem", id="huge integer"),
    ],
)
def test_files_that_are_no_json_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "problem.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=words):
        read(path)


def test_a_missing_file_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read(tmp_path / "none.json")


def test_sizes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stored(tmp_path, example())
    bounds = (
        ("MAX_NODES", 2, "3 nodes"),
        ("MAX_CELLS", 4, "table cells"),
        ("MAX_GRAPH_BYTES", 20, "larger than 20 bytes"),
        ("MAX_VALUES", 30, "more than 30 numbers"),
    )
    for name, most, words in bounds:
        with monkeypatch.context() as patch:
            patch.setattr(iopddl, name, most)
            with pytest.raises(InputError, match=words):
                read(path)


@pytest.mark.parametrize("text", [b" ", b"[],", b"0,"], ids=["blanks", "lists", "10^9 strategies"])
def test_a_small_file_that_unpacks_to_gigabytes_is_left_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    path = tmp_path / "bomb.json.gz"
    block = gzip.compress(text * (2**24 // len(text)))  # parts of a gzip file follow each other
    path.write_bytes(gzip.compress(b'{"problem": {"nodes": {"costs": [[') + block * 2**7)
    assert path.stat().st_size < 2**24
    monkeypatch.setattr(iopddl, "MAX_GRAPH_BYTES", 2**26)
    monkeypatch.setattr(iopddl, "MAX_VALUES", 2**24)
    tracemalloc.start()
    with pytest.raises(InputError, match=r"larger than|more than"):
        read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**27


def test_usages_whose_sum_needs_more_than_64_bits_are_refused(tmp_path: Path) -> None:
    problem = example()
    problem["problem"]["nodes"] = {"intervals": [[0, 1]] * 20, "costs": [[0]] * 20, "usages": [[10**18]] * 20}
    problem["problem"]["edges"] = {"nodes": [], "costs": []}
    with pytest.raises(InputError, match="use a larger unit"):
        read(stored(tmp_path, problem))


def test_a_late_time_costs_nothing(tmp_path: Path) -> None:
    problem = broken("problem.nodes.intervals.0", [0, 2**40])
    graph = read(stored(tmp_path, problem))
    assert graph.peak((0, 1, 0)) == 40
    assert evaluate(tmp_path / "problem.json", (0, 1, 0)).peak == 40


def plain_value(problem: dict[str, Any], chosen: Sequence[int]) -> tuple[int, int, bool]:
    """(cost, peak, within the limit), straight from the definition."""
    nodes, edges = problem["problem"]["nodes"], problem["problem"]["edges"]
    cost = sum(costs[x] for costs, x in zip(nodes["costs"], chosen, strict=True))
    for members, table in zip(edges["nodes"], edges["costs"], strict=True):
        cost += np.array(table, dtype=object).reshape([len(nodes["costs"][v]) for v in members])[tuple(chosen[v] for v in members)]
    last = max(stop for _, stop in nodes["intervals"])
    live = list(zip(nodes["intervals"], nodes["usages"], chosen, strict=True))
    peak = max((sum(usage[x] for (a, b), usage, x in live if a <= t < b) for t in range(last)), default=0)
    return cost, peak, peak <= problem["problem"]["usage_limit"]


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    """Files with edges of one to four nodes, repeated members, forbidden entries and costs whose sums pass 64 bits."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    cost = st.sampled_from([0, 1, 7, 10**17, 9 * 10**17, FORBIDDEN])
    rows = [draw(st.lists(cost, min_size=k, max_size=k)) for k in sizes]
    usages = [draw(st.lists(st.integers(0, 9), min_size=k, max_size=k)) for k in sizes]
    intervals = [sorted((draw(st.integers(0, 4)), draw(st.integers(0, 4)))) for _ in sizes]
    members = draw(st.lists(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=4), max_size=4))
    tables = [draw(st.lists(cost, min_size=n, max_size=n)) for n in (math.prod(sizes[v] for v in edge) for edge in members)]
    nodes = {"intervals": intervals, "costs": rows, "usages": usages}
    return {"problem": {"nodes": nodes, "edges": {"nodes": members, "costs": tables}, "usage_limit": draw(st.integers(0, 20))}}


@settings(max_examples=150)
@given(problem=problems())
def test_any_solution_of_a_file_has_the_value_of_the_definition(tmp_path_factory: pytest.TempPathFactory, problem: dict[str, Any]) -> None:
    path = stored(tmp_path_factory.mktemp("file"), problem)
    graph = read(path)
    sizes = [len(row) for row in problem["problem"]["nodes"]["costs"]]
    allowed: dict[tuple[int, ...], list[int]] = {}
    for x in itertools.product(*map(range, graph.sizes().tolist())):
        if graph.allowed(x):
            allowed.setdefault(x[: len(sizes)], []).append(graph.cost(x))
    for chosen in itertools.product(*map(range, sizes)):
        cost, peak, fits = plain_value(problem, chosen)
        found = evaluate(path, chosen)
        assert (found.cost, found.peak) == (cost, peak)
        assert found.feasible == (fits and found.forbidden == 0)
        assert graph.peak((*chosen, *[0] * (graph.size - len(sizes)))) == peak
        if found.forbidden == 0 and cost < FORBIDDEN:
            assert allowed[chosen] == [cost], "one joint choice for each edge of three nodes or more"
        if found.forbidden:
            assert chosen not in allowed


def test_an_edge_of_three_nodes_is_a_node_of_its_allowed_choices(tmp_path: Path) -> None:
    problem = example()
    problem["problem"]["edges"] = {"nodes": [[0, 1, 2]], "costs": [[5, FORBIDDEN, 6, 7]]}
    graph = read(stored(tmp_path, problem))
    assert graph.names[3:] == ("edge 0",)
    assert graph.node_costs(3).tolist() == [5, 6, 7]
    assert graph.node_usages(3).tolist() == [0, 0, 0]
    assert graph.edges.tolist() == [[0, 3], [1, 3], [2, 3]]
    assert graph.tables[1].tolist() == [[0, FORBIDDEN, FORBIDDEN], [FORBIDDEN, 0, 0]]


def test_an_edge_of_too_many_joint_choices_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = example()
    problem["problem"]["edges"] = {"nodes": [[0, 1, 2]], "costs": [[5, FORBIDDEN, 6, 7]]}
    monkeypatch.setattr(iopddl, "MAX_JOINT", 2)
    with pytest.raises(InputError, match="edge 0 of 3 nodes allows 3 joint choices"):
        read(stored(tmp_path, problem))


@pytest.mark.parametrize(
    ("solution", "words"),
    [
        ([0, 1], "has 2 strategies.*3 nodes"),
        ([0, 2, 0], "strategy 2 for node 1.*from 0 to 1"),
        ([0, -1, 0], "-1 for node 1"),
        ([0, 1.0, 0], "1.0"),
        ([0, True, 0], "True"),
    ],
)
def test_a_solution_that_does_not_fit_is_refused(tmp_path: Path, solution: list[Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        evaluate(stored(tmp_path, example()), solution)


def test_a_file_that_cannot_be_written_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = read(stored(tmp_path, example()))
    before = (tmp_path / "problem.json").read_bytes()

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(InputError, match="No space left"):
        write(graph, tmp_path / "problem.json")
    assert (tmp_path / "problem.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["problem.json"]
