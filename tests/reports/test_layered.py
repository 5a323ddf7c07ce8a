"""Layered drawings: every edge goes down, no two nodes of a layer overlap, and least squares under an order is what brute force finds."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solver_shard.reports.dataflow import DrawnBox, draw, isotonic


@st.composite
def graphs(draw_: st.DrawFn) -> tuple[list[DrawnBox], list[tuple[int, int]]]:
    count = draw_(st.integers(1, 12))
    boxes = [DrawnBox(draw_(st.integers(5, 90)), draw_(st.integers(5, 60))) for _ in range(count)]
    pairs = [(a, b) for b in range(count) for a in range(b)]
    return boxes, draw_(st.lists(st.sampled_from(pairs), max_size=20)) if pairs else []


@settings(max_examples=40)
@given(graphs())
def test_edges_go_down_and_boxes_stay_apart(graph: tuple[list[DrawnBox], list[tuple[int, int]]]) -> None:
    boxes, edges = graph
    drawn = draw(boxes, edges)
    for (a, b), line in zip(edges, drawn.lines, strict=True):
        assert drawn.places[a][1] + boxes[a].height / 2 < drawn.places[b][1] - boxes[b].height / 2
        assert all(before[1] <= after[1] for before, after in itertools.pairwise(line))
    for (i, (x, y)), (j, (u, v)) in itertools.combinations(enumerate(drawn.places), 2):
        wide, tall = (boxes[i].width + boxes[j].width) / 2, (boxes[i].height + boxes[j].height) / 2
        assert abs(x - u) >= wide - 0.2 or abs(y - v) >= tall - 0.2
    for (x, y), box in zip(drawn.places, boxes, strict=True):
        assert -0.1 <= x - box.width / 2 <= x + box.width / 2 <= drawn.width + 0.1
        assert -0.1 <= y - box.height / 2 <= y + box.height / 2 <= drawn.height + 0.1


@settings(max_examples=40)
@given(graphs())
def test_the_same_graph_is_drawn_the_same(graph: tuple[list[DrawnBox], list[tuple[int, int]]]) -> None:
    assert draw(*graph) == draw(*graph)


def test_a_line_passes_beside_the_boxes_of_a_layer() -> None:
    drawn = draw([DrawnBox(40, 20)] * 3, [(0, 1), (1, 2), (0, 2)])
    (middle, _), box = drawn.places[1], 40
    passing = [x for x, y in drawn.lines[2][1:-1]]
    assert passing
    assert all(abs(x - middle) > box / 2 for x in passing)


def test_a_cycle_has_no_layers() -> None:
    with pytest.raises(ValueError, match="cycle"):
        draw([DrawnBox(1, 1)] * 2, [(0, 1), (1, 0)])


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(-4, 4), st.integers(1, 3)), min_size=1, max_size=3))
def test_isotonic_is_nearest_among_ordered_sequences(values: list[tuple[int, int]]) -> None:
    def loss(found: tuple[float, ...]) -> float:
        return sum(w * (x - v) ** 2 for x, (v, w) in zip(found, values, strict=True))

    found = isotonic(values)
    assert all(a <= b for a, b in itertools.pairwise(found))
    grid = [k / 2 for k in range(-8, 9)]
    best = min(loss(candidate) for candidate in itertools.combinations_with_replacement(grid, len(values)))
    assert loss(tuple(found)) <= best + 1e-9
