"""What a model writes into, buffers and inputs, lies where it lay; writes into a part of it move that part and hold no more."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from lowered import Lowered, agrees, lowered, random_assignment
from measured import measure
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from solver_shard.errors import InputError, InternalError
from solver_shard.layout import Layout, S
from solver_shard.mesh import Mesh
from solver_shard.plan.plan import Plan
from solver_shard.program import in_place
from solver_shard.runtime.apply import apply, recorded_collectives
from solver_shard.runtime.collectives import Recorded
from solver_shard.solve.engine import solve
from solver_shard.tracing.torch import trace
from solver_shard.verification import check, processes
from solver_shard.verification.processes import Counted
from solver_shard.verification.subject import Subject, subject_of

pytestmark = pytest.mark.usefixtures("one_thread")

WRITES = ("index_copy", "index_put", "slice", "select", "scatter", "add", "twice", "moved", "old", "whole")
ELSEWHERE = {"moved", "old", "whole"}
"""Those that need the old value beside the new one, or write all of it."""


class Cache(nn.Module):
    """Keys of a step are written into a cache, a buffer or an input, which the step's query reads."""

    def __init__(self, how: str, *, given: bool, heads: int = 4, length: int = 6, dim: int = 8) -> None:
        super().__init__()
        self.how, self.heads, self.dim = how, heads, dim
        self.key, self.query = nn.Linear(heads * dim, heads * dim, bias=False), nn.Linear(heads * dim, heads * dim)
        if not given:
            self.register_buffer("cache", torch.linspace(-1, 1, 3 * heads * length * dim).reshape(3, heads, length, dim))

    def forward(self, x: torch.Tensor, at: torch.Tensor, cache: torch.Tensor | None = None) -> torch.Tensor:
        cache = self.cache if cache is None else cache
        key, query = (m(x).reshape(len(x), self.heads, 1, self.dim) for m in (self.key, self.query))
        before = cache.sum() if self.how == "old" else 0
        match self.how:
            case "index_copy":
                cache.index_copy_(2, at, key)
            case "index_put" | "old":
                cache[:, :, at] = key
            case "slice":
                cache[:, :, 2:3] = key
            case "select":
                cache[:, :, 4] = key[:, :, 0]
            case "scatter":
                cache.scatter_(2, at.reshape(1, 1, 1, 1).expand_as(key), key)
            case "add":
                cache.index_add_(2, at, key)
            case "twice":
                cache[:, :, 1:2] = key
                cache[:, :, at] = query
            case "moved":
                cache[:, :, :-1] = cache[:, :, 1:].clone()
            case "whole":
                cache.mul_(0.5).add_(key)
        return (query * cache).sum((2, 3)) + before


def subject(how: str, *, given: bool) -> Subject:
    torch.manual_seed(0)
    inputs = {"x": torch.randn(3, 32), "at": torch.tensor([3])}
    if given:
        inputs["cache"] = torch.randn(3, 4, 6, 8)
    return subject_of(Cache(how, given=given).eval(), inputs, name="cache", forward_only=True)


def planned(case: Lowered, seed: int) -> Plan:
    plan = agrees(case, random_assignment(case.graph, seed))
    return dataclasses.replace(plan, options=dataclasses.replace(plan.options, forward_only=True))


@pytest.mark.parametrize("given", [False, True], ids=["buffer", "input"])
@pytest.mark.parametrize("how", WRITES)
def test_any_plan_writes_where_the_old_value_lies_and_computes_the_same(how: str, given: bool) -> None:
    found = subject(how, given=given)
    assert len(in_place(found.program)) == (0 if how in ELSEWHERE else 2 if how == "twice" else 1)
    case = lowered(found.program, "2,2")
    for seed in range(4):
        plan = planned(case, seed)
        verdict = check(plan, found)
        assert verdict.holds, str(verdict)
        assert {d.name for d in verdict.differences} == {"output", "updated(cache)"}
        if how not in ELSEWHERE:
            said, measured = case.evaluate(plan), measure(plan, found.program, found.values[0])
            assert all(there <= most for there, most in zip(measured.totals, said.totals, strict=True))


def test_a_write_into_a_part_of_a_cache_costs_that_part_and_no_bytes() -> None:
    """The cache is much larger than all else: 3 x 4 x 4096 x 8 numbers of f32, of which 96 are written."""
    program = trace(
        Cache("index_put", given=True, length=4096).eval(),
        {"x": torch.zeros(3, 32), "at": torch.tensor([3]), "cache": torch.zeros(3, 4, 4096, 8)},
        name="cache",
        forward_only=True,
    )
    case = lowered(program, "2")
    (write,) = in_place(program)
    for seed in range(8):
        plan = planned(case, seed)
        name, held = program.ops[write].name, plan.memory.peak
        copies = [r for r in plan.reshards if r.copy and program.tensors[r.tensor].name in ("cache", "updated(cache)")]
        assert name == "aten.index_put.default"
        assert plan.ops[write].nanoseconds <= 3
        if not copies:
            assert held < 2 * 3 * 4 * 4096 * 8 * 4


def test_a_cut_input_that_is_written_into_holds_in_real_processes() -> None:
    """The plan with the most collectives of some, with the cache cut: what the runtime recorded is what ran."""
    found = subject("index_put", given=True)
    case = lowered(found.program, "2")
    plans = [planned(case, seed) for seed in range(12)]
    (cache,) = [t for t, tensor in enumerate(found.program.tensors) if tensor.name == "cache"]
    plan = max((p for p in plans if p.tensors[cache].layout == Layout([S(1)])), key=lambda p: len(p.collectives()))
    assert plan.collectives()
    verdict = check(plan, found, processes=True, timeout=240)
    assert verdict.holds, str(verdict)
    assert {d.name for d in verdict.differences} == {"output", "updated(cache)"}


@pytest.fixture
def pair() -> Iterator[DeviceMesh]:
    """The first of two processes, whose collectives bring nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


def test_an_input_is_written_into_where_the_caller_holds_it(pair: DeviceMesh) -> None:
    found = subject("index_put", given=True)
    (cache,) = [t for t, tensor in enumerate(found.program.tensors) if tensor.name == "cache"]
    case = lowered(found.program, "tp=2", pins={cache: lambda layout: layout == Layout([S(1)])})
    best = solve(case.graph, time_limit=20).assignment
    assert best is not None
    plan = dataclasses.replace(agrees(case, best), options=dataclasses.replace(case.options, forward_only=True))
    assert found.model is not None
    assert not plan.collectives()
    sharded = apply(found.model, plan, pair)
    given = found.given(0)
    with pytest.raises(InputError, match=r"writes into its input 'cache' in place, and the plan keeps it as .* S\(1\); give a DTensor"):
        sharded(**given)
    with pytest.raises(InputError, match="give a DTensor of that layout"):
        sharded(**given | {"cache": DTensor.from_local(given["cache"], pair, [Replicate()], run_check=False)})
    local = given["cache"][:, :2].clone()
    ours = DTensor.from_local(local, pair, [Shard(1)], run_check=False, shape=given["cache"].shape, stride=given["cache"].stride())
    sharded(**given | {"cache": ours})
    with torch.no_grad():
        found.model(**given)
    torch.testing.assert_close(local, given["cache"][:, :2])
    assert recorded_collectives(sharded) == []


def test_a_collective_that_nobody_recorded_is_seen(pair: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """DTensor brings the cut value to the whole buffer by a gather of its own."""
    monkeypatch.setattr(processes, "issued", lambda: 0)  # these groups do not number what they are asked for
    mesh = Mesh.parse("tp=2")
    buffer = DTensor.from_local(torch.zeros(4, 3), pair, [Replicate()], run_check=False)
    cut = DTensor.from_local(torch.ones(2, 3), pair, [Shard(0)], run_check=False)
    with Counted(mesh) as counted:
        buffer.copy_(cut)
    assert counted.found == {("all_gather", ("tp",)): 1}
    assert counted.nbytes == {("all_gather", ("tp",)): 48}
    with pytest.raises(InternalError, match="recorded the collectives none, and what ran is 1 all_gather on tp of 48 B"):
        counted.agree([])
    with pytest.raises(InternalError, match=r"recorded the collectives 1 all_gather on tp of 24 B, and what ran"):
        counted.agree([Recorded(kind="all_gather", axes=("tp",), nbytes=24, count=1)])
    with pytest.raises(InternalError, match="1 collectives were counted, and the process groups were asked for 0"):
        counted.agree([Recorded(kind="all_gather", axes=("tp",), nbytes=48, count=1)])
