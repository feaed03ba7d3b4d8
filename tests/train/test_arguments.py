"""Wrong arguments of a Checkpointer fail without any agent as they do on a cluster."""

from __future__ import annotations

import math
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
    ({"audit": -1}, ValueError, "audit is -1: wanted a whole number, 0 or more"),
    ({"audit": 1.5}, TypeError, "audit is 1.5: wanted a whole number"),
    ({"seal_timeout_s": 0}, ValueError, "seal_timeout_s is 0: wanted a number of seconds above 0"),
    ({"seal_timeout_s": math.nan}, ValueError, "seal_timeout_s is nan: wanted"),
    ({"hold_s": "15"}, TypeError, "hold_s is '15': wanted a number of seconds"),
    ({"max_repeated": 3}, ValueError, "max_repeated is 3: wanted 1 or 2"),
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


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"every": -1}, "every is -1: wanted a whole number, 0 or more"),
        ({"every": 2.5}, "every is 2.5: wanted a whole number"),
        ({"buffers": 0}, "buffers is 0: wanted a whole number, 1 or more"),
        ({"overhead": 1}, "overhead is 1: wanted a share of the time, above 0 and below 1"),
        ({"overhead": math.nan}, "overhead is nan: wanted a share of the time"),
        ({"mu": "all"}, "mu is 'all': wanted a share of an idle span"),
        ({"chunk_bytes": 1}, "chunk_bytes is 1: wanted 0 (fitted to the link), or a whole number"),
        ({"scheme": "no"}, "scheme is 'no': wanted one of"),
        ({"transport": "no"}, "transport is 'no': wanted one of"),
    ],
    ids=str,
)
def test_a_wrong_setting_of_the_traffic(setting: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        gemini.Traffic(**setting)
    assert words in str(raised.value)
