#!/usr/bin/env bash
# Makes .build/arm64/run, which runs a linux/arm64 program on this machine: under qemu-user with an
# arm64 glibc, or directly where the machine is arm64. Needs no root and installs nothing: the two
# Debian packages are downloaded and unpacked into .build/arm64.
#
# QEMU_AARCH64 and ARM64_SYSROOT name a qemu and a sysroot of your own (both, on a system without apt).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
dir=$PWD/.build/arm64
mkdir -p "$dir"

if [[ $(uname -m) == aarch64 ]]; then
	printf '#!/bin/sh\nexec "$@"\n' >"$dir/run"
	chmod +x "$dir/run"
	exit 0
fi

# fetch PACKAGE FILE... unpacks these files of a Debian package below $dir, through apt's own
# sources but with lists of its own, so that it works without root.
fetch() {
	local package=$1 lists=$dir/apt
	shift
	if ! command -v apt-get >/dev/null; then
		echo "arm64: no apt-get here to fetch $package with: set QEMU_AARCH64 and ARM64_SYSROOT" >&2
		return 1
	fi
	mkdir -p "$lists/lists/partial" "$lists/cache/archives/partial"
	local apt=(apt-get -qq -o "Dir::State::Lists=$lists/lists" -o "Dir::Cache=$lists/cache" -o APT::Sandbox::User= -o APT::Update::Error-Mode=any)
	[[ -e $lists/updated ]] || "${apt[@]}" update
	touch "$lists/updated"
	(cd "$lists" && rm -f "$package"_*.deb && "${apt[@]}" download "$package")
	dpkg-deb --fsys-tarfile "$lists/$package"_*.deb | tar -x -C "$dir" "$@"
	rm "$lists/$package"_*.deb
}

qemu=${QEMU_AARCH64:-$(command -v qemu-aarch64 || command -v qemu-aarch64-static || true)}
if [[ -z $qemu ]]; then
	qemu=$dir/usr/bin/qemu-aarch64-static
	[[ -x $qemu ]] || fetch qemu-user-static ./usr/bin/qemu-aarch64-static
fi
sysroot=${ARM64_SYSROOT:-$dir/usr/aarch64-linux-gnu}
[[ -e $sysroot/lib/ld-linux-aarch64.so.1 ]] || fetch libc6-arm64-cross ./usr/aarch64-linux-gnu/lib

printf '#!/bin/sh\nexec "%s" -L "%s" "$@"\n' "$qemu" "$sysroot" >"$dir/run"
chmod +x "$dir/run"
echo "arm64: $("$qemu" --version | head -1), sysroot $sysroot"
