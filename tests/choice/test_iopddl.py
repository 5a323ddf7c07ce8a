"""IOPDDL files: what is read, what is refused and how, and that writing loses nothing."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_graphs import points, random_graph

from solver_shard.choice import iopddl
from solver_shard.choice.graph import FORBIDDEN, ChoiceGraph
from solver_shard.choice.iopddl import read, write
from solver_shard.errors import InputError


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
        (broken("problem.edges.nodes.0", [0, 1, 2]), "edge 0 has 3 nodes"),
        (broken("problem.edges.nodes", [[0, 1]]), "1 edges but 3 tables"),
        (broken("problem.edges.costs.0", [6]), "table of 1 costs.*1 x 2"),
        (broken("problem.usage_limit", -1), "usage_limit"),
        (broken("problem.usage_limit", "45"), "usage_limit"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, problem: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read(stored(tmp_path, problem))


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"{", "is not JSON"), (b"\xff\xfe", "is not JSON"), (b"\x1f\x8bxx", "gzip|cannot be read"), (b"[" * 100_000, "is not JSON")],
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
    for name, most, words in (("MAX_NODES", 2, "3 nodes"), ("MAX_CELLS", 4, "table cells"), ("MAX_BYTES", 20, "larger than 20 bytes")):
        with monkeypatch.context() as patch:
            patch.setattr(iopddl, name, most)
            with pytest.raises(InputError, match=words):
                read(path)
