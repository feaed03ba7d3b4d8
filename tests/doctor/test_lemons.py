"""What doctor says of nodes that did harm again and again."""

from __future__ import annotations

from pathlib import Path

import msgspec

from gemini_hpc.config import Settings
from gemini_hpc.controller.lemons import FILE, Lemons
from gemini_hpc.doctor.examine import examine
from gemini_hpc.doctor.facts import HostFacts
from gemini_hpc.doctor.finding import Finding


class Told(HostFacts):
    def __init__(self, state_dir: Path) -> None:
        super().__init__("/nonexistent/gemini.toml", "controller")
        self._known["settings"] = Settings(state_dir=str(state_dir))

    def need_slurm_user(self, what: str) -> None:
        return None


def look(state_dir: Path) -> Finding:
    [found] = examine(Told(state_dir), ["controller.lemons"])
    return found


def test_what_comes_again_is_a_warning(tmp_path: Path) -> None:
    kept = Lemons(str(tmp_path), 30)
    assert look(tmp_path).status == "ok"
    kept.add("n2", "fenced", 7, "no answer")
    assert look(tmp_path).status == "ok"
    kept.add("n2", "failed", 8, "rank 1 on n2 was killed or crashed")
    found = look(tmp_path)
    assert found.status == "warning" and "n2 2 times, the last at " in found.found
    assert "(job 8: failed: rank 1 on n2 was killed or crashed)" in found.found
    path = tmp_path / FILE
    path.write_bytes(msgspec.json.encode({"n2": [{"t": 1.0, "what": "fenced", "job": 7, "why": ""}] * 3}))
    assert look(tmp_path).status == "ok", "long ago"
    path.write_text("[]")
    assert look(tmp_path).status == "skipped"
