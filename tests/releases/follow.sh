#!/bin/bash
# follow.sh STEP: what an administrator types on this host by docs/install.md; one line for each finding.
set -eEu -o pipefail
host=$(hostname) step=$1
trap 'echo "follow.sh $step: line $LINENO failed"; tail -n 5 /var/log/slurm/*.log /tmp/*.log' ERR
cd /srv/packages

# slurm.conf, plugstack.conf and the site's scripts, as one text.
files() { find /etc/slurm -type f -print0 | sort -z | xargs -0 sha256sum; }

# The site as it was: its own Slurm, with prolog and epilog scripts in directories.
site() {
	! command -v cc gcc c++ make || { echo "the root has a compiler"; exit 1; }
	[ -z "$(ip route show default)" ] || { echo "the root has a way out"; exit 1; }
	mkdir -p /run/munge /var/lib/munge /var/log/munge /var/spool/{slurmctld,slurmd} /var/log/slurm \
		/etc/slurm/{plugstack.conf.d,prolog.d,epilog.d}
	chown -R munge: /run/munge /var/lib/munge /var/log/munge /etc/munge
	chown slurm: /var/spool/slurmctld /var/log/slurm
	cat >/etc/slurm/slurm.conf <<-C
		ClusterName=mycluster
		SlurmctldHost=ctl
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
		Prolog=/etc/slurm/prolog.d/*
		Epilog=/etc/slurm/epilog.d/*
		NodeName=n[1-2] CPUs=1 RealMemory=1024
		PartitionName=all Nodes=ALL Default=YES State=UP
	C
	echo CgroupPlugin=cgroup/v1 >/etc/slurm/cgroup.conf
	echo 'include /etc/slurm/plugstack.conf.d/*.conf' >/etc/slurm/plugstack.conf
	for kind in prolog epilog; do
		printf '#!/bin/sh\necho "$SLURM_JOB_ID" >>/tmp/%s.ran\n' "$kind" >/etc/slurm/$kind.d/90-site
		chmod 755 /etc/slurm/$kind.d/90-site
	done
	files >/srv/before
	runuser -u munge -- munged
}

# 1. The packages: those that the page names for this host.
install() {
	local wanted=(./gemini-hpc_*.deb ./gemini-hpc-spank-*.deb)
	case $host in
	ctl) wanted+=(./gemini-hpc-controller_*.deb) ;;
	*) wanted+=(./gemini-hpc-node_*.deb ./gemini-hpc-tier_*.deb) ;;
	esac
	apt-get -o Dpkg::Use-Pty=0 install -y -qq "${wanted[@]}" >/tmp/apt.log 2>&1 || { cat /tmp/apt.log; exit 1; }
	cmp /srv/before <(files)
	[ ! -e /etc/gemini-hpc ] && [ -z "$(find /etc/systemd -name 'gemini-hpc*')" ] && ! pgrep -f /opt/gemini-hpc
	[ -s /usr/share/bash-completion/completions/gemini-hpc ]
	bash -c '. /usr/share/bash-completion/completions/gemini-hpc; COMP_WORDS=(gemini-hpc doc) COMP_CWORD=1
		_gemini_hpc gemini-hpc doc; [ "${COMPREPLY[*]}" = doctor ]'
	systemd-analyze verify --man=no /lib/systemd/system/gemini-hpc-tickets.service
	if [ "$host" = ctl ]; then
		systemd-analyze verify --man=no /lib/systemd/system/gemini-hpc-controller.service
	else
		systemd-analyze verify --man=no /lib/systemd/system/gemini-hpc-boot.service
		/opt/gemini-hpc/venv/bin/python3 -I -c 'import gemini_hpc.tier.hdf5, h5py'
		systemd-tmpfiles --create /usr/lib/tmpfiles.d/gemini-hpc-node.conf
	fi
	for conf in /etc/logrotate.d/gemini-hpc-*; do
		[ ! -e "$conf" ] || logrotate -d "$conf" 2>&1 | grep -i '^error' && exit 1 || :
	done
	echo "FOUND installed, and nothing of the site's is changed"
}

# 2. and 3. The lines, one by one as `install --dry-run` names them, and the settings.
lines() {
	gemini-hpc install --dry-run --json >/tmp/lines.json && exit 1 || [ $? = 1 ]
	python3 - <<-'P'
		import json, subprocess
		for need in json.load(open("/tmp/lines.json"))["lines"]:
		    if not need["met"]:
		        print("FOUND", need["file"], need["line"])
		        if need["line"].startswith("cp "):
		            subprocess.run(need["line"].split(), check=True)
		        else:
		            open(need["file"], "a").write(need["line"] + "\n")
	P
	gemini-hpc install --dry-run
	mkdir /etc/gemini-hpc
	printf 'cluster_name = "mycluster"\ncontroller_host = "ctl"\nslurm_user = "slurm"\n' >/etc/gemini-hpc/gemini.toml
}

# 4. Daemons; the controller as its unit starts it: no systemd runs here.
start() {
	if [ "$host" != ctl ]; then
		slurmd
		return
	fi
	slurmctld
	local unit=/lib/systemd/system/gemini-hpc-controller.service
	command install -d -o slurm -g slurm -m 700 /var/lib/gemini-hpc
	setsid runuser -u "$(sed -n 's/^User=//p' $unit)" -- $(sed -n 's/^ExecStart=//p' $unit) </dev/null >/tmp/controller.log 2>&1 &
	for _ in $(seq 30); do grep -q . /tmp/controller.log 2>/dev/null && break; sleep 1; done
}

# The first check.
doctor() {
	for _ in $(seq 30); do [ "$(timeout 5 sinfo -h -o %D/%T 2>/dev/null)" = 2/idle ] && break; sleep 1; done
	timeout 100 gemini-hpc doctor --json >/tmp/doctor.json || :
	python3 - <<-'P'
		import json
		for f in json.load(open("/tmp/doctor.json"))["checks"]:
		    if f["status"] != "ok":
		        print("DOCTOR", f["status"], f["check"], f["found"])
	P
}

job() {
	local id
	srun --help | grep -q -e --gemini-replicas
	timeout 60 srun -N1 true
	echo "FOUND a job without the option runs"
	id=$(cd /tmp && runuser -u nobody -- sbatch --parsable -N2 --gemini-replicas=2 -o /dev/null --wrap 'sleep 120')
	for _ in $(seq 40); do
		timeout 10 gemini-hpc inspect "$id" >/tmp/inspect.txt 2>&1 || :
		[ "$(grep -c live /tmp/inspect.txt)" -ge 2 ] && break
		sleep 1
	done
	cat /tmp/inspect.txt
	grep -q arming /tmp/inspect.txt
	echo "FOUND two nodes are live"
	scancel "$id"
	for _ in $(seq 30); do [ -z "$(squeue -h)" ] && break; sleep 1; done
	sleep 2 # its agents, which end without a word
}

remove() {
	if [ "$host" = ctl ]; then
		pkill -u slurm -f 'gemini-hpc controller' || :
		slurmctld_pid=$(cat /run/slurmctld.pid)
		kill "$slurmctld_pid"
	else
		grep -q . /tmp/prolog.ran /tmp/epilog.ran # the site's own ran, too
		kill "$(cat /run/slurmd.pid)"
	fi
	sed -i '/^PrologFlags=Alloc/d' /etc/slurm/slurm.conf
	rm /etc/slurm/plugstack.conf.d/gemini-hpc.conf /etc/slurm/{prolog,epilog}.d/50-gemini-hpc
	cmp /srv/before <(files)
	apt-get -o Dpkg::Use-Pty=0 purge -y -qq $(dpkg-query -W -f '${Package}\n' 'gemini-hpc*') >/tmp/apt.log 2>&1 || { cat /tmp/apt.log; exit 1; }
	{ findmnt -rn -o TARGET | grep '^/run/gemini-hpc\(/\|$\)' || :; } | sort -r | xargs -r umount -l
	rm -rf /etc/gemini-hpc /var/lib/gemini-hpc /run/gemini-hpc /run/gemini-hpc.agents /run/gemini-hpc.unprotected /run/gemini-hpc.lock
	local left
	left=$(find / -xdev -path /srv -prune -o -path /proc -prune -o -name '*gemini*' -not -path /etc/gemini-hpc-root.json -print; find /run /tmp -name '*gemini*')
	[ -z "$left" ] || { echo "left behind: $left"; exit 1; }
	! pgrep -f gemini
	echo "FOUND removed without a trace"
}

"$1"
