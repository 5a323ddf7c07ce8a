"""Cluster presets and the user's own TOML: what is read, and what every wrong field says."""

from __future__ import annotations

from pathlib import Path

import pytest

from solver_shard.costs.cluster import ASSUMED_KAPPA, MAX_FILE_BYTES, PRESETS, Kernel, load_cluster, parse_cluster
from solver_shard.errors import InputError

KERNELS: tuple[Kernel, ...] = ("matmul", "attention", "streaming", "reduction")

GOOD = """
title = "Two boxes"
launch_ns = 6600

[device]
name = "my GPU"
memory_gib = 24.0
reserve_gib = 1.5
memory_gb_per_s = 1000
vector_tflops = 40.0
matmul_tflops = { bf16 = 160.0, f32 = 40.0 }

[device.efficiency]
matmul = 0.5
attention = 0.25
streaming = 0.75
reduction = 0.625

[[links]]
name = "PCIe"
size = 4
gb_per_s = 25.0
efficiency = 0.8
latency_ns = 2000

[[links]]
name = "Ethernet"
gb_per_s = 3.125
efficiency = 1.0
latency_ns = 15000
topology = "torus"
"""


def test_a_users_own_cluster(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD, encoding="utf-8")
    cluster = load_cluster(path)
    assert (cluster.name, cluster.title, cluster.launch_ns) == ("mine", "Two boxes", 6600.0)
    device = cluster.device
    assert (device.memory, device.reserve) == (24 * 2**30, 3 * 2**29)
    assert [device.flops("bf16", kernel) for kernel in KERNELS] == [80e12, 40e12, 40e12, 40e12]
    assert [device.flops("f32", kernel) for kernel in KERNELS] == [20e12, 10e12, 40e12, 40e12]
    assert [device.flops("i64", kernel) for kernel in KERNELS] == [40e12] * 4
    assert [device.bandwidth(kernel) for kernel in KERNELS] == [750e9, 750e9, 750e9, 625e9]
    assert [(x.size, x.bandwidth, x.latency_ns, x.topology) for x in cluster.levels] == [
        (4, 20e9, 2000.0, "switch"),
        (None, 3.125e9, 15000.0, "torus"),
    ]
    assert load_cluster(str(path)) == cluster
    assert cluster.kappa == ASSUMED_KAPPA
    assert parse_cluster("kappa = 0\n" + GOOD, name="mine", source="mine.toml").kappa == 0.0


@pytest.mark.parametrize("name", PRESETS)
def test_presets_load_and_say_where_their_numbers_come_from(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.device.flops("bf16", "attention") > cluster.device.flops("bf16", "streaming")
    assert 0 < cluster.device.reserve < cluster.device.memory / 5
    assert cluster.levels[-1].size is None
    speeds = [level.bandwidth for level in cluster.levels]
    assert speeds == sorted(speeds, reverse=True)
    text = (Path(__file__).parents[2] / "solver_shard/costs/clusters" / f"{name}.toml").read_text(encoding="utf-8")
    lines = text.splitlines()
    for i, line in enumerate(lines):
        if "=" in line and not line.startswith(("title", "name", "topology", "#", " ")):
            near = line + (lines[i - 2] + lines[i - 1] if line.startswith("matmul_tflops") else "")
            assert any(word in near for word in ("spec", "measured", "assumed", "book", "as for")), f"{name}: no source for {line!r}"


def test_every_preset_file_is_a_preset() -> None:
    folder = Path(__file__).parents[2] / "solver_shard/costs/clusters"
    assert sorted(path.stem for path in folder.glob("*.toml")) == list(PRESETS)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("memory_gib = 24.0", "memory_gib = -1", r"device.memory_gib = -1 is not legal; legal: a number from 1e-06 to 1e\+06"),
        ("memory_gib = 24.0", "memory_gib = true", "device.memory_gib = True is not legal"),
        ("memory_gib = 24.0", 'memory_gib = "24GiB"', "device.memory_gib = '24GiB' is not legal; legal: a number"),
        ("memory_gib = 24.0", "memory_gib = nan", "device.memory_gib = nan is not legal"),
        ("memory_gib = 24.0", "memory_gib = inf", "device.memory_gib = inf is not legal"),
        ("memory_gib = 24.0\n", "", "key 'device.memory_gib' is missing; legal: a number"),
        ("memory_gib = 24.0", "memory_gb = 24.0", "key 'device.memory_gib' is missing"),
        ("reserve_gib = 1.5\n", "", "key 'device.reserve_gib' is missing; legal: a number from 0 to 24"),
        ("reserve_gib = 1.5", "reserve_gib = 25", "device.reserve_gib = 25 is not legal; legal: a number from 0 to 24"),
        ("attention = 0.25", "attention = 0", "device.efficiency.attention = 0 is not legal; legal: a number from 0.01 to 1"),
        ("attention = 0.25\n", "", "key 'device.efficiency.attention' is missing"),
        ("attention = 0.25", "attention = 0.25\nnorm = 1.0", "unknown key 'device.efficiency.norm'; legal here: attention, matmul"),
        ("efficiency = 0.8", "efficiency = 1.1", r"links\[0\].efficiency = 1.1 is not legal; legal: a number from 0.01 to 1"),
        ("size = 4", "size = 4.5", r"links\[0\].size = 4.5 is not legal; legal: a whole number from 2"),
        ("size = 4\n", "", r"key 'links\[0\].size' is missing"),
        ('name = "Ethernet"', 'name = "Ethernet"\nsize = 64', r"unknown key 'links\[1\].size'; .*the last level joins all devices"),
        ('topology = "torus"', 'topology = "mesh"', r"links\[1\].topology = 'mesh' is not legal; legal: 'switch' or 'torus'"),
        ("bf16 = 160.0", "bfloat16 = 160.0", "key 'device.matmul_tflops.bfloat16' is not a dtype; legal: f64, f32"),
        ("bf16 = 160.0", "bf16 = 0", "device.matmul_tflops.bf16 = 0 is not legal"),
        ("launch_ns = 6600", "launch_ns = 6600\nlatency = 3", "unknown key 'latency'; legal here: device, kappa, launch_ns, links"),
        ("launch_ns = 6600", "launch_ns = 6600\nkappa = 1.1", "kappa = 1.1 is not legal; legal: a number from 0 to 1"),
        ("launch_ns = 6600", "launch_ns = 6600\nkappa = -0.1", "kappa = -0.1 is not legal; legal: a number from 0 to 1"),
        ("launch_ns = 6600", 'launch_ns = 6600\nkappa = "10%"', "kappa = '10%' is not legal; legal: a number from 0 to 1"),
        ("launch_ns = 6600", "launch_ns = 6600\nkapa = 0.1", "unknown key 'kapa'; legal here: device, kappa, launch_ns, links"),
        ("launch_ns = 6600", "launch_ns = [1]", r"launch_ns = \[1\] is not legal"),
        ('title = "Two boxes"', "title = 3", "title = 3 is not legal; legal: a text"),
        ('title = "Two boxes"', f'title = "{"x" * 300}"', r"title = 'x+\.\.\. is not legal"),
        ("[device", "[gpu", "key 'device' is missing; legal: a table"),
        ("[[links]]", "[[wires]]", r"key 'links' is missing; legal: one or more \[\[links\]\] tables"),
        ("title =", "title", "not valid TOML"),
    ],
)
def test_wrong_fields_are_named_with_what_is_legal(old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(InputError, match=r"^mine\.toml: .*" + message):
        parse_cluster(GOOD.replace(old, new), name="mine", source="mine.toml")


def test_levels_nest() -> None:
    third = '[[links]]\nname = "box"\nsize = 6\ngb_per_s = 5.0\nefficiency = 1.0\nlatency_ns = 1\n\n'
    text = GOOD.replace('[[links]]\nname = "Ethernet"', third + '[[links]]\nname = "Ethernet"')
    with pytest.raises(InputError, match=r"links\[1\].size = 6 is not legal; legal: a multiple of the inner level's 4, and larger"):
        parse_cluster(text, name="mine", source="mine.toml")
    assert len(parse_cluster(text.replace("size = 6", "size = 8"), name="mine", source="mine.toml").levels) == 3


def test_links_must_be_tables() -> None:
    head = GOOD[: GOOD.index("[[links]]")]
    for links in ("links = 3\n", 'links = ["a"]\n', "links = []\n"):
        with pytest.raises(InputError, match="links"):
            parse_cluster(links + head, name="mine", source="mine.toml")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h1000", "unknown cluster 'h1000'; presets are a100, ethernet, gb200, h100, tpu-v5p; did you mean 'h100'"),
        ("", "unknown cluster ''; presets are .*; for a cluster of your own give a path that ends in .toml"),
        ("nothing/here.toml", "cannot read cluster file 'nothing/here.toml': No such file or directory; presets are"),
    ],
)
def test_unknown_clusters(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_cluster(name)


def test_files_that_are_too_large_or_not_text(tmp_path: Path) -> None:
    large = tmp_path / "large.toml"
    large.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    with pytest.raises(InputError, match="is larger than 1048576 bytes"):
        load_cluster(large)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="is not UTF-8 text"):
        load_cluster(binary)
    with pytest.raises(InputError, match="cannot read cluster file"):
        load_cluster(f"{tmp_path}/")
