"""Why is it so, and what would another layout cost: an explanation of a tensor or op, with the proven price of alternatives.

>>> print(explain(plan, "model.layers.*.mlp:out", "S(0),R"))
model.layers.{0..31}.mlp.down_proj.einsum  bf16[64, 8192, 4096]  activation  x32
...
pinning model.layers.{0..31}.mlp.down_proj.einsum to S(0),R costs +10.6 ms (+2.8%), exactly
...

A **price** is the objective of the best plan with the alternative, less that of the best plan without it. Neither needs to be known to the
last nanosecond: the present plan is known to be within [b1, o1], the other within [b2, o2], so the price is within [b2 - o1, o2 - b1].
Where both are proven optimal that is one number.

What an activation's pin fixes is what it is handed on as; its readers then share one reshard from there, which the present plan has
no place for. So such a price may be below zero: a pin can make a plan faster.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from solver_shard.analysis.counterfactual import (
    CounterfactualAnswer,
    Label,
    Limits,
    Of,
    Question,
    allowed,
    ask,
    check_asked,
    label_text,
    solve_instead,
)
from solver_shard.analysis.difference import Changes, brief, changes, signed_bytes, signed_ns
from solver_shard.analysis.explanation import StaticExplanation, different, explanation
from solver_shard.analysis.reopen import Reopened, reopen, retrace, with_all_relays
from solver_shard.arguments import checked
from solver_shard.clock import Progress, StageClock
from solver_shard.codec import encode
from solver_shard.errors import InputError
from solver_shard.options import check_search
from solver_shard.plan.io import load_plan
from solver_shard.plan.plan import Plan
from solver_shard.solve.solution import Status
from solver_shard.text import format_bytes, format_ns, table, text_of

if TYPE_CHECKING:
    import torch

    from solver_shard.program import Program


MOST_TRIED = 40
"""Alternatives that are tried at all: those that differ from the present on the fewest axes."""

FIRST_SHARE = 0.2
"""Of an alternative's limits: what each has to be ranked; the best then have all of them."""

TIME_LIMIT = 30.0
"""Seconds for an alternative, where neither time nor work is limited."""

Outcome = Literal["plan", "too large", "impossible", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveBounds:
    """What is known of a best plan: its objective is at least ``bound`` and at most ``objective`` (nanoseconds or bytes)."""

    bound: int
    objective: int

    @property
    def proven(self) -> bool:
        return self.bound == self.objective


@dataclass(frozen=True, slots=True, kw_only=True)
class BestAlternative:
    """The best plan with an alternative that was found.

    Attributes:
        value: what is known of the best one.
        low, high: between what the price is, in the objective's unit.
        total_ns, peak: step time and bytes per device of the plan that was found.
        changes: from the present plan to it.
    """

    value: ObjectiveBounds
    low: int
    high: int
    total_ns: int
    peak: int
    changes: Changes


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What an alternative costs.

    Attributes:
        label: the layout or strategy that was asked for.
        outcome: plan; too large (none fits the memory limit); impossible (none runs so); unknown (none was found within the limits).
        bound: no plan with it has a lower objective.
        best: the plan that was found; None for the other outcomes.
        smallest, least: where none fits, the smallest peak that was found, and what no plan with it can do without, in bytes.
    """

    label: str
    outcome: Outcome
    bound: int
    best: BestAlternative | None = None
    smallest: int | None = None
    least: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What a plan says of a tensor or op, and what others would cost.

    Attributes:
        static: from the plan alone.
        of: which decision the prices are about, see ``analysis/counterfactual.py``.
        about: its tensors or ops, folded; ``count`` of them, ``wider`` where more than were named, because copies decide alike.
        present: what the present plan decides; empty where the copies differ.
        now: what is known of the present problem; ``unit`` of it: time, memory, or time + memory.
        limit: bytes that tensors may have.
        instead: of the alternative that was asked for.
        alternatives: the best ones, the cheapest first.
        others: alternatives of which less is known: ranked after those, with what is proven of them.
        untried: how many there are beyond these.
        plan: of ``instead``, complete; not part of the JSON.
    """

    static: StaticExplanation
    of: Of
    about: tuple[str, ...]
    count: int
    wider: bool
    present: str
    unit: str
    now: ObjectiveBounds
    total_ns: int
    peak: int
    limit: int
    problem: str
    template: bool
    instead: Price | None = None
    alternatives: tuple[Price, ...] = ()
    others: tuple[Price, ...] = ()
    untried: int = 0
    plan: Plan | None = dataclasses.field(default=None, compare=False, repr=False)

    def __str__(self) -> str:

        return explanation_text(self)

    def to_json(self) -> str:
        """All but the plan as JSON."""
        return json.dumps(self.data(), indent=1)

    def data(self) -> dict[str, Any]:
        """JSON-able: fields in order, layouts as text."""
        return {f.name: encode(getattr(self, f.name)) for f in dataclasses.fields(self) if f.name != "plan"}


@checked
def explain(
    plan: Plan | str | os.PathLike[str],
    pattern: str,
    instead: str | None = None,
    *,
    of: Of = "layout",
    alternatives: int = 5,
    model: str | os.PathLike[str] | torch.nn.Module | Program | None = None,
    inputs: Mapping[str, Any] | tuple[Any, ...] | None = None,
    loss_fn: Callable[..., Any] | None = None,
    time_limit: float | None = None,
    work_limit: float | None = None,
    gap: float | None = None,
    seed: int | None = None,
    workers: int = 2,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
) -> Explanation:
    """Explain what a plan decides for a tensor or op, and price the alternatives: one that is asked for, or the best ones.

    >>> explain(plan, "lm_head.weight", "R,S(0)").instead.best.low  # the price, in nanoseconds  # doctest: +SKIP

    Args:
        plan: what ``optimize`` returned, or its file.
        pattern: a tensor's name, an op's, a module's path for its ops, or a glob.
        instead: a layout as in a pin (``"S(0),R"``, ``"dp=S(0)"``, ``"S(*),*"``), or names of strategies where ``of`` is strategy.
        of: layout, state, forward, backward or strategy: which decision is meant, see ``analysis/counterfactual.py``.
        alternatives: without ``instead``: how many of the best are solved with all of the limits.
        model, inputs, loss_fn: what the plan was made for, where it is no preset, as of ``solver_shard.optimize``.
        time_limit: seconds of solving per alternative; None for 30, or for any time where there is a work limit.
        work_limit: units of solver work per alternative; the same limit and seed, and no time limit, give the same explanation.
        gap, seed: of the solver; the plan's own by default.
        workers, progress, stop: as of ``solver_shard.optimize``.

    Returns:
        What was chosen and why, and step time (nanoseconds) and peak (bytes) of each alternative with what is proven; ``str()`` says it.

    Raises:
        InputError: nothing matches, or without ``instead`` several different tensors do; the layout is not legal; the plan is of another
            model or version, or keeps what a baseline decided.
        TraceError: the model cannot be traced.
    """
    plan = load_plan(plan)
    clock = StageClock(progress=progress)
    static = explanation(plan, pattern)
    if instead is None and (count := different(plan, pattern)) > 1:
        raise InputError(f"{pattern!r} matches {count} different tensors or ops; name one of them to price its alternatives")
    if plan.options.propagation is not None:
        raise InputError(
            f"the plan keeps what {plan.options.propagation.partition(';')[0]} decided, so other layouts of it have no price; "
            "explain a plan of solve with the same pins, or look at this one with show"
        )
    check_asked(plan, pattern, of, instead)
    seconds = TIME_LIMIT if time_limit is None else time_limit
    check_search(plan.options, time_limit=seconds, workers=workers, work_limit=work_limit, gap=gap, seed=seed)
    limits = Limits(seconds=None if time_limit is None and work_limit is not None else seconds, work=work_limit)
    clock.say("tracing the model")
    reopened = reopen(plan, retrace(plan, model, inputs, loss_fn=loss_fn), clock)
    asking = AlternativePricer(
        reopened, static, limits=limits, gap=gap, seed=seed, workers=workers, clock=clock, stop=stop, pattern=pattern, of=of
    )
    return asking.instead(instead) if instead is not None else asking.alternatives(alternatives)


class AlternativePricer:
    """Questions about one pattern of one plan, whose graph is built once."""

    def __init__(
        self,
        reopened: Reopened,
        static: StaticExplanation,
        *,
        pattern: str,
        of: Of,
        limits: Limits,
        gap: float | None,
        seed: int | None,
        workers: int,
        clock: StageClock,
        stop: Callable[[], bool] | None,
    ) -> None:
        self.reopened, self.static, self.clock, self.stop = reopened, static, clock, stop
        self.limits, self.gap, self.seed, self.workers = limits, gap, seed, workers
        self.question: Question = ask(reopened, pattern, of, clock)
        self.pattern, self.of = pattern, of
        certificate = reopened.plan.certificate
        self.now = ObjectiveBounds(bound=certificate.bound, objective=certificate.objective)

    def instead(self, text: str) -> Explanation:
        """The price of one alternative; what cannot be read or is not legal is an InputError."""
        allows = allowed(self.question, text)
        self.clock.say(f"solving with {text} instead")
        answer = self._solve(allows, self.limits)
        return dataclasses.replace(self._bare(), instead=self._price(text, answer), plan=answer.plan)

    def alternatives(self, best: int) -> Explanation:
        """The prices of the best alternatives."""
        labels = [label for label in self.question.labels if label != self.question.present]
        if self.question.present is not None:
            labels.sort(key=lambda label: _distance(label, self.question.present))
        tried = labels[:MOST_TRIED]
        answers: list[tuple[Label, CounterfactualAnswer]] = []
        for k, label in enumerate(tried):
            if self.stop is not None and self.stop():
                break
            self.clock.say(f"pricing {label_text(label)} ({k + 1} of {len(tried)})")
            answers.append((label, self._solve(self._only(label), self.limits.part(FIRST_SHARE) if len(tried) > best else self.limits)))
        ranked = sorted(range(len(answers)), key=lambda k: (*_rank(answers[k][1]), k))
        first = [k for k in ranked if answers[k][1].plan is not None][:best]
        for k in first:
            label, answer = answers[k]
            if not self._closed(answer) and not (self.stop is not None and self.stop()):
                self.clock.say(f"proving the price of {label_text(label)}")
                again = self._solve(self._only(label), self.limits, answer)
                answers[k] = label, _better(answer, again)
        prices = [self._price(label_text(label), answer) for label, answer in answers]
        chosen = sorted(first, key=lambda k: (_rank(answers[k][1]), k))
        return dataclasses.replace(
            self._bare(),
            alternatives=tuple(prices[k] for k in chosen),
            others=tuple(prices[k] for k in ranked if k not in first),
            untried=len(labels) - len(answers),
        )

    @functools.cached_property
    def _everywhere(self) -> tuple[Reopened, Question]:
        """The question in the graph that has relays everywhere."""
        reopened = with_all_relays(self.reopened, self.clock)
        return reopened, ask(reopened, self.pattern, self.of, self.clock)

    def _only(self, label: Label) -> Callable[[Label], bool]:
        return lambda other: other == label

    def _solve(self, allows: Callable[[Label], bool], limits: Limits, before: CounterfactualAnswer | None = None) -> CounterfactualAnswer:
        """The answer with what is left of the labels; ``before``: of an earlier search, to start from."""

        def solved(reopened: Reopened, question: Question) -> CounterfactualAnswer | None:
            return solve_instead(
                reopened,
                question,
                question.masks(allows),
                limits=limits,
                gap=self.gap,
                seed=self.seed,
                workers=self.workers,
                start=None if before is None or before.lowered is not question.lowered else before.solution.assignment,
                stop=self.stop,
            )

        answer = solved(self.reopened, self.question) if before is None or before.lowered is self.question.lowered else None
        if answer is None:
            answer = solved(*self._everywhere)
        assert answer is not None, "a graph with relays everywhere has an answer"
        return answer

    def _closed(self, answer: CounterfactualAnswer) -> bool:
        gap, value = self.reopened.plan.options.gap if self.gap is None else self.gap, answer.solution.objective
        return value is not None and value - answer.bound <= gap * value

    def _price(self, label: str, answer: CounterfactualAnswer) -> Price:
        plan, found = self.reopened.plan, answer.solution
        if answer.plan is None:
            outcome: Outcome = "impossible" if answer.impossible else "too large" if found.status is Status.INFEASIBLE else "unknown"
            return Price(label=label, outcome=outcome, bound=answer.bound, smallest=found.peak, least=found.peak_bound or None)
        value = ObjectiveBounds(bound=answer.bound, objective=answer.plan.certificate.objective)
        best = BestAlternative(
            value=value,
            low=value.bound - self.now.objective,
            high=value.objective - self.now.bound,
            total_ns=answer.plan.costs.total_ns,
            peak=answer.plan.memory.peak,
            changes=changes(plan, answer.plan),
        )
        return Price(label=label, outcome="plan", bound=answer.bound, best=best)

    def _bare(self) -> Explanation:
        plan, question = self.reopened.plan, self.question
        unit = "memory" if plan.options.objective == "memory" else "time + memory" if plan.options.memory_weight else "time"
        return Explanation(
            static=self.static,
            of=question.of,
            about=question.names,
            count=question.count,
            wider=question.wider,
            present="" if question.present is None else label_text(question.present),
            unit=unit,
            now=self.now,
            total_ns=plan.costs.total_ns,
            peak=plan.memory.peak,
            limit=plan.options.usable_memory,
            problem=plan.certificate.problem,
            template=plan.options.template is not None,
        )


def _distance(label: Label, present: Label | None) -> int:
    """On how many axes an alternative is another one."""
    return 0 if present is None else sum(a != b for a, b in zip(label, present, strict=True))


def _rank(answer: CounterfactualAnswer) -> tuple[int, int]:
    """Plans by their objective, then what was not found by its bound, then what cannot be."""
    if answer.plan is not None:
        return 0, answer.plan.certificate.objective
    return (2 if answer.solution.status is Status.INFEASIBLE else 1), answer.bound


def _better(one: CounterfactualAnswer, other: CounterfactualAnswer) -> CounterfactualAnswer:
    """The better plan of two searches for the same, with the better bound."""
    bound = max(one.bound, other.bound)
    best = other if other.plan is not None and (one.solution.objective or 0) >= (other.solution.objective or 0) else one
    return dataclasses.replace(best, bound=bound)


# An explanation with its prices, as text.

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


def price_text(found: Explanation, best: BestAlternative) -> str:
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


def _proof(value: ObjectiveBounds, show: Callable[[int], str]) -> str:
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
