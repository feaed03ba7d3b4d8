"""The verb `export`: write a version of the persistent tier as a checkpoint that other programs load."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gemini_hpc.cli.job_id import UserError, WrongIdError, raw_id
from gemini_hpc.config import CONFIG_PATH, ConfigError, load

if TYPE_CHECKING:
    from gemini_hpc.tier.version import VersionManifest

    _Subparsers = argparse._SubParsersAction[Any]

FORMATS = ("safetensors", "dcp", "torch")
_JOB = re.compile(r"[0-9]+(_[0-9]+)?")
_RUST = re.compile(r"\(os error ([0-9]{1,3})\)")  # in safetensors' messages on kernel errors


class ExportError(Exception):
    """An error of the export; its text is one line for the user."""


def register(subparsers: _Subparsers) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "export",
        help="write a checkpoint of the persistent tier in another format",
        description="Write a version of the persistent tier as safetensors (all tensors by name), as a checkpoint of "
        "torch.distributed.checkpoint, or as one file of torch.save; the last two have model, optimizer and the "
        "other state under their names. Of an MPI program all three have its arrays by name.",
    )
    parser.add_argument(
        "what",
        metavar="JOBID|DIR",
        help="a job or array task (10_3), or a directory: of a version, of a training, of a job, or the tier itself; "
        "JOBID@NAME or DIR@NAME: the version that is kept under this name",
    )
    parser.add_argument(
        "--tier", metavar="DIR", default="", help="the job's --gemini-tier (default: the site's tier)"
    )
    parser.add_argument(
        "--training", metavar="NAME", default="", help="where a job has several (Checkpointer(name=...))"
    )
    parser.add_argument("--version", metavar="N", type=int, default=0, help="the version's number (default: newest)")
    parser.add_argument("--format", choices=FORMATS, required=True, help="what to write")
    parser.add_argument("-o", "--output", metavar="OUT", required=True, help="file (dcp: directory) to make")
    parser.add_argument("--config", default=CONFIG_PATH, help="settings file (default: %(default)s)")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Export the version and return the exit status: 0, 1 after an error, 2 for a wrong command line."""
    try:
        where, manifest = _find(args)
        with _made(args.output) as temporary:
            print(
                f"version {manifest.stamp[1]} of job {manifest.job}, training {manifest.training}: "
                f"{manifest.world} ranks"
            )
            count = _write(where, manifest, args.format, temporary, args.output)
        print(f"{args.output}: {args.format}, {count} tensors")
    except WrongIdError as error:
        print(f"gemini-hpc export: {error}", file=sys.stderr)
        return 2
    except (ExportError, UserError, ConfigError, OSError, ValueError) as error:
        print(f"gemini-hpc export: {error}", file=sys.stderr)
        return 1
    except ImportError as error:
        print(
            f"gemini-hpc export: {args.format} needs a package that is not here: {error}; the extra [export] has all",
            file=sys.stderr,
        )
        return 1
    return 0


# ---- finding the version --------------------------------------------------------------------------------


def _find(args: argparse.Namespace) -> tuple[str, VersionManifest]:
    """Return directory and manifest of a version. Raises ExportError, UserError, ValueError, OSError."""
    from gemini_hpc.tier.find import find

    path = job_or_directory(args.what, args.tier, args.config)
    where, manifest = find(path, args.training, args.version, _report_skipped)
    # A version's own directory may have been copied to a place with any name.
    if args.training and args.training not in (
        manifest.training,
        os.path.basename(os.path.dirname(os.path.abspath(where))),
    ):
        raise ExportError(
            f"{where} is of training {manifest.training}, and --training says {args.training}: leave one of them out"
        )
    if args.version and args.version != manifest.stamp[1]:
        raise ExportError(
            f"{where} is version {manifest.stamp[1]}, and --version says {args.version}: leave one of them out"
        )
    return where, manifest


def job_or_directory(what: str, tier: str, config: str) -> str:
    """Return the directory that the user means, for a job its own directory, with any "@NAME" appended.

    Raises ExportError, WrongIdError.
    """
    from gemini_hpc.tier import job_directory

    job, at, name = what.partition("@")
    if not _JOB.fullmatch(job):
        return what
    number = raw_id(job)
    where = tier or _site_tier(config, job)
    names = job_directory.names(where, number) if os.path.isdir(where) else []
    if len(names) > 1:
        raise ExportError(
            f"{where}: several jobs have had the number {number}; name the one you want: {', '.join(names)}"
        )
    return f"{where}/{(names or [job_directory.plain_name(number)])[0]}{at}{name}"


def _report_skipped(said: str) -> None:
    print(f"gemini-hpc export: passed over: {said}", file=sys.stderr)


def _site_tier(config: str, job: str) -> str:
    from gemini_hpc.agent.tier.choice import site_tier

    found = site_tier(load(config).tier, os.getuid())
    if not found:
        raise ExportError(f"job {job}: its tier is not known: give --tier DIR, or the directory itself")
    return found


# ---- writing the export --------------------------------------------------------------------------------


@contextmanager
def _made(output: str) -> Iterator[str]:
    """Yield a temporary path beside OUT, and publish it as OUT if the block succeeds.

    OUT appears only when all of it is on disk. If the block fails, the temporary path is removed. Raises
    ExportError.
    """
    from gemini_hpc.tier import publish

    path = os.path.abspath(output)
    if os.path.lexists(path):
        raise ExportError(f"{output or path} already exists")
    parent, name = os.path.split(path)
    try:
        inside = tempfile.mkdtemp(prefix=".gemini-export.", suffix=".tmp", dir=parent)
    except OSError as error:
        raise ExportError(f"{output} cannot be made in {parent}: {publish.why(error)}") from None
    try:
        temporary = f"{inside}/{name}"
        yield temporary
        with _as_export_error(output):
            publish.publish(temporary, parent, name)
    finally:
        shutil.rmtree(inside, ignore_errors=True)


def _write(where: str, manifest: VersionManifest, form: str, path: str, output: str) -> int:
    """Write the version and return its number of tensors.

    Raises ExportError, and OSError or ValueError if the version cannot be read.
    """
    from gemini_hpc.train.state import full_state

    found = full_state.read(where, manifest)
    if form == "safetensors":
        about = {
            "job": str(manifest.job),
            "training": manifest.training,
            "version": str(manifest.stamp[1]),
            "format": "pt",
        }
        with _as_export_error(output):
            _safetensors(full_state.flat(found), path, about)
    else:
        state = full_state.as_state(found)
        with _as_export_error(output):
            (_torch if form == "torch" else _dcp)(state, path)
    return len(found.tensors)


@contextmanager
def _as_export_error(output: str) -> Iterator[None]:
    """Convert errors of writing into an ExportError."""
    from gemini_hpc.tier import publish

    try:
        yield
    except (OSError, RuntimeError) as error:
        raise ExportError(f"{output} cannot be written: {publish.why(_first(error))}") from None


def _first(error: Exception) -> Exception:
    """Return the OSError that caused another error.

    After an OSError, torch fails again while it closes its file, and reports that second error.
    """
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__context__
    return found or error


def _safetensors(tensors: dict[str, Any], path: str, about: dict[str, str]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=about)
    except SafetensorError as error:
        found = _RUST.search(str(error))
        raise OSError(int(found[1]), str(error)) if found else RuntimeError(str(error)) from None
    except KeyError as error:  # raised by save_file for a type that its format lacks
        raise RuntimeError(f"safetensors does not support {error}: choose another format") from None


def _torch(state: dict[str, Any], path: str) -> None:
    import torch

    with open(path, "wb") as file:  # unlike torch, Python reports why it cannot write
        torch.save(state, file)


def _dcp(state: dict[str, Any], path: str) -> None:
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    try:
        with warnings.catch_warnings():  # torch warns of saving in a single process, which is intended here
            warnings.simplefilter("ignore", UserWarning)
            state_dict_saver.save(state, storage_writer=FileSystemWriter(path, sync_files=True), no_dist=True)
    except CheckpointException as error:
        (cause, _), *_ = error.failures.values()
        raise _first(cause) if isinstance(cause, Exception) else cause from None
