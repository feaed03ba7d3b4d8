"""The verb `export`: write a version of the persistent tier as a checkpoint that other programs load."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gemini_hpc.cli import frame
from gemini_hpc.cli.amounts import parse_count
from gemini_hpc.cli.frame import UserError
from gemini_hpc.config import load_site_settings
from gemini_hpc.core.numbers import JOB_ID

if TYPE_CHECKING:
    from gemini_hpc.tier.version import VersionManifest

FORMATS = ("safetensors", "dcp", "torch")
_RUST = re.compile(r"\(os error ([0-9]{1,3})\)")  # in safetensors' messages on kernel errors


def register(verbs: frame.Verbs) -> None:
    """Add the verb to the command line."""
    parser = frame.add_verb(
        verbs,
        "export",
        run,
        "gemini-hpc export 42 --format safetensors -o weights.safetensors",
        "gemini-hpc export /lustre/ada/ckpt --version 800 --format dcp -o dcp/",
        errors=(OSError, ValueError),
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
    frame.add_tier(parser)
    parser.add_argument(
        "--training",
        metavar="NAME",
        default="",
        help="name of the training, if the job has several (Checkpointer(name=...))",
    )
    parser.add_argument(
        "--version", metavar="N", type=parse_count, default=0, help="the version's number (default: newest)"
    )
    parser.add_argument("--format", choices=FORMATS, required=True, help="what to write")
    parser.add_argument("-o", "--output", metavar="OUT", required=True, help="file (dcp: directory) to make")
    frame.add_config(parser)


def run(args: argparse.Namespace) -> int:
    """Export the version and return the exit status 0."""
    where, manifest = _find_version(args)
    with _publish_output(args.output) as temporary:
        print(
            f"version {manifest.stamp[1]} of job {manifest.job}, training {manifest.training}: {manifest.world} ranks"
        )
        try:
            count = _write_export(where, manifest, args.format, temporary, args.output)
        except ImportError as error:
            raise UserError(
                f"{args.format} needs a package that is not here: {error}; the extra [export] has all"
            ) from None
    print(f"{args.output}: {args.format}, {count} tensors")
    return 0


# ---- finding the version --------------------------------------------------------------------------------


def _find_version(args: argparse.Namespace) -> tuple[str, VersionManifest]:
    """Return directory and manifest of a version. Raises UserError, ValueError, OSError."""
    from gemini_hpc.tier.find import find

    path = find_directory(args.what, args.tier, args.config)
    where, manifest = find(path, args.training, args.version, _report_skipped)
    # A version's own directory may have been copied to a place with any name.
    if args.training and args.training not in (
        manifest.training,
        os.path.basename(os.path.dirname(os.path.abspath(where))),
    ):
        raise UserError(
            f"{where} is of training {manifest.training}, and --training says {args.training}: leave one of them out"
        )
    if args.version and args.version != manifest.stamp[1]:
        raise UserError(
            f"{where} is version {manifest.stamp[1]}, and --version says {args.version}: leave one of them out"
        )
    return where, manifest


def find_directory(target: str, tier: str, config: str) -> str:
    """Return the directory that the user means, for a job its own directory, with any "@NAME" appended.

    Raises UserError.
    """
    from gemini_hpc.tier import job_directory

    job, at, name = target.partition("@")
    if not JOB_ID.fullmatch(job):
        return target
    number = frame.find_raw_id(job)
    where = tier or _find_site_tier(config, job)
    names = job_directory.list_names(where, number) if os.path.isdir(where) else []
    if len(names) > 1:
        raise UserError(
            f"{where}: several jobs have had the number {number}; name the one you want: {', '.join(names)}"
        )
    return f"{where}/{(names or [job_directory.format_plain_name(number)])[0]}{at}{name}"


def _report_skipped(text: str) -> None:
    frame.print_error("export", f"skipped: {text}")


def _find_site_tier(config: str, job: str) -> str:
    from gemini_hpc.agent.tier.choice import resolve_site_tier

    found = resolve_site_tier(load_site_settings(config).tier, os.getuid())
    if not found:
        raise UserError(f"job {job}: its tier is not known: give --tier DIR, or the directory itself")
    return found


# ---- writing the export --------------------------------------------------------------------------------


@contextmanager
def _publish_output(output: str) -> Iterator[str]:
    """Yield a temporary path beside OUT, and publish it as OUT if the block succeeds.

    OUT appears only when all of it is on disk. If the block fails, the temporary path is removed. Raises
    UserError.
    """
    from gemini_hpc.tier import publish

    path = os.path.abspath(output)
    if os.path.lexists(path):
        raise UserError(f"{output or path} already exists")
    parent, name = os.path.split(path)
    try:
        inside = tempfile.mkdtemp(prefix=".gemini-export.", suffix=".tmp", dir=parent)
    except OSError as error:
        raise UserError(f"{output} cannot be made in {parent}: {publish.explain_error(error)}") from None
    try:
        temporary = f"{inside}/{name}"
        yield temporary
        with _convert_errors(output):
            publish.publish(temporary, parent, name)
    finally:
        shutil.rmtree(inside, ignore_errors=True)


def _write_export(where: str, manifest: VersionManifest, form: str, path: str, output: str) -> int:
    """Write the version and return its number of tensors.

    Raises UserError, and OSError or ValueError if the version cannot be read.
    """
    from gemini_hpc.train.state import full_state

    found = full_state.read_whole(where, manifest)
    if form == "safetensors":
        about = {
            "job": str(manifest.job),
            "training": manifest.training,
            "version": str(manifest.stamp[1]),
            "format": "pt",
        }
        with _convert_errors(output):
            _write_safetensors(full_state.collect_tensors(found), path, about)
    else:
        state = full_state.as_state(found)
        with _convert_errors(output):
            (_write_torch if form == "torch" else _write_dcp)(state, path)
    return len(found.tensors)


@contextmanager
def _convert_errors(output: str) -> Iterator[None]:
    """Convert errors of writing into a UserError."""
    from gemini_hpc.tier import publish

    try:
        yield
    except (OSError, RuntimeError) as error:
        raise UserError(f"{output} cannot be written: {publish.explain_error(_find_os_error(error))}") from None


def _find_os_error(error: Exception) -> Exception:
    """Return the OSError that caused another error.

    After an OSError, torch fails again while it closes its file, and reports that second error.
    """
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__context__
    return found or error


def _write_safetensors(tensors: dict[str, Any], path: str, about: dict[str, str]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=about)
    except SafetensorError as error:
        found = _RUST.search(str(error))
        raise OSError(int(found[1]), str(error)) if found else RuntimeError(str(error)) from None
    except KeyError as error:  # raised by save_file for a type that its format lacks
        raise RuntimeError(f"safetensors does not support {error}: choose another format") from None


def _write_torch(state: dict[str, Any], path: str) -> None:
    import torch

    with open(path, "wb") as file:  # unlike torch, Python reports why it cannot write
        torch.save(state, file)


def _write_dcp(state: dict[str, Any], path: str) -> None:
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    try:
        with warnings.catch_warnings():  # torch warns of saving in a single process, which is intended here
            warnings.simplefilter("ignore", UserWarning)
            state_dict_saver.save(state, storage_writer=FileSystemWriter(path, sync_files=True), no_dist=True)
    except CheckpointException as error:
        (cause, _), *_ = error.failures.values()
        raise _find_os_error(cause) if isinstance(cause, Exception) else cause from None
