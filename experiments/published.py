"""Published step times of other people's runs beside what the cost model says of the same configuration: a record, not a fit.

    python experiments/published.py [--only mpt-7b] [--rows /tmp/published.jsonl] [--markdown experiments/published.md] [--only-table]

``experiments/published/published.tsv`` has the measurements (facts of the sources that it names: model, sizes, degrees of parallelism,
recomputation, dtype, tokens per second and device). Every row that a mesh, a template and a preset can express is planned with the
parallelism that was published, without a memory limit, and priced; nothing is fitted to a row. A row that cannot be expressed is listed
with the reason. Rows that are in the file of rows already are not planned again; models are traced once for all rows of one trace.

A ratio is predicted over published tokens per second: above 1 the model is too fast. Two prices stand beside each other until the
schedule is part of the plan: all communication exposed (``--overlap 0``) and all gathers and reductions of parameters hidden (1).
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from measure import Rows, machine, table  # noqa: E402

import solver_shard  # noqa: E402
from solver_shard.costs.cluster import Cluster, load_cluster  # noqa: E402
from solver_shard.program import Program  # noqa: E402
from solver_shard.tracing.load import program_of  # noqa: E402

DATA = HERE / "published" / "published.tsv"
OVERLAPS = (0.0, 1.0)
UNLIMITED = "1000TiB"


class NotExpressibleError(Exception):
    """Why a row cannot be planned."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A published run in the words of this package.

    Attributes:
        config: of the model, as Hugging Face writes it.
        batch, seq, microbatches: global batch of a step and its parts.
        checkpoint: whether every layer is computed again in the backward pass.
        mesh, template: the published parallelism.
        cluster: the published machine.
    """

    config: Mapping[str, Any]
    batch: int
    seq: int
    microbatches: int
    checkpoint: bool
    mesh: str
    template: str
    cluster: Cluster

    @property
    def trace(self) -> str:
        """What the traced program depends on."""
        return json.dumps([self.config, self.batch // self.microbatches, self.seq, self.checkpoint], sort_keys=True)


def gpt(width: int, heads: int, layers: int, vocabulary: int) -> dict[str, Any]:
    """A GPT with learned positions and tied embeddings, without dropout."""
    still = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    return {"model_type": "gpt2", "n_embd": width, "n_head": heads, "n_layer": layers, "vocab_size": vocabulary, **still}


def llama(width: int, heads: int, groups: int, layers: int, inner: int, vocabulary: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
    }


MODELS: dict[str, dict[str, Any]] = {
    # llm-foundry's scripts/train/yamls/pretrain/mpt-*.yaml; numbers of parameters equal the published ones to the unit
    "MPT-125m": gpt(768, 12, 12, 50368),
    "MPT-350m": gpt(1024, 16, 24, 50368),
    "MPT-760m": gpt(1536, 12, 24, 50368),
    "MPT-1b": gpt(2048, 16, 24, 50368),
    "MPT-3b": gpt(2560, 20, 32, 50368),
    "MPT-7b": gpt(4096, 32, 32, 50368),
    "MPT-13b": gpt(5120, 40, 40, 50368),
    "MPT-30b": gpt(7168, 56, 48, 50368),
    "MPT-70b": gpt(8192, 64, 80, 50368),
    "Llama2-7B": llama(4096, 32, 32, 32, 11008, 32000),
    "Llama2-13B": llama(5120, 40, 40, 40, 13824, 32000),
    "Llama2-34B": llama(8192, 64, 8, 48, 22016, 32000),
    "Llama2-70B": llama(8192, 64, 8, 80, 28672, 32000),
    "Llama3-8B": llama(4096, 32, 8, 32, 14336, 128256),
    "Llama3.1-8B": llama(4096, 32, 8, 32, 14336, 128256),
    "Llama3-like 7B": llama(4096, 32, 8, 32, 14336, 128256),
    "Llama3-like 13B": llama(5120, 40, 8, 40, 17920, 128256),  # the inner width that gives the published number of parameters
    "Llama3-70B": llama(8192, 64, 8, 80, 28672, 128256),
    "Llama3.1-405B": llama(16384, 128, 8, 126, 53248, 128256),
    "Nemotron4-15B": {  # arXiv 2402.16819, table 1
        "model_type": "nemotron",
        "hidden_size": 6144,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "intermediate_size": 24576,
        "vocab_size": 256000,
    },
}

RECOMPUTE = {"none": False, "full": True}
"""Of the table's words, those that a whole checkpoint of every layer can say."""


def cluster_of(kind: str) -> Cluster:
    """The machine of a row; what differs from a preset is named by the row itself or by the device's data sheet."""
    preset = load_cluster("h100" if kind.startswith(("H100", "H200", "h100")) else "a100" if kind.lower().startswith("a100") else "tpu-v5p")
    device, links = preset.device, preset.levels
    if kind.startswith("H200"):
        device = dataclasses.replace(device, memory_bandwidth=4.8e12)  # data sheet of the H200
    elif "2.4TB/s" in kind:
        device = dataclasses.replace(device, memory_bandwidth=2.4e12)
    elif kind == "a100_40gb":
        device = dataclasses.replace(device, memory_bandwidth=1.555e12)  # data sheet of the A100 40GB
    if "per node" in kind and "Gb/s" in kind:
        node = 800e9 if "800" in kind else 400e9  # bits per second of all network cards of a node
        links = (links[0], dataclasses.replace(links[1], bandwidth=node / 8 / (links[0].size or 1)))
    if "(4 per node)" in kind:
        links = (dataclasses.replace(links[0], size=4), *links[1:])
    if kind.startswith(("TPU", "H", "h", "A", "a")):
        return dataclasses.replace(preset, device=device, levels=links)
    raise NotExpressibleError(f"no preset for {kind}")


def setup_of(row: Mapping[str, str]) -> Setup:
    """The run of a row; NotExpressibleError says why there is none."""
    if int(row["pp"]) > 1:
        raise NotExpressibleError("a pipeline")
    if row["model"] not in MODELS:
        raise NotExpressibleError("the source does not state the model's sizes")
    if int(row["ep"] or 1) > 1:
        raise NotExpressibleError("experts")
    if row["recompute"] not in RECOMPUTE:
        raise NotExpressibleError(f"recomputation: {row['recompute'] or 'not stated'}")
    if row["dtype"].endswith("fp8"):
        raise NotExpressibleError("fp8 products with scales")
    if not row["tokens_per_s_per_device"] or not row["global_batch"]:
        raise NotExpressibleError("no throughput or no batch stated")
    dp, tp, cp = (int(row[name] or 1) for name in ("dp", "tp", "cp"))
    parts = int(row["grad_accum"] or 1)
    notes = row["notes"]
    if "SHARD_GRAD_OP" in notes or "ZeRO-2" in notes:
        data = "zero2"
    elif "distributed optimizer" in notes:
        data = "zero1"
    else:
        data = "zero3"
    axes, templates = [f"dp={dp}"], [f"dp={data}"]
    if "HSDP" in notes or ("FSDP8" in notes and dp > 8):
        node = 8
        axes, templates = [f"dp={dp // node}", f"fsdp={node}"], ["dp=ddp", "fsdp=zero3"]
    if cp > 1:
        axes, templates = [*axes, f"cp={cp}"], [*templates, f"cp={data}+context-parallel"]  # states are cut over both
    if tp > 1:
        axes, templates = [*axes, f"tp={tp}"], [*templates, "tp=megatron-sp+vocab-parallel"]
    named = [(axis, name) for axis, name in zip(axes, templates, strict=True) if not axis.endswith("=1")] or [("dp=1", "dp=replicate")]
    seq = int(row["seq"])
    return Setup(
        config={**MODELS[row["model"]], "n_positions": seq, "max_position_embeddings": seq},
        batch=int(row["global_batch"]),
        seq=seq,
        microbatches=parts,
        checkpoint=RECOMPUTE[row["recompute"]],
        mesh=",".join(axis for axis, _ in named),
        template=",".join(name for _, name in named),
        cluster=cluster_of(row["device_type"]),
    )


class Programs:
    """The last traced program: rows of one trace lie side by side."""

    def __init__(self) -> None:
        self.key, self.program = "", None

    def of(self, setup: Setup) -> Program:
        if setup.trace != self.key:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "config.json"
                path.write_text(json.dumps(setup.config))
                part = setup.batch // setup.microbatches
                self.program, _ = program_of(str(path), batch=part, seq=setup.seq, dtype="bf16", checkpoint=setup.checkpoint)
            self.key = setup.trace
        assert self.program is not None
        return self.program


def predict(setup: Setup, program: Program, overlap: float) -> dict[str, Any]:
    """Seconds of a step and what they are made of."""
    plan = solver_shard.optimize(
        program,
        mesh=setup.mesh,
        cluster=setup.cluster,
        template=setup.template,
        microbatches=setup.microbatches,
        memory=UNLIMITED,
        overlap=overlap,
        reduce_dtype=None,
        gap=1e-3,
        time_limit=60,
    )
    return {
        "step_s": plan.costs.total_ns / 1e9,
        "compute_s": plan.costs.compute_ns / 1e9,
        "communication_s": plan.costs.communication_ns / 1e9,
        "peak_gib": plan.memory.peak / 2**30,
        "status": str(plan.certificate.status),
    }


def study(rows: Sequence[Mapping[str, str]], store: Rows) -> None:
    """Predict what is not there yet, rows of one trace together."""
    todo: list[tuple[str, str, Mapping[str, str], Setup]] = []
    for row in rows:
        try:
            setup = setup_of(row)
        except NotExpressibleError as reason:
            if not store.has({"id": row["id"], "overlap": None}):
                store.add({"id": row["id"], "overlap": None, "reason": str(reason)})
            continue
        todo.append((setup.trace, row["id"], row, setup))
    programs = Programs()
    for _, name, row, setup in sorted(todo, key=lambda t: t[:2]):
        for overlap in OVERLAPS:
            if store.has({"id": name, "overlap": overlap}):
                continue
            try:
                result = predict(setup, programs.of(setup), overlap)
            except solver_shard.SolverShardError as error:
                result = {"error": str(error)[:300]}
            else:
                tokens = setup.batch * setup.seq / result["step_s"] / int(row["devices"])
                result["ratio"] = tokens / float(row["tokens_per_s_per_device"])
            store.add({"id": name, "overlap": overlap, "mesh": setup.mesh, "template": setup.template} | result)
            print(store.rows[-1], flush=True)


def ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    return [float(order.index(i)) for i in range(len(values))]


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation; nan for fewer than three."""
    return statistics.correlation(ranks(a), ranks(b)) if len(a) > 2 else math.nan


def markdown(rows: Sequence[Mapping[str, str]], predicted: Sequence[Mapping[str, Any]]) -> str:
    """The record: by system, in all, every row, and what could not be said."""
    by = {row["id"]: row for row in rows}
    ratios = {o: {p["id"]: p["ratio"] for p in predicted if p["overlap"] == o and "ratio" in p} for o in OVERLAPS}
    lines = [
        "# Published step times and what the cost model says of them",
        "",
        f"By `python experiments/published.py`, {machine()}. Ratio: predicted over published tokens per second; above 1 the model is too",
        "fast. Exposed: all communication waits; hidden: gathers and reductions of parameters cost nothing. Nothing is fitted.",
        "",
    ]
    body: list[list[object]] = []
    systems = list(dict.fromkeys((row["source"], row["device_type"]) for row in rows))
    for system in [*systems, None]:
        cells: list[object] = ["all" if system is None else f"{system[0]}, {system[1]}"]
        for overlap in OVERLAPS:
            ids = [i for i in ratios[overlap] if system is None or (by[i]["source"], by[i]["device_type"]) == system]
            if not ids:
                break
            values = sorted(ratios[overlap][i] for i in ids)
            low, high = values[len(values) // 10], values[-1 - len(values) // 10]
            near = sum(abs(v - 1) <= 0.15 for v in values) / len(values)
            real = [float(by[i]["tokens_per_s_per_device"]) for i in ids]
            said = [ratios[overlap][i] * r for i, r in zip(ids, real, strict=True)]
            if overlap == OVERLAPS[0]:
                cells.append(len(ids))
            cells += [f"{statistics.median(values):.2f}", f"{low:.2f} to {high:.2f}", f"{near:.0%}", f"{spearman(said, real):.2f}"]
        if len(cells) > 1:
            body.append(cells)
    head = ["system", "rows"]
    for word in ("exposed", "hidden"):
        head += [f"{word}: median", "10 to 90%", "within 15%", "rank correlation"]
    lines += [*table(head, body), "", "## Every row", ""]
    rows_of = [
        [p["id"], p["mesh"], p["template"], f"{p['ratio']:.2f}", f"{ratios[1.0].get(p['id'], math.nan):.2f}", f"{p['peak_gib']:.1f}"]
        for p in predicted
        if p["overlap"] == 0.0 and "ratio" in p
    ]
    lines += [*table(["run", "mesh", "template", "exposed", "hidden", "GiB"], rows_of), ""]
    reasons: dict[str, list[str]] = {}
    for p in predicted:
        if "reason" in p or "error" in p:
            reasons.setdefault(p.get("reason") or p["error"], []).append(p["id"])
    lines += ["## Not predicted", "", *(f"- {why}: {', '.join(dict.fromkeys(ids))}" for why, ids in sorted(reasons.items()))]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose id has this part")
    parser.add_argument("--rows", type=Path, default=HERE / "published" / "predicted.jsonl")
    parser.add_argument("--markdown", type=Path, default=HERE / "published.md")
    parser.add_argument("--only-table", action="store_true")
    given = parser.parse_args()
    with DATA.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file, delimiter="\t") if given.only in row["id"]]
    store = Rows(given.rows, ("id", "overlap"))
    if not given.only_table:
        study(rows, store)
    ids = {row["id"] for row in rows}
    given.markdown.write_text(markdown(rows, [p for p in store.rows if p["id"] in ids]), encoding="utf-8")
    print(given.markdown.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
