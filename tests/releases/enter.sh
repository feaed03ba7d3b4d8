#!/bin/bash
# enter.sh ROOT STAGE CHECKOUT PYTHON [--bind DIR]... -- CMD...: process 1 of a run in the root of another release.
#   ROOT      the cached root; only read
#   STAGE     an empty directory: in this mount namespace a tmpfs covers it, which holds all that the run changes
#   CHECKOUT  is copied to /srv/gemini-hpc, where CMD runs; the packages of its .venv are shown there, only read
#   PYTHON    the interpreter of that .venv (/usr/bin/python3.11): the root gets it where it has none of this name
# Started by run.py in mount, pid, uts and ipc namespaces of its own. pivot_root, not chroot: the development cluster
# enters its hosts with `nsenter -m`, which goes to the root of the mount namespace, past a chroot.
set -eu -o pipefail
trap 'exit 130' INT # or process 1 would not hear it between two commands
{  # read as a whole before it runs: the file may change meanwhile
lower=$1 stage=$2 checkout=$3 python=$4
shift 4
binds=()
while [ "$1" != -- ]; do binds+=("$2"); shift 2; done
shift
part=$GEMINI_RELEASES_CGROUP
mapfile -t hierarchies < <(findmnt -rn -o TARGET -t cgroup,cgroup2)

mount -t tmpfs -o mode=755 tmpfs "$stage"
mkdir "$stage"/{root,up,work,packages,packages-work}
root=$stage/root
mount -t overlay -o "lowerdir=$lower,upperdir=$stage/up,workdir=$stage/work" overlay "$root"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
# Each hierarchy of cgroups begins at this run's own part of it, which run.py has made and removes.
mountpoint -q /sys/fs/cgroup && [ "$(findmnt -n -o FSTYPE /sys/fs/cgroup | tail -n 1)" = cgroup2 ] ||
  mount -t tmpfs -o mode=755 tmpfs "$root/sys/fs/cgroup"
for hierarchy in "${hierarchies[@]}"; do
  mkdir -p "$root$hierarchy"
  own=$hierarchy/$part
  { [ -d "$own" ] && echo 0 >"$own/cgroup.procs"; } || own=$hierarchy
  mount --bind "$own" "$root$hierarchy"
done
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mkdir -m 1777 "$root/run/lock"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
# The files of clusters lie below /var/lib, as anywhere on a file system that is no overlay.
mount -t tmpfs -o mode=755 tmpfs "$root/var/lib"
tar -C "$lower/var/lib" --exclude=./apt/lists -c . | tar -C "$root/var/lib" -x
mkdir -p "$root/var/lib/apt/lists/partial"

# The network as this machine has it: names, and whom its programs trust.
for file in /etc/resolv.conf /etc/hosts /etc/ssl/certs/ca-certificates.crt /etc/pip.conf; do
  [ ! -f "$file" ] || { rm -f "$root$file"; cp "$file" "$root$file"; }
done
for dir in "${binds[@]}"; do
  mkdir -p "$root$dir"
  mount --rbind "$dir" "$root$dir"
done

# Python of the .venv: its wheels (torch) are built for this version, and the root's own is another one.
if [ ! -e "$root$python" ]; then
  version=${python##*/}
  touch "$root$python"
  mount --bind -o ro "$python" "$root$python"
  for dir in "/usr/lib/$version" "/etc/$version"; do
    [ ! -d "$dir" ] || { mkdir -p "$root$dir"; mount --bind -o ro "$dir" "$root$dir"; }
  done
fi
project=/srv/gemini-hpc
mkdir -p "$root$project"
tar -C "$checkout" --exclude=./.venv --exclude=./.git --exclude=__pycache__ --exclude=./build --exclude=./slurm/build \
  --exclude='*.so' --exclude=./.pytest_cache --exclude=./.mypy_cache --exclude=./.ruff_cache --exclude=./.hypothesis \
  -c . | tar -C "$root$project" -x --no-same-owner
chroot "$root" "$python" -m venv --without-pip "$project/.venv"
packages=lib/${python##*/}/site-packages
mount -t overlay -o "lowerdir=$checkout/.venv/$packages,upperdir=$stage/packages,workdir=$stage/packages-work" \
  overlay "$root$project/.venv/$packages"

mkdir -p "$root/.machine"
cd "$root"
pivot_root . .machine
cd "$project"
umount -l /.machine
unset GEMINI_RELEASES_CGROUP PYTHONPATH PYTHONHOME VIRTUAL_ENV TMPDIR MAKEFLAGS MFLAGS MAKELEVEL MAKEOVERRIDES
export HOME=/root USER=root LOGNAME=root LC_ALL=C.UTF-8 TZ=UTC
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
hash -r
make -s install
# Not exec: process 1 reaps what the ended parents of others leave, or a cluster that has ended looks alive.
# In the foreground: a job in the background would not hear Ctrl-C.
"$@" && rc=0 || rc=$?
exit "$rc"
}
