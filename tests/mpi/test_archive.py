"""The archive: one HDF5 file that all ranks fill, by Debian's HDF5 with Open MPI 4, read by a serial HDF5."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tests.train.launch import ROOT

from .archiver import plate
from .jobs import OPENMPI

pytestmark = pytest.mark.slow

N = 12
PARALLEL = Path(sys.prefix) / "parallel/bin/python"
OPTIONS = ("--oversubscribe", "--bind-to", "none")
WAIT_S = 120.0


class Debian:
    """Debian's Open MPI and its Python."""

    def __init__(self, ranks: int, options: dict[str, Any], program: Sequence[str] = ()) -> None:
        missing = [str(path) for path in (PARALLEL, Path("/usr/bin/mpiexec.openmpi")) if not path.exists()]
        if missing:
            pytest.fail(f"no {missing[0]}: `make test` installs it", pytrace=False)
        self.scratch = tempfile.TemporaryDirectory(prefix="archive-")
        keep = {k: v for k, v in os.environ.items() if not k.startswith(("GEMINI_", "SLURM_", "PMI", "OMPI_"))}
        env = {
            **keep,
            "PYTHONPATH": str(ROOT),
            "TMPDIR": self.scratch.name,
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_pml": "ob1",
            "OMPI_MCA_btl": "self,vader",
            "OMPI_MCA_btl_vader_backing_directory": self.scratch.name,
            "OMPI_MCA_plm": "isolated",
            "OMPI_MCA_oob_tcp_if_include": "lo",
        }
        mpiexec = ["/usr/bin/mpiexec.openmpi", *OPTIONS, "-n", str(ranks)]
        program = program or ["-m", "tests.mpi.archiver", json.dumps({"n": N, **options})]
        self.process = subprocess.Popen(
            [*mpiexec, str(PARALLEL), *program],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def out(self) -> str:
        """What it has printed, when it has ended."""
        try:
            out, err = self.process.communicate(timeout=WAIT_S)
        except subprocess.TimeoutExpired:
            self.end()
            pytest.fail("the ranks wait for each other", pytrace=False)
        self.scratch.cleanup()
        assert self.process.returncode == 0, out + err
        return out

    def told(self) -> list[list[str]]:
        """For each rank what each archive has raised, or ""."""
        return [json.loads(line)["told"] for line in self.out().splitlines()]

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=30)
        self.scratch.cleanup()


def left(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def test_the_example_archives_its_plate(tmp_path: Path) -> None:
    path = tmp_path / "plate.h5"
    example = [str(ROOT / "examples/heat_mpi.py"), "--n", "24", "--steps", "9", "--archive", str(path)]
    out = Debian(3, {}, example).out()
    with h5py.File(path) as file:
        assert hashlib.sha256(file["tensors/field"][:].tobytes()).hexdigest() in out
        assert file.attrs["version"] == 9 and sorted(file["tensors"]) == ["field", "heat"] and "ranks" not in file


@pytest.mark.parametrize("ranks, boxes", [(1, False), (3, False), (4, True)])
def test_a_serial_hdf5_reads_what_all_ranks_have_written(tmp_path: Path, ranks: int, boxes: bool) -> None:
    path = tmp_path / "plate.h5"
    before = time.time()
    assert Debian(ranks, {"paths": [str(path), str(path)], "boxes": boxes}).told() == [["", ""]] * ranks
    assert left(tmp_path) == ["plate.h5"]
    with h5py.File(path) as file:
        assert (file.attrs["training"], file.attrs["version"], file.attrs["world"]) == ("plate", 2, ranks)
        assert before - 1 <= file.attrs["time"] <= time.time()
        assert sorted(file["tensors"]) == ["field", "halo", "time%2Fs"]
        assert np.array_equal(file["tensors/field"], plate(N) + 2), "of the second, which has taken the first's place"
        assert np.array_equal(file["tensors/halo"][: N // 2], plate(N)[: N // 2])
        assert file["tensors/time%2Fs"][()] == 0.25
        assert file["tensors/time%2Fs"].attrs["tensor"] == "time/s"
        assert sorted(file["ranks"]) == [str(rank) for rank in range(ranks)]
        for rank in range(ranks):
            own = file[f"ranks/{rank}"]
            assert own["flags"][:].tolist() == [rank == 0, rank == 1]
            assert own["other"][:].tobytes() == (np.arange(3, dtype=">i4") + rank).tobytes()
            assert np.array_equal(own["columns"], np.full((2, 3), rank, dtype=np.complex64))
            assert own["nothing"].shape == (0, 2)
            assert ("alone" in own) == (rank == 1)


def test_parts_that_are_not_of_one_array_are_refused_on_all_ranks(tmp_path: Path) -> None:
    told = Debian(3, {"paths": [str(tmp_path / "plate.h5")], "differs_on": 2}).told()
    reason = "ValueError: field is (13, 12) float64 on rank 2, (12, 12) float64 on one before"
    assert told == [[reason]] * 3 and not left(tmp_path)


def test_a_place_that_one_rank_cannot_reach_is_told_on_all(tmp_path: Path) -> None:
    """As with a path on a disk that each node has for itself. The next archive is whole."""
    path = str(tmp_path / "plate.h5")
    far = [path, str(tmp_path / "not-there/plate.h5"), path]
    told = Debian(3, {"paths": [far, path]}).told()
    reason = f"OSError: rank 1: {far[1]}: the directory is not there"
    assert told == [[reason, ""]] * 3 and left(tmp_path) == ["plate.h5"]
    told = Debian(2, {"paths": [far[1]]}).told()
    assert told == [[f"OSError: rank 0: {far[1]}: the directory is not there"]] * 2


@pytest.fixture
def disk() -> Iterator[Path]:
    """A file system of 1 MiB, seen by all."""
    path = Path(tempfile.mkdtemp(prefix="tier-disk-", dir="/var/tmp"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)
        path.rmdir()


@pytest.mark.parametrize("boxes", [False, True])
def test_on_a_full_disk_the_archive_before_stays(disk: Path, boxes: bool) -> None:
    path = disk / "plate.h5"
    Debian(4, {"paths": [str(path)]}).told()
    before = path.read_bytes()
    told = Debian(4, {"paths": [str(path)], "n": 400, "boxes": boxes}).told()
    assert told == [[f"OSError: rank 0: {path}: the file system is full"]] * 4
    assert path.read_bytes() == before and left(disk) == ["plate.h5"]


def test_what_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    """The last one's rows lie where it must not write."""
    path = str(tmp_path / "plate.h5")
    ((told,), *others) = Debian(3, {"paths": [path], "n": 80, "limited": 2}).told()
    assert told.startswith(f"OSError: rank 2: {path}: ") and others == [[told]] * 2
    assert "write" in told and not left(tmp_path)


def test_what_a_killed_program_left_goes_with_the_next_archive(tmp_path: Path) -> None:
    path = tmp_path / "plate.h5"
    (tmp_path / ".plate.h5.tmp").write_bytes(b"half")
    Debian(2, {"paths": [str(path)]}).told()
    assert left(tmp_path) == ["plate.h5"]


def test_an_h5py_without_mpi_is_told(tmp_path: Path) -> None:
    """PyPI's, under a rank of Open MPI 5."""
    options = json.dumps({"paths": [str(tmp_path / "plate.h5")]})
    with (tmp_path / "out").open("wb") as out:
        process = OPENMPI.launch(tmp_path, 2, ["tests.mpi.archiver", options], out)
        assert process.wait(WAIT_S) == 0, (tmp_path / "out").read_text()
    lines = [json.loads(x) for x in (tmp_path / "out").read_text().splitlines() if x.startswith("{")]
    directory = os.path.dirname(h5py.__file__)
    reason = f"RuntimeError: rank 0: an archive needs an h5py that is built with MPI; {directory} is not"
    assert [line["told"] for line in lines] == [[reason]] * 2
