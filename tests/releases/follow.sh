#!/bin/bash
# What an administrator types by docs/install.md, in the root that packages.sh has entered; one line for each finding.
set -eu -o pipefail
trap 'echo "follow.sh: line $LINENO failed" >&2; tail -n 5 /var/log/slurm/*.log /tmp/controller.log >&2' ERR
cd /srv/packages

! command -v cc gcc c++ make || { echo "the root has a compiler"; exit 1; }
[ -z "$(ip route show default)" ] || { echo "the root has a way out"; exit 1; }

# The site as it was: its own Slurm, one host that is everything.
mkdir -p /run/munge /var/lib/munge /var/log/munge /var/spool/{slurmctld,slurmd} /var/log/slurm /etc/slurm/plugstack.conf.d
[ -f /etc/munge/munge.key ] || (umask 077; head -c 1024 /dev/urandom >/etc/munge/munge.key)
chown -R munge: /run/munge /var/lib/munge /var/log/munge /etc/munge
chown slurm: /var/spool/slurmctld /var/log/slurm
cat >/etc/slurm/slurm.conf <<S
ClusterName=mycluster
SlurmctldHost=site
SlurmUser=slurm
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.log
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
NodeName=site CPUs=1 RealMemory=1024
PartitionName=all Nodes=ALL Default=YES State=UP
S
echo CgroupPlugin=cgroup/v1 >/etc/slurm/cgroup.conf
echo 'include /etc/slurm/plugstack.conf.d/*.conf' >/etc/slurm/plugstack.conf
before=$(cat /etc/slurm/slurm.conf /etc/slurm/plugstack.conf | sha256sum; ls /etc/slurm/plugstack.conf.d)
mkdir -p /run/munge; runuser -u munge -- munged

began=$SECONDS
# 1. The packages.
apt-get -o Dpkg::Use-Pty=0 install -y -qq ./gemini-hpc_*.deb ./gemini-hpc-node_*.deb ./gemini-hpc-controller_*.deb ./gemini-hpc-spank-*.deb >/tmp/apt.log 2>&1 || { cat /tmp/apt.log; exit 1; }
[ "$before" = "$(cat /etc/slurm/slurm.conf /etc/slurm/plugstack.conf | sha256sum; ls /etc/slurm/plugstack.conf.d)" ]
[ ! -e /etc/gemini-hpc ] && [ -z "$(find /etc/systemd -name 'gemini-hpc*')" ] && ! pgrep -f /opt/gemini-hpc
echo "FOUND installed, and nothing of the site's is changed"
[ -s /usr/share/bash-completion/completions/gemini-hpc ]
bash -c '. /usr/share/bash-completion/completions/gemini-hpc; COMP_WORDS=(gemini-hpc doc) COMP_CWORD=1
  _gemini_hpc gemini-hpc doc; [ "${COMPREPLY[*]}" = doctor ]'

# 2. and 3. The lines, one by one as `install --dry-run` names them.
gemini-hpc install --dry-run --json >/tmp/lines.json && exit 1 || [ $? = 1 ]
python3 - <<'P'
import json
for need in json.load(open("/tmp/lines.json"))["lines"]:
    if need["met"]:
        continue
    print("FOUND", need["file"], need["line"])
    if need["line"].startswith("cp "):
        import subprocess
        subprocess.run(need["line"].split(), check=True)
    else:
        open(need["file"], "a").write(need["line"] + "\n")
P
gemini-hpc install --dry-run
mkdir /etc/gemini-hpc
printf 'cluster_name = "mycluster"\ncontroller_host = "site"\nslurm_user = "slurm"\n' >/etc/gemini-hpc/gemini.toml

# 4. The controller, as its unit starts it; this root has no systemd that runs.
slurmctld
slurmd
unit=/lib/systemd/system/gemini-hpc-controller.service
install -d -o slurm -g slurm -m 700 /var/lib/gemini-hpc
setsid runuser -u "$(sed -n 's/^User=//p' $unit)" -- $(sed -n 's/^ExecStart=//p' $unit) >/tmp/controller.log 2>&1 &
for _ in $(seq 30); do
  [ "$(timeout 5 sinfo -h -o %T 2>/dev/null)" = idle ] && grep -q . /tmp/controller.log && break
  sleep 1
done

# The first check.
srun --help | grep -q -e --gemini-replicas
echo "FOUND srun --help has --gemini-replicas"
sleep 10
timeout 100 gemini-hpc doctor --json >/tmp/doctor.json || :
python3 - <<'P'
import json
for f in json.load(open("/tmp/doctor.json"))["checks"]:
    if f["status"] != "ok":
        print("DOCTOR", f["status"], f["check"], f["found"])
P
timeout 60 srun -N1 true
echo "FOUND a job without the option runs"
timeout 60 srun -N1 --gemini-replicas=2 true 2>&1 | sed 's/^/JOB /' || :
logrotate -d /etc/logrotate.d/gemini-hpc-node /etc/logrotate.d/gemini-hpc-controller 2>&1 | grep -i '^error' && exit 1 || :
echo "TIME $((SECONDS - began))"

# Removing it.
kill %1
scontrol shutdown
sed -i '/gemini-hpc/d; /^PrologFlags=Alloc/d' /etc/slurm/slurm.conf
rm /etc/slurm/plugstack.conf.d/gemini-hpc.conf
[ "$before" = "$(cat /etc/slurm/slurm.conf /etc/slurm/plugstack.conf | sha256sum; ls /etc/slurm/plugstack.conf.d)" ]
apt-get -o Dpkg::Use-Pty=0 purge -y -qq gemini-hpc gemini-hpc-node gemini-hpc-controller "$(dpkg-query -W -f '${Package}\n' 'gemini-hpc-spank-*')" >/tmp/apt.log 2>&1 || { cat /tmp/apt.log; exit 1; }
rm -rf /etc/gemini-hpc /var/lib/gemini-hpc
left=$(find / -xdev -path /srv -prune -o -name '*gemini*' -not -path /etc/gemini-hpc-root.json -print)
[ -z "$left" ] || { echo "left behind: $left"; exit 1; }
echo "FOUND removed without a trace"
