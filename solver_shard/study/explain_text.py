"""An explanation with its prices, as text."""

from __future__ import annotations

from collections.abc import Callable

from solver_shard.names import text_of
from solver_shard.plan.table import table
from solver_shard.study.changes import Changes, brief, signed_bytes, signed_ns
from solver_shard.study.explain import Best, Explanation, Price, Value
from solver_shard.units import format_bytes, format_ns

MOST_LAYOUTS, MOST_COLLECTIVES, MOST_OTHERS = 12, 8, 12

NARROWS = "more --time-limit or --work-limit narrows this"
INTERVAL = f"""\
  bounds after a price: it is that of the best plan found, which is not proven to be the best there is; the best one's is proven to lie
  within the bounds, low to high; {NARROWS}"""


def explanation_text(found: Explanation) -> str:
    """The static part, then the price that was asked for, or the table of alternatives."""
    blocks = [str(found.static)]
    if found.instead is not None:
        blocks.append(text_of(_instead(found, found.instead)))
    else:
        blocks.append(text_of(_alternatives(found)))
    return "\n\n".join(blocks)


def price_text(found: Explanation, best: Best) -> str:
    """``+12.1 ms (+3.1%), exactly``, or the price of the best plan that was found and the interval that the best of all is proven in."""
    signed = _signed(found)
    text = f"{signed(best.value.objective - found.now.objective)} ({_percent(best.value.objective, found.now.objective)})"
    if best.low == best.high:
        return f"{text}, exactly"
    if signed(best.low) == signed(best.high):
        return f"{text}, proven to within {_show(found)(best.high - best.low)}"
    return f"{text} as far as found, proven to be between {signed(best.low)} and {signed(best.high)}; {NARROWS}"


def _show(found: Explanation) -> Callable[[int], str]:
    return format_bytes if found.unit == "memory" else format_ns


def _signed(found: Explanation) -> Callable[[int], str]:
    return signed_bytes if found.unit == "memory" else signed_ns


def _percent(after: int, before: int) -> str:
    share = 100 * (after - before) / max(before, 1)
    return f"{share:+.1f}%" if abs(share) >= 0.05 or after == before else f"{share:+.1g}%"


def _instead(found: Explanation, price: Price) -> list[str]:
    asked = _asked(found, price.label)
    if price.outcome == "impossible":
        beside = " of this template" if found.template else ""
        return [f"{asked} is impossible: no plan{beside} runs so, whatever the memory (the pins of the plan are kept)"]
    if price.outcome == "too large":
        least = f" no plan with it needs less than {format_bytes(price.least)} per device," if price.least else ""
        smallest = f" the smallest peak found is {format_bytes(price.smallest)}," if price.smallest is not None else ""
        return [f"{asked} does not fit into memory:{least}{smallest} and the limit is {format_bytes(found.limit)}"]
    if price.best is None:
        return [f"{asked}: no plan was found, which does not prove that there is none; give more --time-limit or --work-limit"]
    best, show, change = price.best, _show(found), price.best.changes
    rows = [
        ("", "now", "instead", ""),
        ("step time", format_ns(found.total_ns), format_ns(best.total_ns), signed_ns(change.total_ns)),
        *_parts(change),
        ("peak memory", format_bytes(found.peak), format_bytes(best.peak), signed_bytes(change.peak)),
        ("proof", _proof(found.now, show), _proof(best.value, show), ""),
    ]
    if found.unit == "time + memory":
        rows.insert(1, ("objective", show(found.now.objective), show(best.value.objective), ""))
    lines = [f"{asked} costs {price_text(found, best)}", *table(rows, right=(1, 2, 3))]
    if found.wider:
        lines.append(
            f"  repeated layers decide alike in this plan: the price is of all {found.count} together; solve --free tells them apart"
        )
    if change.nothing:
        return [*lines, "  it is what the plan does: nothing changes"]
    return [*lines, *_collectives(change), *_layouts(found, change)]


def _asked(found: Explanation, label: str) -> str:
    about = _about(found)
    if found.of == "layout":
        return f"pinning {about} to {label}"
    if found.of == "strategy":
        return f"running {about} as {label}"
    return f"keeping the optimizer state of {about} in {label}" if found.of == "state" else f"giving {found.of} readers {about} in {label}"


def _about(found: Explanation) -> str:
    return ", ".join(found.about[:3]) + (f" and {len(found.about) - 3} more" if len(found.about) > 3 else "")


def _parts(change: Changes) -> list[tuple[str, str, str, str]]:
    parts = [("compute", change.compute_ns), ("update", change.update_ns), ("communication", change.communication_ns)]
    parts += [("hidden by overlap", change.hidden_ns)]
    return [(f"  {name}", "", "", signed_ns(ns)) for name, ns in parts if ns]


def _proof(value: Value, show: Callable[[int], str]) -> str:
    if value.proven:
        return "optimal"
    return f">= {show(value.bound)}, gap {100 * (value.objective - value.bound) / max(value.objective, 1):.2g}%"


def _collectives(change: Changes) -> list[str]:
    if not change.collectives:
        return ["  the collectives are the same"]
    shown = change.collectives[:MOST_COLLECTIVES]
    rows = [
        (
            "more" if c.count > 0 else "fewer" if c.count else "as many",
            str(abs(c.count) or ""),
            c.kind,
            ",".join(c.axes),
            format_bytes(c.nbytes),
            signed_ns(c.nanoseconds),
        )
        for c in shown
    ]
    title = "  collectives of a step: how many, bytes of one, time of all"
    return [title, *table(rows, right=(1, 4, 5), indent=4), *_more(len(change.collectives) - len(shown), "less time")]


def _layouts(found: Explanation, change: Changes) -> list[str]:
    others = [c for c in change.layouts if c.name not in found.about]
    if not others:
        return ["  no other tensor changes its layout"]
    rows = [(c.name, c.before, "->", c.after, f"x{c.count}" if c.count > 1 else "") for c in others[:MOST_LAYOUTS]]
    return ["  what else would change, the largest tensors first", *table(rows, indent=4), *_more(len(others) - len(rows), "smaller")]


def _more(rest: int, why: str) -> list[str]:
    return [f"    ... {rest} more ({why})"] if rest > 0 else []


def _alternatives(found: Explanation) -> list[str]:
    if not found.alternatives and not found.others:
        return [f"there is no other {'strategy' if found.of == 'strategy' else 'layout'} of {_about(found)} in this problem"]
    what = {"layout": "pinned", "state": "optimizer state", "strategy": "run as"}.get(found.of, f"{found.of} readers get it as")
    several = f", all {found.count} alike" if found.count > 1 else ""
    show, signed = _show(found), _signed(found)
    head = "step time" if found.unit == "time" else "peak" if found.unit == "memory" else "objective"
    rows = [(what, head, "price", "proof", "peak memory", "what it changes")]
    rows.append(
        (found.present or "as now", show(found.now.objective), "", _proof(found.now, show), format_bytes(found.peak), "the plan as it is")
    )
    unproven = False
    for price in found.alternatives:
        if (best := price.best) is None:
            continue
        text = f"{signed(best.value.objective - found.now.objective)} ({_percent(best.value.objective, found.now.objective)})"
        if signed(best.low) != signed(best.high):
            text += f", {signed(best.low)} to {signed(best.high)}"
            unproven = True
        proof = _proof(best.value, show)
        rows.append((price.label, show(best.value.objective), text, proof, format_bytes(best.peak), brief(best.changes)))
    lines = [f"Alternatives for {_about(found)}{several}", *table(rows, right=(1, 4), header=True)]
    return [*lines, *([INTERVAL] if unproven else []), *_others(found)]


def _others(found: Explanation) -> list[str]:
    show, signed, now = _show(found), _signed(found), found.now.objective
    dearer = [
        f"{p.label} {signed(p.best.value.objective - now)}{'' if p.best.value.proven else f' (at least {signed(p.best.low)})'}"
        for p in found.others
        if p.best is not None
    ]
    large = [p.label + (f" (>= {format_bytes(p.least)})" if p.least else "") for p in found.others if p.outcome == "too large"]
    lines = [
        *_listed("not cheaper than these", dearer),
        *_listed("do not fit into memory", large),
        *_listed(
            f"no plan{' of this template' if found.template else ''} runs so", [p.label for p in found.others if p.outcome == "impossible"]
        ),
        *_listed("no plan was found so far", [f"{p.label} (>= {show(p.bound)})" for p in found.others if p.outcome == "unknown"]),
    ]
    return [*lines, f"  not tried: {found.untried} more; ask for one with --instead"] if found.untried else lines


def _listed(words: str, texts: list[str]) -> list[str]:
    if not texts:
        return []
    rest = len(texts) - MOST_OTHERS
    return [f"  {words}: {', '.join(texts[:MOST_OTHERS])}{f' and {rest} more' if rest > 0 else ''}"]
