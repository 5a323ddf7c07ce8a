"""Plans with names that try to steer what shows them, through every command that prints or writes a plan.

    python experiments/hostile_names.py --plans 1000

Counts the files that still are plans, the outputs that were read, and those that let something through: a character that steers a terminal,
or a line that a name has made. Needs the repository's tests folder. Results are recorded in hostile_names.md.
"""

# ruff: noqa: E402 - the folder of the tests has to be on the path before their helpers are imported

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parent.parent / "tests")

from hostile_plans import COMMANDS, TRACED, hostile_plan, let_through, loads, said

from solver_shard import SolverShardError
from solver_shard.plan import io


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--traced", type=int, default=20, help="every so many plans the commands that trace a model run, too")
    arguments = parser.parse_args()
    start, valid, outputs, wrong = time.process_time(), 0, 0, 0
    io.load_plan = once(io.load_plan)
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(arguments.first, arguments.first + arguments.plans):
            text = hostile_plan(seed)
            valid += loads(Path(folder), text)
            for command in (*COMMANDS, *(TRACED if seed % arguments.traced == 0 else ())):
                outputs += 1
                found = let_through(said(Path(folder), text, command))
                wrong += bool(found)
                if found:
                    print(f"seed {seed}, {' '.join(command)}: {found[0]}", flush=True)
            if seed % 50 == 49:
                print(f"to seed {seed}: {valid} plans, {outputs} outputs, {wrong} let something through", file=sys.stderr, flush=True)
    print(f"{arguments.plans} files, {valid} of them plans; {outputs} outputs, {wrong} let something through")
    print(f"{time.process_time() - start:.0f} s of processor time")


def once(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Reading a plan, kept while the file has the same text: all commands read one file, and reading takes most of their time."""
    held: list[Any] = ["", None, None]

    def load(path: Any) -> Any:
        text = Path(path).read_text(encoding="utf-8")
        if held[0] != text:
            held[:] = [text, None, None]
            try:
                held[1] = read(path)
            except SolverShardError as error:
                held[2] = error
        if held[2] is not None:
            raise held[2]
        return held[1]

    return load


if __name__ == "__main__":
    main()
