"""`python3 -I -m gemini_hpc.tier.worker`: the process that reads and writes on the tier for an agent, one order.

h5py is loaded here and nowhere else, and a file system that hangs holds up this process and nothing else. It ends
when its agent does. What no training waits for runs behind everything (nice 19, idle input/output class).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from importlib.util import find_spec

from gemini_hpc import clock
from gemini_hpc.core.slots import Stamp
from gemini_hpc.tier import lustre, names, orders, publish, retention, version
from gemini_hpc.tier.publish import Pace, TierError, told
from gemini_hpc.tier.readahead import Ahead
from gemini_hpc.wire.stored import Rejection

_PR_SET_PDEATHSIG = 1
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IDLE = 3 << 13
_TELL_EVERY_S = 0.5
MAX_ORDER_BYTES = 256 << 20


def _no_longer_than(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _humble() -> None:
    """Behind everything else on this node, with all threads to come."""
    with suppress(OSError):
        os.nice(19)
    number = _IOPRIO_SET.get(os.uname().machine)
    if number is not None:
        ctypes.CDLL(None).syscall(number, 1, 0, _IDLE)


def _say(answer: orders.Answer) -> None:
    os.write(1, orders.encode(answer) + b"\n")


class _Told:
    """Tells the agent now and then how far it is, at a rate."""

    def __init__(self, bytes_per_s: float) -> None:
        self._pace, self._bytes, self._told_at = Pace(bytes_per_s), 0, clock.monotonic()

    def __call__(self, count: int) -> None:
        self._bytes += count
        self._pace(count)
        if clock.monotonic() - self._told_at > _TELL_EVERY_S:
            self._told_at = clock.monotonic()
            _say(orders.Progress(self._bytes))


def _write(order: orders.Write) -> orders.Answer:
    from gemini_hpc.tier import nodefile
    from gemini_hpc.tier.shards import Shard, digest

    size_bytes = sum(source.used for source in order.shards)
    where = publish.make_directory(
        order.tier,
        order.job,
        order.set,
        order.stamp,
        lambda path: lustre.lay_out(path, size_bytes, order.lfs),
    )
    shards = []
    for source in order.shards:
        view = memoryview(mmap.mmap(source.fd, source.bytes, access=mmap.ACCESS_COPY))
        try:
            shards.append((Shard.parse(view, source.bytes), source.home, source.digest))
        except ValueError:
            if digest(view[: source.used]) == source.digest:
                raise
            raise nodefile.Overwritten(f"the copy of rank {source.rank} in memory was overwritten") from None
    name = version.node_file(order.node_rank)
    with told(where):
        file = nodefile.write(where, name, shards, _Told(order.bytes_per_s), compress=order.compress)
    return orders.Written(file)


def _finish(order: orders.Finish) -> orders.Answer:
    from gemini_hpc.tier import index

    stamp = order.stamp
    where = publish.version_directory(order.tier, order.job, order.set, stamp)
    above = os.path.dirname(where)
    with told(where):
        newest = next(version.whole(above), None)
        serial = 1 if newest is None else newest.serial + 1
        made = version.Manifest(order.job, order.set, stamp, order.world, clock.time(), order.files, serial)
        index.write(where, made, _Told(0.0))
        given = _given(above, stamp, order.names)
        mine = {name: asked for name, (asked, has) in given.items() if has == stamp}
        if mine or retention.for_good(serial, order.keep_every):
            names.give(where, mine)
        with publish.replaced(where, version.MANIFEST) as path, open(path, "xb") as file:
            file.write(version.pack(made))
        publish.sync_directory(above)
    try:
        removed, trouble = retention.clean(above, order.keep_last, before=stamp), ""
    except OSError as error:  # the version is whole nevertheless
        removed, trouble = [], f"{above}: old versions could not be removed: {publish.why(error)}"
    return orders.Finished(tuple(removed), trouble, given)


def _given(directory: str, stamp: Stamp, wanted: Mapping[str, int]) -> dict[str, tuple[int, Stamp]]:
    """For each wanted name, the number that was asked for and the version that has it: this one, unless another one
    of the set has it already."""
    taken = names.of_set(directory) if wanted else {}
    taken = {name: known for name, known in taken.items() if not version.rejected(directory, known[1])}
    return {name: taken.get(name, (asked, stamp)) for name, asked in wanted.items()}


def _name(order: orders.Name) -> orders.Answer:
    stamp = order.stamp
    where = publish.version_directory(order.tier, order.job, order.set, stamp)
    above = os.path.dirname(where)
    with told(where):
        if version.read(above, stamp) is None:
            raise TierError(f"{where}: no longer there, or no longer whole")
        given = _given(above, stamp, order.names)
        names.give(where, {name: asked for name, (asked, has) in given.items() if has == stamp})
    return orders.Finished(names=given)


def _clean(order: orders.Clean) -> orders.Answer:
    where = f"{version.job_directory(order.tier, order.job)}/{order.set}"
    before = order.before
    with told(where):
        removed = retention.clean(where, sys.maxsize, before=before)
    return orders.Finished(tuple(removed))


def _look(order: orders.Look) -> orders.Answer:
    where, found = version.job_directory(order.tier, order.job), []
    lacks = [name for name in ("h5py", "numpy") if order.begin and find_spec(name) is None]
    if lacks:
        raise ImportError(f"there is no {' and no '.join(lacks)}")
    with told(order.tier):
        if order.make:
            with suppress(OSError):  # what is not there then is told below
                os.mkdir(order.tier, 0o700)
        os.stat(f"{order.tier}/.")
        for name in [order.set] if order.set else version.sets(order.tier, order.job):
            _mark(f"{where}/{name}", [r for r in order.rejected if r.set == name])
            wanted = (m for m in version.whole(f"{where}/{name}") if _offered(f"{where}/{name}", m, order))
            found += [m for m in [next(wanted, None)] if m is not None and (m.job, m.set) == (order.job, name)]
    return orders.Found(tuple(found))


def _mark(directory: str, rejected: Sequence[Rejection]) -> None:
    """What a training has found bad says so itself, should nobody remember; as far as one may write there."""
    for stamp in version.stamps(directory) if rejected else ():
        why = next((r.reason for r in rejected if r.low <= stamp <= r.high), None)
        where = f"{directory}/{version.name(stamp)}"
        if why is not None and not version.rejected(directory, stamp):
            with suppress(OSError), publish.replaced(where, version.REJECTED) as path, open(path, "x") as file:
                file.write(f"{why}\n")


def _offered(directory: str, manifest: version.Manifest, order: orders.Look) -> bool:
    if (manifest.set, manifest.stamp) in order.without or version.rejected(directory, manifest.stamp):
        return False
    return not any(r.covers(manifest.set, manifest.stamp) for r in order.rejected)


def _read(order: orders.Read) -> orders.Answer:
    stamp = order.stamp
    where = publish.version_directory(order.tier, order.job, order.set, stamp)
    with told(where):
        manifest = version.read(os.path.dirname(where), stamp)
        name, stored, begin = ("", None, 0) if manifest is None else manifest.shard(order.rank)
        if stored is None or (stored.used, stored.digest) != (order.used, order.digest):
            raise TierError(f"{where} no longer has the shard of rank {order.rank}")
        with closing(Ahead(f"{where}/{name}", begin, order.used)) as ahead:
            from gemini_hpc.tier import nodefile

            view = memoryview(mmap.mmap(order.fd, order.used, mmap.MAP_SHARED | mmap.MAP_POPULATE))
            with nodefile.Reader(f"{where}/{name}", ahead) as reader:
                reader.read(stored, view, _Told(0.0))
    return orders.Finished()


DOES: dict[type, Callable[..., orders.Answer]] = {
    orders.Write: _write,
    orders.Finish: _finish,
    orders.Name: _name,
    orders.Clean: _clean,
    orders.Look: _look,
    orders.Read: _read,
}
AWAITED = (orders.Look, orders.Read)


def answer(line: bytes) -> orders.Answer:
    """Carry out an order. Whatever goes wrong is an answer, too."""
    try:
        order = orders.order_decoder.decode(line)
        if not isinstance(order, AWAITED):
            _humble()
        return DOES[type(order)](order)
    except (TierError, ValueError) as error:
        why = str(error)
    except OSError as error:
        why = f"{order.tier}: {publish.why(error)}"
    except ImportError as error:
        why = f"the tier needs h5py and numpy in {sys.executable}: {error}"
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    return orders.Failed(why[:500])


def main() -> int:
    """Read one order, answer it; the exit status is 0 if there was an answer."""
    _no_longer_than(int(sys.argv[1]))
    _say(answer(sys.stdin.buffer.readline(MAX_ORDER_BYTES)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
