"""PartitionSpecs, Shardy annotations, torchtitan configs: what is written says the plan, and comes back as it was."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shardy.annotation_text import parse_sharding
from tiny_llama import planned

import solver_shard
from solver_shard.cli import main
from solver_shard.costs.layouts import is_ordered
from solver_shard.errors import InputError
from solver_shard.exporters import jax, script, shardy, torchtitan
from solver_shard.exporters.literal import LiteralCall, read_assignments
from solver_shard.layout import Layout, R, S, strided
from solver_shard.mesh import Mesh
from solver_shard.plan.plan import Plan
from solver_shard.shardy.sharding import check_sharding, format_sharding

MESHES = ("dp=2,tp=2", "dp=2,cp=3,tp=2", "dp=2,tp=2x2", "x=4")
FSDP = ("dp=2,tp=2", "dp=zero3,tp=megatron")


@st.composite
def laid_out(draw: st.DrawFn) -> tuple[Mesh, Layout, int]:
    """A mesh, and a layout on it without partial placements, of a tensor of some dims."""
    mesh = Mesh.parse(draw(st.sampled_from(MESHES)))
    dims = draw(st.integers(1, 3))
    placement = st.sampled_from([R, *(cut(d) for d in range(dims) for cut in (S, strided))])
    layout = Layout(draw(st.lists(placement, min_size=len(mesh.axes), max_size=len(mesh.axes))))
    plain = all(not p.is_strided or S(p.dim) in layout[a + 1 :] for a, p in enumerate(layout))
    ordered = plain and is_ordered(layout, mesh.wholes)
    return mesh, layout if ordered else Layout(S(p.dim) if p.is_strided else p for p in layout), dims


@given(laid_out())
@settings(max_examples=150)
def test_every_stored_layout_is_a_partition_spec_and_back(case: tuple[Mesh, Layout, int]) -> None:
    mesh, layout, dims = case
    spec = jax.spec_of(layout, dims, mesh)
    assert sorted(name for axes in spec for name in axes) == sorted(n for n, p in zip(mesh.names, layout, strict=True) if p.is_shard)
    assert jax.layout_of(spec, mesh, "w") == layout


@given(laid_out())
@settings(max_examples=150)
def test_every_stored_layout_is_a_sharding_and_back(case: tuple[Mesh, Layout, int]) -> None:
    mesh, layout, dims = case
    meshes = {shardy.MESH: shardy.mesh_spec(mesh)}
    sharding = shardy.sharding_of(layout, dims, mesh)
    check_sharding(sharding, meshes, dims, "w")
    assert shardy.layout_of(sharding, mesh) == layout
    assert shardy.layout_of(parse_sharding(format_sharding(sharding, meshes), meshes), mesh) == layout


@pytest.mark.parametrize(
    ("mesh", "layout", "spec", "sharding"),
    [
        ("dp=2,tp=4", "S(0)S(0)", (("dp", "tp"), ()), '[{"dp", "tp"}, {}]'),
        ("dp=2,tp=4", "_S(0)S(0)", (("tp", "dp"), ()), '[{"tp", "dp"}, {}]'),
        ("dp=2,tp=4", "S(1)S(0)", (("tp",), ("dp",)), '[{"tp"}, {"dp"}]'),
        ("dp=2,tp=2x2", "RS(0)S(0)", (("tp.0", "tp.1"), ()), '[{"tp"}, {}]'),
        ("dp=2,tp=2x2", "RRS(1)", ((), ("tp.1",)), '[{}, {"tp":(2)2}]'),
    ],
)
def test_layouts_in_other_words(mesh: str, layout: str, spec: jax.Spec, sharding: str) -> None:
    devices = Mesh.parse(mesh)
    assert jax.spec_of(Layout.parse(layout), 2, devices) == spec
    text = format_sharding(shardy.sharding_of(Layout.parse(layout), 2, devices), {shardy.MESH: shardy.mesh_spec(devices)})
    assert text == f"#sdy.sharding<@mesh, {sharding}>"


def stored(plan: Plan) -> dict[str, Layout]:
    return {t.name: t.layout for t in plan.tensors if t.role in ("parameter", "buffer", "input")}


def dims(plan: Plan) -> dict[str, int]:
    return {t.name: len(t.shape) for t in plan.tensors}


def test_partition_specs_come_back_as_pins() -> None:
    plan = planned(*FSDP)
    pins = jax.read(jax.export(plan).text, dims(plan), plan.mesh)
    assert dict(pin.split("=", 1) for pin in pins) == {name: ",".join(map(str, layout)) for name, layout in stored(plan).items()}
    assert jax.read('{"lm_head.weight": [["tp", "dp"], null]}', dims(plan), plan.mesh) == ("lm_head.weight=_S(0),S(0)",)


def test_logical_axes_and_their_rules_give_the_specs() -> None:
    plan = planned(*FSDP)
    parts = read_assignments(jax.export(plan).text, calls=("P",))
    rules = dict(parts["LOGICAL_AXIS_RULES"])
    for name, words in parts["LOGICAL_AXES"].items():
        axes = [rules[word] for word in words]
        spec = parts["PARAMETERS"][name]
        assert isinstance(spec, LiteralCall)
        assert axes == [*spec.args, *[None] * (len(words) - len(spec.args))]


def test_shardy_text_parses_and_comes_back() -> None:
    plan = planned(*FSDP)
    text = shardy.export(plan).text  # parsed by jaxlib before it is handed back
    assert shardy.read(text, plan.mesh) == stored(plan)
    zero1 = planned("dp=4", "zero1")
    states = shardy.read(shardy.export(zero1).text, zero1.mesh, function="optimizer_states")
    assert states == {t.name: t.state for t in zero1.tensors if t.state is not None}


def test_a_module_of_the_model_gets_the_plans_shardings() -> None:
    plan = planned(*FSDP)
    head = "module @m {\n  func.func public @main(%a: tensor<16x16xf32>, %b: tensor<4xf32>) -> tensor<4xf32> {"
    text = f"{head}\n    return %b : tensor<4xf32>\n  }}\n}}"
    made = shardy.annotate(text, plan, ["model.layers.0.self_attn.q_proj.weight", None])
    assert '%arg0: tensor<16x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"tp"}, {"dp"}]>}, %arg1: tensor<4xf32>)' in made
    with pytest.raises(InputError, match=r"cannot be 'lm_head\.weight'"):
        shardy.annotate(text, plan, ["lm_head.weight", None])
    with pytest.raises(InputError, match="2 arguments, and 1 names"):
        shardy.annotate(text, plan, [None])


def test_torchtitan_configs_say_the_tensor_axis() -> None:
    plan = planned("tp=4", "megatron")
    made = torchtitan.export(plan)
    assert not made.dropped
    pins = torchtitan.read(made.text, dims(plan))
    expected = {t.name: str(t.layout) for t in plan.tensors if t.role in ("parameter", "buffer")}
    assert {pin.split("=tp=")[0]: pin.split("=tp=")[1] for pin in pins} == expected
    states = '{"weight": {MeshAxisName.TP: Shard(-1)}, "bias": {MeshAxisName.TP: Replicate()}}'
    old = f'SHARDING = {{"lm_head": ShardingConfig(state_shardings={states})}}'
    assert torchtitan.read(old, {"lm_head.weight": 2}) == ("lm_head.weight=tp=S(1)",)


def test_a_gradient_that_norms_reduce_once_is_declared_behind_the_norm() -> None:
    """One I -> R at the maker of the tensor, not three at its readers: as many all-reduces as in the plan."""
    text = torchtitan.export(planned("tp=4", "megatron")).text
    norm = text[text.index("'model.layers.*.input_layernorm'") :]
    assert "out_dst_shardings=SpmdLayout({DP: spmd.S(0), CP: spmd.R, TP: spmd.R})" in norm[: norm.index("    ),")]
    assert "in_dst_shardings" not in text[: text.index("'model.layers.*.self_attn.k_proj'")]


def test_torchtitan_refuses_what_its_fsdp_does_not_cut() -> None:
    with pytest.raises(InputError, match=r"q_proj.weight.*cut by dim 1 over dp"):
        torchtitan.export(planned(*FSDP))


def uneven(plan: Plan) -> Plan:
    """One parameter with 6 words for 4 devices."""
    tensors = tuple(dataclasses.replace(t, shape=(6, *t.shape[1:])) if t.name == "lm_head.weight" else t for t in plan.tensors)
    layout = Layout.parse("S(0)S(0)")
    tensors = tuple(dataclasses.replace(t, layout=layout, state=layout) if t.name == "lm_head.weight" else t for t in tensors)
    return dataclasses.replace(plan, tensors=tensors)


@pytest.mark.parametrize("exporter", [jax, shardy])
def test_unequal_shards_are_refused_by_name(exporter: object) -> None:
    plan = uneven(planned(*FSDP))
    with pytest.raises(InputError, match=r"lm_head.weight: dim 0 of 6 cut"):
        exporter.export(plan)  # type: ignore[attr-defined]
    made = exporter.export(plan, lossy=True)  # type: ignore[attr-defined]
    assert [item.tensors for item in made.dropped] == [("lm_head.weight",)]


def test_files_are_data(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    text = f'PARAMETERS = {{"w": P("tp")}}\nOTHER = open({str(mark)!r}, "w")\nMORE = P(*[1])\n'
    assert read_assignments(text, calls=("P",)) == {"PARAMETERS": {"w": LiteralCall("P", ("tp",))}}
    assert not mark.exists()
    for bad, says in (
        ("PARAMETERS = {", "neither JSON nor Python"),
        ("PARAMETERS = " + "[" * 300 + "]" * 300, "nested|cannot be read|neither"),
        ('PARAMETERS = {"w": P("tp"), "w": P()}', "twice"),
        ('PARAMETERS = {"v": P("tp")}', "no tensor is called 'v'"),
        ('PARAMETERS = {"w": P("tp", "tp")}', "used twice"),
        ('PARAMETERS = {"w": P(("x",))}', "unknown mesh axis"),
        ('PARAMETERS = {"w": P(3)}', "no entry of a spec"),
        ('PARAMETERS = {"w": P(None, None, None)}', "at most one per dim"),
    ):
        with pytest.raises(InputError, match=says):
            jax.read(bad, {"w": 2}, Mesh.parse("dp=2,tp=2"))
    with pytest.raises(InputError, match="mesh @mesh"):
        shardy.read(shardy.export(planned(*FSDP)).text, Mesh.parse("dp=4,tp=2"))


def test_script_names_its_plan_and_compiles() -> None:
    text = script.export(planned(*FSDP), plan_path="plan.json").text
    compile(text, "run.py", "exec")
    assert "'plan.json'" in text
    assert "torchrun --nproc-per-node 4" in text


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned(*FSDP).save(tmp_path / "plan.json")
    for target in ("dtensor-script", "parallelize", "jax", "sdy"):
        assert main(["export", str(tmp_path / "plan.json"), "--to", target, "-o", str(tmp_path / target)]) == 0
        assert (tmp_path / target).stat().st_size > 1000
    assert main(["export", str(tmp_path / "plan.json"), "--to", "hf", "-o", str(tmp_path / "hf")]) == 1
    assert not (tmp_path / "hf").exists()
    assert "q_proj.weight" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "plan.json"), "--to", "hf", "--lossy", "-o", str(tmp_path / "hf")]) == 0
    assert "left out:\n  - model.layers.{0,1}.self_attn.q_proj" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "plan.json"), "--to", "hf", "-o", str(tmp_path / "no" / "hf")]) == 2


_SHARDS = """
import runpy, sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding
import solver_shard
plan = solver_shard.load_plan(sys.argv[1])
made = runpy.run_path(sys.argv[2])
mesh = Mesh(np.array(jax.devices()).reshape(made["MESH_SHAPE"]), made["MESH_NAMES"])
coordinates = list(plan.mesh.coordinates())
checked = 0
for tensor in plan.tensors:
    if tensor.role != "parameter":
        continue
    parts = tensor.name.split(".")
    pattern = ".".join("*" if part.isdigit() else part for part in parts)
    spec = made["PARAMETERS"].get(tensor.name) or made["PARAMETERS"][pattern]
    value = np.arange(np.prod(tensor.shape), dtype=np.float32).reshape(tensor.shape)
    for shard in jax.device_put(value, NamedSharding(mesh, spec)).addressable_shards:
        coordinate = coordinates[shard.device.id]
        start = tensor.layout.local_offset(tensor.shape, plan.mesh.shape, coordinate)
        size = tensor.layout.local_shape(tensor.shape, plan.mesh.shape, coordinate)
        expected = value[tuple(slice(a, a + n) for a, n in zip(start, size))]
        np.testing.assert_array_equal(np.asarray(shard.data), expected)
        checked += 1
print(checked)
"""


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed (pip install jax)")
def test_jax_arrays_are_cut_as_the_plan_says(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    plan = planned(*FSDP, pins=(f"{name}=_S(0)S(0)",))
    assert plan.layouts[name] == Layout.parse("_S(0)S(0)")
    plan.save(tmp_path / "plan.json")
    (tmp_path / "specs.py").write_text(jax.export(plan).text)
    path = os.pathsep.join([str(Path(solver_shard.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", _SHARDS, str(tmp_path / "plan.json"), str(tmp_path / "specs.py")]
    job = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert job.returncode == 0, job.stderr[-2000:]
    assert int(job.stdout) == 4 * len(plan.gradients)
