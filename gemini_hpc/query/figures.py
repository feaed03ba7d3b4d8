"""The figures on a job that lists and metrics show, from the job's inspect document."""

from __future__ import annotations

import pwd

from gemini_hpc.query.inspect_document import Document


def compute_sealed_age_s(d: Document) -> float | None:
    """Return the age of the newest sealed version, for the training where it is oldest.

    The age is None if a training has no sealed version.
    """
    ages: list[float] = []
    for s in d["trainings"]:
        own = [h["age_s"] for shard in s["shards"] for h in shard["holders"] if h["state"] == "sealed"]
        known = [age for age in own if age is not None]
        if not known:
            return None
        ages.append(min(known))
    return max(ages, default=None)


def find_sealed_version(d: Document) -> int | None:
    """Return the newest sealed version, for the training where it is oldest; None if there is none."""
    versions = [s["sealed"][1] if s["sealed"] else 0 for s in d["trainings"]]
    return min(versions, default=0) or None


def count_survivable_nodes(d: Document) -> int | None:
    """Return how many nodes, whichever they are, may be lost without loss of a shard.

    The number is None if nothing is sealed yet.
    """
    if not d["trainings"] or any(s["survival"]["lost_already"] for s in d["trainings"]):
        return None
    counts = []
    for s in d["trainings"]:
        sure = [row["k"] for row in s["survival"]["survives"] if row["probability"] >= 1.0]
        counts.append(max(sure, default=0))
    return min(counts)


def find_user_name(uid: int) -> str:
    """Return the name of a user, or the number if the user is unknown here."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)
