#!/usr/bin/env bash
# Tries the artefacts of a release as a user would: scripts/release/try.sh DIRECTORY NUMBER. Needs root, Linux,
# readelf, mandoc, man, dpkg-deb, rpm, jq. scripts/release.sh check runs it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec </dev/null

out=$(realpath "$1") number=$2
host=$(go env GOHOSTARCH)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "try: $*" >&2; exit 1; }

((EUID == 0)) || fail "needs root, for chroot"
(cd "$out" && sha256sum --quiet -c SHA256SUMS && ls -l | awk 'NR > 1 { print $5, $9 }')

declare -A interpreter=([amd64]=/lib64/ld-linux-x86-64.so.2 [arm64]=/lib/ld-linux-aarch64.so.1)
for arch in amd64 arm64; do
	name=pincheck_${number}_linux_$arch
	tar -xf "$out/$name.tar.gz" -C "$work"
	dir=$work/$name

	# glibc's loader, nothing newer than glibc 2.17, and no other library.
	readelf -lW "$dir/pincheck" | grep -qF "interpreter: ${interpreter[$arch]}]" || fail "$arch: the interpreter is not ${interpreter[$arch]}"
	newest=$(readelf -VW "$dir/pincheck" | { grep -oE 'GLIBC_[0-9.]+' || true; } | sort -uV | tail -1)
	[[ $(printf '%s\nGLIBC_2.17\n' "$newest" | sort -V | tail -1) == GLIBC_2.17 ]] || fail "$arch: it needs $newest"
	libraries=$(readelf -dW "$dir/pincheck" | grep -oE 'NEEDED.*\[.*\]' | grep -oE '\[.*\]' | sort | tr -d '\n')
	echo "$arch: needs $libraries, ${newest:-no version of glibc}"

	mandoc -T lint -W all "$dir/man/pincheck.1" || fail "mandoc complains"
	complaints=$(LC_ALL=C.UTF-8 MANROFFSEQ='' MANWIDTH=80 man --warnings -E UTF-8 -l -Tutf8 -Z "$dir/man/pincheck.1" 2>&1 >/dev/null)
	[[ -z $complaints ]] || fail "man: $complaints"
	bash -n "$dir/completions/pincheck.bash"
	for file in LICENSE LICENSES-OF-MODULES.txt README.md CHANGELOG.md completions/_pincheck completions/pincheck.fish deploy/slurm/prolog-pincheck.sh; do
		[[ -s $dir/$file ]] || fail "$arch: the archive has no $file"
	done

	# The SBOM names the modules that the binary says it is made of.
	while read -r module; do
		jq -e --arg m "$module" 'any(.packages[]; .name == $m)' "$out/$name.spdx.json" >/dev/null || fail "$arch: the SBOM lacks $module"
	done < <(go version -m "$dir/pincheck" | awk '$1 == "dep" { print $2 }')
	jq -e '.spdxVersion == "SPDX-2.3"' "$out/$name.spdx.json" >/dev/null || fail "$arch: the SBOM is no SPDX 2.3"

	[[ $(dpkg-deb -f "$out/$name.deb" Depends Architecture Version | tr '\n' ' ') == "Depends: libc6 (>= 2.17) Architecture: $arch Version: $number " ]] ||
		fail "$arch: $(dpkg-deb -f "$out/$name.deb")"
	rpm -K --nosignature "$out/$name.rpm" >/dev/null || fail "$arch: the rpm is damaged"
	rpm -qp --requires "$out/$name.rpm" 2>/dev/null | grep -qx 'glibc >= 2.17' || fail "$arch: the rpm does not require glibc"
	debs=$(dpkg-deb -c "$out/$name.deb" | awk '{ print substr($6, 2) }') rpms=$(rpm -qlp "$out/$name.rpm" 2>/dev/null)
	for file in /usr/bin/pincheck /usr/lib/systemd/system/pincheck-watch.service /usr/libexec/pincheck/{pincheck-plugin,prolog-pincheck,healthcheck-pincheck}.sh \
		/usr/share/pincheck/node-problem-detector.json /usr/share/man/man1/pincheck.1.gz /usr/share/bash-completion/completions/pincheck /usr/share/doc/pincheck/copyright; do
		grep -qx "$file" <<<"$debs" || fail "$arch: the deb has no $file"
		grep -qx "$file" <<<"$rpms" || fail "$arch: the rpm has no $file"
	done
done

# run ROOT COMMAND... runs a command in a chroot, as user 65532, with /proc and without Go.
run() {
	local root=$1
	shift
	unshare --mount --pid --fork sh -c 'mount -t proc proc "$1/proc" || exit 99
		[ ! -d "$1/fake/driver" ] || mount --bind "$1/fake/driver" "$1/proc/driver" || exit 99
		root=$1; shift; exec chroot --userspec=65532:65532 "$root" "$@"' sh "$root" "$@"
}

# The image: its layers unpacked as a container runtime would, and its entry point run.
mkdir "$work/layout"
tar -xf "$out/pincheck_${number}_oci.tar" -C "$work/layout"
blob() { echo "$work/layout/blobs/${1/://}"; }
index=$(jq -r '.manifests[0].digest' "$work/layout/index.json")
for arch in amd64 arm64; do
	manifest=$(jq -r --arg a $arch '.manifests[] | select(.platform.architecture == $a and .platform.os == "linux").digest' "$(blob "$index")")
	root=$work/image-$arch
	mkdir -p "$root/proc" "$root/tmp"
	while read -r layer; do tar -xf "$(blob "$layer")" -C "$root"; done < <(jq -r '.layers[].digest' "$(blob "$manifest")")
	config=$(blob "$(jq -r .config.digest "$(blob "$manifest")")")
	[[ $(jq -r '.config.User + " " + .config.Entrypoint[0]' "$config") == "65532:65532 /usr/bin/pincheck" ]] || fail "image: $arch: $(<"$config")"
	if [[ $arch == "$host" ]]; then
		run "$root" "$(jq -r '.config.Entrypoint[0]' "$config")" version
		run "$root" /usr/bin/pincheck --sim --npd --expect-bandwidth 1
	elif [[ -x .build/arm64/run ]]; then
		$(sed -n 's/^exec "\([^"]*\)" .*/\1/p' .build/arm64/run) -L "$root" "$root/usr/bin/pincheck" version
	fi
done

DEB=$out/pincheck_${number}_linux_$host.deb scripts/fleet-check.sh package

# A made-up host: a glibc, NVIDIA's driver as the kernel shows it, no Go, no CUDA. The package is unpacked
# as dpkg would. What pincheck finds there needs no GPU.
root=$work/host
mkdir -p "$root"/{proc,tmp,dev,sys/bus/pci/devices/0000:06:00.0,sys/module/nvidia,fake/driver/nvidia/gpus/0000:06:00.0}
ldd /usr/bin/env "$work/pincheck_${number}_linux_$host/pincheck" | grep -o '/[^ ]*\.so[^ ]*' | sort -u | while read -r library; do install -D "$library" "$root$library"; done
dpkg-deb -x "$out/pincheck_${number}_linux_$host.deb" "$root"
(cd "$root/sys/bus/pci/devices/0000:06:00.0" && echo 0x10de >vendor && echo 0x2335 >device && echo 0x030200 >class && echo '32.0 GT/s PCIe' | tee current_link_speed >max_link_speed && echo 16 | tee current_link_width >max_link_width && echo -1 >numa_node)
echo 'NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (root@host)' >"$root/fake/driver/nvidia/version"
printf 'Model: \t\t NVIDIA H200\nBus Location: \t 0000:06:00.0\nDevice Minor: \t 0\n' >"$root/fake/driver/nvidia/gpus/0000:06:00.0/information"
mknod -m 666 "$root/dev/null" c 1 3
mknod -m 666 "$root/dev/nvidia0" c 195 0
mknod -m 666 "$root/dev/nvidiactl" c 195 255
for node in nvidia-uvm:0 nvidia-uvm-tools:1; do mknod -m 666 "$root/dev/${node%:*}" c 511 "${node#*:}"; done
echo '$ pincheck'
began=$EPOCHREALTIME status=0
run "$root" /usr/bin/pincheck >"$work/said" || status=$?
cat "$work/said"
awk -v a="$began" -v b="$EPOCHREALTIME" -v s="$status" 'BEGIN { printf "exit status %d after %.1f s\n", s, b - a; exit b - a > 60 }' || fail "the first finding took more than a minute"
[[ $status == 3 ]] && grep -q '^Problem' "$work/said" || fail "no finding: status $status"
echo "$out: tried"
