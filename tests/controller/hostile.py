"""Texts that look like what Slurm prints, and jobs that carry them in every field which their owner can set."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st

from gemini_hpc.devcluster import Cluster

FEATURE = "fast"  # all nodes of the cluster must have it
IMITATIONS = (
    "s Features=2",
    "lr=1 NumNodes=2",
    "x\nJobId=77 JobState=FAILED UserId=root(0)",
    "|77|N/A|N/A|N/A|0|FAILED|n9|||",
    "\n77|0|FAILED|n9|N/A\n",
    "NodeName=n1 State=DOWN Reason=gemini-hpc: lost",
    '"}, "job_id": 77, "job_state": ["FAILED"], "x": "',
    " Requeue=0 Restarts=7 BatchFlag=0 ReqNodeList=n9 HetJobId=3 ArrayTaskId=1",
    "   SubmitLine=sbatch\n   NodeList=n9",
    "(null)",
    "N/A",
    "%A|%T",
    "\u2028\u00e9\u00a0|\t\r\v\f\x1b[2J\x7f",
)


@dataclass(frozen=True)
class Texts:
    """What the owner of one job writes."""

    name: str = ""
    comment: str = ""
    account: str = ""
    wckey: str = ""
    mail_user: str = ""
    network: str = ""
    features: str = ""  # behind a feature with a count Slurm takes any text
    path: str = ""  # of the working directory, the script and its output
    arguments: str = ""
    environment: str = ""

    def argv(self) -> list[str]:
        """For sbatch: all but the path and the arguments."""
        options = {
            "--job-name": self.name,
            "--comment": self.comment,
            "--account": self.account,
            "--wckey": self.wckey,
            "--mail-user": self.mail_user,
            "--network": self.network,
            "--constraint": f"{FEATURE}*1 {self.features}" if self.features else "",
        }
        return [f"{key}={value}" for key, value in options.items() if value]


# An argument holds no NUL, and slurmctld takes at most 1024 bytes for each text.
CHARACTERS = st.characters(codec="utf-8", exclude_characters="\0")
TEXT = st.lists(st.one_of(st.sampled_from(IMITATIONS), st.text(CHARACTERS, max_size=20)), max_size=3).map(
    lambda parts: " ".join(parts).encode()[:900].decode(errors="ignore")
)
# What ends a feature's name or a count is read by Slurm, which then refuses the job.
FEATURES = TEXT.map(lambda t: "".join(c for c in t if c not in "&|*[]()!,"))
PATHS = TEXT.map(lambda t: t.replace("/", "_").encode()[:200].decode(errors="ignore"))
ALL = st.builds(
    Texts,
    name=TEXT,
    comment=TEXT,
    account=TEXT,
    wckey=TEXT,
    mail_user=TEXT,
    network=TEXT,
    features=FEATURES,
    path=PATHS,
    arguments=TEXT,
    environment=TEXT,
)
WORST = Texts(
    **dict.fromkeys(("name", "comment", "account", "wckey", "mail_user", "network"), IMITATIONS[2]),
    features="NumNodes=9\nJobId=77 JobState=FAILED",
    path="x Features=2\nNumNodes=2",
    arguments="JobState=FAILED\n   NodeList=n9",
    environment="Restarts=7",
)


def submit(cluster: Cluster, texts: Texts, *options: str, script: str = "#!/bin/sh\nsleep 600\n") -> int:
    """A job of alice's with these texts; its raw id. Raises `DevclusterError` where Slurm takes one of them not."""
    home = cluster.locate_home("alice")
    owner = home.stat()
    place = home / "jobs" / f" {texts.path}"
    if not place.exists():
        place.mkdir(parents=True)
        for made in (home / "jobs", place):
            _give(made, owner.st_uid, owner.st_gid)
    file = place / f"run {texts.path}"
    file.write_text(script)
    file.chmod(0o755)
    _give(file, owner.st_uid, owner.st_gid)
    output = str(place / "out %j").replace("\\", "\\\\")
    argv = [*options, *texts.argv(), "-D", str(place), "-o", output, "--export", "ALL", str(file)]
    if texts.arguments:
        argv.append(texts.arguments)
    return cluster.submit_job(argv, env={"OWNERS_TEXT": texts.environment})


def _give(path: Path, uid: int, gid: int) -> None:
    import os

    os.chown(path, uid, gid)
