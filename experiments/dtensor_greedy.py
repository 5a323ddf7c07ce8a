"""The walk beside DTensor itself: collectives of small blocks from random pins, forward and backward.

    python experiments/dtensor_greedy.py [SETS] [--markdown experiments/dtensor_greedy.md]

Ten pin sets by default for each model and mesh: every parameter and input cut or replicated at random, by the same seed as the tests
use. DTensor runs eagerly on rank 0 of a fake process group; its functional collectives are counted by kind, axis and bytes, and once
more by its own CommDebugMode, which knows the kinds alone. Where it raises, the walk must report an op as unsupported, and where it
does not, none.
"""

from __future__ import annotations

import argparse
import random
import sys
import warnings
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from dtensor_models import MODELS, inputs_of, random_pins, really, seen_on_cpu  # noqa: E402

from solver_shard import Mesh  # noqa: E402
from solver_shard.baselines.dtensor_greedy import walk  # noqa: E402
from solver_shard.tracing.torch import trace_raw  # noqa: E402


def study(name: str, text: str, sets: int) -> str:
    """One row: how many pin sets ran with equal collectives, how many raised where the walk says so, and what is neither."""
    mesh, model = Mesh.parse(text), MODELS[name]()
    raw = trace_raw(model, inputs_of(model), name=name, loss_fn=lambda output: (output**2).mean())
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=mesh.size)
    on, rng = DeviceMesh("cpu", torch.arange(mesh.size).reshape(mesh.shape)), random.Random(1)
    equal = raised = wrong = collectives = counted = 0
    for _ in range(sets):
        pins = random_pins(raw, mesh, rng)
        found = walk(raw, mesh, pins, devices_per_host=1)
        try:
            model = MODELS[name]()
            issued, debug = really(model, inputs_of(model), mesh, pins, on)
        except Exception:
            raised += bool(found.unsupported)
            wrong += not found.unsupported
            continue
        same = Counter(issued) == seen_on_cpu(found.collectives, mesh) and not found.unsupported
        equal, wrong, collectives = equal + same, wrong + (not same), collectives + len(issued)
        counted += Counter(c.kind for c in seen_on_cpu(found.collectives, mesh).elements()) == debug
    dist.destroy_process_group()
    return f"| {name} | {text} | {sets} | {equal} | {collectives} | {counted} | {raised} | {wrong} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="?", type=int, default=10)
    parser.add_argument("--markdown", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    lines = [
        "| model | mesh | pin sets | run, collectives equal | collectives | equal by CommDebugMode | raise, as the walk says | neither |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for text in ("4", "2,2"):
        for name in MODELS:
            lines.append(study(name, text, given.sets))
            print(lines[-1], flush=True)
    if given.markdown is not None:
        head = f"# The walk beside DTensor\n\nBy `python experiments/dtensor_greedy.py {given.sets}`.\n\n"
        given.markdown.write_text(head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
