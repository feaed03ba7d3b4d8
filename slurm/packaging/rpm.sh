#!/bin/bash
# rpm.sh OUT: OUT/*.rpm of the trees that stage.sh has made below OUT/stage.
set -eu -o pipefail
out=$(cd "$1" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
top=$(cd "$here/../.." && pwd)
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -C "$top" log -1 --format=%ct 2>/dev/null || date +%s)}
umask 022
spank=$(basename "$(echo "$out"/stage/gemini-hpc-spank-*)")
python=$(basename "$(echo "$out"/stage/gemini-hpc/opt/gemini-hpc/venv/lib/python3.*)")
rm -rf "$out/rpm" "$out"/*.rpm
rpmbuild -bb --quiet --define "day $(LC_ALL=C date -u -d "@$SOURCE_DATE_EPOCH" '+%a %b %d %Y')" \
	--define "maintainer ${MAINTAINER:-The gemini-hpc developers <gemini-hpc@localhost.localdomain>}" \
	--define "_binary_payload w2.zstdio" \
	--define "_topdir $out/rpm" --define "_rpmdir $out/rpm/made" --define "stage $out/stage" \
	--define "scripts $here/scripts" --define "license_file $top/LICENSE" \
	--define "version_here $(sed -n 's/^version = "\(.*\)"/\1/p' "$top/pyproject.toml")" \
	--define "spank_release ${spank##*-}" --define "python_abi ${python#python}" \
	--define "plugins ${PLUGIN_DIR:-/usr/lib/x86_64-linux-gnu/slurm-wlm}" "$here/gemini-hpc.spec"
mv "$out"/rpm/made/*/*.rpm "$out/"
rm -rf "$out/rpm"
ls "$out"/*.rpm
