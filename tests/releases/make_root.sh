#!/bin/bash
# make_root.sh SUITE DIR MIRROR APT_CONF PACKAGE...: a Debian root of SUITE with these packages, in DIR.
# Runs in mount and pid namespaces of its own (see root.py): what it mounts and starts ends with it.
set -eu -o pipefail
suite=$1 dir=$2 mirror=$3 apt_conf=$4
shift 4
debootstrap --variant=minbase --include=ca-certificates "$suite" "$dir" "$mirror"
# No daemon is started while packages are installed; the cluster has its own.
printf '#!/bin/sh\nexit 101\n' >"$dir/usr/sbin/policy-rc.d"
chmod 755 "$dir/usr/sbin/policy-rc.d"
cp "$apt_conf" "$dir/etc/apt/apt.conf.d/80from-the-machine"
cp /etc/resolv.conf "$dir/etc/resolv.conf"
[ ! -f /etc/ssl/certs/ca-certificates.crt ] || cp /etc/ssl/certs/ca-certificates.crt "$dir/etc/ssl/certs/"
mountpoint -q "$dir/proc" || mount -t proc proc "$dir/proc"
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8
chroot "$dir" apt-get update -qq
chroot "$dir" apt-get install -y -qq --no-install-recommends "$@"
chroot "$dir" apt-get clean
rm -rf "$dir"/var/lib/apt/lists/*
umount "$dir/proc"
