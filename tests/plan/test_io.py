"""Plans as files: nothing is lost, the schema describes them, and whatever is wrong is said with its place."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from plan_examples import example, stepped

from solver_shard.costs.cluster import ASSUMED_KAPPA
from solver_shard.errors import InputError
from solver_shard.layout import Layout
from solver_shard.plan.io import MAX_PLAN_BYTES, load_plan, plan_from_json, plan_schema, plan_to_json, save_plan

SCHEMA = json.loads(Path(str(Path(__file__).parents[2] / "solver_shard/plan/schema.json")).read_text())


def test_a_saved_plan_comes_back_equal(tmp_path: Path) -> None:
    for plan in (example(), stepped(example())):
        save_plan(plan, tmp_path / "plan.json")
        assert load_plan(tmp_path / "plan.json") == plan
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_saving_twice_writes_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        example().save(str(tmp_path / name))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_saved_plans_are_valid_under_the_published_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    for plan in (example(), stepped(example())):
        jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(plan_to_json(plan)))


def test_another_order_is_written_and_read_back() -> None:
    plan = example()
    up = dataclasses.replace(plan.tensors[1], layout=Layout.parse("_S(0)S(0)"), state=Layout.parse("_S(1)S(1)"))
    gather = dataclasses.replace(
        plan.reshards[0], source=up.layout, steps=(dataclasses.replace(plan.reshards[0].steps[0], before=up.layout),)
    )
    changed = dataclasses.replace(plan, tensors=(plan.tensors[0], up, *plan.tensors[2:]), reshards=(gather, *plan.reshards[1:]))
    text = plan_to_json(changed)
    assert '"layout":"_S(0)S(0)"' in text
    assert plan_from_json(text) == changed
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(text))


def test_the_published_schema_is_the_one_of_the_dataclasses() -> None:
    assert plan_schema() == SCHEMA, "run python -m solver_shard.plan.io"


def test_files_written_before_plans_kept_their_history_load_without_one() -> None:
    data = json.loads(plan_to_json(example()))
    del data["certificate"]["history"]
    jsonschema.Draft202012Validator(SCHEMA).validate(data)
    certificate = dataclasses.replace(example().certificate, history=())
    assert plan_from_json(json.dumps(data)) == dataclasses.replace(example(), certificate=certificate)


def test_a_deep_plan_stays_small() -> None:
    """5,000 ops; the promise is below 10 MB."""
    assert len(plan_to_json(example(layers=2500))) < 10_000_000


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    broken = dataclasses.replace(example(), name=object())  # type: ignore[arg-type]
    with pytest.raises(Exception, match="cannot hold"):
        save_plan(broken, path)
    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_saving_where_there_is_no_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot write .*give a file in a folder that exists"):
        save_plan(example(), tmp_path / "none" / "plan.json")
    with pytest.raises(InputError, match=r"cannot write .*not a regular file"):
        save_plan(example(), tmp_path)


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b", "."])
def test_what_cannot_be_a_plan_file_is_an_input_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="plan"):
        load_plan(tmp_path / name)


def _set(path: str, value: Any) -> Callable[[Any], None]:
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]

    def change(data: Any) -> None:
        for part in parents:
            data = data[part]
        data[last] = value

    return change


def _drop(path: str) -> Callable[[Any], None]:
    *parents, last = path.split(".")

    def change(data: Any) -> None:
        for part in parents:
            data = data[int(part) if part.isdigit() else part]
        del data[last]

    return change


DATA = json.loads(plan_to_json(stepped(example())))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop("schema_version"), "not a plan: it has no schema_version"),
        (_set("schema_version", 2), "plan schema version 2 is not known; this solver-shard reads version 1"),
        (_set("schema_version", "1"), "plan schema version '1' is not known"),
        (_set("schema_version", "9" * 10_000), "plan schema version '9{39} is not known"),
        (_drop("ops"), "ops is missing"),
        (_drop("tensors.0.dtype"), r"tensors\[0\].dtype is missing"),
        (_set("extra", 1), "extra is not known"),
        (_set("cluster.kappa", 2), "cluster: kappa = 2 is not legal; legal: a number from 0 to 1"),
        (_set("cluster.levels.0.bandwidth", 0), r"cluster: levels\[0\].bandwidth = 0 is not legal; legal: a number from 10 to 1e\+18"),
        (_set("cluster.levels.0.topology", "ring"), r"cluster: levels\[0\].topology = 'ring' is not legal; legal: 'switch' or 'torus'"),
        (_set("cluster.levels.1.size", 4), r"cluster: levels of sizes \[8, 4\] are not legal; legal: 1 to 8, each a multiple"),
        (
            _set("ops.0.collectives", [{"kind": "all_gather", "axes": ["pp"], "nbytes": 1, "nanoseconds": 1}]),
            "collective on pp, mesh has dp, tp",
        ),
        (_set("tensors.1.layout", "S(0)X"), r"tensors\[1\].layout: unknown placement in layout 'S\(0\)X'"),
        (_set("tensors.1.layout", "S(0)P(mean)"), "unknown placement"),
        (_set("tensors.1.layout", "S(99999999999999999999)"), "unknown placement"),
        (_set("tensors.1.layout", "_R"), "unknown placement"),
        (_set("tensors.1.layout", "_S(0)R"), r"tensors\[1\].layout: layout '_S\(0\)R': _S\(0\) says that axes to the right"),
        (_set("tensors.1.layout", "_S(2)S(2)"), "cuts a dim that"),
        (_set("tensors.1.state", "_S(2)S(2)"), r"state _S\(2\)S\(2\) does not fit"),
        (_set("tensors.1.layout", 3), "expected a layout as text"),
        (_set("tensors.1.layout", "R"), r"tensors\[1\] .*has 1 placements, mesh dp=4,tp=2 has 2 axes"),
        (_set("tensors.1.layout", "S(2)R"), "cuts a dim that"),
        (_set("tensors.1.shape", ["x"]), r"tensors\[1\].shape\[0\]: expected a whole number, got 'x'"),
        (_set("tensors.1.shape", [-1, 32]), "negative"),
        (_set("tensors.1.dtype", "f31"), "unknown dtype 'f31'"),
        (_set("tensors.1.name", "x"), "two have one name"),
        (_set("tensors.1.role", "thing"), "expected 'parameter' or 'buffer'"),
        (_set("tensors", {}), "tensors: expected a list"),
        (_set("ops.0.operands", [0, 999]), r"ops\[0\] .*refers to a tensor that is not there"),
        (_set("ops.0.operands", [4, 1]), r"ops\[0\] .*: reads a tensor that no op before it makes"),
        (_set("ops.1.results", [2]), r"ops\[1\] .*: makes a tensor that is there already"),
        (_set("ops.0.operand_layouts", ["RR"]), "one layout per operand"),
        (_set("ops.0.nanoseconds", True), "expected a whole number, got True"),
        (_set("ops.0.nanoseconds", 10**30), "expected a whole number"),
        (_set("reshards.0.readers", [[0, 9]]), r"reshards\[0\]: refers to an operand that is not there"),
        (_set("reshards.0.readers", [[0]]), "expected a list of 2"),
        (_set("reshards.0.steps.0.axes", ["pp"]), "step on pp, mesh has dp, tp"),
        (_set("tensors.1.state", "RRR"), r"tensors\[1\] \(layers.0.up.weight\): state RRR does not fit \[128, 32\] on mesh dp=4,tp=2"),
        (_set("tensors.1.state", "S(2)R"), r"state S\(2\)R does not fit"),
        (_set("holds.0.tensor", 99), r"holds\[0\]: refers to a tensor that is not there"),
        (_set("holds.0.reshard", 99), r"holds\[0\]: refers to a reshard that is not there"),
        (_set("holds.0.layout", "R"), r"holds\[0\]: one placement per mesh axis"),
        (_drop("holds"), "holds is missing"),
        (_set("reshards.0.purpose", "step"), "expected 'forward' or 'backward'"),
        (_set("outputs", [-1]), "outputs or gradients"),
        (_set("gradients", {"no": 1}), "a parameter is not among the tensors"),
        (_set("memory.series", {"inputs": [1]}), "memory.series.inputs: 1 values"),
        (_set("memory.limit", 0), "memory.limit"),
        (_set("options.reserve", 24_000), "options.reserve: expected at least 0 and less than memory_limit"),
        (_set("options.reserve", -1), "options.reserve"),
        (_set("mesh.axes.0.size", 0), "mesh.*size 0"),
        (_set("mesh.axes", []), "a mesh needs at least one axis"),
        (_set("options.optimizer", "lion"), "options: unknown optimizer 'lion'"),
        (_set("options.state_bytes", -1), "options: -1 bytes of optimizer state"),
        (_set("options.microbatches", 0), "options.microbatches: expected at least 1"),
        (_set("options.reduce_dtype", "f64"), "options: gradients cannot be reduced in 'f64'"),
        (_set("clip", {"kind": "all_reduce", "axes": ["pp"], "nbytes": 4, "nanoseconds": 1}), "clip: on pp, mesh has dp, tp"),
        (_drop("options.master_weights"), "options.master_weights is missing"),
        (_set("options.overlap", "half"), "options.overlap: expected a number"),
        (_set("certificate.gap", None), "certificate.gap: expected a number"),
        (_set("certificate.history.0.bound", "low"), r"certificate.history\[0\].bound: expected a whole number"),
        (_drop("certificate.stages"), "certificate.stages is missing"),
        (_set("certificate.proof", 1), "certificate.proof is not known"),
        (_set("cluster.device", None), "cluster.device: expected an object"),
        (_set("mesh.axes.0.name", "d" * 65), "a mesh axis name of 65 characters"),
        (_set("tensors.1.name", "n" * 10**6), "a name has 1,000,000 characters, 'n{60}'"),
        (_set("ops.1.module", "a." * 501), "a name has 1,002 characters"),
        (_set("reshards.1.family", "f" * 1001), "a name has 1,001 characters"),
        (_set("options.pins", ["w=S(0),R"] * 100_001), "options.pins: 100,001 rules were given; at most 100,000"),
        (_set("options.pins", ["w" * 1001]), "options.pins: a pattern has 1,001 characters"),
    ],
)
def test_what_does_not_fit_is_said_with_its_place(change: Callable[[Any], None], message: str) -> None:
    data = copy.deepcopy(DATA)
    change(data)
    with pytest.raises(InputError, match=message):
        plan_from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "[]", "null", "3", '"plan"', "{", "[" * 100_000, '{"schema_version": NaN}', '{"schema_version": 1}'])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="plan"):
        plan_from_json(text)


def test_files_that_are_no_plans_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read plan .*No such file.*solve \.\.\. -o none.json"):
        load_plan(tmp_path / "none.json")
    with pytest.raises(InputError, match="cannot read plan"):
        load_plan(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="is not text, so not a plan"):
        load_plan(tmp_path / "binary")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(MAX_PLAN_BYTES + 1)
    with pytest.raises(InputError, match="is this the right file"):
        load_plan(tmp_path / "huge")


def test_a_plan_of_an_earlier_release_has_the_kappa_that_cluster_files_without_one_have() -> None:
    data = json.loads(plan_to_json(example()))
    del data["cluster"]["kappa"]
    assert plan_from_json(json.dumps(data)).cluster.kappa == ASSUMED_KAPPA
