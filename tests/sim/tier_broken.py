"""What is broken on purpose, to see that the stories of the tier find it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from gemini_hpc.agent.peers.mesh import Mesh
from gemini_hpc.agent.tier.salvage import Salvage
from gemini_hpc.agent.tier.saver import Saver
from gemini_hpc.tier import publish, retention, version, worker


class _NoTurns:
    """In place of the locks."""

    def __getitem__(self, name: str) -> AbstractAsyncContextManager[None]:
        return nullcontext()


def _put(where: Any, **values: Any) -> None:
    for name, value in values.items():
        setattr(where, name, value)


def _unsynced() -> None:
    """Files get their names before they are on disk."""
    _put(publish, publish=lambda made, directory, name: publish.os.rename(made, f"{directory}/{name}"))  # type: ignore[attr-defined]


def _blind() -> None:
    """What cannot be seen counts as gone."""
    _put(version, there=version.os.path.lexists)  # type: ignore[attr-defined]


def _forgetful() -> None:
    """Names do not keep a version."""
    there = version.there
    _put(version, there=lambda path: not path.endswith(f"/{version.KEPT}") and there(path))


BROKEN: dict[str, Callable[[], None]] = {
    "unsynced": _unsynced,
    "blind": _blind,
    "forgetful": _forgetful,
    "unmarked": lambda: _put(worker, _mark=lambda *_: None),
    "untidy": lambda: _put(retention, clean=lambda directory, keep_last, *, before=None: []),
    "at_once": lambda: _put(Saver, _turns=property(lambda self: _NoTurns(), lambda self, value: None)),
    "silent_leave": lambda: _put(Mesh, leave=lambda self: None),
    "left": lambda: _put(Salvage, due=lambda self, now, *, last=False: False),
}
