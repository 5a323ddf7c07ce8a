"""Our search beside DTensor's on random calls: equal costs, times, states visited against the size of the full product.

    python experiments/expand.py [CALLS] [--markdown experiments/expand.md]

2,000 calls by default: a quarter on each of the meshes (4), (2,2), (2,3) and (2,2,2), by turns of matmul, pointwise, reduction, view,
embedding and concat ops, with random layouts (see tests/expand_cases.py). Both searches get the same strategies and DTensor's cost
formulas; times are of one run, one call at a time, from the strategies to the result.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from expand_cases import FAMILIES, MESHES, device_mesh, our_search_input, random_case, their_cost, their_schema, their_search  # noqa: E402

from solver_shard import Mesh  # noqa: E402
from solver_shard.costs.dtensor import DTensorCosts  # noqa: E402
from solver_shard.expander.pricing import DTensorPricing  # noqa: E402
from solver_shard.expander.search import expand_exhaustively, search  # noqa: E402
from solver_shard.rules.table import load_table  # noqa: E402


def study(text: str, calls: int) -> list[str]:
    """Two rows of the table: all calls, and those whose inputs do not fit as they are."""
    mesh = Mesh.parse(text)
    their_mesh, pricing = device_mesh(mesh), DTensorPricing(DTensorCosts(mesh_shape=mesh.shape, devices_per_host=1), mesh)
    rng, table = random.Random(2026), load_table()
    found = []
    for k in range(calls):
        case = random_case(rng, mesh, table, FAMILIES[k % len(FAMILIES)])
        schema, info, metas = their_schema(case, their_mesh)
        start = time.perf_counter()
        theirs = their_search(schema, info, metas, their_mesh)
        middle = time.perf_counter()
        prepared = our_search_input(case)
        ours = search(prepared, pricing)
        end = time.perf_counter()
        full = expand_exhaustively(prepared, pricing)[0]
        cost = math.inf if ours is None else ours.cost
        equal = math.isclose(cost, math.inf if theirs is None else their_cost(theirs), rel_tol=1e-9)
        below = cost <= full.cost * (1 + 1e-9)
        less = cost < full.cost * (1 - 1e-9)
        found.append((ours, middle - start, end - middle, equal, below, less))
    rows = []
    for name, part in (("all", found), ("searched", [f for f in found if f[0] is None or f[0].how == "search"])):
        ours_us, theirs_us = (statistics.median(f[i] for f in part) * 1e6 for i in (2, 1))
        visited = [f[0].visited for f in part if f[0] is not None]
        products = [f[0].product for f in part if f[0] is not None]
        rows.append(
            f"| {text} | {name} | {len(part)} | {sum(f[3] for f in part)} | {sum(f[4] for f in part)} | {sum(f[5] for f in part)} | "
            f"{theirs_us:.0f} | {ours_us:.0f} | {statistics.median(f[1] / f[2] for f in part):.1f} | "
            f"{sum(f[1] for f in part) / sum(f[2] for f in part):.1f} | {statistics.mean(visited):.1f} | {max(visited)} | "
            f"{statistics.mean(products):.0f} |"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("calls", nargs="?", type=int, default=2000)
    parser.add_argument("--markdown", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    lines = [
        "| mesh | calls | number | cost equals DTensor's | at most the full product's | less | DTensor µs | ours µs | median ratio | "
        "ratio of sums | states visited, mean | most | product, mean |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    for text in MESHES:
        rows = study(text, given.calls // len(MESHES))
        print("\n".join(rows), flush=True)
        lines += rows
    dist.destroy_process_group()
    if given.markdown is not None:
        head = f"# Our search beside DTensor's\n\nBy `python experiments/expand.py {given.calls}`; times are medians.\n\n"
        given.markdown.write_text(head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
