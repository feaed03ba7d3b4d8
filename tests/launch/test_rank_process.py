"""What the end of a rank shows its launcher."""

from __future__ import annotations

import faulthandler
import os
import select
import signal
from collections.abc import Callable

import pytest

from gemini_hpc.core.culprits import Cause
from gemini_hpc.launch.rank_process import Forked, RankProcess, note_error


def rank(run: Callable[[], object]) -> RankProcess:
    """A process that runs this, as `gemini_hpc.launch` runs a script."""
    try:
        return RankProcess({})
    except Forked:
        status = 1
        try:
            run()
            status = 0
        except BaseException as error:
            note_error(error)
            status = 0 if isinstance(error, SystemExit) and not error.code else 1
        finally:
            os._exit(status)


def ended(process: RankProcess) -> Cause | None:
    assert select.select([process.fd], [], [], 20)[0], "it does not end"
    assert process.has_ended()
    return process.cause


def raises(error: BaseException) -> Callable[[], object]:
    def run() -> None:
        raise error

    return run


def swallows() -> None:
    try:
        raise RuntimeError("[gloo] Connection closed by peer")
    except RuntimeError:
        raise SystemExit(1) from None


def in_a_child() -> None:
    """What a rank forks has errors of its own."""
    pid = os.fork()
    if pid == 0:
        note_error(ValueError("in a worker"))
        os._exit(1)
    os.waitpid(pid, 0)
    os._exit(7)


def kills(number: int) -> Callable[[], object]:
    def run() -> None:
        faulthandler.disable()  # pytest's
        os.kill(os.getpid(), number)

    return run


@pytest.mark.parametrize(
    ("run", "cause"),
    [
        (lambda: None, None),
        (raises(SystemExit(0)), None),
        (raises(ValueError("a mistake")), Cause.RAISED),
        (raises(RuntimeError("CUDA error: an illegal memory access was encountered")), Cause.DEVICE),
        (raises(RuntimeError("CUDA error: device-side assert triggered")), Cause.RAISED),
        (raises(SystemExit(3)), Cause.RAISED),
        (raises(RuntimeError("[gloo] Connection closed by peer")), Cause.CONSEQUENCE),
        (swallows, Cause.CONSEQUENCE),
        (in_a_child, Cause.RAISED),
        (kills(signal.SIGKILL), Cause.CRASHED),
        (kills(signal.SIGSEGV), Cause.CRASHED),
        (kills(signal.SIGABRT), Cause.ABORTED),
        (kills(signal.SIGTERM), Cause.CONSEQUENCE),
    ],
)
def test_what_an_end_shows(run: Callable[[], object], cause: Cause | None) -> None:
    assert ended(rank(run)) == cause


def test_an_error_is_known_before_the_process_ends() -> None:
    """Its handler may wait for a while, and the launcher may kill it meanwhile."""
    told, tell = os.pipe()

    def run() -> None:
        note_error(ValueError("a mistake"))
        os.write(tell, b".")
        signal.pause()

    process = rank(run)
    assert os.read(told, 1) == b"."
    assert process.raised is Cause.RAISED and not process.has_ended()
    process.kill()
    assert process.cause is Cause.RAISED
    os.close(told)
    os.close(tell)
