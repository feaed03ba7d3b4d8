#!/bin/bash
# wheels.sh PYTHON OUT: OUT/*.whl, from which hosts without a package index install gemini-hpc, or gemini-hpc-client.
#   PYTHON  has pip and hatchling: that of .venv. Compiled packages are for its version.
# gemini-hpc-client is what a training imports in a container: the same modules, less what only hosts of the site run.
set -eu -o pipefail
python=$(realpath -s "$1") out=$2
top=$(cd "$(dirname "$0")/../.." && pwd)
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -C "$top" log -1 --format=%ct 2>/dev/null || date +%s)}
umask 022
rm -rf "$out"
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Without what was compiled here.
copy() {
	mkdir "$work/$1"
	tar -C "$top" --exclude=__pycache__ --exclude='*.so' --exclude=slurm/build --exclude=slurm/packaging \
		-c pyproject.toml README.md LICENSE gemini_hpc slurm prolog_epilog examples | tar -C "$work/$1" -x --no-same-owner
}

copy site
"$python" -m pip wheel -q --no-build-isolation --only-binary :all: -w "$out" "$work/site[tier]"

copy client
cd "$work/client"
rm -rf slurm prolog_epilog examples gemini_hpc/{agent,cli,controller,devcluster,doctor,forecast,query,report,slurm} \
	gemini_hpc/{logs,operators}.py
sed -i -e 's/^name = "gemini-hpc"$/name = "gemini-hpc-client"/' -e '/^gemini-hpc = /d' -e '/_site/d' pyproject.toml
"$python" -m pip wheel -q --no-build-isolation --no-deps -w "$out" .
ls "$out"/*.whl
