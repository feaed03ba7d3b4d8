#!/bin/sh
# container.sh JOBS FSTAB PACKAGE PYTHON SCRIPT: SCRIPT as in a container of enroot's, on a node where a prolog has been.
#   JOBS     a directory that stands for /run/gemini-hpc
#   FSTAB    a file of /etc/enroot/mounts.d
#   PACKAGE  the folder from which the image's Python imports gemini_hpc
# Run by `unshare -Umr`: the node's view. A second user and mount namespace is the container, so that what the node has
# mounted is locked in it, as root's mounts are for a user's container.
set -eu
if [ "${1:-}" != inside ]; then
	mount -t tmpfs -o mode=755 tmpfs /run
	mkdir /run/gemini-hpc
	mount -t tmpfs -o mode=0755,nosuid,nodev,noexec tmpfs /run/gemini-hpc
	mkdir /run/gemini-hpc/77
	mount --bind "$1" /run/gemini-hpc/77
	exec unshare -Umr "$0" inside "$@"
fi
shift
fstab=$2 package=$3 python=$4 script=$5
image=$(mktemp -d)
mount -t tmpfs -o mode=755 tmpfs "$image"
for part in /usr /bin /lib /lib64 /etc /proc /sys /dev "${python%/bin/*}" "$package"; do
	[ -e "$part" ] || continue
	mkdir -p "$image$part"
	mount --rbind "$part" "$image$part"
done
mkdir -p "$image/tmp" "$image/run"
# As enroot reads it: x-create, nofail and silent are its own words.
grep -v '^#' "$fstab" | while read -r source target kind options; do
	[ "$kind" = none ] || exit 1
	case ,$options, in *,x-create=dir,*) mkdir -p "$image$target" ;; esac
	options=$(echo "$options" | tr , '\n' | grep -v -e '^x-' -e '^nofail$' -e '^silent$' | paste -s -d ,)
	mount -o "$options" "$source" "$image$target"
done
cd "$image"
mkdir .old
pivot_root . .old
umount -l /.old
cd /
[ ! -e /run/systemd ] && [ ! -e /.old/usr ] && [ ! -e /media ]
exec env PYTHONPATH="$package" "$python" -c "$script"
