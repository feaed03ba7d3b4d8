#!/bin/bash
# deb.sh OUT: OUT/*.deb of the trees that stage.sh has made below OUT/stage.
set -eu -o pipefail
out=$(cd "$1" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
top=$(cd "$here/../.." && pwd)
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -C "$top" log -1 --format=%ct 2>/dev/null || date +%s)}
umask 022
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$top/pyproject.toml")-1
# The site builds them for itself: MAINTAINER='Name <address>'.
maintainer=${MAINTAINER:-The gemini-hpc developers <gemini-hpc@localhost.localdomain>}
arch=$(dpkg --print-architecture)
python=$(basename "$(echo "$out"/stage/gemini-hpc/opt/gemini-hpc/venv/lib/python3.*)")
minor=${python#python3.}
spank=$(basename "$(echo "$out"/stage/gemini-hpc-spank-*)")
release=${spank##*-}
next=${release%.*}.$(printf '%02d' $((10#${release#*.} + 1)))

# package NAME ARCH DEPENDS SHORT: the text of the description comes on stdin, its paragraphs folded.
package() {
	local name=$1 arch=$2 depends=$3 short=$4 tree=$out/stage/$1 work=$out/deb/$1 doc
	rm -rf "$work"
	mkdir -p "$out/deb"
	cp -a "$tree" "$work"
	doc=$work/usr/share/doc/$name
	mkdir -p "$doc" "$work/DEBIAN"
	sed "s/@YEAR@/$(date -u -d "@$SOURCE_DATE_EPOCH" +%Y)/" "$here/files/copyright" >"$doc/copyright"
	printf '%s (%s) unstable; urgency=medium\n\n  * Built from the checkout; CHANGELOG.md tells what is new.\n\n -- %s  %s\n' \
		"$name" "$version" "$maintainer" "$(date -u -R -d "@$SOURCE_DATE_EPOCH")" | gzip -9n >"$doc/changelog.Debian.gz"
	mkdir -p "$work/usr/share/lintian/overrides"
	cat "$here/files/lintian-overrides" "$here/files/$name.lintian-overrides" 2>/dev/null \
		>"$work/usr/share/lintian/overrides/$name" || :
	[ ! -d "$work/etc" ] || (cd "$work" && find etc -type f -printf '/%p\n') >"$work/DEBIAN/conffiles"
	for script in preinst postinst prerm postrm; do
		[ ! -f "$here/scripts/$name.$script" ] || install -m 755 "$here/scripts/$name.$script" "$work/DEBIAN/$script"
	done
	{
		printf 'Package: %s\nSource: gemini-hpc\nVersion: %s\nArchitecture: %s\nMaintainer: %s\nSection: admin\n' \
			"$name" "$version" "$arch" "$maintainer"
		printf 'Priority: optional\nInstalled-Size: %s\nDepends: %s\n' "$(du -sk --apparent-size "$work" | cut -f1)" "$depends"
		[ "${name#gemini-hpc-spank-}" = "$name" ] ||
			printf 'Provides: gemini-hpc-spank\nConflicts: gemini-hpc-spank\nReplaces: gemini-hpc-spank\n'
		printf 'Description: %s\n' "$short"
		fold -s -w 76 | sed 's/^/ /; s/ *$//'
	} >"$work/DEBIAN/control"
	(cd "$work" && find . -type f -not -path './DEBIAN/*' -printf '%P\0' | sort -z | xargs -0 md5sum) >"$work/DEBIAN/md5sums"
	dpkg-deb --root-owner-group -z1 -b "$work" "$out/${name}_${version}_$arch.deb" >/dev/null
}

rm -rf "$out/deb" "$out"/*.deb
package gemini-hpc "$arch" "python3 (>= 3.$minor), python3 (<< 3.$((minor + 1))), libc6 (>= 2.28), libmunge2" \
	"in-memory checkpoint replicas for jobs on Slurm" <<-T
	The command gemini-hpc, and the interpreter of prolog, epilog and controller. With the plugin of the site's Slurm this is all that a login node needs.
T
package gemini-hpc-tier "$arch" "gemini-hpc (>= ${version%-*}), python3, libc6 (>= 2.28)" "h5py for the persistent tier of gemini-hpc" <<-T
	What agents and the command need to write and read a tier: h5py and numpy, in the interpreter of gemini-hpc. For nodes and login nodes of sites with a tier.
T
package gemini-hpc-node all "gemini-hpc (>= ${version%-*})" "prolog and epilog of gemini-hpc for Slurm nodes" <<-T
	Prolog and epilog, which start and end the agents of protected jobs. Slurm runs them once slurm.conf names them: this package does not change it.
T
package gemini-hpc-controller all "gemini-hpc (>= ${version%-*})" "controller of gemini-hpc for the host of slurmctld" <<-T
	The unit of the controller, which recovers protected jobs. The package neither enables nor starts it.
T
package "$spank" "$arch" "libc6 (>= 2.34), slurm-wlm-basic-plugins (>= $release), slurm-wlm-basic-plugins (<< $next)" \
	"SPANK plugin of gemini-hpc for Slurm $release" <<-T
	The options --gemini-replicas and others of sbatch and srun. Slurm loads a plugin of its own release only, so there is a package for each. It is loaded once plugstack.conf names it: this package does not change it.
T
rm -rf "$out/deb"
ls "$out"/*.deb
