"""`describe.py man|completion`: the manual page or the completion for bash, from the parser of the command line."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
import time

from gemini_hpc import __version__
from gemini_hpc.cli.main import build_parser


def verbs(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of a parser's verbs."""
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found[0].choices) if found else {}


def quoted(text: str) -> str:
    """Return a text as roff, one line that begins no request."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text.startswith((".", "'")) else text


def man(parser: argparse.ArgumentParser) -> str:
    """Return the manual page: each verb's own help, as the command prints it."""
    day = time.strftime("%Y-%m-%d", time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH", time.time()))))
    lines = [
        f'.TH GEMINI\\-HPC 1 {day} "gemini\\-hpc {__version__}" "User Commands"',
        ".SH NAME",
        "gemini\\-hpc \\- in\\-memory checkpoint replicas for training jobs on Slurm",
        ".SH SYNOPSIS",
        ".B gemini\\-hpc",
        "VERB [ARGUMENT...]",
        ".SH DESCRIPTION",
        *map(quoted, textwrap.wrap(parser.description or "", 78)),
        ".SH VERBS",
    ]
    for name, verb in verbs(parser).items():
        lines += [f".SS {quoted(name)}", ".nf", *map(quoted, verb.format_help().rstrip().splitlines()), ".fi"]
    return "\n".join(lines) + "\n"


def options(parser: argparse.ArgumentParser) -> str:
    """Return the words that may stand behind a verb: its options and the names of its own verbs."""
    long = [o for action in parser._actions for o in action.option_strings if o.startswith("--")]
    return " ".join([*verbs(parser), *long])


def completion(parser: argparse.ArgumentParser) -> str:
    """Return the completion for bash."""
    cases = "".join(f"\t{name}) words='{options(verb)}' ;;\n" for name, verb in verbs(parser).items())
    return f"""# bash completion for gemini-hpc
_gemini_hpc() {{
\tlocal words
\t[ "$COMP_CWORD" -gt 1 ] || {{
\t\tmapfile -t COMPREPLY < <(compgen -W '{options(parser)}' -- "$2")
\t\treturn
\t}}
\tcase ${{COMP_WORDS[1]}} in
{cases}\t*) return ;;
\tesac
\tmapfile -t COMPREPLY < <(compgen -W "$words" -- "$2")
}}
complete -o default -F _gemini_hpc gemini-hpc
"""


if __name__ == "__main__":
    os.environ["COLUMNS"] = "78"
    print({"man": man, "completion": completion}[sys.argv[1]](build_parser()), end="")
