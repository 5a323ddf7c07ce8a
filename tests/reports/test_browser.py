"""The page in a real browser, from disk and without a network: it opens, finds, explains, folds, sorts, and no name runs."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import chromium, console, requests
from report_plans import HOSTILE, hostile, llama
from report_studies import compared, row, swept, write

from solver_shard.reports.html import html
from solver_shard.reports.studies import read_comparison

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as driver:
        yield driver


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "plan.html"
    path.write_text(html(llama()), encoding="utf-8")
    return path


@pytest.fixture
def opened(browser: Any, page: Path) -> Any:
    open_page(browser, page)
    return browser


def open_page(driver: Any, path: Path) -> None:
    """Load the page and wait for its script."""
    from selenium.webdriver.support.ui import WebDriverWait

    driver.get(path.as_uri())
    WebDriverWait(driver, 60).until(lambda d: d.execute_script("return document.documentElement.dataset.ready"))


def find(driver: Any, selector: str) -> Any:
    return driver.find_element("css selector", selector)


def keys(driver: Any, *pressed: str) -> None:
    driver.switch_to.active_element.send_keys(*pressed)


def test_it_opens_from_disk_with_the_network_off(browser: Any, page: Path) -> None:
    requests(browser), console(browser)
    open_page(browser, page)
    assert requests(browser) == [page.as_uri()]
    assert console(browser) == []
    assert browser.title == f"{llama().name}: sharding plan"
    assert [dt.text for dt in browser.find_elements("css selector", ".figures dt")] == [
        *("Step time", "Peak memory", "Communication", "Proof"),
    ]


def test_search_finds_a_tensor_and_enter_opens_its_explanation(opened: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    keys(opened, "/")
    search = find(opened, "#search")
    assert opened.switch_to.active_element == search
    search.send_keys("layers.1 up_proj.weight")
    options = [option.text for option in opened.find_elements("css selector", "#found [role=option]")]
    assert options[0].startswith("model.layers.1.mlp.up_proj.weight")
    search.send_keys(Keys.ARROW_DOWN, Keys.ARROW_UP)
    assert search.get_attribute("aria-activedescendant") == "found-0"
    search.send_keys(Keys.ENTER)
    panel = find(opened, "#panel").text
    assert "model.layers.{0,1}.mlp.up_proj.weight" in panel
    assert "model.layers.1.mlp.up_proj.weight" in panel
    assert "all-gather dp" in panel
    assert "gathers dim" in panel
    assert opened.switch_to.active_element.tag_name == "h2"
    keys(opened, Keys.ESCAPE)
    assert find(opened, "#panel").text == ""


def test_a_name_that_is_not_there_is_said(opened: Any) -> None:
    find(opened, "#search").send_keys("layers.7")
    assert "No tensor" in find(opened, "#found").text


def test_what_is_read_as_it_is_is_said_so(opened: Any) -> None:
    find(opened, "#search").send_keys("gate_proj.einsum\n")
    assert "read as it is by silu in model.layers.#.mlp.act_fn" in find(opened, "#panel").text


def test_a_click_explains_and_follows_references(opened: Any) -> None:
    find(opened, ".tree .ref").click()
    assert "Around it" in find(opened, "#panel").text
    find(opened, "#panel .ref").click()
    assert "grad(" in find(opened, "#panel h2").text
    assert opened.find_elements("css selector", "main .selected, #panel .ref")


def test_the_drawing_explains_by_mouse_and_keyboard(opened: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    collective = find(opened, ".drawing .collective")
    opened.execute_script("arguments[0].scrollIntoView({block: 'center'})", collective)
    collective.click()
    assert find(opened, "#panel h2").text
    keys(opened, Keys.ESCAPE)
    tensor = find(opened, ".drawing g.tensor")
    opened.execute_script("arguments[0].focus()", tensor)
    keys(opened, Keys.ENTER)
    assert find(opened, "#panel h2").text


def test_folding_by_mouse_and_keyboard(opened: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    def shown() -> int:
        return sum(row.is_displayed() for row in opened.find_elements("css selector", ".tree .row"))

    before = shown()
    find(opened, "#fold").click()
    everything = shown()
    assert everything > before
    assert find(opened, "#fold").text == "Fold all"
    summary = find(opened, ".tree details details > summary")
    summary.click()
    assert shown() < everything
    opened.execute_script("arguments[0].focus()", summary)
    keys(opened, Keys.ENTER)
    assert shown() == everything


def test_collectives_sort_by_a_column(opened: Any) -> None:
    def times() -> list[int]:
        cells = opened.find_elements("css selector", "#collectives tbody td.timed")
        return [int(cell.get_attribute("data-value")) for cell in cells]

    button = opened.find_elements("css selector", "#collectives thead button")[6]
    assert button.text == "time"
    button.click()
    assert times() == sorted(times(), reverse=True)
    button.click()
    assert times() == sorted(times())


def test_the_memory_chart_is_read_with_arrow_keys(opened: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    opened.execute_script("document.querySelector('#memory-chart svg').focus()")
    keys(opened, Keys.HOME)
    first = find(opened, "#memory-readout").text
    assert re.match(r"op 0: \S+ [KM]?i?B = ", first)
    keys(opened, Keys.ARROW_RIGHT)
    assert re.match(r"op [1-9]\d*: ", find(opened, "#memory-readout").text)


CONTRAST = """
const channel = (v) => ((v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
function rgb(text) {
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = text;
  canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data];
}
const light = (c) => 0.2126 * channel(c[0]) + 0.7152 * channel(c[1]) + 0.0722 * channel(c[2]);
function behind(e) {
  for (; e; e = e.parentElement) {
    const ground = rgb(getComputedStyle(e).backgroundColor);
    if (ground[3] === 255) return ground;
  }
  return [255, 255, 255, 255];
}
const texts = "h1, h2, h3, p, dt, dd, th, td, .chip, .ref, .mark, nav a, button, .does, .n, .note, .legend li, figcaption";
const found = [];
for (const e of document.querySelectorAll(texts)) {
  if (!e.textContent.trim() || !e.checkVisibility()) continue;
  const a = light(rgb(getComputedStyle(e).color)), b = light(behind(e));
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < 4.5) found.push([e.className || e.tagName, e.textContent.trim().slice(0, 30), ratio.toFixed(2)]);
}
return found;
"""
"""Texts with less contrast to their ground than 4.5, the least that WCAG 2.1 asks for at level AA."""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_both_themes_can_be_read(opened: Any, theme: str) -> None:
    media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    find(opened, ".tree .ref").click()
    assert opened.execute_script(CONTRAST) == []
    grounds = [opened.execute_script("return getComputedStyle(document.body).backgroundColor")]
    find(opened, "#theme").click()  # the other one, against what the system says
    assert opened.execute_script(CONTRAST) == []
    grounds.append(opened.execute_script("return getComputedStyle(document.body).backgroundColor"))
    assert len(set(grounds)) == 2
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_chips_of_one_placement_are_alike_and_never_colour_alone(opened: Any) -> None:
    script = """return [...document.querySelectorAll("main span.chip")].map((c) =>
        [c.lastChild.textContent, getComputedStyle(c).backgroundColor, getComputedStyle(c).color])"""
    colours: dict[str, set[tuple[str, str]]] = {}
    for text, ground, ink in opened.execute_script(script):
        colours.setdefault(text, set()).add((ground, ink))
    assert {"R", "S(0)", "S(1)", "P(sum)"} <= set(colours)
    assert all(len(found) == 1 for found in colours.values())
    assert all(colours[a] != colours[b] for a, b in itertools.combinations(sorted(colours), 2))


def test_a_printed_page_has_everything_open_and_no_controls(opened: Any) -> None:
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert not find(opened, ".bar-top").is_displayed()
    assert not find(opened, "#fold").is_displayed()
    shown = opened.execute_script(
        "return [...document.querySelectorAll('.tree .row')].every((row) => row.checkVisibility({contentVisibilityAuto: true}))"
    )
    assert shown
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert opened.print_page()


@pytest.mark.parametrize("width", [390, 900, 1500])
def test_nothing_is_wider_than_the_window(opened: Any, width: int) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    assert opened.execute_script("return document.documentElement.scrollWidth") <= width
    opened.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_notes_and_reasons_of_other_commands_stay_within_a_phone(browser: Any, tmp_path: Path, theme: str) -> None:
    op = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
    rows = [{**row, "notes": [f"DTensor raises at 64 ops of this trace ({op})"]} for row in compared()["rows"]]
    sweep = dataclasses.replace(swept(), model=op, rows=(*swept().rows, row(op, "dp=1", None, None, "error", message=op)))
    comparison = read_comparison(write(tmp_path / "comparison.json", compared(rows=rows)))
    path = tmp_path / "all.html"
    path.write_text(html(llama(), comparison=comparison, sweep=sweep), encoding="utf-8")
    metrics = {"width": 390, "height": 900, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]})
    open_page(browser, path)
    browser.execute_script("document.querySelectorAll('details').forEach((e) => (e.open = true))")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


EVERY_ENTRY = """
const once = new Map([...document.querySelectorAll("main [data-entry]")].map((e) => [e.dataset.entry, e]));
once.forEach((e) => e.dispatchEvent(new MouseEvent("click", { bubbles: true })));
"""


def test_hostile_names_are_text(browser: Any, tmp_path: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    path = tmp_path / "hostile.html"
    path.write_text(html(hostile()), encoding="utf-8")
    requests(browser), console(browser)
    open_page(browser, path)
    assert find(browser, "h1").text == HOSTILE[2]
    for name in HOSTILE:
        search = find(browser, "#search")
        search.clear()
        search.send_keys(name)
        assert name in find(browser, "#found").text
        search.send_keys(Keys.ENTER)
        assert find(browser, "#panel h2").text == name
    browser.execute_script("document.querySelectorAll('details').forEach((e) => (e.open = true))")
    browser.execute_script(EVERY_ENTRY)
    assert browser.execute_script("return window.hacked") is None
    assert not browser.find_elements("css selector", "img, [onload], [onerror]")
    assert requests(browser) == [path.as_uri()]
    assert console(browser) == []


def test_the_policy_lets_no_other_script_run(browser: Any, page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    planted = tmp_path / "planted.html"  # as if an escape were missing
    planted.write_text(text.replace("<h1>", "<script>window.hacked=1</script><img src=x onerror='window.hacked=2'><h1>"), encoding="utf-8")
    open_page(browser, planted)
    console(browser)
    assert browser.execute_script("return [window.hacked, document.documentElement.dataset.ready !== undefined]") == [None, True]
