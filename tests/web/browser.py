"""A real Chromium and its driver: windows of any size, light and dark, and what is wrong in them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM, DRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)

CUT_OFF = (Path(__file__).parent / "layout.js").read_text()
"""What is cut off, outside the window, or lies over something else."""


def available() -> bool:
    """Whether the distribution's Chromium, its driver and selenium are here."""
    try:
        import selenium  # noqa: F401
    except ModuleNotFoundError:
        return False
    return Path(CHROMIUM).exists() and Path(DRIVER).exists()


may_hold_certificates = pytest.mark.skipif(
    os.getuid() != 0 or not all(map(shutil.which, ("certutil", "pk12util", "unshare"))),
    reason="needs root, certutil, pk12util and unshare",
)
needed = pytest.mark.skipif(not available(), reason="needs chromium, chromium-driver and selenium")


@contextlib.contextmanager
def browser(*more: str, binary: str = CHROMIUM) -> Iterator[Any]:
    """A window of a browser that has never been used before."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    profile = tempfile.mkdtemp(prefix="muster-browser-")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for option in (*OPTIONS, f"--user-data-dir={profile}", *more):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(DRIVER))
    try:
        driver.set_page_load_timeout(100)
        yield driver
    finally:
        driver.quit()
        shutil.rmtree(profile, ignore_errors=True)


def with_certificate(directory: Path, p12: Path, password: bytes, authority: Path, origin: str) -> str:
    """A browser of a user who imported a .p12 and its authority and shows that certificate to ``origin``.

    The choice is a policy of Chromium, read below /etc: its process has an /etc/chromium of its own.
    """
    store = directory / ".pki" / "nssdb"
    store.mkdir(parents=True)
    where = ["-d", f"sql:{store}"]
    for command in (
        ["certutil", *where, "-N", "--empty-password"],
        ["certutil", *where, "-A", "-n", "authority", "-t", "CT,,", "-a", "-i", str(authority)],
        ["pk12util", *where, "-i", str(p12), "-W", password.decode(), "-K", ""],
    ):
        subprocess.run(command, check=True, capture_output=True, timeout=100)
    policy = directory / "policy.json"
    choice = json.dumps({"pattern": origin, "filter": {}})
    policy.write_text(json.dumps({"AutoSelectCertificateForUrls": [choice]}))
    binary = directory / "chromium"
    binary.write_text(f"""#!/bin/sh
export HOME={directory}
exec unshare --mount sh -c '
    mount -t tmpfs none /etc/chromium && mkdir -p /etc/chromium/policies/managed &&
    cp {policy} /etc/chromium/policies/managed/ && exec {CHROMIUM} "$@"' sh "$@"
""")
    binary.chmod(0o755)
    return str(binary)


def show(driver: Any, width: int, height: int = 900, *, dark: bool = False) -> None:
    """Gives the window a size, down to a telephone's, and the colours that a user has chosen."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    media = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})


def picture(driver: Any, path: Path) -> None:
    """A picture of the whole page, as long as it is."""
    import base64

    shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": False, "format": "png"})
    path.write_bytes(base64.b64decode(shot["data"]))


def whole_page(driver: Any, width: int, *, dark: bool = False, at_most: int = 6000) -> None:
    """Makes the window as high as the page."""
    show(driver, width, dark=dark)
    height = int(driver.execute_script("return document.documentElement.scrollHeight"))
    show(driver, width, min(max(height, 600), at_most), dark=dark)


def complaints(driver: Any) -> list[str]:
    """What the browser itself complained of: a policy broken, a script failed, a file missing."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]


def wrong_layout(driver: Any) -> list[str]:
    """What is cut, outside the window, or lies over something else."""
    return [str(each) for each in driver.execute_script(CUT_OFF)]
