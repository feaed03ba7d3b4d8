"""The order of a cluster's start."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping, Sequence

from gemini_hpc.devcluster import accounting, accounts, configuration, environment, hosts, network, services, teardown
from gemini_hpc.devcluster.configuration import SLURMCTLD_PORT
from gemini_hpc.devcluster.layout import ClusterFiles, ClusterRecord, save_record
from gemini_hpc.devcluster.profiles import Profile, Setting
from gemini_hpc.devcluster.sitefiles import SiteBuild, SiteFiles


def bring_up(
    layout: ClusterFiles,
    profile: Profile,
    nodes: list[str],
    *,
    cpus: int,
    memory_mb: int,
    site: bool,
    overrides: Mapping[str, Setting],
    slurm_conf: Sequence[str],
) -> None:
    """Start hosts, network and daemons. Until the last line the cluster dies with this process."""
    _create_directories(layout)
    build = SiteBuild(layout) if site else None
    try:
        accounts.write(layout, nodes)
        configuration.write_settings(layout, profile, overrides)
        teardown.create_mount_points()
        boot, outer = hosts.boot_controller(layout, environment.build(layout))
        try:
            network.create_bridge(outer.pid)
            services.create_munge_key(layout)
            services.start_munged(layout, {network.CONTROLLER: outer})
            found = build.files if build else SiteFiles()
            configuration.write_slurm_conf(
                layout, profile, nodes, cpus=cpus, memory_mb=memory_mb, site=found, extra=slurm_conf
            )
            if profile.accounting:
                accounting.start(layout, outer)
            services.start_daemon(layout, outer, "slurmctld", "-f", str(layout.slurm_conf), "-i")
            started = hosts.boot_nodes(layout, outer, profile, nodes)
            # A slurmd that registers before slurmctld answers retries only after seconds.
            services.wait_for_daemon(layout, outer, "slurmctld", SLURMCTLD_PORT, 15.0)
            if build:
                build.wait()
            services.start_node_daemons(layout, profile, started)
            flags = (found.plugin is not None, found.prolog is not None, found.epilog is not None)
            save_record(layout.record, ClusterRecord(profile.name, nodes, *flags))
            boot.commit()
        finally:
            boot.close()
    finally:
        if build:
            build.cancel()


def _create_directories(layout: ClusterFiles) -> None:
    slurm = pwd.getpwnam("slurm")
    layout.directory.mkdir(mode=0o755)
    for path in (
        *(layout.nodes, layout.etc, layout.slurm_etc, layout.settings, layout.log, layout.home, layout.spool),
        *(layout.munge, layout.site, layout.opt, layout.state, layout.controller),
    ):
        path.mkdir()
        path.chmod(0o755)
    # slurmctld and the controller service have dropped root privileges when they open these.
    for path in (layout.state, layout.controller, layout.log):
        os.chown(path, slurm.pw_uid, slurm.pw_gid)
    layout.controller.chmod(0o700)
