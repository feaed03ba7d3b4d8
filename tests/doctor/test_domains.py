"""What doctor says of the file of failure domains."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gemini_hpc.agent.peers import failure_domains
from gemini_hpc.config import Settings
from gemini_hpc.doctor.examine import examine
from gemini_hpc.doctor.facts import HostFacts
from gemini_hpc.doctor.finding import Finding


class Told(HostFacts):
    """Node n1."""

    own_node: Any = SimpleNamespace(name="n1")

    def __init__(self, setting: str) -> None:
        super().__init__("/nonexistent/gemini.toml", "node")
        self._known["settings"] = Settings(failure_domains=setting)


def look(setting: str) -> Finding:
    [found] = examine(Told(setting), ["files.domains"])
    return found


def test_the_sites_file(tmp_path: Path) -> None:
    cases: list[tuple[str | None, int, str, str]] = [
        ("n[1-2] rack1\nn3 rack2\n", 0o644, "ok", "3 nodes in 2 domains"),
        ("n[2-3] rack1\n", 0o644, "warning", "does not name n1"),
        ("n1\n", 0o644, "wrong", "line 1: wanted NODES DOMAIN"),
        ("n1 rack1\n", 0o640, "wrong", "cannot be read by every job's owner"),
        (None, 0, "wrong", "No such file or directory"),
    ]
    for case in cases:
        text, mode, status, words = case
        path = tmp_path / "racks"
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
            path.chmod(mode)
        found = look(str(path))
        assert found.status == status and words in found.found, case


def test_where_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(failure_domains, "SLURMS", (str(tmp_path / "topology.conf"),))
    assert (look("").status, look("none").status) == ("ok", "ok")
    (tmp_path / "topology.conf").write_text("SwitchName=leaf Nodes=n[1-9]\n")
    assert "9 nodes in 1 domains" in look("").found
