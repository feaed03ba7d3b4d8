"""The controller's figures for Prometheus, and the alerts and the dashboard that ask for them."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client.parser import text_string_to_metric_families

from gemini_hpc.config import ConfigError, Settings, parse_settings
from gemini_hpc.controller import metrics
from gemini_hpc.controller.metrics import EVENTS, Metrics
from gemini_hpc.controller.withheld import Withheld
from gemini_hpc.query.inspect_document import build_inspect_document

from .test_inspect_document import SLURM, pairs

MONITORING = Path(__file__).parents[2] / "examples/monitoring"


def track(raw_id: int, ended: float = 0.0) -> Any:
    agents = {"n1": SimpleNamespace(is_connected=True)}
    return SimpleNamespace(raw_id=raw_id, user_id=4_000_000, stored=SimpleNamespace(ended_at=ended), agents=agents)


async def ask(of: Any) -> dict[str, Any]:
    if of.raw_id == 9:
        raise OSError("its agents are gone")
    return build_inspect_document(of.raw_id, pairs({}), (), SLURM, (), "controller", 1000.0)


def made(tmp_path: Path, **settings: Any) -> Metrics:
    registry = SimpleNamespace(jobs={n: track(n) for n in (7, 8, 9)} | {3: track(3, ended=5.0)})
    journal = SimpleNamespace(count_fenced=lambda window_s: 1, count_drained=lambda window_s: 2)
    withheld = Withheld(str(tmp_path), lambda *said: None)
    whole = Settings(state_dir=str(tmp_path), **settings)
    home = SimpleNamespace(settings=whole, registry=registry, journal=journal, withheld=withheld)
    return Metrics(home, ask)  # type: ignore[arg-type]


def published(path: Path) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(path.read_text()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def run_until(figures: Metrics, path: Path) -> None:
    async def main() -> None:
        task = asyncio.create_task(figures.run())
        async with asyncio.timeout(20):
            while not path.exists():
                await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(main())


def test_the_file(tmp_path: Path) -> None:
    path = tmp_path / "gemini.prom"
    figures = made(tmp_path, metrics_file=str(path))
    for event in ("confirmed", "down", "down", "running", "made up by an agent"):
        figures.count_event(7, 0, event)
    run_until(figures, path)
    found = published(path)
    job = (("job", "7"), ("user", "4000000"))
    assert found["gemini_hpc_jobs"] == {(("state", "protected"),): 2.0}, "one job's agents did not answer"
    assert found["gemini_hpc_jobs_tracked"] == {(): 3.0} and found["gemini_hpc_agents_connected"] == {(): 4.0}
    assert found["gemini_hpc_job_sealed_step"][job] == 5.0 and found["gemini_hpc_job_sealed_age_seconds"][job] == 2.0
    assert found["gemini_hpc_job_survivable_nodes"][job] == 1.0
    assert found["gemini_hpc_fence_budget_left"] == {(): 1.0} and found["gemini_hpc_drained_nodes"] == {(): 2.0}
    events = {dict(labels)["event"]: n for labels, n in found["gemini_hpc_events_total"].items()}
    assert set(events) == set(EVENTS) and events["down"] == 2.0
    assert found["gemini_hpc_recovery_seconds_count"] == {(): 1.0}


def test_the_endpoint(tmp_path: Path) -> None:
    path = tmp_path / "x.prom"
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    figures = made(tmp_path, metrics_file=str(path), metrics_listen=address)

    async def main() -> str:
        task = asyncio.create_task(figures.run())
        async with asyncio.timeout(20):
            while not path.exists():
                await asyncio.sleep(0.01)
        with await asyncio.to_thread(urllib.request.urlopen, f"http://{address}/metrics", None, 5) as answer:
            text: str = answer.read().decode()
        task.cancel()
        await asyncio.wait([task])
        return text

    assert "gemini_hpc_jobs_tracked 3.0" in asyncio.run(main())
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://{address}/metrics", None, 5)


def test_what_cannot_be_used_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An address that is taken, a directory that is not there: a line in the log, and the service goes on."""
    figures = made(tmp_path, metrics_file=str(tmp_path / "none/x.prom"), metrics_listen="203.0.113.1:1")

    async def main() -> None:
        task = asyncio.create_task(figures.run())
        await asyncio.sleep(0.3)
        assert not task.done()
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(main())
    assert "metrics-not-written" in caplog.text and "no-metrics-endpoint" in caplog.text


def test_settings() -> None:
    for good in ("", "127.0.0.1:9417", "[::1]:9417"):
        assert parse_settings(f'metrics_listen = "{good}"').metrics_listen == good
    for text in (
        'metrics_listen = "9417"',
        'metrics_listen = "h:0"',
        'metrics_listen = "h:99999"',
        'metrics_file = "x"',
    ):
        with pytest.raises(ConfigError, match="metrics_"):
            parse_settings(text)


def test_alerts_and_dashboard_ask_for_figures_that_exist(tmp_path: Path) -> None:
    path = tmp_path / "gemini.prom"
    run_until(made(tmp_path, metrics_file=str(path)), path)
    known = set(published(path)) | {"gemini_hpc_job_agent_cores"}  # shown where agents measure themselves
    rules = yaml.safe_load((MONITORING / "rules.yml").read_text())
    asked = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    asked += [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(asked) >= 14
    for expression in asked:
        names = set(re.findall(r"gemini_hpc_[a-z_]+", expression))
        assert names and names <= known, (expression, names - known)
        events = set(re.findall(r'event="([a-z_]+)"', expression))
        assert events <= set(EVENTS), expression


def test_figures_are_documented() -> None:
    text = (MONITORING.parents[1] / "docs/admin.md").read_text()
    source = Path(metrics.__file__).read_text()
    names = set(re.findall(r'"(gemini_hpc_[a-z_]+)"', source))
    assert len(names) >= 13 and [name for name in sorted(names) if f"`{name}" not in text] == []
