"""Wrong arguments of a Checkpointer fail without any agent as they do on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import gemini_hpc as gemini

pytestmark = pytest.mark.slow

WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"name": "my run"}, ValueError, "name is 'my run': use 1 to 64 letters, digits"),
    ({"name": ""}, ValueError, "name is ''"),
    ({"name": "../up"}, ValueError, "name is '../up'"),
    ({"name": 5}, TypeError, "name is a int, wanted a str"),
    ({"extra": [1]}, TypeError, "extra is a list, wanted a dict of objects by name"),
    ({"extra": {1: torch.nn.Linear(1, 1)}}, TypeError, "extra is a dict, wanted a dict of objects by name"),
    ({"tier": "relative/path"}, ValueError, "wanted an absolute path"),
    ({"tier": Path("/tmp")}, TypeError, "tier is a PosixPath, wanted a str"),
    ({"traffic": "host"}, TypeError, "wanted a gemini_hpc.Traffic"),
    ({"audit": -1}, ValueError, "wanted audit >= 0"),
]


@pytest.mark.parametrize("agent", [False, True], ids=["laptop", "cluster"])
@pytest.mark.parametrize(("argument", "error", "words"), WRONG, ids=str)
def test_a_wrong_argument(
    agent: bool,
    argument: dict[str, Any],
    error: type[Exception],
    words: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GEMINI_SOCKET", raising=False)
    if agent:
        request.getfixturevalue("job")
    model = torch.nn.Linear(2, 2)
    given = {"traffic": gemini.Traffic()} | argument
    with pytest.raises(error) as raised:
        gemini.Checkpointer(model, torch.optim.SGD(model.parameters(), 0.1), **given)
    assert words in str(raised.value)
