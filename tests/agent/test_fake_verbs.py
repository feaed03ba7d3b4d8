"""The fake of the verbs has the names and signatures of ibverbs, where that is installed."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
from typing import Any

import pytest
from sim import fake_verbs

SAME = [
    *("CQ", "MR", "PD", "QP", "SGE", "WC", "CompChannel", "Context", "Device", "DeviceAttr", "Gid", "PortAttr"),
    *("QPInitAttr", "RecvWR", "SendWR"),
]
ENUMS = ("AccessFlags", "PortState", "QPAttrMask", "QPState", "SendFlags", "WCStatus", "WROpcode")
OURS = {  # what tests ask of the fake, and not the product
    *("pd", "access", "attr", "remote", "flushed", "under_way", "wire", "ended", "put", "cqs", "ring", "rung"),
    *("regions", "verbs", "domains"),
}


@pytest.fixture(scope="module")
def real() -> Any:
    return importlib.import_module("ibverbs")  # of the extra `dev`


def parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def documented(cls: Any) -> list[str]:
    """Return the arguments of a constructor, as the docstring of the extension's class lists them."""
    head = cls.__doc__.splitlines()[0]
    return [part.partition("=")[0].strip() for part in head[head.index("(") + 1 : head.rindex(")")].split(",")]


@pytest.mark.parametrize("name", SAME)
def test_classes_have_the_names_of_the_real_ones(real: Any, name: str) -> None:
    there, here = getattr(real, name), getattr(fake_verbs, name)
    for attribute, value in vars(here).items():
        if attribute.startswith("_") or attribute in OURS or not callable(value):
            continue
        given, wanted = parameters(value), parameters(getattr(there, attribute))
        if (name, attribute) == ("QP", "modify"):  # (attr_mask, ah_attr=None, **fields)
            assert given == ["attr_mask", "qp_state"] and wanted[::2] == ["attr_mask", "fields"]
        else:
            assert given == wanted[: len(given)], f"{name}.{attribute}"


@pytest.mark.parametrize("name", ["RecvWR", "SendWR", "SGE"])
def test_requests_take_what_the_real_ones_take(real: Any, name: str) -> None:
    given = parameters(getattr(fake_verbs, name).__init__)
    assert given == documented(getattr(real, name))[: len(given)]


def test_a_queue_pair_is_asked_for_in_the_same_way(real: Any) -> None:
    given = parameters(fake_verbs.QPInitAttr.__init__)
    assert given == parameters(real.QPInitAttr.__init__)[: len(given)]
    assert [f.name for f in dataclasses.fields(fake_verbs.QPInfo)] == [
        f.name for f in dataclasses.fields(real.QPInfo)
    ]


@pytest.mark.parametrize(
    ("name", "attributes"),
    [
        ("Device", ("name",)),
        ("WC", ("wr_id", "status", "status_str", "is_success")),
        ("MR", ("addr", "length", "rkey", "closed")),
        ("QP", ("qp_num", "state")),
        ("CompChannel", ("fd",)),
        ("Gid", ("raw",)),
        ("PortAttr", [f.name for f in dataclasses.fields(fake_verbs.PortAttr)]),
        ("DeviceAttr", [f.name for f in dataclasses.fields(fake_verbs.DeviceAttr)]),
    ],
)
def test_attributes_are_there(real: Any, name: str, attributes: list[str]) -> None:
    assert [a for a in attributes if not hasattr(getattr(real, name), a)] == []


@pytest.mark.parametrize("name", ENUMS)
def test_values_are_the_same(real: Any, name: str) -> None:
    mine: type[enum.IntEnum] = getattr(fake_verbs, name)
    assert {m.name: int(getattr(getattr(real, name), m.name)) for m in mine} == {m.name: int(m) for m in mine}


def test_the_error_is_a_subclass_of_oserror_there_too(real: Any) -> None:
    assert issubclass(real.VerbsError, OSError)
