"""Reports, once each, of a training's state that the Checkpointer does not capture. The training goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from gemini_hpc.train.state.tree import StateTree
from gemini_hpc.train.unpassed_objects import UnpassedObjects


class Uncaptured:
    """The findings of one rank.

    Ranks often have the same findings. Each is reported once, when all ranks talk anyway.
    """

    def __init__(self, tree: StateTree, unpassed: UnpassedObjects) -> None:
        self._tree, self._unpassed = tree, unpassed
        self._found: set[str] = set()
        self._later: list[str] = []

    def find(self) -> list[str]:
        """Return a new sentence for each state that objects hand out and the Checkpointer does not capture.

        Never raises.
        """
        found: list[str] = []
        with suppress(Exception):  # if the state itself cannot be captured, the first plan reports it
            found += self._describe_handed_out()
        with suppress(Exception):
            for what, why in self._tree.comm_hooks.find_uncaptured().items():
                if self._is_new(what):
                    found.append(f"{what} is not captured, or only in part, and begins anew after a resume: {why}")
        return found

    def find_when_planned(self) -> list[str]:
        """Return the findings including optimizers, which have state by now, and objects not passed.

        Never raises.
        """
        found = self.find()
        with suppress(Exception):
            found += self._describe_join()
        with suppress(Exception):  # classes of others may raise
            found += self._unpassed.list_sentences()
        return found

    def postpone_sentence(self, sentence: str) -> None:
        """Keep a sentence until the ranks next plan together, in each `step()` until they have a plan."""
        self._later.append(sentence)

    def pop_sentences(self) -> list[str]:
        """Return and forget the sentences kept for later."""
        found, self._later = self._later, []
        return found

    def _describe_join(self) -> list[str]:
        """Return a sentence if the training runs inside DDP.join.

        Once a rank has no more batches, the ranks no longer mean the same by a version.
        """
        joins = [recorder.ddp._join_config for recorder in self._tree.ddps]
        uneven = any(join.enable and not join.throw_on_early_termination for join in joins)
        if not uneven:
            return []
        return [
            "the training runs inside DDP.join: a rank that is out of batches makes no step() of its own. From then "
            "on a version would mix iterations, so nothing is sealed. Give all ranks as many "
            "batches, or use join(throw_on_early_termination=True)"
        ]

    def _describe_handed_out(self) -> Iterator[str]:
        for where, look in self._tree.build_entry_searches().items():
            names: Sequence[str] = ()
            with suppress(Exception):  # an object whose state_dict() raises hands out no loadable state
                names = look() if where not in self._found else ()
            if names and self._is_new(where):
                more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
                yield (
                    f"the state_dict() of {where} also has {names[0]}{more}, which is not captured and begins anew "
                    "after a resume: make it a buffer or extra state (get_extra_state, set_extra_state), or pass an "
                    "object with state_dict and load_state_dict for it in extra"
                )

    def _is_new(self, name: str) -> bool:
        """Return whether there is no earlier finding on this object."""
        is_new = name not in self._found
        self._found.add(name)
        return is_new
