"""Wrong arguments of a Checkpointer fail without any agent as they do on a cluster."""

from __future__ import annotations

import math
from collections.abc import Iterator
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
    ({"start": 3}, TypeError, "start is a int, wanted the path of a checkpoint"),
    ({"start": b"/x"}, TypeError, "start is a bytes, wanted the path of a checkpoint"),
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


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((3,), "tier is 3: wanted an absolute path"),
        (("/" + "x" * 5000,), "wanted an absolute path"),
        (("/a", math.nan), "a tier's interval_s is nan: wanted 1 to 604800, or 'auto'"),
        (("/a", None), "a tier's interval_s is None: wanted"),
        (("/a", "1"), "a tier's interval_s is '1': wanted"),
    ],
)
def test_a_wrong_tier(values: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ValueError, match=r"wanted") as raised:
        gemini.Tier(*values)
    assert words in str(raised.value) and len(str(raised.value)) < 200


class _Stream(torch.utils.data.IterableDataset[int]):
    def __repr__(self) -> str:  # in the test's name, which all workers must agree on
        return "stream"

    def __iter__(self) -> Iterator[int]:
        yield 1


@pytest.mark.parametrize(
    ("dataset", "wrong", "words"),
    [
        ([1, 2, 3], {"batch_size": 0}, "batch_size is 0: wanted a whole number, 1 or more"),
        ([1, 2, 3], {"batch_size": 1.5}, "batch_size is 1.5: wanted a whole number"),
        ([1, 2, 3], {"rank": 2, "world": 2}, "rank is 2: wanted a whole number from 0 to 1"),
        ([1, 2, 3], {"rank": "0"}, "rank is '0': wanted a whole number from 0 to 0"),
        ([1, 2, 3], {"world": 0}, "world is 0: wanted a whole number, 1 or more"),
        ([1, 2, 3], {"seed": "x"}, "seed is 'x': wanted a whole number"),
        (_Stream(), {}, "dataset is a _Stream, which has no len(): wanted a map-style dataset"),
        (3, {}, "dataset is a int, which has no len()"),
    ],
    ids=str,
)
def test_a_wrong_argument_of_a_loader(dataset: Any, wrong: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        gemini.StatefulLoader(dataset, **{"batch_size": 1} | wrong)
    assert words in str(raised.value)
