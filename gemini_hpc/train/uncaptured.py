"""Name the state of a training that nothing captures, once; the training goes on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from gemini_hpc.client.session import Session
from gemini_hpc.train.not_given import NotGiven
from gemini_hpc.train.state.tree import StateTree


class Uncaptured:
    """The findings of one rank."""

    def __init__(self, session: Session, tree: StateTree, not_given: NotGiven) -> None:
        self._session, self._tree, self._not_given = session, tree, not_given
        self._told: set[str] = set()

    def tell_at_construction(self) -> None:
        """Name what objects hand out and nothing captures. Never raises."""
        with suppress(Exception):  # where the state itself cannot be captured, the first plan says so
            self._tell_handed_out()
        with suppress(Exception):
            for what, why in self._tree.comm_hooks.left_out().items():
                if what not in self._told:
                    self._say(what, f"{what} is not captured, or only in part, and begins anew after a resume: {why}")

    def tell_when_planned(self) -> None:
        """Do the same for optimizers, which have state by now, and name what was not passed. Never raises."""
        self.tell_at_construction()
        with suppress(Exception):
            self._tell_join()
        with suppress(Exception):  # of classes that are not ours
            for sentence in self._not_given.sentences():
                self._say(sentence, sentence)

    def _tell_join(self) -> None:
        """Say that ranks inside DDP.join stop to mean the same by a version once one of them has no more batches."""
        joins = [recorder.ddp._join_config for recorder in self._tree.ddps]
        uneven = any(join.enable and not join.throw_on_early_termination for join in joins)
        if uneven and self._session.rank == 0:
            self._say(
                "DDP.join",
                "the training runs inside DDP.join: a rank that is out of batches makes no step() of its own. From "
                "then on the ranks do not mean the same iteration by a version, and nothing is sealed. Give all "
                "ranks as many batches, or use join(throw_on_early_termination=True)",
            )

    def _tell_handed_out(self) -> None:
        for where, look in self._tree.handed_out().items():
            names: Sequence[str] = ()
            with suppress(Exception):  # one whose state_dict() raises hands out nothing that anybody could load
                names = look() if where not in self._told else ()
            if names:
                more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
                self._say(
                    where,
                    f"the state_dict() of {where} also has {names[0]}{more}, which is not captured and begins anew "
                    "after a resume: make it a buffer or extra state (get_extra_state, set_extra_state), or pass an "
                    "object with state_dict and load_state_dict for it in extra",
                )

    def _say(self, what: str, sentence: str) -> None:
        self._told.add(what)
        self._session.find(sentence)
        self._session.say(f"rank {self._session.rank}: {sentence}")
