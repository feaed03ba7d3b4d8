"""A lost shard comes from a peer into the replacement's memory: the agents' own pull against plain sockets."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess

from benchmarks.bench import PYTHON, USER, MeasureError, Options, cluster, directory
from benchmarks.rows import Row, median_row


def measure(options: Options) -> list[Row]:
    """All rows of the family."""
    runs = options.count(9)
    with cluster(2, site=False, controller=False) as on:
        program = str(directory(on, "puller.py") / "puller.py")
        source = on.start_command([PYTHON, program, "serve", "n2", str(options.state_bytes)], user=USER, node="n2")
        try:
            assert source.stdout is not None
            offer = source.stdout.readline()
            if not offer:
                raise MeasureError(f"the source did not start: {source.communicate()[1]}")
            options.progress.say("pull", f"{runs} pulls of {options.gb:g} GB, beside plain transfers")
            argv = [PYTHON, program, "fetch", "n1", "n2", on.find_address("n2"), str(runs)]
            try:
                done = on.exec("n1", argv, user=USER, timeout_s=60 + 30 * runs * options.gb, stdin=offer)
            except subprocess.TimeoutExpired:
                raise MeasureError("the transfers took too long") from None
        finally:
            source.send_signal(signal.SIGKILL)
            source.communicate()
    if done.returncode:
        raise MeasureError(f"the transfers failed: {done.stderr[-2000:]}")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    pulls = [line for line in lines if line["how"] == "pull"]
    rates = {
        how: [line["bytes"] / 1e9 / line["seconds"] for line in lines if line["how"] == how]
        for how in ("pull", "plain", "pulls", "plains")
    }
    with_reserve = [line["bytes"] / 1e9 / (line["seconds"] + line["reserve_s"]) for line in pulls]
    return [
        median_row(
            "pull.throughput_ratio",
            "a pull (MUNGE handshake, transfer, digest verified) against one plain stream with hashing, paired",
            "x",
            [a / b for a, b in zip(rates["pull"], rates["plain"], strict=True)],
            limit=0.9,
            at_least=True,
        ),
        median_row(
            "pull.shards_ratio",
            "eight shards at once, an eighth each, against eight plain streams that hash as well, paired",
            "x",
            [a / b for a, b in zip(rates["pulls"], rates["plains"], strict=True)],
            limit=0.9,
            at_least=True,
        ),
        median_row(
            "pull.cpu_gb",
            "processor seconds of the pulling side a GB, one shard",
            "core-s/GB",
            [line["cpu_s"] / (line["bytes"] / 1e9) for line in pulls],
        ),
        median_row(
            "pull.rate_gbs",
            f"the pull itself, {options.gb:g} GB between two nodes",
            "GB/s",
            rates["pull"],
            peers={"one plain stream": statistics.median(rates["plain"])},
            baseline="one plain stream",
        ),
        median_row(
            "pull.rate_with_reserve_gbs", "the same with reserving the memory page by page", "GB/s", with_reserve
        ),
    ]
