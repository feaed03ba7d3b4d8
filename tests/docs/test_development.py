"""What a developer finds beside the code: the lists of packages, the public CI, the form for a defect."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import yaml  # type: ignore[import-untyped]

from .test_links import ROOT, targets, wrong_in

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()


def read(path: str) -> Any:
    """Return a YAML document of .github."""
    return yaml.safe_load((ROOT / ".github" / path).read_text())


def commands(job: dict[str, Any]) -> list[str]:
    """Return what the steps of a job run."""
    return [step["run"] for step in job["steps"] if "run" in step]


def test_what_is_installed_for_development_is_bounded_and_listed_once() -> None:
    lists = {name: wanted for name, wanted in PROJECT["optional-dependencies"].items() if name.startswith("dev")}
    wanted = [requirement for required in lists.values() for requirement in required]
    assert [requirement for requirement in wanted if not re.search(r"==|<", requirement)] == []
    names = [re.split(r"[<>=]", requirement)[0] for requirement in wanted]
    assert sorted(names) == sorted(set(names))
    assert set(re.findall(r"call installed,([\w -]+),", MAKEFILE)) == {"dependencies dev", "dependencies", *lists} - {
        "dev"
    }
    assert not re.search(r"[<>=]=\d", MAKEFILE), "versions stand in pyproject.toml"


def test_the_public_ci_runs_what_is_there() -> None:
    jobs = read("workflows/check.yml")["jobs"]
    said = [line for job in jobs.values() for line in commands(job)]
    made = [
        re.fullmatch(r"make ([a-z-]+)((?: [A-Z]+=\S+)*)", line)
        for line in said
        if "make " in line and "apt" not in line
    ]
    assert made and all(made), said
    known = targets(ROOT / "Makefile")
    for found in filter(None, made):
        assert found[1] in known, found[0]
        assert all(re.search(rf"^{name}\b.*=", MAKEFILE, re.M) for name in re.findall(r"([A-Z]+)=", found[2])), found[
            0
        ]
    assert re.search(r"^check:.* lint\b", MAKEFILE, re.M), "the check begins with lint"
    assert commands(jobs["check"]) == ["make check PYTHON=python"]


def test_releases_of_python_that_are_claimed_are_run() -> None:
    claimed = [
        found[1] for line in PROJECT["classifiers"] if (found := re.fullmatch(r".* :: Python :: (3\.\d+)", line))
    ]
    assert read("workflows/check.yml")["jobs"]["check"]["strategy"]["matrix"]["python"] == claimed
    assert PROJECT["requires-python"] == f">={claimed[0]}"


def test_tests_on_clusters_wait_for_the_night_or_for_somebody() -> None:
    workflow = read("workflows/check.yml")
    cluster = workflow["jobs"]["cluster"]
    assert {"push", "pull_request", "schedule", "workflow_dispatch"} == set(workflow[True]), "YAML 1.1: `on` is true"
    assert set(re.findall(r"'(\w+)'", cluster["if"])) == {"schedule", "workflow_dispatch"}
    assert cluster["container"]["image"] == "debian:12" and "--privileged" in cluster["container"]["options"]
    assert {"make demo", "make test"} <= set(commands(cluster))


def test_the_form_asks_for_what_the_commands_say() -> None:
    fields = {field["id"]: field for field in read("ISSUE_TEMPLATE/bug.yml")["body"] if field["type"] != "markdown"}
    asked = [
        command
        for field in fields.values()
        for command in re.findall(r"`gemini-hpc( [^`]+)`", field["attributes"]["description"])
    ]
    assert {" --version", " doctor --json", " inspect JOBID --json"} <= set(asked)
    for command in asked:
        assert wrong_in(command.replace("JOBID", "7")) == "", command
    required = {name for name, field in fields.items() if field.get("validations", {}).get("required")}
    assert required == {"what", "release", "slurm", "doctor"}
