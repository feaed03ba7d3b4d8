"""The frame of the verbs: parsers, the job that a command line names, results, and exit statuses of errors."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from gemini_hpc.config import CONFIG_PATH, ConfigError, Settings
from gemini_hpc.core.numbers import JOB_ID
from gemini_hpc.wire.sanitize import sanitize

Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
_EXAMPLES = "examples:\n"


class UserError(Exception):
    """An error of the user; its text is one line."""


class UsageError(UserError):
    """The error that the command line is wrong."""


class Result(NamedTuple):
    """The result of a verb.

    Attributes:
        document: The JSON document.
        render: Returns the document as text; no line is printed for an empty text.
        status: The exit status.
    """

    document: Any
    render: Callable[[Any], str]
    status: int = 0

    def format(self, as_json: bool) -> str:
        """Return the result as one line of JSON, or as text for people."""
        return json.dumps(self.document) if as_json else self.render(self.document)


Action = Callable[[argparse.Namespace], Result | int]


class HelpFormatter(argparse.HelpFormatter):
    """A formatter that folds paragraphs and leaves the lines of examples as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        folded = (
            "\n".join(f"{indent}{line}" for line in part.splitlines())
            if part.startswith(_EXAMPLES)
            else super(HelpFormatter, self)._fill_text(part, width, indent)
            for part in text.split("\n\n")
        )
        return "\n\n".join(folded)


def add_verb(
    verbs: Verbs,
    name: str,
    action: Action,
    *examples: str,
    epilog: str = "",
    errors: tuple[type[Exception], ...] = (),
    **texts: str,
) -> argparse.ArgumentParser:
    """Add a verb to the command line. Return its parser.

    Args:
        verbs: The verbs of the command line.
        name: The verb.
        action: Does the work. Returns the result, or the exit status of a verb that prints by itself.
        examples: Lines for the end of the help.
        epilog: Sentences before the examples.
        errors: Exceptions of the action, beside those of all verbs, whose text is for the user.
        texts: `help` and `description`.
    """
    shown = _EXAMPLES + "\n".join(f"  {line}" for line in examples)
    epilog = f"{epilog}\n\n{shown}" if epilog else shown
    parser = verbs.add_parser(name, epilog=epilog, formatter_class=HelpFormatter, **texts)  # type: ignore[arg-type]
    parser.set_defaults(func=partial(run_verb, name, action, errors))
    return parser


def add_job(parser: argparse.ArgumentParser) -> None:
    """Add the argument for a job."""
    parser.add_argument("job", metavar="JOBID", help="job id, or array task as 10_3")


def add_node(parser: argparse.ArgumentParser) -> None:
    """Add the argument for a node."""
    parser.add_argument("node", metavar="NODE", help="the node, as Slurm names it")


def add_tier(parser: argparse.ArgumentParser) -> None:
    """Add the option for the tier of a job."""
    parser.add_argument(
        "--tier", metavar="DIR", default="", help="the job's --gemini-tier (default: the site's tier)"
    )


def add_json(parser: argparse.ArgumentParser, text: str = "print the documented JSON document (schema 1)") -> None:
    """Add the option `--json` with its help."""
    parser.add_argument("--json", action="store_true", help=text)


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the option for the site's settings."""
    parser.add_argument("--config", default=CONFIG_PATH, help="settings file (default: %(default)s)")


def run_verb(name: str, action: Action, errors: tuple[type[Exception], ...], args: argparse.Namespace) -> int:
    """Run a verb and print its result.

    Returns:
        The exit status: the verb's own, 1 after an error, 2 for a wrong command line.
    """
    try:
        result = action(args)
        text, status = ("", result) if isinstance(result, int) else (result.format(args.json), result.status)
    except (*errors, *_list_expected_errors()) as error:
        print_error(name, sanitize(str(error)))
        return 2 if isinstance(error, UsageError) else 1
    if text:
        print(text, flush=True)
    return status


def _list_expected_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of all verbs, imported only after an exception, so that a verb starts fast."""
    from gemini_hpc.query.ask import QueryError
    from gemini_hpc.report.drawing import MissingError
    from gemini_hpc.slurm import SlurmError

    return UserError, ConfigError, QueryError, SlurmError, MissingError


def print_error(name: str, text: str) -> None:
    """Print one line of a verb on stderr."""
    print(f"gemini-hpc {name}: {text}", file=sys.stderr)


def overwrite_line(text: str) -> None:
    """Show a text in place of the last line on stderr, a terminal."""
    print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def find_job(args: argparse.Namespace) -> tuple[Settings, int]:
    """Return the settings by which the agents of the named job are asked, and its raw id.

    Raises:
        UserError: Slurm does not know the job.
        UsageError: The argument is no job id.
        ConfigError: The settings or the job's key file cannot be used.
    """
    from gemini_hpc.wire import own_key

    job = find_raw_id(args.job)
    return own_key.load_settings(job, args.config), job


def find_raw_id(text: str) -> int:
    """Return the raw id of a job, or of an array task (`10_3`), for which Slurm is asked.

    Raises:
        UserError: Slurm does not know the job, or does not answer.
        UsageError: The text is no job id.
    """
    m = JOB_ID.fullmatch(text)
    if m is None:
        raise UsageError(f"{text[:80]!r} is not a job id: wanted a number, or 10_3 of an array")
    job = int(m[1]) if m[2] is None else _find_task_raw_id(text)
    if job >= 1 << 32:
        raise UserError(f"job {job}: unknown, or not yours")
    return job


def _find_task_raw_id(task: str) -> int:
    import asyncio

    from gemini_hpc.slurm import Slurm, SlurmError, UnknownJob

    try:
        return asyncio.run(Slurm().find_raw_id(task))
    except UnknownJob:
        raise UserError(f"job {task}: unknown, or not yours") from None
    except SlurmError as exc:
        raise UserError(f"job {task}: {exc}") from None
