"""Which of the strategies that torch registers with DTensor, for ops that have no row here, are right on numbers.

    python experiments/registered.py --rows /tmp/registered.jsonl             # run, resumable
    python experiments/registered.py --rows /tmp/registered.jsonl --write     # solver_shard/rules/registered.toml and registered.md here

Calls are those that torch's own op tests make, forward and backward: dims of 6, 3 and 10, numbers of both signs. Every call runs with the
sample's numbers, with the others' signs, with whole numbers (ties and zeros) and with large ones, whole and on 2, 3 and 2x2 devices. A
strategy is listed for the numbers of dims of operands and results with which it ran and never failed, on no call and no draw.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from solver_shard.program import Op, Ref
from solver_shard.rules.check.instances import _DROPPED, _NAMES, tensor_of
from solver_shard.rules.check.shards import close, legal_strategies, run_local, run_whole, verify
from solver_shard.rules.check.truth import FAULTS
from solver_shard.rules.registered import dtensor_rule, ranks_of
from solver_shard.rules.table import load_table
from solver_shard.rules.variants import is_list_op, overload_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import op_cases

MESHES = ((2,), (3,), (2, 2))
CALLS = 12
"""Of an op and one combination of ranks."""
SQUARE = 3
"""Of these, how many run on 2x2 devices, where strategies are tried in pairs."""
SAMPLES = 30
"""Of torch's op tests, for each op."""
SHAPES = ((12,), (6, 6), (6, 2, 6), (3, 2, 6, 2), (2, 3, 2, 2, 6))
"""Of pointwise calls, beside those of the tests."""
ELEMENTS = 600
Call = tuple[Op, list[torch.Tensor]]


def wanted() -> set[str]:
    """Ops whose strategies torch registers and that have no row."""
    import torch.distributed.tensor._ops  # noqa: F401

    propagator, table = DTensor._op_dispatcher.sharding_propagator, load_table()
    found = {*propagator.op_strategy_funcs, *propagator.op_single_dim_strategy_funcs}
    names = {str(op) for op in found if op.namespace in ("aten", "prims") and not op._schema.is_mutable}
    return {name for name in names if name not in table and not is_list_op(name)}


class Recorder(TorchDispatchMode):
    """Keeps the calls of some ops with the values of their tensors."""

    def __init__(self, ops: set[str], found: dict[str, dict[str, Call]]) -> None:
        super().__init__()
        self.ops, self.found = ops, found

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(function) in self.ops:
            self.keep(function, args, kwargs)
        return function(*args, **kwargs)

    def keep(self, function: Any, args: Any, kwargs: Any) -> None:
        values: list[torch.Tensor] = []

        def plain(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                if not any(value is known for known in values):
                    values.append(value)
                return Ref(next(i for i, known in enumerate(values) if known is value))
            if isinstance(value, list | tuple):
                return tuple(map(plain, value))
            return _NAMES[value] if isinstance(value, torch.dtype) else value

        schema = function._schema.arguments
        given = {a.name: args[i] if i < len(args) else kwargs.get(a.name, a.default_value) for i, a in enumerate(schema)}
        attributes = {name: plain(value) for name, value in given.items() if name not in _DROPPED}
        if not values or any(v.layout != torch.strided or v.dtype not in _NAMES or v.is_conj() for v in values):
            return
        op = Op(name=str(function), operands=tuple(range(len(values))), results=(), attributes=attributes)
        key = f"{attributes} {[(tuple(v.shape), v.dtype) for v in values]}"
        ranks = ",".join(str(v.ndim) for v in values)
        mine = self.found.setdefault(op.name, {})
        if key not in mine and sum(k.startswith(f"{ranks} ") for k in mine) < CALLS:
            mine[f"{ranks} {key}"] = (op, [v.detach().clone().contiguous() for v in values])


def calls() -> dict[str, dict[str, Call]]:
    """Calls of the ops by name, of torch's op tests and of the texts below."""
    from solver_shard.rules.check.instances import parse_instance

    ops, found = wanted(), {}
    for name, texts in MORE.items():
        for text in texts if name in ops else ():
            made = parse_instance(name, text)
            for turn in range(2):
                found.setdefault(name, {})[f"{text} {turn}"] = (made.op, made.draw(turn))
    for name in op_cases.database():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                for case in op_cases.cases(name, SAMPLES):
                    with Recorder(ops, found):
                        case.run()
            except Exception as error:  # a sample that does not run is no call
                print(f"{name}: {type(error).__name__}: {str(error)[:100]}", file=sys.stderr)
    for name, mine in found.items():
        if torch.Tag.pointwise in overload_of(name).tags:
            mine.update({f"{key}, {rank} dims": call for key, (op, values) in mine.items() for rank, call in reranked(op, values)})
    return {name: small(mine) for name, mine in found.items()}


def small(mine: dict[str, Call]) -> dict[str, Call]:
    """The calls of few elements; the smallest where there are none."""
    size = {key: sum(v.numel() for v in values) for key, (_, values) in mine.items()}
    least = max(ELEMENTS, min(size.values()))
    return {key: call for key, call in mine.items() if size[key] <= least}


def reranked(op: Op, values: Sequence[torch.Tensor]) -> Iterator[tuple[int, tuple[Op, list[torch.Tensor]]]]:
    """A pointwise call with every number of dims."""
    if len({v.shape for v in values if v.ndim}) == 1:
        for shape in SHAPES:
            count = math.prod(shape)
            yield len(shape), (op, [v.reshape(-1).repeat(1 + count // v.numel())[:count].reshape(shape) if v.ndim else v for v in values])


MORE = {
    "aten.threshold.default": ["self=f64[6, 6], threshold=0.5, value=20", "self=f64[6, 6], threshold=-1, value=-3.0"],
    "aten.view_copy.default": ["self=f64[6, 4], size=(4, 6)", "self=f64[6, 4], size=(24,)", "self=f64[6, 4], size=(2, 3, 4)"],
}


def draws(values: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The values; of floats also the negative ones, whole ones with ties and zeros, and large ones."""
    yield list(values)
    for change in (torch.neg, lambda x: x.round().clamp(-2, 2), lambda x: x * 20):
        yield [change(v) if v.is_floating_point() else v for v in values]


def prove(op: Op, values: Sequence[torch.Tensor], square: bool) -> tuple[str, set[str], dict[str, str]]:
    """Ranks, the strategies that ran, and those (or pairs of them, on two axes) that failed with what was seen."""
    operands = [tensor_of(f"x{i}", v) for i, v in enumerate(values)]
    whole = run_whole(op, values)
    if not all(close(a, b, 0.0) for a, b in zip(whole, run_whole(op, values), strict=True)):
        raise RuntimeError("random results")
    results = [tensor_of(f"y{i}", v) for i, v in enumerate(whole)]
    rule = dtensor_rule(op, operands, results, trust=True)
    ranks = ranks_of(operands, results)
    if rule is None:
        return ranks, set(), {}
    shapes = [t.shape for t in operands], [t.shape for t in results]
    ran: set[str] = set()
    failed: dict[str, str] = {}
    for turn, drawn in enumerate(draws(values)):
        try:
            run_whole(op, drawn)
        except FAULTS:
            continue
        for mesh in MESHES if square and not turn else MESHES[:2]:
            checked = verify(op, drawn, rule, run_local, result_shapes=[r.shape for r in results], mesh_shape=mesh, seed=turn)
            for failure in checked.failures:
                failed.setdefault(failure.strategy, f"{failure.what[:120]} on {'x'.join(map(str, mesh))} devices")
            if len(mesh) == 1:
                ran |= {s.name for (s,) in legal_strategies(rule, *shapes, mesh) if s.name != "R"}
    return ranks, ran, failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.write:
        write([json.loads(line) for line in options.rows.read_text().splitlines()])
        return
    known = {json.loads(line)["op"] for line in options.rows.read_text().splitlines()} if options.rows.exists() else set()
    for name, mine in sorted(calls().items()):
        if name in known:
            continue
        start = time.process_time()
        by_ranks: dict[str, dict[str, Any]] = {}
        faults: dict[str, None] = {}
        with options.rows.open("a") as out:  # a kernel may end the process: the op is then there, with nothing proven
            print(json.dumps({"op": name, "ranks": {}, "calls": 0, "faults": ["ended the process"]}), file=out)
        for number, (op, values) in enumerate(mine.values()):
            try:
                ranks, ran, failed = prove(op, values, number < SQUARE)
            except Exception as error:
                faults[f"{type(error).__name__}: {str(error)[:100]}"] = None
                continue
            entry = by_ranks.setdefault(ranks, {"ran": {}, "failed": {}, "calls": 0})
            entry["calls"] += 1
            entry["ran"].update(dict.fromkeys(sorted(ran)))
            entry["failed"].update(failed)
        for entry in by_ranks.values():
            entry["failed"] = blamed(entry["failed"])
        row = {
            "op": name,
            "ranks": {r: {**e, "ran": list(e["ran"])} for r, e in by_ranks.items()},
            "calls": len(mine),
            "faults": list(faults),
        }
        row["seconds"] = round(time.process_time() - start, 1)
        with options.rows.open("a") as out:
            print(json.dumps(row), file=out)
        print(name, row["seconds"], flush=True)


def blamed(failed: dict[str, str]) -> dict[str, str]:
    """Strategies that failed by themselves, and both of a pair that fails though each of them holds."""
    alone = {name: what for name, what in failed.items() if " x " not in name}
    pairs = {name: what for name, what in failed.items() if " x " in name and not any(part in alone for part in name.split(" x "))}
    return alone | {part: f"with another: {what}" for name, what in pairs.items() for part in name.split(" x ") if part != "R"}


def write(rows: list[dict[str, Any]]) -> None:
    """The list that ships, and the record."""
    last = {row["op"]: row for row in rows if row["op"] in wanted()}
    version = ".".join(torch.__version__.split(".")[:2])
    lines = [
        "# Strategies that torch registers with DTensor for ops without a row, and that are proven on numbers: op, dims of operands and",
        "# results, strategies (results <- operands). Made by experiments/registered.py; what is not here is not trusted by default.",
        f'torch = "{version}"',
        "",
        "[proven]",
    ]
    ran = proven = 0
    wrong = []
    for op, row in sorted(last.items()):
        held = {r: [n for n in e["ran"] if n not in e["failed"]] for r, e in sorted(row["ranks"].items())}
        ran += sum(len(e["ran"]) for e in row["ranks"].values())
        proven += sum(map(len, held.values()))
        wrong += [(op, r, n, e["failed"][n]) for r, e in sorted(row["ranks"].items()) for n in e["failed"]]
        if any(held.values()):
            inner = ", ".join(f'"{r}" = {json.dumps(names)}' for r, names in held.items() if names)
            lines.append(f'"{op}" = {{ {inner} }}')
    root = Path(__file__).resolve().parents[1]
    (root / "solver_shard" / "rules" / "registered.toml").write_text("\n".join(lines) + "\n")
    missing = sorted(wanted() - {op for op, row in last.items() if row["ranks"]})
    record = [
        __doc__.split("\n\n")[0],
        "",
        f"torch {torch.__version__}, {datetime.date.today()}. Made by `python experiments/registered.py --rows FILE` and then `--write`.",
        "",
        f"{len(wanted())} ops have registered strategies and no row; {len(wanted()) - len(missing)} of them were run, "
        f"{sum(r['calls'] for r in last.values())} calls. "
        f"{ran} strategies (by op and numbers of dims) ran, {proven} never failed and are listed in solver_shard/rules/registered.toml.",
        "",
        "What failed:",
        "",
        "| op | dims | strategy | what was seen |",
        "|---|---|---|---|",
        *(f"| {op} | {r} | `{n}` | {what.replace('|', '/')} |" for op, r, n, what in wrong),
        "",
        f"Not run, so not used without `--trust-dtensor`: {', '.join(missing)}.",
    ]
    (root / "experiments" / "registered.md").write_text("\n".join(record) + "\n")


if __name__ == "__main__":
    main()
