"""The permitted ranges of numbers and names, in memory, in files and on the wire.

A decoded message, from any peer, holds no number that later code cannot pack, count or print.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from numbers import Integral, Real
from typing import Annotated, Any, Literal

import msgspec

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")  # names that users choose
PLACES = 9999
# name of a training, also part of paths; with its place in the job's sequence (`core.sequence`)
TRAINING_NAME = re.compile(rf"{NAME.pattern}(\+[1-9][0-9]{{0,3}}\.[1-9][0-9]{{0,3}})?")
JOB_ID = re.compile(r"([0-9]{1,10})(_[0-9]{1,10})?")  # as users write it: a job, or a task of an array
VERSION_BITS, EPOCH_BITS = 40, 23  # both share one signed word (`control_page.pack_seal`)
MAX_RANKS = 1 << 20

TrainingName = Annotated[str, msgspec.Meta(pattern=rf"\A{TRAINING_NAME.pattern}\Z")]
StepName = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]  # name of one launch of a training
Job = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
JobKey = Annotated[
    str, msgspec.Meta(pattern=r"\A([0-9a-f]{16})?\Z")
]  # random, per submission; "" if the submission had none
ClusterName = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_.-]{0,64}\Z")]  # as written in slurm.conf
Restart = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Epoch = Annotated[int, msgspec.Meta(ge=0, lt=1 << EPOCH_BITS)]
Version = Annotated[int, msgspec.Meta(ge=0, lt=1 << VERSION_BITS)]
Round = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_RANKS)]
Attempt = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]  # any number that differs the next time
Bytes = Annotated[int, msgspec.Meta(ge=0, lt=1 << 50)]
Time = Annotated[float, msgspec.Meta(ge=0, le=1e11)]  # Unix time in seconds; neither NaN nor infinity
Pairs = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
PARITY_MAX = 4  # blocks of parity in a row of a group
Blocks = Annotated[int, msgspec.Meta(ge=0, le=PARITY_MAX)]  # 0: no parity
SomeBlocks = Annotated[int, msgspec.Meta(ge=1, le=PARITY_MAX)]
Seconds = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
TierInterval = Seconds | Literal["auto"]  # 0: no interval; "auto": see `tier_interval`
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


def parse_number(text: str, otherwise: int = 0) -> int:
    """Return the number of a text of one to ten digits, or `otherwise` for any other text."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 11 else otherwise


def check_argument(
    name: str, value: object, wanted: str, fits: Callable[[Any], bool] = lambda _: True, *, whole: bool = False
) -> None:
    """Check a number that a program passes as an argument.

    Args:
        name: Name of the argument.
        value: Its value.
        wanted: Description of the values that fit.
        fits: Returns whether a number fits.
        whole: Only a whole number fits.

    Raises:
        TypeError: The value is no number.
        ValueError: The number does not fit.
    """
    text = f"{name} is {repr(value)[:80]}: wanted {wanted}"
    if not isinstance(value, Integral if whole else Real):
        raise TypeError(text)
    if not fits(value):
        raise ValueError(text)


def check_count(name: str, value: object, least: int) -> None:
    """Check a whole number, as `check_argument` does."""
    check_argument(name, value, f"a whole number, {least} or more", lambda count: count >= least, whole=True)


def check_overhead(value: object) -> None:
    """Check a ceiling on the cost of copies, as `check_argument` does."""
    check_argument("overhead", value, "a share of the time, above 0 and below 1", lambda share: 0 < share < 1)


def check_timeout(name: str, value: object) -> None:
    """Check a time-out in seconds, as `check_argument` does."""
    check_argument(name, value, "a number of seconds above 0", lambda timeout_s: timeout_s > 0)
