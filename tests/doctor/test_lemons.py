"""Doctor's words on the controller's records: nodes that did harm again and again, and withheld acts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from gemini_hpc.config import Settings
from gemini_hpc.controller import withheld
from gemini_hpc.controller.lemons import FILE, Lemons
from gemini_hpc.doctor.examine import examine
from gemini_hpc.doctor.facts import HostFacts
from gemini_hpc.doctor.finding import Finding


class Told(HostFacts):
    def __init__(self, state_dir: Path, **settings: Any) -> None:
        super().__init__("/nonexistent/gemini.toml", "controller")
        self._known["settings"] = Settings(state_dir=str(state_dir), **settings)

    def ask_slurm(self, question: Any) -> Any:
        return {"debug": "UP", "gpu": "UP"}

    def require_slurm_user(self, what: str) -> None:
        return None


def look(state_dir: Path, check: str = "controller.lemons", **settings: Any) -> Finding:
    [found] = examine(Told(state_dir, **settings), [check])
    return found


def test_what_comes_again_is_a_warning(tmp_path: Path) -> None:
    kept = Lemons(str(tmp_path), 30)
    assert look(tmp_path).status == "ok"
    kept.add_visit("n2", "fenced", 7, "no answer")
    assert look(tmp_path).status == "ok"
    kept.add_visit("n2", "failed", 8, "rank 1 on n2 was killed or crashed")
    found = look(tmp_path)
    assert found.status == "warning" and "n2 2 times, the last at " in found.found
    assert "(job 8: failed: rank 1 on n2 was killed or crashed)" in found.found
    path = tmp_path / FILE
    path.write_bytes(msgspec.json.encode({"n2": [{"t": 1.0, "what": "fenced", "job": 7, "why": ""}] * 3}))
    assert look(tmp_path).status == "ok", "long ago"
    path.write_text("[]")
    assert look(tmp_path).status == "skipped"


def test_the_score_of_a_site_that_observes(tmp_path: Path) -> None:
    assert look(tmp_path, "controller.mode").found == 'mode = "act"; nothing was withheld yet'
    kept = withheld.Withheld(str(tmp_path), lambda *said: None)
    kept.record_act(withheld.FENCE, 7, 0, "n2", "no answer for 5.0 s, 2 witnesses", "")
    found = look(tmp_path, "controller.mode", mode="observe")
    assert found.status == "ok" and "1 acts, of which Slurm confirmed 0 and refuted 0; 1 are open" in found.found
    kept.acts[0] = msgspec.structs.replace(kept.acts[0], verdict=withheld.REFUTED, evidence="n2 was IDLE later")
    kept.record_act(withheld.DRAIN, 8, 0, "n3", "the health check is red", "")
    found = look(tmp_path, "controller.mode", mode="observe")
    assert found.status == "warning" and "fenced n2 (job 7: no answer for 5.0 s, 2 witnesses)" in found.found
    (tmp_path / withheld.FILE).write_text("[")
    assert look(tmp_path, "controller.mode").status == "skipped"


def test_a_canary_partition_that_slurm_does_not_have(tmp_path: Path) -> None:
    canary = {"mode": "canary", "canary_partitions": ("debug", "gqu")}
    found = look(tmp_path, "controller.mode", **canary)
    assert found.status == "wrong" and found.found == "Slurm has no partition gqu"
