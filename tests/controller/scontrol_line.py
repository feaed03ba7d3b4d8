"""A second reading of jobs, to compare the client's with: `scontrol show job -o`, for jobs without hostile texts."""

from __future__ import annotations

import re

from gemini_hpc.slurm.facts import Job
from gemini_hpc.slurm.text import hosts, megabytes, number, pairs, state_of, text_of, unix_time


def parse_job(line: str) -> Job:
    """The job of one line."""
    line = re.sub(r"JobName=.*?(?=UserId=)|(?<=\s)Network=.*", "", line)  # its owner's texts
    fields: dict[str, str] = {}
    for key, value in pairs(line):
        fields.setdefault(key, value)
    owner = re.fullmatch(r"(.*)\(([0-9]+)\)", fields["UserId"])
    assert owner is not None, line
    array = int(fields["ArrayJobId"]) if "ArrayJobId" in fields else None
    task = fields.get("ArrayTaskId", "").partition("%")[0]
    return Job(
        id=f"{array}_{task}" if array is not None else fields["JobId"],
        raw_id=int(fields["JobId"]),
        state=state_of(fields["JobState"]),
        reason=text_of(fields["Reason"]),
        user_id=int(owner[2]),
        user=owner[1],
        nodes=hosts(fields["NodeList"]),
        req_nodes=hosts(fields["ReqNodeList"]),
        num_nodes=number(fields["NumNodes"]),
        restarts=number(fields["Restarts"]),
        requeue=fields["Requeue"] != "0",
        partition=text_of(fields["Partition"]),
        reservation=text_of(fields.get("Reservation", "")),
        features=text_of(fields["Features"]),
        array_job_id=array,
        array_task_id=task,
        het="HetJobId" in fields,
        batch=fields["BatchFlag"] != "0",
        batch_host=text_of(fields.get("BatchHost", "")) if fields["BatchFlag"] != "0" else "",
        min_cpus=number(fields["MinCPUsNode"]),
        min_memory_mb=megabytes(fields.get("MinMemoryNode", fields.get("MinMemoryCPU", ""))),
        start_time=unix_time(fields["StartTime"]),
        end_time=unix_time(fields["EndTime"]),
        exit_code=fields["ExitCode"],
        gres_per_node={},
    )
