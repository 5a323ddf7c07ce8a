"""The points of a sweep: factorings against brute force, and what a grid makes of its arguments."""

from __future__ import annotations

import itertools
import math
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from solver_shard.analysis.sweep.points import Point, factorings, grid, meshes
from solver_shard.costs.cluster import load_cluster
from solver_shard.errors import InputError


def points_of(**options: Any) -> tuple[Point, ...]:
    options = {"meshes": ["4"], "batches": [8], "memories": ["70GiB"], "clusters": ["h100"], "options": {}, **options}
    return grid("gpt2", **options)


@given(st.integers(2, 24), st.sets(st.integers(1, 3), min_size=1, max_size=2))
def test_factorings_are_all_ordered_products_of_factors_larger_than_one(devices: int, axes: set[int]) -> None:
    found = [sizes for k in sorted(axes) for sizes in itertools.product(range(2, devices + 1), repeat=k) if math.prod(sizes) == devices]
    if found:
        assert list(factorings(devices, sorted(axes))) == found
    else:
        with pytest.raises(InputError, match=rf"{devices} devices have no factoring into"):
            factorings(devices, sorted(axes))


def test_64_devices_have_15_meshes_of_two_and_three_axes() -> None:
    found = [str(mesh) for mesh in meshes(64, (2, 3))]
    assert found[:5] == ["d0=2,d1=32", "d0=4,d1=16", "d0=8,d1=8", "d0=16,d1=4", "d0=32,d1=2"]
    assert len(found) == len(set(found)) == 15
    assert "d0=2,d1=4,d2=8" in found


@pytest.mark.parametrize(("devices", "axes"), [(0, (1,)), (2.0, (1,)), (8, ()), (8, (0,)), (8, (7,)), (True, (1,))])
def test_what_is_no_number_of_devices_or_axes_is_refused(devices: Any, axes: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="not legal"):
        factorings(devices, axes)


def test_a_grid_has_every_combination_once_and_those_of_a_batch_follow_each_other() -> None:
    found = points_of(
        meshes=["dp=2,tp=2", "4"], batches=[8, 16], memories=["40GiB", "70GiB", "71680MiB"], clusters=["h100", "a100"], options={"seq": 128}
    )
    assert len(found) == 2 * 2 * 2 * 2  # two of the limits are one
    assert [point.request.options.batch for point in found] == [8] * 8 + [16] * 8
    assert len({point.name for point in found}) == len(found)
    assert found[0].name == "dp=2,tp=2_b8_40GiB_h100"
    assert found[0].file == "dp=2,tp=2_b8_40GiB_h100.json"
    assert {point.request.options.seq for point in found} == {128}


def test_what_is_not_given_is_as_in_optimize() -> None:
    (point,) = points_of(memories=[None])
    options = point.request.options
    assert (options.dtype, options.optimizer, options.gap, options.time_limit, options.tied) == ("bf16", "adamw", 1e-4, 60.0, True)
    assert options.memory_limit == int(load_cluster("h100").device.memory * 0.9)
    assert point.name == "d0=4_b8_h100"


def test_a_cluster_of_ones_own_is_told_from_others_of_its_name(tmp_path: Path) -> None:
    preset = (resources.files("solver_shard.costs") / "clusters" / "h100.toml").read_text()
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        lines = [f'title = "{folder}"' if line.startswith("title") else line for line in preset.splitlines()]
        (tmp_path / folder / "mine.toml").write_text("\n".join(lines))
    found = points_of(clusters=[tmp_path / "one" / "mine.toml", str(tmp_path / "two" / "mine.toml"), "h100"])
    assert len({point.name for point in found}) == 3
    assert all("mine-" in point.name for point in found[:2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"meshes": ["d0=2,d1=2", "d0=4"], "options": {"pins": ["x=R,R"]}}, r"d0=4"),
        ({"options": {"microbatches": 3}}, "cannot be run in 3 equal microbatches"),
        ({"options": {"inputs": ()}}, "a sweep has no argument 'inputs'"),
        ({"options": {"gap": 2.0}}, "gap 2.0 is not legal"),
        ({"batches": []}, "at least one batch"),
        ({"batches": range(1, 2002)}, "a sweep has at most 2,000"),
        ({"memories": ["70 apples"]}, "cannot read memory size"),
        ({"clusters": ["h1000"]}, "unknown cluster"),
        ({"meshes": ["dp="]}, "cannot read mesh"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_traced(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        points_of(**options)
