"""The families of `make bench`: the module of each, and the figures that it has to give."""

from __future__ import annotations

import importlib
import itertools
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from benchmarks.bench import Options
from benchmarks.rows import Row


@dataclass(frozen=True)
class Family:
    """module: of this package; figures: as a shell would expand them; cluster: whether it brings one up."""

    module: str
    figures: tuple[str, ...]
    cluster: bool = True

    def names(self) -> list[str]:
        """The names of its figures."""
        return [name for pattern in self.figures for name in _expanded(pattern)]

    def measure(self, options: Options) -> list[Row]:
        """All its rows; of a tiny run without bars. Raises MeasureError."""
        rows: list[Row] = importlib.import_module(f"benchmarks.{self.module}").measure(options)
        return [replace(row, limit=None, goal=None) for row in rows] if options.tiny else rows

    def amiss(self, rows: Iterable[Row]) -> str:
        """Return a line that names missing and surplus figures; "" where there are none."""
        found, wanted = Counter(row.id for row in rows), Counter(self.names())
        differences = {"missing": wanted - found, "not declared": found - wanted}
        return "; ".join(f"{what}: {', '.join(names)}" for what, names in differences.items() if names)


def _expanded(pattern: str) -> list[str]:
    """`a{b,c}` is ab and ac; braces hold no others."""
    parts = re.split(r"\{([^}]*)\}", pattern)
    choices = [part.split(",") if number % 2 else [part] for number, part in enumerate(parts)]
    return ["".join(words) for words in itertools.product(*choices)]


_PARTS = "{detect,confirm,fence,requeue,start,agree,python,load,iterate,pull}_s"

# A family's rows have its name before their dot.
FAMILIES = {
    "save": Family(
        "save",
        (
            "save.{stall_ms,slowdown,sync_ratio,row_ratio,sealed_s,iteration_s,first_stall_ms,first_step_ms}",
            "save.{step_ms,hook_ms,stall_worst_ms,copy_ms,late_step_ms}",
        ),
    ),
    "traffic": Family("traffic", ("traffic.{ddp,lora}_share",)),
    "fig16": Family(
        "interleave",
        (
            "fig16.{none,spread,rate,idle}{,_short,_tight,_slow,_4,_4_short}",
            "fig16.{gemini,short,tight,slow,gemini_4,short_4}{,_j}",
            "fig8.{before,after}{,_short,_tight,_slow,_4,_4_short}",
            "fig16.{blocking,background,naive,no_pipeline,blocking_expected}",
            "fig16.{blocking,background,blocking_expected}_{tight,4}",
            "fig16.background_slow",
        ),
    ),
    "ceiling": Family("ceiling", ("ceiling.{own_01,own_05,pair_own_01,host_01,host_1}{,_first}",)),
    "watch": Family("watch", ("watch.{bare,cost,recorded}_us",), cluster=False),
    "fig11": Family("remote", ("fig11.store.{2,4,8}", "fig11.{gemini,reduction}.{2,4,8}.{250mbit,500mbit,1gbit}")),
    "fig13": Family("models", ("fig13.{none,gemini,j,before,after}_{small,large,deep}",)),
    "reft": Family(
        "reft",
        (
            "reft.{speed,free}.gemini.shm.{1,2,4}",
            "reft.{speed,free}.{torch_save,checkfreq,chunked,dcp}.{disk.1,disk.2,disk.4,shm.2}",
            "reft.overhead.{gemini,torch_save,checkfreq,chunked}.{1,2,4}",
        ),
    ),
    "holders": Family(
        "holders",
        (
            "holders.{all,one}.{sequence,flowing,both,chain,own_first}.{3,4,3_alone,4_alone}",
            "holders.{all,one}.{sequence,flowing,chain}.3_large",
        ),
    ),
    "pp": Family(
        "pipeline",
        (
            "pp.{none,idle,blocking,background,gemini}_{2,4}",
            "pp.{delay,delay_share}_{2.0,2.1,4.0,4.1,4.2,4.3}",
        ),
    ),
    "plane": Family(
        "plane",
        (
            "plane.{digest_ratio,digest_gbs,own_ratio,own_s,inventory_ratio}",
            "plane.{push_ratio,push_gbs,push_cpu_ratio,push_cpu,ranks_ratio,wakes}",
        ),
        cluster=False,
    ),
    "pull": Family("pull", ("pull.{throughput_ratio,shards_ratio,cpu_gb,rate_gbs,rate_with_reserve_gbs}",)),
    "agent": Family(
        "agent", ("agent.{start_s,socket_s,start_cpu_s,first_sealed_s,loop_late_ms,rss_mib,supervisor_rss_mib}",)
    ),
    "prolog": Family("prolog", ("prolog.{added,start,srun_added,srun_start}_s",)),
    "inspect": Family("inspect", ("inspect.{,json_}wall_s",)),
    "recovery": Family(
        "recovery",
        (
            "recovery.{total_s,total_worst_s,own_s,own_worst_s,lost_iterations}",
            f"recovery.{_PARTS}{{,.stock,.site}}",
            "recovery.{total,own,slurm}_s.{stock,site}",
            "recovery.{batch_host,batch_host_spare,two_nodes,rank,hang,evacuate}_s",
        ),
    ),
    "launch": Family("launch", ("launch.{rank,step}_s",)),
    "spare": Family("spare", ("spare.{total,total_worst,without,agreed,resumed}_s",)),
    "chaos": Family("chaos", ("chaos.{dcp,dcp_fenced,requeue,spare}_{s,lost_s,repeated}",)),
    "busy": Family("busy", ("busy.{stolen,rival_delay_s,resumed_s,lost_iterations}",)),
    "tier": Family(
        "tier",
        (
            "tier.{drain_ratio,restore_ratio,write_s,finish_s,read_s,drain_slowdown}",
            "tier.{memory,tier}_{pull,recovery}_s",
        ),
    ),
    "place": Family("place", ("place.nodes_100k_s",), cluster=False),
    "xor": Family("parity", ("xor.{encode_ratio,encode_gbps,decode_gbps}",), cluster=False),
    "rs": Family("reed_solomon", ("rs.{encode_ratio,encode_gbps,decode_gbps}",), cluster=False),
    "disk": Family("disk", ("disk.{disk,memory}{1,4}_{save_ms,load_ms,rate,repeated}",)),
}
