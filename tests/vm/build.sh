#!/bin/bash
# build.sh ROOT STAGE CHECKOUT OUT: builds the packages of CHECKOUT for the Debian and the Slurm of ROOT, into OUT.
#   ROOT   the cached root of that release, with compiler, headers and a way to a package index; only read
#   STAGE  an empty directory: a tmpfs covers it, which holds all that the run changes
# Started in mount and pid namespaces of its own, so that all of it ends with this process.
set -eu -o pipefail
lower=$1 stage=$2 checkout=$3 out=$4
mount -t tmpfs -o mode=755 tmpfs "$stage"
mkdir "$stage"/{root,up,work}
root=$stage/root
mount -t overlay -o "lowerdir=$lower,upperdir=$stage/up,workdir=$stage/work" overlay "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
for file in /etc/resolv.conf /etc/hosts /etc/ssl/certs/ca-certificates.crt /etc/pip.conf; do
	[ ! -f "$file" ] || { rm -f "$root$file"; cp "$file" "$root$file"; }
done
mkdir -p "$root/srv/gemini-hpc" "$root/srv/out"
tar -C "$checkout" --exclude=./.venv --exclude=./.git --exclude=__pycache__ --exclude=./slurm/build --exclude='*.so' \
	-c README.md LICENSE CHANGELOG.md pyproject.toml gemini_hpc slurm prolog_epilog examples |
	tar -C "$root/srv/gemini-hpc" -x --no-same-owner
mount --bind "$out" "$root/srv/out"
exec env -i HOME=/root USER=root LC_ALL=C.UTF-8 PATH=/usr/sbin:/usr/bin:/sbin:/bin SOURCE_DATE_EPOCH="$(date +%s)" \
	chroot "$root" /bin/bash -eu -c '
	cd /srv/gemini-hpc
	python3 -m venv /tmp/venv
	/tmp/venv/bin/python -c "import tomllib; p = tomllib.load(open(\"pyproject.toml\", \"rb\"))[\"project\"]
print(*p[\"dependencies\"], *(d for d in p[\"optional-dependencies\"][\"dev\"] if d.startswith(\"hatchling\")), sep=\"\n\")" >/tmp/needed
	/tmp/venv/bin/pip install -q -r /tmp/needed
	slurm/packaging/stage.sh /tmp/venv/bin/python /srv/out
	slurm/packaging/deb.sh /srv/out'
