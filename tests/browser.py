"""A headless Chromium for tests, with no network.

Where Debian's chromium is not installed its tests are skipped, unless SOLVER_SHARD_BROWSER=required, as in continuous integration.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND"),
)


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A WebDriver; the network is off, and console and requests are logged."""
    if not (CHROMIUM.exists() and DRIVER.exists()):
        needed = f"{CHROMIUM} and {DRIVER} are needed: apt-get install chromium chromium-driver"
        if os.environ.get("SOLVER_SHARD_BROWSER") == "required":
            pytest.fail(needed)
        pytest.skip(needed)
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory(prefix="chromium_", ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = str(CHROMIUM)
        for flag in (*FLAGS, f"--user-data-dir={profile}", "--window-size=1400,900"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
        try:
            driver.execute_cdp_cmd("Network.enable", {})
            driver.execute_cdp_cmd(
                "Network.emulateNetworkConditions", {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
            )
            yield driver
        finally:
            driver.quit()


def console(driver: Any) -> list[str]:
    """What the console said since the last call."""
    return [entry["message"] for entry in driver.get_log("browser")]


def requests(driver: Any) -> list[str]:
    """Addresses outside the browser that pages asked for since the last call; its own start page has some of its inside."""
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    asked = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    return [url for url in asked if not url.startswith(("data:", "chrome:", "about:"))]
