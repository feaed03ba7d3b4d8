"""For all tests: which ones a run takes, in what order, and what it records; what a failed one is repeated with;
failures of tasks that nobody hears of; and the leak check. That looks before and after each test, each file, and, in
the main process, the whole run."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import hypothesis
import parts
import pytest
import quick
from leaks import Found, assert_nothing_new, machine, new
from sharing import shared  # noqa: F401
from unheard import Unheard

from gemini_hpc.devcluster.cluster import Cluster

# What ends by itself after a test may take that long: a process that was sent its signal, a memfd of a dead agent.
SETTLE_S = 10.0
# Other people's files on this machine come and go.
SHMEM_TOLERANCE_BYTES = 64 << 20
_unheard = Unheard()
_outcome = pytest.StashKey[bool]()
_complaint = pytest.StashKey[str]()
_running: pytest.Item | None = None
_before_the_run = pytest.StashKey[tuple[Found, int]]()


# Time limits are pytest-timeout's. `steady` draws the same few examples each time.
hypothesis.settings.register_profile("usual", deadline=None)
hypothesis.settings.register_profile("steady", deadline=None, derandomize=True, database=None, max_examples=20)
hypothesis.settings.load_profile("usual")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="the tests that need neither root nor a cluster nor long")
    parser.addoption("--record", action="store_true", help="write how long each file took to tests/durations.json")


def pytest_configure(config: pytest.Config) -> None:
    machine.begin()
    config.add_cleanup(machine.end)
    _unheard.begin()
    config.add_cleanup(_unheard.end)
    if config.option.quick:
        quick.begin()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if addresses := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"workers do not agree on a name with an address: {addresses[0]}")
    if config.option.quick and (left_out := [item for item in items if quick.is_left_out(item)]):
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not quick.is_left_out(item)]
    if hasattr(config, "workerinput"):
        order = {
            file: n for n, file in enumerate(parts.longest_first({_file(i.nodeid) for i in items}, parts.read()))
        }
        items.sort(key=lambda item: order[_file(item.nodeid)])


def _file(test: str) -> str:
    """Return the file of a test, relative to tests/."""
    return test.partition("::")[0].removeprefix("tests/")


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


@pytest.fixture(scope="session", autouse=True)
def clusters_are_marked() -> Iterator[None]:
    """Fail the test that brings up a cluster and is not marked: the stages of `make test` go by the marker."""
    up = Cluster.bring_up

    def marked_up(*arguments: Any, **options: Any) -> Cluster:
        if _running is not None and _running.get_closest_marker("cluster") is None:
            pytest.fail("this test brings up a cluster: mark it with pytest.mark.cluster")
        return up(*arguments, **options)

    Cluster.bring_up = marked_up  # type: ignore[method-assign,assignment]
    yield
    Cluster.bring_up = up  # type: ignore[method-assign]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    global _running  # noqa: PLW0603
    _running = item
    return (yield)


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
        for line in quick.over_budget([(r.nodeid, r.duration) for r in reports]):
            terminalreporter.write_line(line)
    if config.option.record:
        parts.record((_file(r.nodeid), _kind(r), r.duration) for r in reports)
    if failed := sorted({r.nodeid for r in reports if r.failed}):
        terminalreporter.section("to repeat a failure", red=True)
        for test in failed:
            terminalreporter.write_line(f"PYTHONPATH=. .venv/bin/python -m pytest -m '' '{test}'")
    if complaint := config.stash.get(_complaint, ""):
        terminalreporter.section("after all tests", red=True)
        terminalreporter.write_line(complaint)


def _kind(report: pytest.TestReport) -> str:
    """Return which of the stages of `make test-all` runs a test."""
    return next((kind for kind in ("alone", "cluster") if kind in report.keywords), "work")
