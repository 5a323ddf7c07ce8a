"""Where time and memory go for very large models: CPU seconds by stage, sizes, and the gap.

    python experiments/scale.py [CASE ...] [--time-limit 60] [--markdown experiments/scale.md]

Models are Hugging Face configurations with the published sizes (or fewer layers, where a case says so). One process per case; seconds are
CPU seconds of the process, so that other work on the machine does not count, and the solver's limit is in CPU seconds, too. *Distinct* ops
are those with tables of their own; *tied* choices are what the solver decides, after repeated blocks were folded.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256, "routed_scaling_factor": 2.5, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 8, "topk_group": 4,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "norm_topk_prob": True, "max_position_embeddings": 163840,
}  # fmt: skip
QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
    "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "max_position_embeddings": 40960,
}  # fmt: skip
MAMBA_2_8B = {
    "architectures": ["MambaForCausalLM"], "model_type": "mamba", "vocab_size": 50280, "hidden_size": 2560, "num_hidden_layers": 64,
    "state_size": 16, "intermediate_size": 5120, "time_step_rank": 160,
}  # fmt: skip
RWKV_7B = {
    "architectures": ["RwkvForCausalLM"], "model_type": "rwkv", "vocab_size": 50277, "hidden_size": 4096, "attention_hidden_size": 4096,
    "num_hidden_layers": 32, "context_length": 1024,
}  # fmt: skip

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "deepseek-v3": (DEEPSEEK_V3, {"batch": 1024, "seq": 4096, "mesh": "dp=16,ep=8,tp=8"}),
    "deepseek-v3, checkpointed": (DEEPSEEK_V3, {"batch": 1024, "seq": 4096, "mesh": "dp=16,ep=8,tp=8", "checkpoint": True}),
    "qwen3-30b-a3b": (QWEN3_30B, {"batch": 256, "seq": 4096, "mesh": "dp=32,tp=8"}),
    "mamba-2.8b, 8 layers of 16 steps": (MAMBA_2_8B | {"num_hidden_layers": 8}, {"batch": 256, "seq": 16, "mesh": "dp=32,tp=8"}),
    "rwkv-7b, 3 layers of 16 steps": (RWKV_7B | {"num_hidden_layers": 3}, {"batch": 256, "seq": 16, "mesh": "dp=32,tp=8"}),
}


def measured(name: str, time_limit: float) -> dict[str, Any]:
    """One case in this process."""
    time.perf_counter = time.monotonic = time.process_time  # limits in CPU seconds: before anything takes them as its clock
    from solver_shard import Mesh, load_cluster
    from solver_shard.clock import StageClock
    from solver_shard.graph.build import lower_program
    from solver_shard.graph.symmetry import node_classes
    from solver_shard.graph.transient_memory import Transients
    from solver_shard.options import Options
    from solver_shard.pipeline import solve_lowered
    from solver_shard.tracing.load import traced_of

    seconds: dict[str, float] = {}
    since = time.process_time()

    def done(stage: str) -> None:
        nonlocal since
        now = time.process_time()
        seconds[stage], since = round(now - since, 1), now

    config, job = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        sizes = {"batch": job["batch"], "seq": job["seq"], "checkpoint": job.get("checkpoint", False)}
        program, _, _ = traced_of(str(path), None, dtype="bf16", **sizes)
    done("trace")
    options = Options(memory_limit=80 << 30, reserve=6 << 30, time_limit=time_limit)
    made = lower_program(program, mesh=Mesh.parse(job["mesh"]), cluster=load_cluster("h100"), options=options)
    done("lower")
    tied = Transients(made.lowering, made.costs, node_classes(made.lowering))
    tied_choices = tied.graph.size
    del tied
    done("tie")
    clock = StageClock()
    clock.bound_solver(time_limit)
    found, _ = solve_lowered(made.lowering, made.costs, options, clock, workers=1)
    done("solve")
    first = next((event.seconds for event in found.history if event.objective is not None), None)
    graph = made.lowering.graph
    return {
        "case": name,
        "mesh": str(made.mesh),
        "ops": len(program.ops),
        "distinct_ops": len({id(column) for column in made.lowering.strategies}),
        "choices": graph.size,
        "tied_choices": tied_choices,
        "table_mib": round(sum(table.nbytes for table in graph.tables) / 2**20),
        "cpu_s": seconds,
        "max_rss_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "first_plan_s": None if first is None else round(first, 1),
        "status": found.status.value,
        "objective_ns": found.objective,
        "bound_ns": found.bound,
        "gap": found.gap,
        "peak_bound_gib": round(found.peak_bound / 2**30, 1),
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| case | ops (distinct) | choices, tied | tables | trace | lower | tie | solve | peak RSS | first plan | gap |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        s, none = r["cpu_s"], f"none: at least {r['peak_bound_gib']} GiB of 74 are needed" if r["status"] == "infeasible" else "none yet"
        first = none if r["first_plan_s"] is None else f"{r['first_plan_s']} s"
        cells = [
            f"{r['case']}, {r['mesh']}",
            f"{r['ops']:,} ({r['distinct_ops']})",
            f"{r['choices']:,}, {r['tied_choices']:,}",
            f"{r['table_mib']} MiB",
            *(f"{s[stage]} s" for stage in ("trace", "lower", "tie", "solve")),
            f"{r['max_rss_gib']} GiB",
            first,
            r["status"] if r["gap"] is None else format(r["gap"], ".2%"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--time-limit", type=float, default=300.0, help="CPU seconds of solving")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    parser.add_argument("--inside", action="store_true", help="run the one case in this process")
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}; cases: {', '.join(CASES)}")
    if options.inside:
        print(json.dumps(measured(options.cases[0], options.time_limit)), flush=True)
        return
    rows = []
    for name in options.cases or CASES:
        command = [sys.executable, __file__, name, "--inside", "--time-limit", str(options.time_limit)]
        rows.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]))
        print(json.dumps(rows[-1]), flush=True)
    if options.markdown:
        options.markdown.write_text(markdown(rows))


if __name__ == "__main__":
    main()
