"""What other commands wrote, on the page: comparisons, sweeps and prices; files that are something else are refused by their place."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from plan_examples import example
from report_studies import compared, row, swept, write

from solver_shard.analysis.sweep.points import MAX_POINTS
from solver_shard.analysis.sweep.results import load_sweep
from solver_shard.cli import main
from solver_shard.errors import InputError
from solver_shard.reports.html import embedded, html
from solver_shard.reports.studies import comparison_table, read_comparison, read_prices, regret_text, sweep_chart


def test_a_comparison_is_bars_of_one_scale(tmp_path: Path) -> None:
    table = comparison_table(read_comparison(write(tmp_path / "c.json", compared(later="more"))))
    assert [(row["name"], row["regret_text"], row["fits"]) for row in table["rows"]] == [("ours", "0", True), ("zero3", "+25.0%", False)]
    assert sum(part["share"] for part in table["rows"][0]["parts"]) == pytest.approx(100 / 125)
    assert table["kinds"] == ["all_gather", "reduce_scatter"]
    assert table["bound"] == {"text": "no tied plan within 19.5 KiB takes less than 100 us", "share": 0.8}
    assert table["rows"][1]["notes"] == [1]


def test_a_plan_that_is_far_slower_does_not_stretch_the_bars(tmp_path: Path) -> None:
    rows = compared()["rows"]
    table = comparison_table(
        read_comparison(write(tmp_path / "c.json", compared(rows=[*rows, {**rows[0], "name": "x", "step_ns": 10**7}])))
    )
    assert [row["beyond"] for row in table["rows"]] == [False, False, True]
    assert sum(part["share"] for part in table["rows"][0]["parts"]) == pytest.approx(100 / 125)


def test_what_a_recipe_needs_where_it_does_not_fit(tmp_path: Path) -> None:
    rows = [{**compared()["rows"][1], "name": str(proven), "least_peak": 2**20, "least_proven": proven} for proven in (True, False)]
    table = comparison_table(read_comparison(write(tmp_path / "c.json", compared(rows=[*compared()["rows"], *rows]))))
    assert [row["fits_text"] for row in table["rows"]] == ["yes", "no", "no, least 1.00 MiB", "no, least found 1.00 MiB"]


@pytest.mark.parametrize(
    ("share", "text"), [(None, ""), (0.0, "0"), (0.0312, "+3.1%"), (-0.5, "-50.0%"), (2.0, "+200%"), (0.0004, "+0.04%")]
)
def test_regret_in_words(share: float | None, text: str) -> None:
    assert regret_text(share) == text


@pytest.mark.parametrize(
    ("data", "where"),
    [
        (compared(limit="much"), "limit: expected a whole number, got 'much'"),
        (compared(rows=[{"name": "x"}]), r"rows\[0\]\.kind is missing"),
        ([1], "expected"),
    ],
)
def test_what_is_no_comparison_is_refused(tmp_path: Path, data: Any, where: str) -> None:
    with pytest.raises(InputError, match=f"not a comparison: .*{where}"):
        read_comparison(write(tmp_path / "c.json", data))


def test_a_sweep_of_more_points_than_there_can_be_is_refused(tmp_path: Path) -> None:
    rows = tuple(row(f"p{i}", "d0=2", 1, 1) for i in range(MAX_POINTS + 1))
    (tmp_path / "sweep.json").write_text(dataclasses.replace(swept(), rows=rows).to_json())
    with pytest.raises(InputError, match="2,001 points; a sweep has at most 2,000"):
        load_sweep(tmp_path)


def test_a_sweep_is_points_with_a_front() -> None:
    chart = sweep_chart(swept())
    assert [(point["label"], point["front"]) for point in chart["points"]] == [("dp=4,tp=2", True), ("dp=8", True), ("dp=2,tp=4", False)]
    left, right = (next(p for p in chart["points"] if p["label"] == label) for label in ("dp=4,tp=2", "dp=8"))
    assert left["x"] < right["x"]  # faster is further left,
    assert left["y"] < right["y"]  # and more memory further up
    assert chart["without"] == [
        {"name": "d", "why": "no plan fits; the smallest peak found is 20.0 GiB"},
        {"name": "e", "why": "failed: it broke"},
    ]


def priced(**best: Any) -> dict[str, Any]:
    value = {"bound": 0, "objective": 0}
    found = {"value": value, "low": 5000, "high": 5000, "total_ns": 105_000, "peak": 4096, "changes": {}, **best}
    return {
        "about": ["layers.{0..2}.up.weight"],
        "of": "layout",
        "unit": "time",
        "now": {"bound": 100_000, "objective": 100_000},
        "instead": None,
        "alternatives": [{"label": "RR", "outcome": "plan", "bound": 1, "best": found, "smallest": None, "least": None}],
        "others": [{"label": "RS(1)", "outcome": "too large", "bound": 1, "best": None, "smallest": 2**20, "least": 1}],
    }


def test_prices_stand_with_their_tensor(tmp_path: Path) -> None:
    asked = read_prices(write(tmp_path / "e.json", priced()))
    assert [price.text for price in asked.prices] == [
        "+5.00 us (+5%); then 105 us and a peak of 4.00 KiB",
        "no plan with it fits; the smallest peak found is 1.00 MiB",
    ]
    page = html(example(), asked=[asked])
    entry = page[page.index('<h2 tabindex="-1">layers.{0..2}.up.weight') :]
    assert "+5.00 us (+5%)" in entry[: entry.index("</template>")]
    between = read_prices(write(tmp_path / "b.json", priced(low=-1000, high=3000))).prices[0].text
    assert between.startswith("between -1.00 us and +3.00 us (+3%)")


@pytest.mark.parametrize("data", [{}, [], {"about": 3}, priced(low="free"), priced(high=10**400)])
def test_what_has_no_prices_is_refused(tmp_path: Path, data: Any) -> None:
    with pytest.raises(InputError, match="not an explanation with prices"):
        read_prices(write(tmp_path / "e.json", data))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, page = tmp_path / "plan.json", tmp_path / "plan.html"
    example().save(plan)
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sweep.json").write_text(swept().to_json())
    given = ["--compare", str(write(tmp_path / "c.json", compared())), "--sweep", str(tmp_path / "sweep")]
    given += ["--explain", str(write(tmp_path / "e.json", priced()))]
    assert main(["report", str(plan), "-o", str(page), *given]) == 0
    assert re.fullmatch(r"wrote \S+plan\.html \(\S+ KiB\): deep mlp on dp=4,tp=2; open it in a browser\n", capsys.readouterr().out)
    text = page.read_text(encoding="utf-8")
    assert all(
        f'id="{section}"' in text
        for section in ("time", "modules", "layer", "memory", "collectives", "cuts", "comparison", "sweep", "proof")
    )
    assert "://" not in text  # nothing is fetched, nothing is linked
    assert main(["report", str(plan), "-o", str(plan)]) == 2
    assert main(["report", str(plan), "-o", str(page), "--compare", str(plan)]) == 1
    assert "not a comparison" in capsys.readouterr().err


def test_the_same_plan_makes_the_same_page() -> None:
    assert html(example()) == html(example())


def test_embedded_text_cannot_end_its_script() -> None:
    assert "<" not in embedded({"</script><!--": ["<script>", "\u2028"]})
    assert json.loads(embedded({"</script>": "\u2028"})) == {"</script>": "\u2028"}


def test_control_and_direction_characters_show_themselves() -> None:
    import dataclasses

    plan = dataclasses.replace(example(), name="safe\u202egnp.exe\x1b[31m")
    page = html(plan)
    assert "\u202e" not in page
    assert "\x1b" not in page
    assert "safe\\u202egnp.exe\\x1b[31m" in page
