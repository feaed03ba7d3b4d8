"""A second reading of jobs, to compare the client's with: `scontrol show job -o`, for jobs without hostile texts."""

from __future__ import annotations

import re

from gemini_hpc.slurm.facts import Job
from gemini_hpc.slurm.text import (
    drop_none,
    parse_hosts,
    parse_megabytes,
    parse_number,
    parse_state,
    parse_time,
    split_pairs,
)


def parse_job(line: str) -> Job:
    """The job of one line."""
    line = re.sub(r"JobName=.*?(?=UserId=)|(?<=\s)Network=.*", "", line)  # its owner's texts
    fields: dict[str, str] = {}
    for key, value in split_pairs(line):
        fields.setdefault(key, value)
    owner = re.fullmatch(r"(.*)\(([0-9]+)\)", fields["UserId"])
    assert owner is not None, line
    array = int(fields["ArrayJobId"]) if "ArrayJobId" in fields else None
    task = fields.get("ArrayTaskId", "").partition("%")[0]
    return Job(
        id=f"{array}_{task}" if array is not None else fields["JobId"],
        raw_id=int(fields["JobId"]),
        state=parse_state(fields["JobState"]),
        reason=drop_none(fields["Reason"]),
        user_id=int(owner[2]),
        user=owner[1],
        nodes=parse_hosts(fields["NodeList"]),
        req_nodes=parse_hosts(fields["ReqNodeList"]),
        num_nodes=parse_number(fields["NumNodes"]),
        restarts=parse_number(fields["Restarts"]),
        may_requeue=fields["Requeue"] != "0",
        partition=drop_none(fields["Partition"]),
        reservation=drop_none(fields.get("Reservation", "")),
        features=drop_none(fields["Features"]),
        array_job_id=array,
        array_task_id=task,
        is_het="HetJobId" in fields,
        is_batch=fields["BatchFlag"] != "0",
        min_cpus=parse_number(fields["MinCPUsNode"]),
        min_memory_mb=parse_megabytes(fields.get("MinMemoryNode", fields.get("MinMemoryCPU", ""))),
        start_time=parse_time(fields["StartTime"]),
        end_time=parse_time(fields["EndTime"]),
        exit_code=fields["ExitCode"],
        gres_per_node={},
    )
