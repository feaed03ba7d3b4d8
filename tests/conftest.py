"""For all tests: the order in which `pytest -n 3 --dist loadfile --no-loadscope-reorder` deals the files; what
`pytest --quick` leaves out; failures of tasks that nobody hears of; and the leak check. That looks before and after
each test, each file, and, in the main process, the whole run."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import moved
import pytest
import quick
from dealing import Work, longest_first, taken
from leaks import Found, assert_nothing_new, machine, new
from unheard import Unheard

# What ends by itself after a test may take that long: a process that was sent its signal, a memfd of a dead agent.
SETTLE_S = 10.0
# Other people's files on this machine come and go.
SHMEM_TOLERANCE_BYTES = 64 << 20
_unheard = Unheard()
_outcome = pytest.StashKey[bool]()
_complaint = pytest.StashKey[str]()
_before_the_run = pytest.StashKey[tuple[Found, int]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="what needs neither root nor a cluster nor long: quick.py")


def pytest_configure(config: pytest.Config) -> None:
    machine.begin()
    config.add_cleanup(machine.end)
    _unheard.begin()
    config.add_cleanup(_unheard.end)
    if config.option.quick:
        quick.begin()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Saves the import of what is left out as a whole. None: as usual."""
    below = config.option.quick and collection_path.is_relative_to(quick.TESTS)
    return True if below and quick.later(collection_path.relative_to(quick.TESTS).as_posix()) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if moved.instead(item.nodeid.removeprefix("tests/")):
            item.add_marker("variant")
    if config.option.quick and (left_out := [item for item in items if quick.later(item.nodeid)]):
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not quick.later(item.nodeid)]
    if hasattr(config, "workerinput"):
        items[:] = longest_first(items)


def pytest_collection_finish() -> None:
    """What all the imports have made is not looked through after each test: with torch that takes 0.1 s."""
    gc.collect()
    gc.freeze()


def look(before: Found) -> Found:
    """What is there now, also where a process has ended since the last look. What only garbage of the tests' own
    process holds is not left behind; to collect it takes longest, so that is done only where something is new."""
    machine.rescan()
    found = machine.present()
    if new(before, found):
        gc.collect()
        machine.rescan()
        found = machine.present()
    return found


def _nothing_new(before: Found) -> None:
    assert_nothing_new(before, lambda: look(before), SETTLE_S)


@pytest.fixture(scope="module", autouse=True)
def no_leaks_of_a_file() -> Iterator[None]:
    before = machine.present()
    yield
    _nothing_new(before)


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest, no_leaks_of_a_file: None) -> Iterator[None]:
    """Nothing that a test starts or makes outlives it. A test that has failed is not blamed again here."""
    before = machine.present()
    yield
    if request.node.stash.get(_outcome, True):
        _nothing_new(before)


@pytest.fixture(autouse=True)
def every_failure_is_heard() -> Iterator[None]:
    """A task whose exception nobody takes writes a traceback into somebody's log."""
    _unheard.take()
    yield
    assert not (texts := _unheard.take()), "\n".join(texts)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.failed:
        item.stash[_outcome] = False
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    session.stash[_before_the_run] = machine.present(), machine.shmem_bytes()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    machine.adopt(getattr(node, "workeroutput", {}).get("pid", machine.PID))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """In the main process, when all workers have ended. Shared memory counts unless others have clusters."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["pid"] = machine.PID
        return
    before, shmem = session.stash[_before_the_run]
    try:
        _nothing_new(before)
        deadline = time.monotonic() + SETTLE_S
        while not machine.strangers() and (grown := machine.shmem_bytes() - shmem) > SHMEM_TOLERANCE_BYTES:
            assert time.monotonic() < deadline, f"{grown >> 20} MiB of shared memory more than before the tests"
            time.sleep(0.2)
    except AssertionError as exc:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        session.config.stash[_complaint] = str(exc)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    reports = [r for found in terminalreporter.stats.values() for r in found if isinstance(r, pytest.TestReport)]
    if config.option.quick:
        terminalreporter.section("the quick check")
        why = [str(r.longrepr[2]) for r in reports if r.skipped and isinstance(r.longrepr, tuple)]
        for line in [*quick.skipped(why), *quick.over_budget([(r.nodeid, r.duration) for r in reports])]:
            terminalreporter.write_line(line)
    elif reports := [r for r in reports if hasattr(r, "worker_id")]:
        terminalreporter.section("the longest files")
        for line in taken([Work(r.worker_id, r.nodeid, r.start, r.stop) for r in reports]):
            terminalreporter.write_line(line)
    if complaint := config.stash.get(_complaint, ""):
        terminalreporter.section("after all tests", red=True)
        terminalreporter.write_line(complaint)
