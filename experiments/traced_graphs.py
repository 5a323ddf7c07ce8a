"""Choice graphs of traced models as IOPDDL files, for studies that compare solvers; made once, then read from a folder.

    python experiments/traced_graphs.py FOLDER [CASE ...]     # no case: the names of all

A case is a model, its number of layers, a mesh, tied or free, and a limit: "loose" is that of the device (70 GiB less its reserve), "tight"
lies 30% of the way from the least peak there is to the peak of the fastest plan, so that memory decides. The graph is the first
round's: intermediates of transitions, which later rounds may add, are not in it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.resources
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from solver_shard.graph.choice_graph import ChoiceGraph

TINY_GPT2 = {"n_layer": 2, "n_embd": 256, "n_head": 8, "vocab_size": 1024, "n_positions": 256, "n_ctx": 256}
TIGHT = 0.3


@dataclass(frozen=True, kw_only=True)
class Case:
    """A graph to be made.

    Attributes:
        model: a preset, or "gpt2-tiny".
        layers: of the model, None for its own.
        mesh, batch, seq, dtype: as the command line takes them.
        tied: whether repeated layers share decisions.
        tight: whether the limit is put where it binds.
    """

    model: str
    mesh: str
    batch: int
    seq: int
    dtype: str
    layers: int | None = None
    tied: bool = False
    tight: bool = False

    @property
    def name(self) -> str:
        layers = "" if self.layers is None else f"-{self.layers}l"
        mesh = self.mesh.replace("=", "").replace(",", "-")
        return f"{self.model}{layers}-{mesh}-{'tied' if self.tied else 'free'}-{'tight' if self.tight else 'loose'}"


def cases() -> dict[str, Case]:
    """All cases by name, small ones first."""
    found = [
        Case(model="gpt2-tiny", mesh=mesh, batch=64, seq=256, dtype="f32", tight=tight)
        for mesh in ("8", "dp=4,tp=4")
        for tight in (False, True)
    ]
    found += [Case(model="gpt2", mesh="8", batch=16, seq=1024, dtype="f32", tied=tied) for tied in (True, False)]
    found += [Case(model="gpt2", mesh="8", batch=16, seq=1024, dtype="f32", tied=tied, tight=True) for tied in (True, False)]
    for layers in (1, 2, 4):
        for tied in (True, False):
            if layers > 1 or not tied:
                llama = Case(model="llama3-8b", layers=layers, mesh="dp=32,tp=8", batch=64, seq=8192, dtype="bf16", tied=tied)
                found += [llama, dataclasses.replace(llama, tight=True)]
    for layers in (10, 16, 32):  # free graphs of 5,000 nodes and more
        llama = Case(model="llama3-8b", layers=layers, mesh="dp=32,tp=8", batch=64, seq=8192, dtype="bf16")
        found += [llama, dataclasses.replace(llama, tight=True)]
    return {case.name: case for case in found}


@contextmanager
def config(model: str, layers: int | None) -> Iterator[str]:
    """A preset, or the file of a config that is one with another number of layers."""
    if layers is None and model != "gpt2-tiny":
        yield model
        return
    preset = "gpt2" if model.startswith("gpt2") else model
    raw = json.loads(importlib.resources.files("solver_shard.tracing").joinpath("presets", f"{preset}.json").read_text())
    if model == "gpt2-tiny":
        raw |= TINY_GPT2
    if layers is not None:
        raw["n_layer" if "n_layer" in raw else "num_hidden_layers"] = layers
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{model}{'' if layers is None else f'-{layers}'}.json"
        path.write_text(json.dumps(raw))
        yield str(path)


@functools.cache
def graphs(model: str, layers: int | None, mesh: str, batch: int, seq: int, dtype: str) -> tuple[ChoiceGraph, ChoiceGraph]:
    """The free and the tied graph of a traced model, with the limit of an H100 of which 70 GiB may be used."""
    from solver_shard import Mesh, Rulebook, load_cluster
    from solver_shard.costs.memory import optimizer_state
    from solver_shard.costs.model import CostModel
    from solver_shard.graph.lowering import lower
    from solver_shard.graph.sub_axes import split_where_needed
    from solver_shard.graph.symmetry import node_classes
    from solver_shard.graph.transient_memory import Transients
    from solver_shard.tracing.load import program_of

    with config(model, layers) as source:
        program, _ = program_of(source, batch=batch, seq=seq, dtype=dtype)
    cluster, rulebook = load_cluster("h100"), Rulebook()
    costs = CostModel(split_where_needed(program, rulebook, Mesh.parse(mesh)), cluster)
    limit = 70 * 2**30 - cluster.device.reserve
    lowering = lower(program, rulebook, costs, optimizer_state=optimizer_state("adamw"), limit=limit)
    return lowering.graph, Transients(lowering, costs, node_classes(lowering)).graph


def tightened(graph: ChoiceGraph) -> ChoiceGraph:
    """The graph with a limit TIGHT of the way from the least peak to that of the fastest assignment."""
    from solver_shard.solve.engine import solve

    free = dataclasses.replace(graph, limit=None)
    low = solve(free, objective="memory", gap=0.01, time_limit=120).peak
    high = solve(free, gap=1e-3, time_limit=120).peak
    if low is None or high is None:
        raise SystemExit("neither the least nor the largest peak was found in 120 s")
    return dataclasses.replace(graph, limit=int(low + TIGHT * (high - low)))


def made(case: Case, folder: Path) -> Path:
    """The file of a case, traced and written where it is not there yet."""
    from solver_shard.graph.iopddl import write

    path = folder / f"{case.name}.json.gz"
    if not path.exists():
        started = time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        free, tied = graphs(case.model, case.layers, case.mesh, case.batch, case.seq, case.dtype)
        graph = tied if case.tied else free
        part = folder / f"part-{case.name}.json.gz"
        write(tightened(graph) if case.tight else graph, part)
        part.rename(path)
        print(f"{case.name}: {graph.size} nodes, {len(graph.edges)} edges, made in {time.monotonic() - started:.0f} s", flush=True)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    given = parser.parse_args()
    known = cases()
    if not given.cases:
        print("\n".join(known))
    for name in given.cases:
        if name not in known:
            parser.error(f"no case {name}; cases: {', '.join(known)}")
        made(known[name], given.folder)


if __name__ == "__main__":
    main()
