"""Fixtures: a MUNGE of our own."""

from __future__ import annotations

import pytest

from gemini_hpc.wire import munge

from .fake_munge import FakeMunge


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeMunge:
    made = FakeMunge()
    monkeypatch.setattr(munge, "encode", made.encode)
    monkeypatch.setattr(munge, "decode", made.decode)
    return made
