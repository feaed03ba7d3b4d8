"""The process that carries out one order on the tier for an agent (`python3 -I -m gemini_hpc.tier.worker`).

h5py is loaded here and nowhere else. A hanging file system blocks only this process. The process ends when
its agent ends. Orders that no training waits for run at the lowest priority (nice 19, idle input/output
class).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from importlib.util import find_spec

from gemini_hpc import clock
from gemini_hpc.core.digest import digest_bytes
from gemini_hpc.core.slots import Stamp
from gemini_hpc.tier import job_directory, lustre, names, orders, owned, publish, retention, version
from gemini_hpc.tier.owned import Directory, NotOurs
from gemini_hpc.tier.publish import TierError, WritePace, as_tier_error
from gemini_hpc.tier.readahead import Ahead
from gemini_hpc.wire.stored import Rejection, Stored

_PR_SET_PDEATHSIG = 1
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IDLE = 3 << 13
_TELL_EVERY_S = 0.5  # interval of progress reports, which a person follows
MAX_ORDER_BYTES = 256 << 20


def _end_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _lower_priority() -> None:
    """Lower the priority of this process and its future threads below all others on this node."""
    with suppress(OSError):
        os.nice(19)
    number = _IOPRIO_SET.get(os.uname().machine)
    if number is not None:
        ctypes.CDLL(None).syscall(number, 1, 0, _IDLE)


def _say(answer: orders.Answer) -> None:
    os.write(1, orders.encode(answer) + b"\n")


class _ReportingPace:
    """A pacer that also reports progress to the agent at intervals, limited to a rate."""

    def __init__(self, bytes_per_s: float) -> None:
        self._pace, self._bytes, self._reported_at = WritePace(bytes_per_s), 0, clock.monotonic()

    def __call__(self, count: int) -> None:
        self._bytes += count
        self._pace(count)
        if clock.monotonic() - self._reported_at > _TELL_EVERY_S:
            self._reported_at = clock.monotonic()
            _say(orders.Progress(self._bytes))


@contextmanager
def _open_job(order: orders.Order) -> Iterator[Directory]:
    """Yield the job's directory. Raises FileNotFoundError if it has none, OSError."""
    with Directory.open_tier(order.tier) as tier:
        found = job_directory.find(tier, order.mark)
    if found is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), order.tier)
    with found:
        yield found


def _write(order: orders.Write) -> orders.Answer:
    from gemini_hpc.tier import nodefile
    from gemini_hpc.tier.shards import ParsedSlot

    size_bytes = sum(source.used for source in order.shards)

    def lay_out(path: str) -> object:
        return lustre.lay_out(path, size_bytes, order.lfs)

    with publish.make_version(order.tier, order.mark, order.training, order.stamp, lay_out) as made:
        shards = []
        for source in order.shards:
            view = memoryview(mmap.mmap(source.fd, source.bytes, access=mmap.ACCESS_COPY))
            try:
                shards.append((ParsedSlot.parse(view, source.bytes), source.home, source.digest))
            except ValueError:
                if digest_bytes(view[: source.used]) == source.digest:
                    raise
                raise nodefile.Overwritten(f"the copy of rank {source.rank} in memory was overwritten") from None
        name = version.format_node_file(order.node_rank)
        with as_tier_error(made.where):
            file = nodefile.write(made.path, name, shards, _ReportingPace(order.bytes_per_s), compress=order.compress)
    return orders.Written(file)


def _finish(order: orders.Finish) -> orders.Answer:
    from gemini_hpc.tier import index

    stamp = order.stamp
    with (
        as_tier_error(order.tier),
        _open_job(order) as job,
        job.open_below(order.training) as above,
        above.open_below(version.format_name(stamp)) as made,
    ):
        absent = sum(not os.path.lexists(f"{made.path}/{file.name}") for file in order.files)
        if absent:
            raise TierError(
                f"{order.tier}: the files of {absent} of {len(order.files)} nodes are not there: "
                "each node has a directory of its own of this name, and a tier has to be shared by all nodes"
            )
        with as_tier_error(made.where):
            newest = next(version.list_whole(above), None)
            serial = 1 if newest is None else newest.serial + 1
            mark = order.mark
            manifest = version.VersionManifest(
                order.job,
                order.training,
                stamp,
                order.world,
                clock.time(),
                order.files,
                serial,
                key=mark.key,
                cluster=mark.cluster,
            )
            index.write(made.path, manifest, _ReportingPace(0.0))
            given = _resolve_names(above.path, stamp, order.names)
            given_names = {name: asked for name, (asked, has) in given.items() if has == stamp}
            if given_names or retention.is_permanent(serial, order.keep_every):
                names.keep_version(made.path, given_names)
            with publish.replace_file(made.path, version.MANIFEST) as path, open(path, "xb") as file:
                file.write(version.pack(manifest))
            job_directory.sync(above.path)
        try:
            removed, trouble = retention.clean(above.path, order.keep_last, before=stamp), ""
        except OSError as error:  # the version is whole nevertheless
            removed, trouble = [], f"{above.where}: old versions could not be removed: {publish.explain_error(error)}"
        return orders.Finished(tuple(removed), trouble, given, job.where)


def _resolve_names(directory: str, stamp: Stamp, wanted: Mapping[str, int]) -> dict[str, tuple[int, Stamp]]:
    """Return for each wanted name the version number asked for, and the version that has the name.

    A name belongs to this version, unless another version of the training already has it.
    """
    taken = names.find_training_names(directory) if wanted else {}
    taken = {name: known for name, known in taken.items() if not version.is_rejected(directory, known[1])}
    return {name: taken.get(name, (asked, stamp)) for name, asked in wanted.items()}


def _name(order: orders.Name) -> orders.Answer:
    stamp = order.stamp
    with as_tier_error(order.tier), _open_job(order) as job, job.open_below(order.training) as above:
        where = f"{above.path}/{version.format_name(stamp)}"
        if version.read(above, stamp) is None:
            raise TierError(f"{above.where}/{version.format_name(stamp)}: no longer there, or no longer whole")
        given = _resolve_names(above.path, stamp, order.names)
        names.keep_version(where, {name: asked for name, (asked, has) in given.items() if has == stamp})
        return orders.Finished(names=given, directory=job.where)


def _clean(order: orders.Clean) -> orders.Answer:
    with as_tier_error(order.tier), Directory.open_tier(order.tier) as tier:
        job_directory.clean(tier, order.job)
        try:
            with _open_job(order) as job, job.open_below(order.training) as where:
                return orders.Finished(tuple(retention.clean(where.path, sys.maxsize, before=order.before)))
        except FileNotFoundError:
            return orders.Finished()


def _find_versions(order: orders.Look) -> orders.Answer:
    found, directory = list[version.VersionManifest](), ""
    lacks = [name for name in ("h5py", "numpy") if order.begin and find_spec(name) is None]
    if lacks:
        raise ImportError(f"there is no {' and no '.join(lacks)}")
    with as_tier_error(order.tier):
        if order.make:
            with suppress(OSError):  # a directory that is still missing is reported below
                os.mkdir(order.tier, 0o700)
        os.stat(f"{order.tier}/.")
        with Directory.open_tier(order.tier) as tier:
            for job in _open_jobs(tier, order):
                found += _find_newest(job, order)
                directory = job.where
            beside = job_directory.explain_clash(tier, order.mark) if order.begin and order.key is not None else ""
    newest = {manifest.training: manifest for manifest in sorted(found, key=lambda manifest: manifest.time)}
    return orders.Found(tuple(newest.values()), directory, beside)


def _open_jobs(tier: Directory, order: orders.Order) -> Iterator[Directory]:
    """Yield the job directories that the order means, each open until the next is requested. Raises OSError."""
    if order.key is None:
        yield from job_directory.open_former(tier, order.job, order.cluster)
        return
    found = job_directory.find(tier, order.mark)
    if found is not None:
        with found:
            yield found


def _find_newest(job: Directory, order: orders.Look) -> Iterator[version.VersionManifest]:
    """Yield the newest version of each training that the order wants. Raises OSError."""
    for name in [order.training] if order.training else version.list_trainings(job.path):
        try:
            directory = job.open_below(name)
        except (FileNotFoundError, NotOurs):
            continue
        with directory:
            _mark(directory.path, [r for r in order.rejected if r.training == name])
            wanted = (m for m in version.list_whole(directory) if _is_offered(directory.path, m, order))
            manifest = next(wanted, None)
        if manifest is not None and (manifest.job, manifest.training) == (order.job, name):
            yield manifest


def _mark(directory: str, rejected: Sequence[Rejection]) -> None:
    """Mark rejected versions on the tier, so that the rejection outlives the job, as far as permissions allow."""
    for stamp in version.list_stamps(directory) if rejected else ():
        why = next((r.reason for r in rejected if r.low <= stamp <= r.high), None)
        where = f"{directory}/{version.format_name(stamp)}"
        if why is not None and not version.is_rejected(directory, stamp):
            with suppress(OSError), publish.replace_file(where, version.REJECTED) as path, open(path, "x") as file:
                file.write(f"{why}\n")


def _is_offered(directory: str, manifest: version.VersionManifest, order: orders.Look) -> bool:
    if (manifest.training, manifest.stamp) in order.without or version.is_rejected(directory, manifest.stamp):
        return False
    return not any(r.covers(manifest.training, manifest.stamp) for r in order.rejected)


def _read(order: orders.Read) -> orders.Answer:
    stamp = order.stamp
    with as_tier_error(order.tier), Directory.open_tier(order.tier) as tier:
        for job in _open_jobs(tier, order):
            with (
                suppress(FileNotFoundError),
                job.open_below(order.training) as above,
                above.open_below(version.format_name(stamp)) as directory,
            ):
                manifest = version.read(above, stamp)
                name, stored, begin = ("", None, 0) if manifest is None else manifest.find_shard(order.rank)
                if stored is not None and (stored.used, stored.digest) == (order.used, order.digest):
                    with os.fdopen(directory.open_file(name), "rb") as file:
                        _fill(order, stored, owned.build_fd_path(file.fileno(), f"{directory.where}/{name}"), begin)
                    return orders.Finished()
    raise TierError(f"{order.tier} no longer has the shard of rank {order.rank} of version {stamp.version}")


def _fill(order: orders.Read, stored: Stored, path: str, begin: int) -> None:
    """Read a shard of an open node file into the order's memory. Raises OSError, ValueError."""
    with closing(Ahead(path, begin, order.used)) as ahead:
        from gemini_hpc.tier import nodefile

        view = memoryview(mmap.mmap(order.fd, order.used, mmap.MAP_SHARED | mmap.MAP_POPULATE))
        with nodefile.NodeFileReader(path, ahead) as reader:
            reader.read(stored, view, _ReportingPace(0.0))


DOES: dict[type, Callable[..., orders.Answer]] = {
    orders.Write: _write,
    orders.Finish: _finish,
    orders.Name: _name,
    orders.Clean: _clean,
    orders.Look: _find_versions,
    orders.Read: _read,
}
AWAITED = (orders.Look, orders.Read)


def answer(line: bytes) -> orders.Answer:
    """Carry out an order and return its answer; every error becomes a `Failed` answer."""
    try:
        order = orders.order_decoder.decode(line)
        if not isinstance(order, AWAITED):
            _lower_priority()
        return DOES[type(order)](order)
    except (TierError, ValueError) as error:
        why = str(error)
    except OSError as error:
        why = f"{order.tier}: {publish.explain_error(error)}"
    except ImportError as error:
        why = f"the tier needs h5py and numpy in {sys.executable}: {error}"
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    return orders.Failed(owned.as_users_know(why)[:500])


def main() -> int:
    """Read one order and answer it; return exit status 0 if an answer was sent."""
    _end_with(int(sys.argv[1]))
    _say(answer(sys.stdin.buffer.readline(MAX_ORDER_BYTES)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
