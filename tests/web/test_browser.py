"""The page in a real browser: real jobs, a worker killed, one drained, a scheduler that goes, odd names."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scheduler.processes import (
    PASSWORD,
    Pki,
    Stream,
    channel,
    environment,
    form,
    join,
    leave,
    scheduler,
)
from tests.waiting import LIMIT_S
from tests.web.browser import (
    browser,
    complaints,
    may_hold_certificates,
    needed,
    show,
    whole_page,
    with_certificate,
    wrong_layout,
)
from tests.web.launch import launch
from tests.web.processes import Web, web

pytestmark = [pytest.mark.system, needed, pytest.mark.timeout(300)]

WIDTHS = (360, 1280, 2560)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki.make(tmp_path_factory.mktemp("pki"))


@pytest.fixture
def window() -> Iterator[Any]:
    with browser() as driver:
        yield driver


def wait(window: Any, true: Callable[[Any], object]) -> Any:
    from selenium.common.exceptions import StaleElementReferenceException
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(window, LIMIT_S, 0.1, [StaleElementReferenceException]).until(true)


def text(window: Any, selector: str) -> str:
    """The text of an element; empty where there is none."""
    script = "return document.querySelector(arguments[0])?.innerText ?? ''"
    return str(window.execute_script(script, selector))


def count(window: Any, selector: str) -> int:
    return int(window.execute_script("return document.querySelectorAll(arguments[0]).length", selector))


def click(window: Any, selector: str) -> None:
    """Clicks as a script does: what is live may move under a pointer."""
    script = "const e = document.querySelector(arguments[0]); if (e) e.click(); return e !== null"
    wait(window, lambda w: w.execute_script(script, selector))


def fits(window: Any) -> None:
    """Nothing is cut or lies over something else, at any width, light and dark; the browser is content."""
    for dark in (False, True):
        for width in WIDTHS:
            whole_page(window, width, dark=dark)
            wrong = wrong_layout(window)
            assert wrong == [], f"at {width} px"
    show(window, 1280)
    assert complaints(window) == []


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The source of axe-core, which finds what keeps people out."""
    directory = tmp_path_factory.mktemp("axe")
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("needs npm")
    command = [npm, "install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts", "axe-core@4"]
    ran = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=120, check=False)
    if ran.returncode:
        pytest.skip("axe-core cannot be installed")
    return (directory / "node_modules" / "axe-core" / "axe.min.js").read_text()


def findings(window: Any, axe: str) -> list[str]:
    """What is serious or worse."""
    window.execute_script(axe)
    script = "const done = arguments[0]; axe.run(document).then((found) => done(found.violations))"
    found = window.execute_async_script(script)
    return [
        f"{each['id']}: {each['nodes'][0]['html']}"
        for each in found
        if each["impact"] in ("serious", "critical")
    ]


# ---------------------------------------------------------------- coming in


def test_the_file_that_is_opened_leads_a_browser_to_the_jobs(window: Any, pki: Pki, tmp_path: Path) -> None:
    opener, noted = tmp_path / "browser", tmp_path / "noted"
    opener.write_text(f'#!/bin/sh\necho "$@" > {noted}.part && mv {noted}.part {noted}\n')
    opener.chmod(0o700)
    with (
        scheduler("--serve", **pki.env(), MS_WORKER_NUM="") as running,
        web(running, "--open", BROWSER=f"{opener} %s") as page,
    ):
        wait(window, lambda w: noted.exists())
        window.get(noted.read_text().strip())
        wait(window, lambda w: text(w, "#link") == "live")
        assert window.current_url == f"{page.origin}{page.place}/jobs"


# ---------------------------------------------------------------- a real job


def test_a_job_of_six_from_its_first_look_to_its_end(window: Any, axe: str, tmp_path: Path) -> None:
    with launch(tmp_path, 6) as job, job.web() as page:
        window.get(page.link())
        wait(window, lambda w: "running" in text(w, ".job"))
        fits(window)
        assert findings(window, axe) == []
        click(window, ".job a")
        wait(window, lambda w: count(w, ".cell.s-member") == 6)
        wait(window, lambda w: count(w, "svg.timeline rect.stood") == 1)
        wait(window, lambda w: count(w, "#plots path") == 4)

        os.kill(job.pid_of(3), signal.SIGKILL)
        wait(window, lambda w: "5 of 6" in text(w, "#head"))
        wait(
            window,
            lambda w: "node 3" in text(w, ".cell.s-missing"),
        )
        wait(window, lambda w: "rank 3 (node 3" in text(w, "#timeline"))  # read by a request of its own

        click(window, '.drain[aria-label="Drain rank 1, node 1"]')
        wait(window, lambda w: "Drain node 1?" in text(w, "h1"))
        fits(window)
        assert findings(window, axe) == []
        click(window, "button.danger")
        wait(window, lambda w: "will leave at a step boundary" in text(w, ".flash"))
        wait(window, lambda w: "4 of 6" in text(w, "#head"))
        assert "drained" in text(window, "#trail")
        fits(window)
        for dark in (False, True):
            show(window, 1280, dark=dark)
            assert findings(window, axe) == []

        click(window, "#logs summary")
        wait(window, lambda w: "Generation 1" in text(w, "#log-0"))
        _keyboard(window)

        click(window, "a.danger")
        wait(window, lambda w: "End job" in text(w, "h1"))
        click(window, "button.danger")
        wait(window, lambda w: "has ended the job" in text(w, ".flash"))
        wait(window, lambda w: "cannot be reached since" in text(w, "#absence"))
        assert job.process.wait(LIMIT_S) != 0
        fits(window)


def _keyboard(window: Any) -> None:
    """The first stop is the way past the bar, and cells' links are stops, each of which shows where it is."""
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    window.execute_script("document.activeElement.blur(); window.getSelection().removeAllRanges();")
    window.execute_script("document.body.setAttribute('tabindex', '-1'); document.body.focus();")
    stops = []
    for _ in range(6):
        ActionChains(window).send_keys(Keys.TAB).perform()
        stops.append(str(window.execute_script("return document.activeElement.textContent")).strip())
        outline = window.execute_script("return getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none"
    assert stops[0] == "To the content" and "Jobs" in stops
    assert any(stop.startswith("Drain") for stop in stops)


# ---------------------------------------------------------------- what else may come


HOSTILE = ("<script>alert(1)</script>", '"><img/src=x/onerror=alert(1)>', "שלום-עולם", "n" * 128)


def test_hostile_names_are_text_and_break_nothing(window: Any, axe: str, pki: Pki, tmp_path: Path) -> None:
    with (
        scheduler("--serve", **pki.env(), MS_WORKER_NUM="", MS_NODE_TIMEOUT="200") as running,
        web(running) as page,
        channel(running.target, pki.credentials("client")) as workers,
    ):
        streams = []
        for name in HOSTILE:
            stream = Stream(workers)
            stream.put(join(name, worker_num=6, incarnation=hash(name) % 1000 + 1))
            stream.next("welcome")
            streams.append(stream)
        window.get(page.link())
        click(window, ".job a")
        wait(window, lambda w: count(w, ".cell.s-waiting") == 4)
        shown = text(window, "#grid")
        assert all(name in shown for name in HOSTILE)
        fits(window)
        assert findings(window, axe) == []
        click(window, ".cell .drain")
        wait(window, lambda w: "Drain node" in text(w, "h1"))
        fits(window)
        for stream in streams:
            stream.call.cancel()


def test_a_scheduler_that_is_killed_and_started_again(window: Any, pki: Pki, tmp_path: Path) -> None:
    journal = {"MS_ENABLE_RECOVERY": "1", "MS_RECOVERY_PATH": str(tmp_path), "MS_NODE_TIMEOUT": "200"}
    with scheduler("--serve", **pki.env(), **journal) as first, web(first) as page:
        with channel(first.target, pki.credentials("client")) as workers:
            streams = form(workers)
            window.get(page.link())
            click(window, ".job a")
            wait(window, lambda w: count(w, ".cell.s-member") == 2)
            first.process.kill()
            wait(window, lambda w: "cannot be reached since" in text(w, "#absence"))
            assert count(window, ".cell") == len(streams)  # what was last heard stays
            fits(window)
        with scheduler("--serve", port=str(first.port), **pki.env(), **journal):
            wait(window, lambda w: text(w, "#absence") == "")
            wait(window, lambda w: count(w, ".cell.s-lost") == 2)


def test_two_jobs(window: Any, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "muster", "certs", "init", "--dir", "keys", "--password-file", "password"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    env = {"MS_CONFIG_FILE": str(tmp_path / "keys/config.json"), "MS_WORKER_NUM": ""}
    env["MS_NODE_TIMEOUT"] = "200"
    for role in ("SERVER", "CLIENT"):
        env[f"MS_{role}_PASSWORD_FILE"] = str(tmp_path / "password")
    from muster.certs.runtime.store import load_credentials

    password = (tmp_path / "password").read_bytes().strip()
    client = load_credentials(tmp_path / "keys/client.p12", password, tmp_path / "keys/ca.crt")
    with (
        scheduler("--serve", **env) as running,
        web(running) as page,
        channel(running.target, client) as workers,
    ):
        first = form(workers, 2, job_id="first")
        second = form(workers, 3, job_id="second")
        window.get(page.link())
        wait(window, lambda w: count(w, ".job .s-running") == 2)
        fits(window)
        for stream in first:
            stream.put(leave())
            stream.next("ended")
        wait(window, lambda w: count(w, ".job .s-running") == 1 and count(w, ".job .s-ended") == 1)
        for stream in (*first, *second):
            stream.call.cancel()


def test_a_link_that_was_used_is_told_so(window: Any, pki: Pki) -> None:
    with scheduler("--serve", **pki.env()) as running, web(running) as page:
        window.get(page.link())
        wait(window, lambda w: "Jobs" in text(w, "h1"))
        window.delete_all_cookies()
        window.get(page.link())
        assert "This link is not good" in text(window, "h1")
        window.get(page.link(1))
        wait(window, lambda w: "Jobs" in text(w, "h1"))
        _other_site(window, page)


@may_hold_certificates
@pytest.mark.parametrize("name", ["operator", "client"])
def test_beyond_loopback_the_p12_in_the_browser_lets_an_operator_in(
    name: str, pki: Pki, tmp_path: Path
) -> None:
    with (
        scheduler("--serve", **pki.env()) as running,
        web(running, "--bind", "0.0.0.0", "--name", "localhost") as page,
    ):
        p12, authority = pki.directory / f"{name}.p12", pki.directory / "ca.crt"
        chromium = with_certificate(tmp_path, p12, PASSWORD, authority, page.origin)
        with browser(binary=chromium) as window:
            window.get(page.link())
            if name == "operator":
                wait(window, lambda w: "Jobs" in text(w, "h1"))
                fits(window)
            else:
                wait(window, lambda w: "has the role worker" in text(w, "body"))


def _other_site(window: Any, page: Web) -> None:
    """A page of another origin here reaches nothing, though this browser is let in."""
    import http.server
    import threading

    place = f"{page.origin}{page.place}"
    html = f"""<form id=f method=post action="{place}/end"><input name=id value=default></form>
    <script>
    window.got = [];
    for (const path of ["jobs", "events", "job?id=default"]) {{
      fetch("{place}/" + path, {{credentials: "include"}})
        .then(r => r.text()).then(t => got.push(t), e => got.push("refused"));
    }}
    </script>"""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(html.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        window.get(f"http://127.0.0.1:{server.server_port}/")
        wait(window, lambda w: w.execute_script("return got.length") == 3)
        assert window.execute_script("return got") == ["refused"] * 3
        window.execute_script("document.getElementById('f').submit()")
        wait(window, lambda w: "refused" in text(w, "body"))
    finally:
        server.shutdown()
        server.server_close()
