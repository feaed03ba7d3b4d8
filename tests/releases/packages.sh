#!/bin/bash
# packages.sh ROOT STAGE PACKAGES: follows docs/install.md on three hosts, each a clean Debian without internet and without
# a compiler: ctl (slurmctld, login), n1 and n2 (slurmd).
#   ROOT      the cached root; only read
#   STAGE     an empty directory: a tmpfs covers it, which holds all that the run changes
#   PACKAGES  a directory with the .deb files
# Started in mount, pid, uts, ipc and net namespaces of its own, so that all of it ends with this process.
set -eu -o pipefail
lower=$1 stage=$2 packages=$3 here=$(cd "$(dirname "$0")" && pwd)
hosts=(ctl n1 n2)
declare -A first
mount -t proc proc /proc # of this pid namespace
mount -t tmpfs -o mode=755 tmpfs "$stage"
ip link set lo up
ip link add br0 type bridge forward_delay 0
ip link set br0 up
head -c 1024 /dev/urandom >"$stage/munge.key"

# host NAME ADDRESS: a root, and process 1 of namespaces of its own.
host() {
	local name=$1 address=$2 root=$stage/$1/root outer
	mkdir -p "$stage/$name"/{root,up,work}
	mount -t overlay -o "lowerdir=$lower,upperdir=$stage/$name/up,workdir=$stage/$name/work" overlay "$root"
	mount --rbind /dev "$root/dev"
	mount -t tmpfs -o mode=755 tmpfs "$root/run"
	mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
	mount -t tmpfs -o mode=755 tmpfs "$root/var/spool" # no overlay for the files of daemons
	mkdir "$root/srv/packages"
	cp "$packages"/*.deb "$root/srv/packages/"
	cp "$here/follow.sh" "$root/srv/follow.sh"
	printf '127.0.0.1 localhost\n10.9.0.1 ctl\n10.9.0.2 n1\n10.9.0.3 n2\n' >"$root/etc/hosts"
	: >"$root/etc/resolv.conf"
	install -m 600 "$stage/munge.key" "$root/etc/munge/munge.key" # its owner: follow.sh
	unshare --fork --pid --kill-child --mount --uts --ipc --net -- bash -c '
		hostname "$1"; ip link set lo up; mount -t proc proc "$2/proc"; mount -t sysfs sysfs "$2/sys"
		while :; do sleep 3600 & wait; done' bash "$name" "$root" </dev/null >/dev/null 2>&1 &
	outer=$!
	for _ in $(seq 100); do
		first[$name]=$(tr -d ' ' <"/proc/$outer/task/$outer/children")
		[ -z "${first[$name]}" ] || ! nsenter -t "${first[$name]}" -m test -d "$root/sys/fs" || break
		sleep 0.1
	done
	ip link add "v$name" type veth peer name eth0 netns "${first[$name]}"
	ip link set "v$name" master br0 up
	nsenter -t "${first[$name]}" -n sh -c "ip address add $address/24 dev eth0; ip link set eth0 up"
}

# on HOST ARGUMENT...: follow.sh there.
on() {
	local name=$1 out rc
	shift
	out=$(nsenter -t "${first[$name]}" -m -u -i -n -p -- env -i HOME=/root USER=root LC_ALL=C.UTF-8 \
		PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
		chroot "$stage/$name/root" /bin/bash /srv/follow.sh "$@" 2>&1 </dev/null) && rc=0 || rc=$?
	[ -z "$out" ] || sed "s/^/$name: /" <<<"$out"
	return $rc
}

# everywhere ARGUMENT...: on all hosts, one after the other, as a person would without a tool for it.
everywhere() { for name in "${hosts[@]}"; do on "$name" "$@"; done; }

host ctl 10.9.0.1
host n1 10.9.0.2
host n2 10.9.0.3
everywhere site
began=$SECONDS
everywhere install
everywhere lines
everywhere start
everywhere doctor
on ctl job
echo "TIME $((SECONDS - began))"
everywhere remove
