"""Meetings: collective calls wait until all ranks are in them, and name the missing ranks.

Meetings use the store of the process group, which needs no collective. In a collective, a rank that calls another one
meanwhile (an all-reduce of the training) would take part in ours.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from gemini_hpc import clock
from gemini_hpc.train.state.collectives import TorchRanks

TELL_S = 10.0  # longer than ranks are apart in a healthy training
SOON_S = 60.0  # of reject() and abandon(), which ranks call at the same time
MOST_S = 1800.0  # gloo's own limit for a rank in a collective
_POST_S = 1.0  # shorter waits are not reported
_LONGEST_NAP_S = 0.05  # short beside the ten seconds after which a wait is reported
_NAMED = 8
_STORELESS = ("fake", "mpi")  # torch's dry run has one rank, and a store that stores nothing

_met: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()


class Meetings:
    """The meetings of one rank of a training.

    Args:
        ranks: The ranks that train.
        name: Name of the training.
        say: Prints a line to the user.
    """

    def __init__(self, ranks: TorchRanks, name: str, say: Callable[[str], None]) -> None:
        self._rank, self._world, self._name, self._say = ranks.rank, ranks.world, name, say
        self._store: Store | None = None
        if ranks.group is not None and ranks.world > 1 and dist.get_backend(ranks.group) not in _STORELESS:
            self._store = dist.distributed_c10d._get_process_group_store(ranks.group)
            self._counts = _met.setdefault(ranks.group, Counter())

    def meet(self, call: str, within_s: float = MOST_S) -> None:
        """Wait until all ranks are in this call.

        Args:
            call: Name of the call, for the messages.
            within_s: Longest wait in seconds.

        Raises:
            RuntimeError: Some ranks do not come in time.
        """
        store = self._store
        if store is None:
            return
        key = self._build_key(call)
        store.set(f"{key}/{self._rank}", "here")
        came = store.add(f"{key}/came", 1)
        if came == self._world:
            store.set(f"{key}/all", "here")
        if came < self._world:
            with self._watch_absent(call, key, posted=True):
                self._wait(store, call, key, within_s)
        self._counts[f"{self._name}/{call}"] += 1

    def _wait(self, store: Store, call: str, key: str, within_s: float) -> None:
        began = clock.monotonic()
        while not store.check([f"{key}/all"]):
            waited_s = clock.monotonic() - began
            if waited_s > within_s and store.add(f"{key}/came", -1) < self._world - 1:
                late = self._list_late(store, key)
                store.delete_key(f"{key}/{self._rank}")
                raise RuntimeError(f"{call} is collective: {_name_ranks(late)} did not call it within {within_s:g} s")
            if waited_s > within_s:  # the last rank has come at this moment and goes on
                return
            clock.sleep(min(_LONGEST_NAP_S, max(0.001, waited_s / 8)))

    @contextmanager
    def watch(self, call: str) -> Iterator[None]:
        """Report missing ranks in a collective over our own group, which begins without a meeting."""
        if self._store is None:
            yield
            return
        key = self._build_key(call)
        self._counts[f"{self._name}/{call}"] += 1
        with self._watch_absent(call, key, posted=False):
            yield

    def _build_key(self, call: str) -> str:
        """Return the store's key of a call, equal on all ranks that have made as many such calls before."""
        return f"gemini/{self._name}/{call}/{self._counts[f'{self._name}/{call}']}"

    # ---- saying ----------------------------------------------------------------------------------------

    @contextmanager
    def _watch_absent(self, call: str, key: str, *, posted: bool) -> Iterator[None]:
        """Report for which ranks this rank waits.

        Args:
            call: Name of the call.
            key: The store's key of the call.
            posted: The other ranks can already see that this rank is there.
        """
        over, all_arrived = threading.Event(), threading.Event()
        args = (call, key, posted, over, all_arrived)
        thread = threading.Thread(target=self._report_absent, args=args, name="gemini-meeting", daemon=True)
        thread.start()
        try:
            yield
            all_arrived.set()
        finally:
            over.set()
            thread.join(_POST_S)

    def _report_absent(
        self, call: str, key: str, posted: bool, over: threading.Event, all_arrived: threading.Event
    ) -> None:
        store, began = self._store, clock.monotonic()
        assert store is not None
        try:
            if over.wait(_POST_S):
                return
            if not posted:
                store.set(f"{key}/{self._rank}", "here")
            if over.wait(TELL_S - _POST_S) or store.add(f"{key}/told", 1) != 1:
                return
            late = self._list_late(store, key)
        except RuntimeError:  # the store has gone; the wait ends with an error, too
            return
        if not late or over.is_set():
            return
        present_ranks = [rank for rank in range(self._world) if rank not in late]
        self._say(
            f"{_name_ranks(present_ranks)} {'has' if len(present_ranks) == 1 else 'have'} waited {TELL_S:g} s "
            f"in {call} for {_name_ranks(late)}: the training stands still until all ranks have called it. "
            "Call it on every rank; where only some ranks train, make the Checkpointer on those, with process_group="
        )
        over.wait()
        if all_arrived.is_set():
            self._say(f"all ranks are in {call} now, after {clock.monotonic() - began:.0f} s")

    def _list_late(self, store: Store, key: str) -> list[int]:
        return [rank for rank in range(self._world) if not store.check([f"{key}/{rank}"])]


def _name_ranks(ranks: Sequence[int]) -> str:
    """Return a phrase that names the first ranks by number."""
    named = ", ".join(map(str, ranks[:_NAMED]))
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' * (len(ranks) != 1)} {named}{more}"
