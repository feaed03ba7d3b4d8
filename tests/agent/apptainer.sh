#!/bin/sh
# apptainer.sh ROOT JOBS HOOK PACKAGE PYTHON SCRIPT: SCRIPT in a container of Apptainer's, on a node where a prolog has
# been. Run by `unshare -m` as root.
#   ROOT     a Debian that has Apptainer; it is not changed
#   JOBS     a directory that stands for /run/gemini-hpc/77
#   HOOK     the task prolog, or /bin/true
#   PACKAGE  the folder from which the image's Python imports gemini_hpc, there /package
# The image is this machine's own root, without what else is mounted in it.
set -eu
root=$1 jobs=$2 hook=$3 package=$4 python=$5 script=$6
memory=$(mktemp -d)
mount -t tmpfs -o mode=755 tmpfs "$memory"
cd "$memory"
mkdir upper work top
mount -t overlay -o "lowerdir=$root,upperdir=upper,workdir=work" overlay top
cd top
mkdir image host old
cp /etc/hosts etc/
mount -t proc proc proc
for part in sys dev; do mount --rbind "/$part" "$part"; done
mount -t tmpfs tmpfs run
mkdir -p run/gemini-hpc/77
mount --bind "$jobs" run/gemini-hpc/77
mount --bind / image
mount --rbind / host
pivot_root . old
umount -l /old
cd /
eval "$("/host$hook")" # what Slurm does with its lines
env=${python%/bin/*}
exec apptainer --quiet exec --userns --no-home --bind "/host$env:$env,/host$package:/package" /image \
	env PYTHONPATH=/package "$python" -c "$script"
