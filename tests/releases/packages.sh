#!/bin/bash
# packages.sh ROOT STAGE PACKAGES: follows docs/install.md in a clean Debian without internet and without a compiler.
#   ROOT      the cached root; only read
#   STAGE     an empty directory: a tmpfs covers it, which holds all that the run changes
#   PACKAGES  a directory with the .deb files
# Started in mount, pid, uts, ipc and net namespaces of its own, so that all of it ends with this process.
set -eu -o pipefail
lower=$1 stage=$2 packages=$3
mount -t tmpfs -o mode=755 tmpfs "$stage"
mkdir "$stage"/{root,up,work}
root=$stage/root
mount -t overlay -o "lowerdir=$lower,upperdir=$stage/up,workdir=$stage/work" overlay "$root"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
# The files of daemons lie on a file system that is no overlay.
mount -t tmpfs -o mode=755 tmpfs "$root/var/spool"
mkdir "$root/srv/packages"
cp "$packages"/*.deb "$root/srv/packages/"
hostname site
printf '127.0.0.1 localhost\n10.9.0.1 site\n' >"$root/etc/hosts"
: >"$root/etc/resolv.conf"
ip link set lo up
# Resolvers give no address to a host that has none but the loopback's. This interface leads nowhere.
ip link add nowhere type veth peer name end
ip address add 10.9.0.1/24 dev nowhere
ip link set nowhere up
ip link set end up
cp "$(dirname "$0")/follow.sh" "$root/srv/follow.sh"
exec env -i HOME=/root USER=root LC_ALL=C.UTF-8 PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
  chroot "$root" /bin/bash /srv/follow.sh
