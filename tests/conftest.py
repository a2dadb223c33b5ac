"""What all tests share."""

from __future__ import annotations

import contextlib
import fnmatch
import gc
import importlib.metadata
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

# A slow machine is no fault of the code: no test is judged by the clock.
# Each run has the same cases, so that none fails by chance; --hypothesis-profile random looks for new ones.
settings.register_profile(
    "muster", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.register_profile("random", settings.get_profile("muster"), derandomize=False)
settings.load_profile("muster")

# Tests start hundreds of processes: without bytecode on disk each would compile its modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Several tests at a time have several ranks each: threads of numpy and torch would wait for cores in loops.
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

ONE_JOB = "tests/attacks/on_one_job"


class _AttacksTogether(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """All tests of a file run in one process, and all attacks on one job, which is judged at last."""

    def _split_scope(self, nodeid: str) -> str:
        return ONE_JOB if nodeid.startswith(f"{ONE_JOB}/") else super()._split_scope(nodeid)


def pytest_xdist_auto_num_workers() -> int:
    """Two for each core: most of these tests wait for processes."""
    return 2 * len(os.sched_getaffinity(0))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """Takes the place of ``--dist loadfile``."""
    if config.getoption("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False  # else files with many tests begin, and slow ones end last
    return _AttacksTogether(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Spares the garbage collector the thousands of tests, which stay until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins with what is slow."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(autouse=True)
def _loggers_as_they_were() -> Iterator[None]:
    """What one test has Muster log is not in the next one's log."""
    before = {logger: (logger.level, logger.propagate, logger.handlers[:]) for logger in _own_loggers()}
    yield
    for logger in _own_loggers():
        level, logger.propagate, logger.handlers[:] = before.get(logger, (logging.NOTSET, True, []))
        logger.setLevel(level)


def _own_loggers() -> list[logging.Logger]:
    known = dict(logging.root.manager.loggerDict)
    return [
        each
        for name, each in known.items()
        if name.startswith(("muster", "scheduler")) and isinstance(each, logging.Logger)
    ]


# ---------------------------------------------------------------- skips that are allowed


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds ``--allowed-skips FILE``: a skip that no line of the file allows makes the run fail."""
    words = "fail where a test is skipped that FILE does not list"
    parser.addoption("--allowed-skips", metavar="FILE", help=words)


def pytest_configure(config: pytest.Config) -> None:
    """Watches the skips of the whole run: with xdist in the process that hears of all of them."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        if importlib.metadata.version("torch").startswith("2.5."):  # where two threads cannot load it at once
            importlib.import_module("torch._dynamo")
    name = config.getoption("--allowed-skips")
    if name and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SkipGate(Path(name).read_text()), "skip-gate")


class SkipGate:
    """Fails a run in which a test was skipped without leave.

    Args:
        allowed: lines ``NODE-ID PATTERN | REASON PATTERN``, as fnmatch has them; ``#`` begins a comment.
    """

    def __init__(self, allowed: str) -> None:
        lines = (line.partition("#")[0].strip() for line in allowed.splitlines())
        self._allowed = [tuple(part.strip() for part in line.split("|", 1)) for line in lines if line]
        self._refused: list[str] = []

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        if not any(
            fnmatch.fnmatchcase(report.nodeid, node) and fnmatch.fnmatchcase(reason, why)
            for node, why in self._allowed
        ):
            self._refused.append(f"{report.nodeid} | {reason}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes a test that was skipped."""
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Notes a module that was skipped."""
        self._note(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Makes a failure of skips without leave."""
        if self._refused and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Lists them."""
        if self._refused:
            terminalreporter.section("skipped, and not in the list of allowed skips")
            for line in sorted(set(self._refused)):
                terminalreporter.write_line(line)
