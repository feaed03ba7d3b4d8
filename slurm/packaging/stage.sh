#!/bin/bash
# stage.sh PYTHON OUT: what `make deb` and `make rpm` pack, as one tree for each package below OUT/stage.
#   PYTHON  has pip, hatchling and what gemini-hpc imports: that of .venv
# Needs a way to a package index, a compiler and Slurm's headers; the hosts that the packages are for need none of them.
set -eu -o pipefail
python=$(realpath -s "$1") out=$2
here=$(cd "$(dirname "$0")" && pwd)
top=$(cd "$here/../.." && pwd)
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -C "$top" log -1 --format=%ct 2>/dev/null || date +%s)}
umask 022
rm -rf "$out/stage"
mkdir -p "$out/stage"
out=$(cd "$out" && pwd)
base=$out/stage/gemini-hpc tier=$out/stage/gemini-hpc-tier node=$out/stage/gemini-hpc-node controller=$out/stage/gemini-hpc-controller

# The interpreter is Debian's; its packages are wheels, because Debian 12 has no msgspec.
opt=opt/gemini-hpc
mkdir -p "$base/$opt"
/usr/bin/python3 -m venv --without-pip --symlinks "$base/$opt/venv"
site=$(echo "$base/$opt"/venv/lib/python3.*/site-packages)
rm -f "$base/$opt"/venv/bin/{[aA]ctivate*,python} "$base/$opt/venv/lib64" "$base/$opt"/venv/bin/python3.*
rmdir "$base/$opt/venv/include" 2>/dev/null || rm -rf "$base/$opt/venv/include"
sed -i '/^command = /d' "$base/$opt/venv/pyvenv.cfg"
"$here/wheels.sh" "$python" "$out/wheels" >/dev/null
"$python" -m pip install -q --no-index --find-links "$out/wheels" --no-compile --ignore-installed --target "$site" gemini-hpc
# What a tier needs besides, in the same environment. Its libraries are as in the wheels: auditwheel has rewritten them,
# and not all of them bear stripping after that.
tier_site=$tier/${site#"$base/"}
"$python" -m pip install -q --no-index --find-links "$out/wheels" --no-compile --ignore-installed \
	--target "$tier_site" 'gemini-hpc[tier]'
for there in "$site"/*; do rm -rf "$tier_site/${there##*/}"; done
rm -rf "$site/bin" "$tier_site/bin"
find "$site" "$tier_site" -name __pycache__ -prune -exec rm -rf {} +
chmod -R u=rwX,go=rX "$site" "$tier_site"
find "$tier_site" -name '*.so*' -exec chmod 644 {} +
find "$site" -name '*.so' -exec strip --strip-unneeded {} +
cat >"$base/$opt/venv/bin/gemini-hpc" <<'S'
#!/opt/gemini-hpc/venv/bin/python3
import sys

from gemini_hpc.cli.main import main

sys.exit(main())
S
chmod 755 "$base/$opt/venv/bin/gemini-hpc"
mkdir -p "$base/usr/bin" "$base/usr/share/man/man1" "$base/usr/share/bash-completion/completions"
ln -s /opt/gemini-hpc/venv/bin/gemini-hpc "$base/usr/bin/gemini-hpc"
cd "$top"
PYTHONPATH=$top "$python" "$here/describe.py" man | gzip -9n >"$base/usr/share/man/man1/gemini-hpc.1.gz"
PYTHONPATH=$top "$python" "$here/describe.py" completion >"$base/usr/share/bash-completion/completions/gemini-hpc"

# Where users ask without MUNGE: on login nodes, and on nodes if batch scripts ask.
install -D -m 644 "$here/files/gemini-hpc-tickets.service" "$base/lib/systemd/system/gemini-hpc-tickets.service"

mkdir -p "$node/$opt"
install -D -m 755 -t "$node/$opt/prolog_epilog" "$top"/prolog_epilog/{prolog,epilog}
for kind in prolog epilog; do # also for hosts whose /etc/slurm is that of the nodes
	install -D -m 755 -t "$base/$opt/prolog_epilog/$kind.d" "$top/prolog_epilog/$kind.d/50-gemini-hpc"
done
install -D -m 644 "$here/files/gemini-hpc-boot.service" "$node/lib/systemd/system/gemini-hpc-boot.service"
install -D -m 644 "$here/files/gemini-hpc-node.tmpfiles" "$node/usr/lib/tmpfiles.d/gemini-hpc-node.conf"
install -D -m 644 "$here/files/gemini-hpc-node.fstab" "$node/usr/share/gemini-hpc/enroot/mounts.d/50-gemini-hpc.fstab"
install -D -m 755 "$here/files/gemini-hpc-node.task_prolog" "$node/usr/share/gemini-hpc/apptainer/task_prolog"
install -D -m 644 "$here/files/gemini-hpc-node.logrotate" "$node/etc/logrotate.d/gemini-hpc-node"

install -D -m 644 "$here/files/gemini-hpc-controller.service" "$controller/lib/systemd/system/gemini-hpc-controller.service"
install -D -m 644 "$here/files/gemini-hpc-controller.logrotate" "$controller/etc/logrotate.d/gemini-hpc-controller"

# The plugin, for the release whose headers are here.
plugins=${PLUGIN_DIR:-/usr/lib/x86_64-linux-gnu/slurm-wlm}
objects=$(mktemp -d)
trap 'rm -rf "$objects"' EXIT
make -s -C "$top/slurm" SLURM_INCLUDE="${SLURM_INCLUDE:-/usr/include}" BUILD="$objects" PLUGIN="$objects/gemini_spank.so"
release=$(PYTHONPATH=$top "$python" -c \
	'import sys; from gemini_hpc.doctor import plugin; print("{}.{:02}".format(*plugin.read_release(sys.argv[1]).series))' \
	"$objects/gemini_spank.so")
spank=$out/stage/gemini-hpc-spank-$release
install -D -m 644 "$objects/gemini_spank.so" "$spank$plugins/gemini_spank.so"
strip --strip-unneeded "$spank$plugins/gemini_spank.so"
install -D -m 644 "$here/files/plugstack.conf" "$spank/usr/share/gemini-hpc/plugstack.conf.d/gemini-hpc.conf"
