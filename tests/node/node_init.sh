#!/bin/sh
# PID 1 of an imagined node: node_init.sh HOSTS_MOUNT_NAMESPACE VENV SCRIPTS
# It changes /etc, /opt and /usr/bin, so it first makes sure that they are its own.
set -eu
if [ "$$" -ne 1 ] || [ "$(readlink /proc/self/ns/mnt)" = "$1" ]; then
	echo "not in namespaces of its own" >&2
	exit 1
fi
venv=$2
scripts=$3
mount --make-rprivate /
umount -R /sys/fs/cgroup 2>/dev/null || : # or the prolog would make its cgroup on this machine

# Whatever hides below /run, /opt or a private /tmp is reached through descriptors from here on.
exec 8<"$venv" 9<"$scripts"
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -m 755 /run/etc
# A development cluster's mount point may be made or removed at any moment.
find /etc -mindepth 1 -maxdepth 1 ! -name gemini-hpc -exec cp -a -t /run/etc {} +
mount --bind /run/etc /etc
printf 'passwd: files\ngroup: files\n' >/etc/nsswitch.conf
printf '%s\n' 'alice:x:61001:61101::/nonexistent:/bin/sh' 'bob:x:61002:61102::/nonexistent:/bin/sh' >>/etc/passwd
printf '%s\n' 'alice:x:61101:' 'bob:x:61102:' 'extra:x:61103:alice' >>/etc/group

mount -t tmpfs -o mode=755 tmpfs /opt
mkdir -p /opt/gemini-hpc/venv /opt/tattle /opt/scripts
mount --bind /proc/self/fd/8 /opt/gemini-hpc/venv
mount --bind /proc/self/fd/9 /opt/scripts
exec 8<&- 9<&-

printf '#!/bin/sh\necho "$0 $*" >>/run/slurm-was-called\n' >/opt/tattle/command
chmod 755 /opt/tattle/command
for name in scontrol squeue sinfo srun sbatch scancel sacct sacctmgr salloc; do
	if [ -e "/usr/bin/$name" ]; then mount --bind /opt/tattle/command "/usr/bin/$name"; fi
done
echo ready
exec sleep 600
