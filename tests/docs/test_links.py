"""README and docs name only what exists: links, make targets, verbs, options, settings, events, arguments, keys."""

from __future__ import annotations

import argparse
import inspect
import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

from gemini_hpc import config
from gemini_hpc.cli.main import build_parser
from tests.releases import __main__ as releases

from .tables import ADMIN, REPRODUCTION, with_figures, with_goodput, with_settings

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
# Options of other programs that the pages name.
FOREIGN = {
    "--now",  # systemctl
    "--root",  # rpm
    *("--no-index", "--find-links"),  # pip
    *(
        "--requeue",
        "--no-requeue",
        "--open-mode",
        "--wrap",
        "--ntasks-per-node",
        "--kill-on-bad-exit",
        "--export",
        "--output",
    ),
    *("--nnodes", "--nproc-per-node", "--node-rank", "--master-addr", "--master-port"),  # torchrun's
    *("--max-restarts", "--log"),
    *("--cleanenv", "--containall", "--writable", "--writable-tmpfs"),  # Apptainer's
    *("--mem", "--bind", "--container-mounts", "--mpi"),
    *("--parsable", "--dependency", "--nodelist"),
    *(
        "--signal",
        "--full",
        "--no-kill",
        "--overlap",
        "--contiguous",
        "--switches",
        "--noconvert",
        "--exclusive",
        "--hint",
    ),
    "--with-ft",  # Open MPI's
    *("--tiny", "--fake"),  # python -m benchmarks, benchmarks.gpu
}
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.M | re.S)
LONE = re.compile(r"(?<![\w-])--[a-z]+(?:-[a-z]+)*(?![\w-])")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def fences(text: str) -> Iterator[tuple[str, str]]:
    for found in FENCE.finditer(text):
        yield found[2], re.sub(rf"^{found[1]}", "", found[3], flags=re.M)


def spans(text: str) -> list[str]:
    return [span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", FENCE.sub("", text))]


def code(text: str) -> list[str]:
    """Every line of a block and every span."""
    return [*spans(text), *(line for _, block in fences(text) for line in block.splitlines())]


@cache
def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ +(.+)$", FENCE.sub("", text), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


def section(page: str, heading: str) -> str:
    text = (ROOT / page).read_text()
    return text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


def test_links() -> None:
    bad = []
    for page in PAGES:
        for link in LINK.findall(FENCE.sub("", page.read_text())):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
                bad.append(f"{page.name}: {link}")
    assert not bad


def named_sections(text: str) -> list[tuple[str, str]]:
    """The pages that a program names, each with the words after its comma, where a section may be named."""
    joined = re.sub(r"\"\s*f?r?\"|\s+#?\s*", lambda gap: "" if gap[0].startswith('"') else " ", text)
    page = r"(?:docs/[\w/]+|README|ARCHITECTURE|CONTRIBUTING|SECURITY)(?:\.md)?\b"
    return re.findall(rf"({page})(?:, ([^.,;:)\"']*))?", joined)


def test_pages_and_sections_that_the_program_names_are_there() -> None:
    bad = []
    for path in sorted(ROOT.glob("gemini_hpc/**/*.py")):
        for page, words in named_sections(path.read_text()):
            target = ROOT / (page if page.endswith(".md") else f"{page}.md")
            if not target.exists():
                bad.append(f"{path.name}: {page}")
                continue
            known = [anchor.replace("-", " ") for anchor in anchors(target.read_text())]
            if words[:1].isupper() and not re.match(r"R\d", words) and words.lower() not in known:
                bad.append(f"{path.name}: {page} has no section {words!r}")
    assert not bad


def test_modules_that_are_named_are_there() -> None:
    """But for the notes on how things came about."""
    places = (ROOT, ROOT / "gemini_hpc", ROOT / "tests")
    for page in PAGES:
        named = {span for span in spans(page.read_text()) if re.fullmatch(r"[a-z_]+(/[a-z_0-9]+)+\.py", span)}
        absent = sorted(name for name in named if not any((place / name).exists() for place in places))
        assert not absent or "notes" in page.name, f"{page.name} names {absent}"


def test_requirements_that_are_named_have_an_anchor() -> None:
    known = anchors((ROOT / "docs/dev/requirements.md").read_text())
    name = r"[a-z]+(?:-[a-z]+)*"
    found = set()
    for path in [*ROOT.glob("gemini_hpc/**/*.py"), *ROOT.glob("tests/**/*.py")]:
        text = re.sub(r"\s+", " ", path.read_text())
        for names in re.findall(rf"(?:\(|\"\"\")(?i:requirements?) ({name}(?:, {name})*)", text):
            found |= {one for one in names.split(", ") if "-" in one}
    assert len(found) > 10 and found <= known


def targets(makefile: Path) -> set[str]:
    return set(re.findall(r"^([a-z-]+):(?!=)", makefile.read_text(), re.M))


def test_make_targets() -> None:
    known = {"": targets(ROOT / "Makefile"), "slurm": targets(ROOT / "slurm" / "Makefile")}
    for page in PAGES:
        for line in code(page.read_text()):
            found = re.match(r"(?:.* )?make(?: -C (\w+))?((?: [a-z-]+\b(?!=))*)(?: |$)", line.partition("#")[0])
            if found:
                assert set(found[2].split()) <= known[found[1] or ""], f"{page.name}: {line}"


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def options(parser: argparse.ArgumentParser) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings}


def every_option(parser: argparse.ArgumentParser) -> set[str]:
    return options(parser).union(*map(every_option, subparsers(parser).values()))


whole_parser = cache(build_parser)


def wrong_in(command: str) -> str:
    """What is wrong in the words behind `gemini-hpc`; "" if nothing."""
    parser = whole_parser()
    for word in re.sub(r"[\[\]|]", " ", command).split():
        if word == "--":
            break
        option = re.match(r"--?[a-z][a-z-]*", word)
        verbs = subparsers(parser)
        if option:
            if getattr(parser, "_before", None) is not None and option[0] not in options(parser):
                break  # the rest is the command's own
            if option[0] not in options(parser):
                return f"{parser.prog} has no {option[0]}"
        elif verbs:
            if word not in verbs:
                return f"{parser.prog} has no verb {word}"
            parser = verbs[word]
    return ""


def test_commands() -> None:
    for page in PAGES:
        for line in code(page.read_text()):
            for command in re.split(r"(?:^|(?<=[\s(\"])|(?<=/bin/))gemini-hpc(?= )", line.partition("  #")[0])[1:]:
                if re.match(r" [a-z-]", command):
                    wrong = wrong_in(re.split(r" \||;|  |,", command)[0])
                    assert not wrong, f"{page.name}: {line}: {wrong}"


def test_wrong_commands_are_noticed() -> None:
    for command, wrong in (
        (" inspect 7 --json --watch 2", ""),
        (" inspect 7 --yaml", "--yaml"),
        (" heal 7", "no verb heal"),
        (" devcluster power-off n2 --reset", ""),
        (" devcluster explode n2", "no verb explode"),
        (" devcluster status --loud", "--loud"),
        (" devcluster sbatch --user bob -N2 --exclusive job.sh", ""),
        (" run --max-restarts 2 -- srun --anything", ""),
        (" run --restarts 2 -- srun", "--restarts"),
    ):
        found = wrong_in(command)
        assert wrong in found if wrong else not found, command


def test_lone_options() -> None:
    ours = set(re.findall(r'"(gemini-[a-z-]+)"', (ROOT / "slurm" / "options.c").read_text()))
    known = (
        every_option(whole_parser())
        | every_option(releases.build_parser())
        | FOREIGN
        | {f"--{name}" for name in ours}
    )
    for page in PAGES:
        named = {found for line in code(page.read_text()) for found in re.findall(LONE, line)}
        assert named <= known, page.name


def test_settings_in_examples() -> None:
    for page in PAGES:
        text = page.read_text()
        blocks = [block for kind, block in fences(text) if kind == "toml"]
        lone = [span for span in spans(text) if re.match(r"[a-z_]+ = ", span)]
        for toml in [*blocks, *lone]:
            config.parse_settings(toml, page.name)  # the name is in what it raises


def test_every_setting_is_documented_with_its_default() -> None:
    rows = re.findall(r"^- `(\w+)` = `([^`]+)`: (.+)$", section("docs/admin.md", "Settings"), re.M)
    found = {key: tomllib.loads(f"value = {value}")["value"] for key, value, _ in rows}
    wanted = {f.name: list(f.default) if isinstance(f.default, tuple) else f.default for f in fields(config.Settings)}
    assert found == wanted
    assert [type(found[key]) for key in wanted] == [type(value) for value in wanted.values()]


def test_the_list_of_settings_is_made_from_them() -> None:
    text = ADMIN.read_text()
    assert text == with_settings(text), "python -m tests.docs.tables writes it anew"


def test_the_papers_figures_are_what_is_computed() -> None:
    text = REPRODUCTION.read_text()
    assert text == with_goodput(with_figures(text)), "python -m tests.docs.tables writes it anew"


def texts_of(part: str) -> list[str]:
    return [path.read_text() for path in sorted((ROOT / "gemini_hpc" / part).rglob("*.py"))]


def test_every_event_is_documented() -> None:
    items = re.findall(r"^- ((?:`[a-z_]+`(?:, | \(.*?\), )?)+)", section("docs/admin.md", "Event names"), re.M)
    named = set(re.findall(r"`([a-z_]+)`", "\n".join(items)))
    sources = "\n".join(path.read_text() for path in sorted((ROOT / "gemini_hpc").rglob("*.py")))
    assert all(f'"{name}"' in sources for name in named)
    owner = r"\b(?:self|agent|rescue|_agent|events|client|_client|helper)"
    call = owner + r"\.(?:log|_log|Log|say|_say|_once|_note|event)\(\s*"
    events = "\n".join(text for part in ("agent", "controller", "node", "train") for text in texts_of(part))
    told = set(re.findall(call + r'"([a-z_]+)"\s*[,)]', events))
    assert len(told) > 20
    assert told <= named


def test_every_argument_and_the_report_are_documented() -> None:
    import torch

    import gemini_hpc as gemini

    text = (ROOT / "docs" / "reference.md").read_text()
    rows = dict(re.findall(r"^- `(\w+)` = `([^`]+)`:", text, re.M))
    parameters = inspect.signature(gemini.Checkpointer).parameters.values()
    tuning = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not None}
    assert tuning.pop("traffic") == gemini.Traffic()
    tuning |= {field.name: field.default for field in fields(gemini.Traffic)}
    for name, default in tuning.items():
        assert rows.get(name, "").strip('"') == str(default), name
    model = torch.nn.Linear(2, 2)
    ckpt = gemini.Checkpointer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    table = section("docs/reference.md", "report")
    report = ckpt.report()
    assert all(f"`{key}`" in table for key in [*report, *report["captured"]])
    ckpt.close()


def test_the_whole_of_cluster_is_named() -> None:
    from gemini_hpc.devcluster import Cluster

    text = (ROOT / "docs" / "dev" / "devcluster.md").read_text()
    public = [name for name in vars(Cluster) if not name.startswith("_")]
    assert [name for name in public if not re.search(rf"\b{name}\b", text)] == []


def test_nobody_is_told_to_install_by_a_name_that_is_not_ours() -> None:
    """The name on PyPI is nobody's, or a stranger's: only a checkout or a wheel is installed."""
    advice = re.compile(
        r"gemini[-_]hpc\[|pip3? install\s+(?:-[^\s`'\"]+\s+)*['\"]?gemini[-_]hpc(?![\w/-]*/|[-\w.]*\.whl)"
    )
    places = [ROOT / "README.md", ROOT / "pyproject.toml", ROOT / "Makefile"]
    for top, pattern in (("docs", "*.md"), ("gemini_hpc", "*.py"), ("examples", "*"), ("slurm", "*.[ch]")):
        places += [p for p in (ROOT / top).rglob(pattern) if p.is_file() and p.parent.name != "__pycache__"]
    assert {str(p.relative_to(ROOT)): found[0] for p in places if (found := advice.search(p.read_text()))} == {}
    assert advice.search("pip install 'gemini-hpc[mpi]'") and advice.search("pip install -q gemini-hpc")
    assert not advice.search("pip install ./gemini_hpc-0.1.0-py3-none-any.whl")
