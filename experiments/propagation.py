"""Propagation beside the reference implementation: random modules, and time against the number of ops.

    python experiments/propagation.py random --modules 2000
    python experiments/propagation.py random --modules 1000 --groups
    python experiments/propagation.py time

Needs jaxlib (``pip install 'solver-shard[jax]'``) and the repository's tests folder. Results are recorded in propagation.md.
"""

# ruff: noqa: E402 - the folder of the tests has to be on the path before their helpers are imported

from __future__ import annotations

import argparse
import itertools
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path[0] = str(Path(__file__).parent.parent / "tests")  # instead of this folder, whose name for this file is a package there

from shardy.all_ops import all_ops_module
from shardy.compare import Outcome, compare, draw
from shardy.layers import layers_module
from shardy.random_modules import random_module
from shardy_oracle import Oracle

from solver_shard.shardy.passes import propagate
from solver_shard.shardy.stablehlo import StablehloModule
from solver_shard.shardy.stablehlo.rules import StablehloRules


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    modules = verbs.add_parser("random", help="propagate random modules on both sides and count differences")
    modules.add_argument("--modules", type=int, default=2000)
    modules.add_argument("--variants", type=int, default=4, help="passes with options per module")
    modules.add_argument("--first", type=int, default=0, help="the first seed")
    modules.add_argument("--groups", action="store_true", help="only modules that put a manual computation's result into a sharding group")
    timing = verbs.add_parser("time", help="time a transformer of 8 to 128 layers")
    timing.add_argument("--layers", type=int, nargs="+", default=[8, 16, 32, 64, 128])
    arguments = parser.parse_args()
    if arguments.verb == "random":
        drawn = draws(arguments.first, arguments.groups)
        run_random(itertools.islice(drawn, arguments.modules), arguments.modules, arguments.variants)
    else:
        run_time(arguments.layers)


def draws(first: int, groups: bool) -> Iterator[tuple[int, str]]:
    """Random modules with their seeds; ``groups``: only those in which a group holds what a manual computation gives."""
    for seed in itertools.count(first):
        text = all_ops_module(seed) if seed % 2 else random_module(seed)
        members = set(re.findall(r"sdy\.sharding_group (%\w+)", text))
        if not groups or members.intersection(re.findall(r"(%\w+) = sdy\.manual_computation", text)):
            yield seed, text


def run_random(drawn: Iterator[tuple[int, str]], modules: int, variants: int) -> None:
    """Count outcomes; print every difference with the seed that shows it again."""
    oracle, count, lines, seed = Oracle(), Counter[tuple[str, str]](), 0, 0
    for number, (seed, text) in enumerate(drawn):
        if number % 100 == 0:
            print(f"{number} modules, to seed {seed}: {dict(count)}", file=sys.stderr, flush=True)
        rng = random.Random(seed)
        if rng.random() < 0.9:  # without edges nothing flows through control flow
            edged = oracle.run(text, "sdy-add-data-flow-edges")
            if edged.text is None:
                count["module", "refused" if edged.error else "aborted"] += 1
                continue
            text = edged.text
        lines += text.count("\n")
        for outcome in compare(oracle, text, draw(rng, variants)):
            count[outcome.variant.name, outcome.kind] += 1
            if outcome.kind == "different":
                show(seed, outcome)
    oracle.close()
    print(f"{modules} modules to seed {seed}, of {lines / modules:.0f} lines on average, {variants} passes with options each")
    for (name, kind), times in sorted(count.items()):
        print(f"  {name:14} {kind:10} {times:6}")


def show(seed: int, outcome: Outcome) -> None:
    print(f"seed {seed}, {outcome.variant.reference}\n{outcome.detail}", flush=True)


def run_time(layers: list[int]) -> None:
    """Time user-priority propagation on both sides; the reference's includes reading and printing, as ours is given with them."""
    oracle = Oracle()
    oracle.run(layers_module(1)[0], "sdy-user-priority-propagate")
    print("layers    ops  read s  propagate s  print s  in all s  per op us  reference s  same text")
    for count in layers:
        text, ops = layers_module(count)
        start = time.perf_counter()
        module = StablehloModule.parse(text)
        read = time.perf_counter()
        made = propagate(module.graph, "user-priority", StablehloRules()).graph
        done = time.perf_counter()
        printed = module.print(made)
        end = time.perf_counter()
        theirs = oracle.run(text, "sdy-user-priority-propagate")
        reference = time.perf_counter() - end
        print(
            f"{count:6} {ops:6} {read - start:7.2f} {done - read:12.2f} {end - done:8.2f} {end - start:9.2f} "
            f"{(done - read) / ops * 1e6:10.0f} {reference:12.2f}  {'yes' if printed == theirs.text else 'no'}"
        )
    oracle.close()


if __name__ == "__main__":
    main()
