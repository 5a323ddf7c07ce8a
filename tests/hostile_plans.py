"""Plan files whose names try to steer what shows them, and what every command says of such a file."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import random
from pathlib import Path
from typing import Any

from lowered import lowered, random_assignment
from plan_examples import example
from programs import trained_mlp

from solver_shard.cli import main
from solver_shard.plan.io import load_plan, plan_to_json

MARK = "EVIL"
"""Comes after every break of a hostile name: a line that begins so is one that the name has made."""

BREAKS = ("\n", "\r\n", "\r", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029")
STEERING = (
    *("\x00", "\x07", "\x08", "\x1b[2J", "\x1b[31m", "\x1b]0;title\x07", "\x1b]8;;http://evil\x1b\\", "\x7f", "\x9b2J", "\t"),
    *("\u202e", "\u2066", "\u200f", "\u061c", "\u200b", "\ufeff", "\u00ad", "\U000e0041", "\ud800"),
    *("[bold red]", "[/]", "[link=http://evil]", "{0}", "%s", "#", '"""', "'", "\\", "\\n", "<b>", "|", "`", "*/", "\N{NO-BREAK SPACE}"),
)

TARGETS = ("dtensor-script", "hf", "parallelize", "jax", "torchtitan", "sdy")
TRACED: tuple[tuple[str, ...], ...] = (
    ("explain", "{plan}", "{name}", "--alternatives", "1", "--model", "entry_models:mlp"),
    ("compare", "{plan}", "--with", "none", "--model", "entry_models:mlp"),
    ("verify", "{plan}", "entry_models:mlp"),
)
"""Commands that trace a model, which takes longer."""

COMMANDS: tuple[tuple[str, ...], ...] = (
    ("show", "{plan}"),
    ("show", "{plan}", "*"),
    ("show", "{plan}", "{name}"),
    ("show", "{plan}", "no such tensor"),
    ("explain", "{plan}", "*"),
    ("explain", "{plan}", "{name}"),
    ("report", "{plan}", "-o", "{folder}/report.html"),
    ("trace", "{plan}", "-o", "{folder}/trace.json"),
    *(("export", "{plan}", "--to", target, "--lossy", "-o", "{folder}/" + target) for target in TARGETS),
)


@functools.cache
def texts() -> tuple[str, ...]:
    """The files that are made hostile: forward only, and a training step with clipping."""
    case = lowered(trained_mlp(layers=2), "dp=2,tp=2", clip=True)
    return plan_to_json(example()), plan_to_json(case.plan(random_assignment(case.graph, 1)))


def hostile_name(draw: random.Random, name: str) -> str:
    """A name with breaks and steering characters in it, some of it before, some behind."""
    parts = [draw.choice(STEERING) if draw.random() < 0.6 else draw.choice(BREAKS) + MARK for _ in range(draw.randint(1, 4))]
    at = draw.randint(0, len(name))
    return f"{name[:at]}{''.join(parts)}{name[at:]}"


def hostile_plan(seed: int) -> str:
    """A plan's JSON in which some of its strings, wherever they stand, are hostile; many files still are plans."""
    draw = random.Random(seed)
    data = json.loads(draw.choice(texts()))
    names = sorted({tensor["name"] for tensor in data["tensors"]} | {op[key] for op in data["ops"] for key in ("name", "module")})
    free = sorted({data["name"], data["provenance"]["command"], data["provenance"]["tool"], data["provenance"]["source"]})
    free += sorted({reshard["family"] for reshard in data["reshards"]} | {data["memory"]["peak_op"], data["cluster"]["title"]})
    every = sorted(_strings(data))
    pool = draw.choice([names, free, names + free, every])
    swap = {name: hostile_name(draw, name) for name in draw.sample(pool, min(len(pool), draw.randint(1, 6)))}
    if draw.random() < 0.5:
        data["options"]["pins"] = [hostile_name(draw, "x=S(0)")]
    found = _swapped(data, swap)
    found["memory"]["peak_op"] = _peak_op(found) if draw.random() < 0.9 else found["memory"]["peak_op"]
    return json.dumps(found)


def said(folder: Path, text: str, command: tuple[str, ...]) -> str:
    """What a command prints of a plan file, and what it writes."""
    plan = folder / "plan.json"
    plan.write_text(text, encoding="utf-8")
    name = next((t["name"] for t in json.loads(text)["tensors"]), "x")
    given = [part.replace("{plan}", str(plan)).replace("{folder}", str(folder)).replace("{name}", name) for part in command]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        main(given)
    written = [Path(part) for part in given[-1:] if part.startswith(str(folder)) and Path(part) != plan and Path(part).exists()]
    found = [out.getvalue(), err.getvalue(), *(path.read_text(encoding="utf-8") for path in written)]
    for path in written:
        path.unlink()
    return "\n".join(found)


def loads(folder: Path, text: str) -> bool:
    """Whether the file still is a plan."""
    (folder / "plan.json").write_text(text, encoding="utf-8")
    try:
        load_plan(folder / "plan.json")
    except Exception:
        return False
    return True


def let_through(text: str) -> list[str]:
    """What no output may have: a character that steers, or a line that a name has made."""
    found = [f"{c!r} in {text[max(0, i - 60) : i + 20]!r}" for i, c in enumerate(text) if not c.isprintable() and c != "\n"]
    return found + [f"a line of its own: {line[:80]!r}" for line in text.split("\n") if line.lstrip(" #-│|").startswith(MARK)]


def _peak_op(data: dict[str, Any]) -> str:
    time = data["memory"]["peak_time"]
    if time >= len(data["ops"]):
        return "optimizer"
    op = data["ops"][time]
    return f"{op['module'] or 'model'}: {op['name']} ({op['phase']})"


def _strings(data: Any) -> set[str]:
    if isinstance(data, dict):
        return {key for key in data if key.strip("abcdefghijklmnopqrstuvwxyz_")} | {x for value in data.values() for x in _strings(value)}
    if isinstance(data, list):
        return {x for value in data for x in _strings(value)}
    return {data} if isinstance(data, str) and data else set()


def _swapped(data: Any, swap: dict[str, str]) -> Any:
    if isinstance(data, dict):
        return {swap.get(key, key): _swapped(value, swap) for key, value in data.items()}
    if isinstance(data, list):
        return [_swapped(value, swap) for value in data]
    return swap.get(data, data) if isinstance(data, str) else data
