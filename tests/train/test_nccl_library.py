"""Our calls of NCCL's C interface, against a library that only writes them down (fake_nccl.c)."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gemini_hpc.train.device.interface import Broken, Communicator, Message
from gemini_hpc.train.nccl.communicator import NcclCommunicator
from gemini_hpc.train.nccl.library import ID_BYTES, Library

from .fake_device import FakeStream, World

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("nccl") / "libnccl.so.2"
    source = Path(__file__).with_name("fake_nccl.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", made, source], check=True, timeout=60)
    return made


Made = tuple[NcclCommunicator, FakeStream, Callable[[], list[str]]]


@pytest.fixture
def made(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    log = tmp_path / "calls"
    monkeypatch.setenv("FAKE_NCCL_LOG", str(log))
    communicator = NcclCommunicator(Library([str(built)]), 1, 4, lambda stream: 0xABC, launch_s=0.2)
    return communicator, World(1, 0).devices[0].training, lambda: log.read_text().splitlines()


def connect(communicator: NcclCommunicator, built: Path) -> None:
    made_id = Library([str(built)]).create_unique_id()
    assert len(made_id) == ID_BYTES
    communicator.connect(made_id, 5.0)


def test_a_group_goes_out_as_it_was_given(built: Path, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NCCL_BUSY", "3")
    nccl, stream, calls = made
    _: Communicator = nccl
    connect(nccl, built)
    out, back = torch.full((5,), 9, dtype=torch.uint8), torch.zeros(6, dtype=torch.uint8)
    nccl.exchange(stream, [Message(2, out)], [Message(0, back[1:])])
    assert back.tolist() == [0, 7, 7, 7, 7, 7]
    assert nccl.poll_error() == ""
    nccl.abort()
    nccl.abort()
    assert calls() == [
        "ncclGetUniqueId",
        "ncclCommInitRankConfig 1/4 id=1 size=1 magic=cafebeef blocking=0 least=-2147483648 most=4 net=0",
        "ncclGroupStart",
        "ncclSend first=9 count=5 type=1 peer=2 stream=0xabc",
        "ncclRecv count=5 type=1 peer=0 stream=0xabc",
        "ncclGroupEnd depth=0",
        "ncclCommAbort",
    ]
    with pytest.raises(Broken, match="aborted"):
        nccl.exchange(stream, [Message(2, out)], [])
    assert nccl.poll_error() == "aborted"


def test_a_group_is_closed_also_after_a_failure(built: Path, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    nccl, stream, calls = made
    connect(nccl, built)
    monkeypatch.setenv("FAKE_NCCL_FAIL", "ncclSend")
    with pytest.raises(Broken, match="ncclSend: remote process exited"):
        nccl.exchange(stream, [Message(2, torch.zeros(1, dtype=torch.uint8))], [])
    assert calls()[-1] == "ncclGroupEnd depth=0"


def test_an_error_at_another_rank_is_seen(built: Path, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    nccl, _, _ = made
    connect(nccl, built)
    monkeypatch.setenv("FAKE_NCCL_FAIL", "async")
    assert nccl.poll_error() == "remote process exited"


def test_a_launch_that_does_not_end_holds_the_training_no_longer_than_agreed(
    built: Path, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    nccl, stream, _ = made
    connect(nccl, built)
    monkeypatch.setenv("FAKE_NCCL_BUSY", "1000000000")
    began = time.monotonic()
    with pytest.raises(Broken, match=r"0\.2 s"):
        nccl.exchange(stream, [Message(2, torch.zeros(1, dtype=torch.uint8))], [])
    assert time.monotonic() - began < 30
    assert nccl.poll_error() == ""  # in progress is no error


def test_abort_ends_a_launch_that_hangs_in_another_thread(
    built: Path, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    nccl, stream, calls = made
    nccl._launch_s = 30.0
    connect(nccl, built)
    monkeypatch.setenv("FAKE_NCCL_BUSY", "1000000000")
    found: list[str] = []

    def launch() -> None:
        try:
            nccl.exchange(stream, [Message(2, torch.zeros(1, dtype=torch.uint8))], [])
        except Broken as error:
            found.append(str(error))

    thread = threading.Thread(target=launch)
    thread.start()
    deadline = time.monotonic() + 20
    while not any("GroupEnd" in call for call in calls()) and time.monotonic() < deadline:
        time.sleep(0.01)
    nccl.abort()
    thread.join(20)
    assert found == ["aborted"] and calls()[-1] == "ncclCommAbort"
