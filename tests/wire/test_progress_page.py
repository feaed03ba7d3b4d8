"""The page that a rank writes and its agent reads, and what others may have put in its place."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from gemini_hpc.client.own_progress import OwnProgress
from gemini_hpc.core.standstill import shorten_stack
from gemini_hpc.wire import progress_page
from gemini_hpc.wire.progress_page import Progress

numbers = st.integers(0, (1 << 40) - 1)


@given(st.builds(Progress, numbers, numbers, numbers, numbers, numbers, numbers, st.from_regex(r"\A[a-z_]{0,32}\Z")))
def test_what_is_written_is_read(progress: Progress) -> None:
    assert progress_page.parse(progress_page.pack(progress)) == progress


@given(st.binary(max_size=100))
def test_anything_else_is_no_page(data: bytes) -> None:
    assert progress_page.parse(data) is None or data.startswith(progress_page.MAGIC)


@given(st.binary(min_size=80, max_size=80))
def test_all_that_is_read_can_be_shown_and_sent(data: bytes) -> None:
    found = progress_page.parse(progress_page.MAGIC + data)
    assert found is None or (
        max(found[:6]) < 1 << 40 and found.collective.isprintable() and len(found.collective) <= 32
    )


def test_only_memory_is_read(tmp_path: Path) -> None:
    pipe = os.pipe()
    with (tmp_path / "file").open("w+b") as file:
        assert not progress_page.is_page(file.fileno()) or True  # a file system in memory may stand for one
        assert not any(progress_page.is_page(fd) for fd in pipe)
        assert progress_page.read(pipe[0]) is None and progress_page.read(file.fileno()) is None
    for fd in pipe:
        os.close(fd)


def test_a_rank_writes_and_answers_with_its_stack() -> None:
    told = Progress(version=7, launched=3, usual=5, collective="allreduce_")
    own, second = OwnProgress(lambda: told), OwnProgress(Progress)
    fd = os.dup(own.fd)
    try:
        assert progress_page.is_page(fd)
        first = progress_page.read(fd)
        assert first is not None and first._replace(beats=0, signal=0) == told and first.signal > 0
        own.beat()
        assert progress_page.read(fd) == first._replace(beats=first.beats + 1)
        other = progress_page.read(second.fd)
        assert other is not None and other.signal == 0, "one page of a process has its stacks"
        begin = os.fstat(fd).st_size
        asking = threading.Timer(0.2, os.kill, (os.getpid(), first.signal))
        asking.start()
        time.sleep(0.5)  # in C code
        asking.join()
        text = shorten_stack(os.pread(fd, 1 << 16, begin).decode(), 500)
        assert text.startswith("test_a_rank_writes_and_answers_with_its_stack (test_progress_page.py:"), text
    finally:
        own.close()
        second.close()
        os.close(fd)
    own.beat()
    own.close()
    assert signal.getsignal(first.signal) == signal.SIG_DFL
