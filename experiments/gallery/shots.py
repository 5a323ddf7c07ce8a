"""Screenshots of a report in headless Chromium, and how long it takes until it can be used.

    python experiments/gallery/shots.py experiments/gallery/llama3-8b.html experiments/gallery

writes light.png and dark.png (the latter with a tensor explained) and prints the milliseconds from navigation to ready, and to the first
painted content, of five loads; the processor time of the page's main thread, which other work on the machine does not add to; and how
wide the page is in windows of several widths.
"""

from __future__ import annotations

import base64
import sys
import tempfile
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--hide-scrollbars")


def main(page: Path, folder: Path) -> None:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = "/usr/bin/chromium"
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        driver = webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver"))
        try:
            times = [_load(driver, page, "light", 1440, 1000) for _ in range(5)]
            print("ready, ms:", sorted(ready for ready, _ in times), " first paint, ms:", sorted(paint for _, paint in times))
            driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
            before = _spent(driver)
            _load(driver, page, "light", 1440, 1000)
            print(f"the main thread's own time of a load: {1000 * (_spent(driver) - before):.0f} ms ({before:.3f} s before it)")
            _shot(driver, folder / "light.png")
            _load(driver, page, "dark", 1440, 1000)
            driver.execute_script("document.querySelector('#layer').scrollIntoView()")
            driver.execute_script(
                "document.querySelectorAll('.drawing .collective')[4].dispatchEvent(new MouseEvent('click', {bubbles: true}))"
            )
            _shot(driver, folder / "dark.png")
            for width in (390, 768, 1024, 1440):
                _load(driver, page, "light", width, 900)
                print(f"width {width}: the page is {driver.execute_script('return document.documentElement.scrollWidth')} wide")
        finally:
            driver.quit()


def _load(driver: Any, page: Path, theme: str, width: int, height: int) -> tuple[int, int]:
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    )
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]})
    driver.get(page.resolve().as_uri())
    WebDriverWait(driver, 60).until(lambda d: d.execute_script("return document.documentElement.dataset.ready"))
    paint = driver.execute_script("return Math.round(performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? -1)")
    return int(driver.execute_script("return document.documentElement.dataset.ready")), paint


def _spent(driver: Any) -> float:
    """Seconds of processor time in tasks of the page's main thread."""
    metrics = driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    return next(float(metric["value"]) for metric in metrics if metric["name"] == "TaskDuration")


def _shot(driver: Any, path: Path) -> None:
    driver.execute_script("return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    path.write_bytes(base64.b64decode(driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
