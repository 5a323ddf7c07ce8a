"""Check all rules on numbers, and hold them against DTensor's: what ``solver-shard rules check --dtensor`` finds, as a page.

python experiments/rules.py [OP ...] [--markdown experiments/rules.md]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from solver_shard.rules.check import CheckReport, check_rules
from solver_shard.rules.check.dtensor import StrategyComparison, compare
from solver_shard.rules.table import load_table


def markdown(report: CheckReport, compared: dict[str, StrategyComparison], seconds: float) -> str:
    """The page: totals, what is excluded and why, differences to DTensor, and the table of all ops."""
    ops = report.ops
    blind = sum(any("only" in note for note in op.notes) for op in ops)
    pruned = sum(any("cuts tried" in note for note in op.notes) for op in ops)
    own = {op: c for op, c in compared.items() if c.registered}
    lines = [
        "# The rules, checked on numbers",
        "",
        f"By `python experiments/rules.py` (torch {torch.__version__.partition('+')[0]}, one thread, {seconds:.0f} s for the check).",
        "",
        f"{sum(op.passed for op in ops)} of {len(ops)} rows are sound and complete: {sum(op.strategies for op in ops):,} strategies and "
        f"{sum(op.combinations for op in ops):,} combinations of placements run, on {sum(op.instances for op in ops)} instances, 2 and 3 "
        f"devices, 3 draws. Of {blind} ops with random or uninitialised results only the shapes are checked; {pruned} ops have more cuts "
        "than the budget.",
        "",
        "## Excluded",
        "",
        "| reason | combinations | ops |",
        "|---|---|---|",
    ]
    reasons: dict[str, list[str]] = {}
    for op in ops:
        for _, reason in op.excluded:
            reasons.setdefault(reason, []).append(op.op)
    lines += [f"| {reason} | {len(names)} | {_some(names)} |" for reason, names in reasons.items()]
    lines += [
        "",
        "## Beside DTensor",
        "",
        f"DTensor registers a strategy of its own for {len(own)} of the ops, and accepts {sum(c.accepted for c in own.values()):,} "
        f"combinations on these instances (two devices). True ones that our rules lack: {sum(len(c.only_theirs) for c in own.values())}. "
        f"In our rules only: {sum(len(c.only_ours) for c in own.values())}, of {sum(bool(c.only_ours) for c in own.values())} ops. "
        f"Accepted by DTensor and false on numbers, with arguments that are sizes made local: {sum(len(c.false) for c in own.values())}.",
        "",
    ]
    for title, name in (("False on numbers", "false"), ("True, and in DTensor only", "only_theirs")):
        rows = [
            f"- `{op}`: {'; '.join(f'`{line}`' for line in getattr(c, name)[:4])}{_more(getattr(c, name))}"
            for op, c in own.items()
            if getattr(c, name)
        ]
        lines += [f"### {title}", "", *(rows or ["None."]), ""]
    lines += ["### In two processes", "", "Whole against `DTensor.full_tensor()` over gloo, cut in dim 1:", ""]
    lines += [*(f"- {line}" for line in confirmed()), ""]
    lines += [
        "## All rows",
        "",
        "| op | family | instances | strategies | combinations | sound | complete | excluded | notes | in ours only |",
    ]
    lines += ["|---|---|---|---|---|---|---|---|---|---|"]
    for op in ops:
        mine = compared.get(op.op)
        only = "" if mine is None else str(len(mine.only_ours)) if mine.registered else "not in DTensor"
        cells = [op.op, op.family, str(op.instances), str(op.strategies), str(op.combinations)]
        cells += [
            "NO" if op.wrong else "yes",
            "NO" if op.missing else "yes" if op.combinations else "-",
            str(len(op.excluded) or ""),
            "; ".join(op.notes),
            only,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


CLAIMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cumsum(x, 2) of x[4, 6, 8]": lambda x: x.cumsum(2),
    "cumsum(x, 1) of x[4, 6, 8]": lambda x: x.cumsum(1),
    "cumsum(x, -2) of x[4, 6, 8]": lambda x: x.cumsum(-2),
    "logsumexp(x, (0, 2), keepdim=True) of x[4, 6, 8]": lambda x: x.logsumexp((0, 2), keepdim=True),
}
"""Calls of which DTensor's strategy is asked in real processes."""


def confirmed() -> list[str]:
    """Whether real DTensors give the whole tensor's numbers."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_confirm, (folder,), nprocs=2)
        return Path(folder, "found").read_text(encoding="utf-8").splitlines()


def _confirm(rank: int, folder: str) -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh, lines = init_device_mesh("cpu", (2,)), []
    for name, call in CLAIMS.items():
        torch.manual_seed(0)
        x = torch.randn(4, 6, 8)
        made, expected = call(distribute_tensor(x, mesh, [Shard(1)])), call(x)
        found = made.full_tensor()
        same = found.shape == expected.shape and torch.allclose(found, expected)
        lines.append(f"`{name}`: {'right' if same else 'WRONG'}, as {made.placements[0]}")
    if rank == 0:
        Path(folder, "found").write_text("\n".join(lines), encoding="utf-8")
    dist.destroy_process_group()


def _some(names: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(names))
    return ", ".join(f"`{name}`" for name in distinct[:3]) + (f" and {len(distinct) - 3} more" if len(distinct) > 3 else "")


def _more(lines: Sequence[str]) -> str:
    return f" and {len(lines) - 4} more" if len(lines) > 4 else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ops", nargs="*", metavar="OP", help="rows to check (default: all)")
    parser.add_argument("--markdown", type=Path, help="write the page to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = load_table()
    start = time.perf_counter()
    report = check_rules(arguments.ops, table=table)
    seconds = time.perf_counter() - start
    compared = {}
    for op in report.ops:
        compared[op.op] = compare(table[op.op], table)
        print(f"{op.op}: {compared[op.op].registered or 'not in DTensor'}", file=sys.stderr, flush=True)
    page = markdown(report, compared, seconds)
    if arguments.markdown:
        arguments.markdown.write_text(page, encoding="utf-8")
    print(page if not arguments.markdown else f"wrote {arguments.markdown}: passed {report.passed}")


if __name__ == "__main__":
    main()
