#!/bin/bash
# image.sh ROOT STAGE PACKAGES PROGRAMS DISK: the disk of one virtual machine, a site of its own before gemini-hpc comes.
#   ROOT      the cached root, with kernel, systemd, Slurm and MPI; only read
#   STAGE     an empty directory: a tmpfs covers it
#   PACKAGES  a directory with the .deb files, which the machine finds in /srv/packages, not installed
#   PROGRAMS  a directory with what jobs run, which the machine finds in /home/alice
# Started in mount and pid namespaces of its own. All machines have this disk: name and address come from the kernel's
# command line (systemd.hostname=n1).
set -eu -o pipefail
lower=$1 stage=$2 packages=$3 programs=$4 disk=$5
here=$(cd "$(dirname "$0")" && pwd)
mount -t tmpfs -o mode=755 tmpfs "$stage"
mkdir "$stage"/{root,up,work}
root=$stage/root
mount -t overlay -o "lowerdir=$lower,upperdir=$stage/up,workdir=$stage/work" overlay "$root"
mount -t proc proc "$root/proc"
rm -f "$root/usr/sbin/policy-rc.d" "$root"/boot/initrd* "$root/etc/hostname" "$root/etc/machine-id"
mkdir "$root/srv/packages"
cp "$packages"/*.deb "$root/srv/packages/"
printf '127.0.0.1 localhost\n10.77.0.1 n1\n10.77.0.2 n2\n10.77.0.3 n3\n' >"$root/etc/hosts"
: >"$root/etc/resolv.conf"
: >"$root/etc/fstab"
install -m 755 "$here/guest.py" "$root/usr/local/sbin/guest"

cat >"$root/etc/systemd/system/guest.service" <<'U'
[Unit]
Description=Runs what the test asks for
After=basic.target
[Service]
ExecStart=/usr/local/sbin/guest
KillMode=process
[Install]
WantedBy=multi-user.target
U
cat >"$root/etc/systemd/system/network-of-the-test.service" <<'U'
[Unit]
Description=The address that belongs to the host's name
DefaultDependencies=no
After=systemd-udevd.service systemd-modules-load.service
Before=network-pre.target network-online.target munge.service
Wants=network-pre.target
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/sh -c 'modprobe virtio_net; until ip link set eth0 up; do sleep 0.2; done; ip link set lo up; \
  n=$(hostname); exec ip address add 10.77.0.$${n#n}/24 dev eth0'
[Install]
WantedBy=network-online.target multi-user.target
U

mkdir -p "$root/etc/slurm/plugstack.conf.d" "$root/etc/systemd/system/slurmctld.service.d"
printf '[Unit]\nConditionHost=n1\n' >"$root/etc/systemd/system/slurmctld.service.d/site.conf"
cat >"$root/etc/slurm/slurm.conf" <<'C'
ClusterName=mycluster
SlurmctldHost=n1
SlurmUser=slurm
StateSaveLocation=/var/lib/slurm/slurmctld
SlurmdSpoolDir=/var/lib/slurm/slurmd
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.log
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
ProctrackType=proctrack/cgroup
TaskPlugin=task/cgroup,task/affinity
JobAcctGatherType=jobacct_gather/cgroup
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerNode=300
MessageTimeout=60
ReturnToService=2
NodeName=n[1-3] CPUs=1 RealMemory=700
PartitionName=all Nodes=ALL Default=YES State=UP
C
printf 'CgroupPlugin=cgroup/v2\nConstrainRAMSpace=yes\nConstrainCores=yes\nConstrainDevices=yes\n' >"$root/etc/slurm/cgroup.conf"
echo 'include /etc/slurm/plugstack.conf.d/*.conf' >"$root/etc/slurm/plugstack.conf"
head -c 1024 /dev/urandom >"$root/etc/munge/munge.key"

cp -r "$programs" "$root/home/alice"
chroot "$root" /bin/bash -eu -c '
chown munge: /etc/munge/munge.key
chmod 600 /etc/munge/munge.key
install -d -o slurm -g slurm /var/lib/slurm /var/lib/slurm/slurmctld /var/log/slurm
install -d /var/lib/slurm/slurmd
useradd --uid 1000 --home-dir /home/alice --shell /bin/bash alice
chown -R alice: /home/alice
systemctl -q enable guest network-of-the-test munge slurmd slurmctld
# What a boot would wait for, or what would take the processor meanwhile.
systemctl -q mask serial-getty@ttyS0 getty@tty1 apt-daily.timer apt-daily-upgrade.timer e2scrub_all.timer \
  e2scrub_reap.service fstrim.timer dpkg-db-backup.timer \
  systemd-networkd.service systemd-networkd.socket systemd-networkd-wait-online.service
'
umount "$root/proc"
rm -f "$disk"
mke2fs -q -t ext4 -d "$root" "$disk" 4G
