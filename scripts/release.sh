#!/usr/bin/env bash
# Makes the artefacts of a release from the last commit:
#
#   scripts/release.sh v0.1.0          # .build/release/v0.1.0
#   scripts/release.sh check v0.1.0    # the same twice, from two clones: the bytes must be the same; then tries them
#   scripts/release.sh fixtures v0.1.0 # what its pincheck writes, kept in testdata/released: later versions must read it
#
# It builds in a clone of its own, where it sets the tag, so that the bytes are those of the day on which the
# repository gets it; nothing here is tagged. It needs Linux, Go, git and jq, and check root (or sudo), readelf, mandoc,
# man, dpkg-deb and rpm. docs/release.md has the steps of a release.
#
# BASE=NAME@sha256:... is the base of the OCI image. Without it glibc of this machine stands in, which is
# good for a trial and not for publishing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec </dev/null
umask 022
export LC_ALL=C TZ=UTC

go_version=go1.26.8 # decides the bytes of the binaries
nfpm=github.com/goreleaser/nfpm/v2/cmd/nfpm@v2.45.2
crane=github.com/google/go-containerregistry/cmd/crane@v0.22.1
syft=github.com/anchore/syft/cmd/syft@v1.57.0

architectures=(amd64 arm64)
tools=$PWD/.build/release/tools
base=${BASE:-}

fail() { echo "release: $*" >&2; exit 1; }

# step TEXT says what begins, and the seconds so far.
step() { printf 'release: %4d s  %s\n' "$SECONDS" "$*" >&2; }

# tool MODULE prints the path of a program, built at this version outside any module.
tool() {
	local bin=$tools/${1//\//_}
	if [[ ! -x $bin ]]; then
		local place
		step "building ${1##*/} (once: kept in ${tools#"$PWD"/})"
		place=$(mktemp -d "$tools.XXXXXX")
		(cd "$place" && GOFLAGS= GOBIN=$place CGO_ENABLED=0 go install "$1" >&2)
		mv "$place"/* "$bin"
		rmdir "$place"
	fi
	echo "$bin"
}

# notes VERSION prints the section of the changelog, without its heading.
notes() {
	awk -v version="$1" '/^## / { inside = $2 == version || $2 == version ","; next } inside' CHANGELOG.md |
		sed -e '/./,$!d'
}

# make_release VERSION DIRECTORY writes the artefacts of the last commit.
make_release() {
	local version=$1 out=$2 number=${1#v} work arch
	[[ $version =~ ^v[0-9]+\.[0-9]+\.[0-9]+(-[0-9A-Za-z.]+)?$ ]] || fail "$version is no version: want v1.2.3"
	work=$(mktemp -d)
	mkdir -p "$tools"
	rm -rf "$out"
	mkdir -p "$out"
	git clone -q --no-checkout . "$work/src"
	git -C "$work/src" checkout -q --detach "$(git rev-parse HEAD)"
	git -C "$work/src" tag -d "$version" >/dev/null 2>&1 || true
	git -C "$work/src" -c user.name=release -c user.email= tag "$version"
	SOURCE_DATE_EPOCH=$(git -C "$work/src" log -1 --format=%ct)
	export SOURCE_DATE_EPOCH
	(
		cd "$work/src"
		notes "$version" >"$out/notes.md"
		[[ -s $out/notes.md ]] || fail "CHANGELOG.md has no section $version"
		for arch in "${architectures[@]}"; do
			step "building pincheck for $arch"
			GOTOOLCHAIN=$go_version GOFLAGS= GOWORK=off CGO_ENABLED=0 GOOS=linux GOARCH=$arch GOAMD64=v1 GOARM64=v8.0 \
				go build -trimpath -buildvcs=true -ldflags='-s -w -buildid=' -o "$work/pincheck-$arch" ./cmd/pincheck
		done
	)
	"$work/pincheck-$(go env GOHOSTARCH)" man >"$work/pincheck.1"
	grep -qF "\"pincheck $version\"" "$work/pincheck.1" || fail "the binary's version is not $version"
	for arch in "${architectures[@]}"; do
		step "archive, packages and SBOM for $arch"
		stage "$work" "$version" "$arch"
		archive "$work" "$out" "$number" "$arch"
		packages "$work" "$out" "$number" "$arch"
		sbom "$work" "$out" "$number" "$arch"
	done
	step "OCI image"
	image "$work" "$out" "$version"
	(cd "$out" && find . -type f -name 'pincheck_*' -printf '%P\n' | sort | xargs sha256sum >"$work/sums" && mv "$work/sums" SHA256SUMS)
	chmod -R u+w "$work"
	rm -rf "$work"
}

# stage WORK VERSION ARCH lays out the files of the archive in WORK/pincheck_NUMBER_linux_ARCH.
stage() {
	local dir=$1/pincheck_${2#v}_linux_$3 host
	host=$1/pincheck-$(go env GOHOSTARCH)
	mkdir -p "$dir/completions" "$dir/man"
	cp "$1/pincheck-$3" "$dir/pincheck"
	cp "$1/pincheck.1" "$dir/man/"
	"$host" completion bash >"$dir/completions/pincheck.bash"
	"$host" completion zsh >"$dir/completions/_pincheck"
	"$host" completion fish >"$dir/completions/pincheck.fish"
	cp "$1"/src/{LICENSE,README.md,CHANGELOG.md} "$dir/"
	cp "$1/src/cmd/pincheck/internal/licenses/licenses.txt" "$dir/LICENSES-OF-MODULES.txt"
	cp -r "$1/src/deploy" "$dir/deploy"
	rm -r "$dir/deploy/Dockerfile" "$dir/deploy/kubernetes/schemas"
	find "$dir" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
}

# tarball DIRECTORY NAME... writes a tar to standard output that depends on the files alone.
tarball() {
	tar -C "$1" --format=gnu --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX -cf - "${@:2}"
}

archive() {
	local name=pincheck_$3_linux_$4
	tarball "$1" "$name" | gzip -9n >"$2/$name.tar.gz"
}

packages() {
	local work=$1 out=$2 number=$3 arch=$4 dir kind bin
	dir=$work/package-$arch
	bin=$(tool "$nfpm")
	cp -r "$work/pincheck_${number}_linux_$arch" "$dir"
	cp "$work"/src/scripts/release/{nfpm.yaml,postinstall.sh,preremove.sh} "$dir/"
	gzip -9nc "$dir/man/pincheck.1" >"$dir/pincheck.1.gz"
	gzip -9nc "$dir/CHANGELOG.md" >"$dir/changelog.gz"
	cat "$dir/LICENSE" "$dir/LICENSES-OF-MODULES.txt" >"$dir/copyright"
	find "$dir" -exec touch --date="@$SOURCE_DATE_EPOCH" {} +
	for kind in deb rpm; do
		(cd "$dir" && ARCH=$arch VERSION=$number "$bin" package -p $kind -f nfpm.yaml -t "$out/pincheck_${number}_linux_$arch.$kind")
	done
}

# sbom writes what a binary contains. Syft puts the time and a random UUID into it: the commit's time and
# the binary's digest take their places.
sbom() {
	local file=pincheck_$3_linux_$4 digest bin
	bin=$(tool "$syft")
	digest=$(sha256sum "$1/pincheck-$4" | cut -c1-64)
	(cd "$1/pincheck_$3_linux_$4" && SYFT_CHECK_FOR_APP_UPDATE=false "$bin" scan -q file:pincheck --source-name pincheck --source-version "v$3" -o spdx-json) |
		jq -S --arg time "$(date -u -d "@$SOURCE_DATE_EPOCH" +%FT%TZ)" --arg name "https://github.com/gopinned/pinned/spdx/$file-$digest" \
			'.creationInfo.created = $time | .documentNamespace = $name' >"$2/$file.spdx.json"
}

# image writes an OCI image layout of both architectures, by way of a registry in crane's own process.
image() {
	local work=$1 out=$2 version=$3 bin port registry arch root images=()
	bin=$(tool "$crane")
	: >"$work/registry.log"
	"$bin" registry serve --address 127.0.0.1:0 >"$work/registry.log" 2>&1 &
	registry=$!
	for _ in {1..100}; do
		port=$(grep -oE '[0-9]+$' "$work/registry.log" || true)
		[[ -z $port ]] || break
		sleep 0.1
	done
	for arch in "${architectures[@]}"; do
		local name=127.0.0.1:$port/pincheck:$arch from=(--oci-empty-base)
		root=$work/image-$arch
		mkdir -p "$root/usr/bin"
		cp "$work/pincheck-$arch" "$root/usr/bin/pincheck"
		if [[ -n $base ]]; then
			from=(--base "$base" --set-base-image-annotations)
		else
			stand_in "$root" "$arch"
		fi
		tarball "$root" . | gzip -9n >"$root.tar.gz"
		"$bin" append --platform "linux/$arch" "${from[@]}" -f "$root.tar.gz" -t "$name" >/dev/null 2>&1
		"$bin" mutate "$name" -t "$name" --set-platform "linux/$arch" --entrypoint /usr/bin/pincheck --user 65532:65532 \
			--env NVIDIA_VISIBLE_DEVICES=all --env NVIDIA_DRIVER_CAPABILITIES=compute,utility \
			--label org.opencontainers.image.source=https://github.com/gopinned/pinned \
			--label org.opencontainers.image.version="$version" \
			--label org.opencontainers.image.revision="$(git -C "$work/src" rev-parse HEAD)" \
			--label org.opencontainers.image.licenses=Apache-2.0 >/dev/null 2>&1
		images+=(-m "$name")
	done
	"$bin" index append "${images[@]}" -t "127.0.0.1:$port/pincheck:all" >/dev/null 2>&1
	"$bin" pull --format oci "127.0.0.1:$port/pincheck:all" "$work/layout"
	kill "$registry"
	wait "$registry" || true
	tarball "$work/layout" . >"$out/pincheck_${version#v}_oci.tar"
}

# stand_in ROOT ARCH puts a glibc instead of a base image: of this machine, or Debian's cross package.
stand_in() {
	local from library
	if [[ $2 == "$(go env GOHOSTARCH)" ]]; then
		ldd "$1/usr/bin/pincheck" /usr/bin/env | grep -o '/[^ ]*\.so[^ ]*' | sort -u | while read -r library; do
			install -D "$library" "$1$library"
		done
		library=$(ldd "$1/usr/bin/pincheck" | grep -o '/[^ ]*/libc\.so[^ ]*')
		from=${library%/*}
		install "$from"/{librt.so.1,libdl.so.2,libpthread.so.0} "$1$from/"
	else
		scripts/arm64-tools.sh >/dev/null
		from=${ARM64_SYSROOT:-.build/arm64/usr/aarch64-linux-gnu}/lib
		install -D -t "$1/lib" "$from"/{ld-linux-aarch64.so.1,libc.so.6,libdl.so.2,libpthread.so.0,librt.so.1,libm.so.6}
	fi
}

# check VERSION makes the release twice, compares, and tries what was made.
check() {
	local version=$1 one two
	one=$PWD/.build/release/$1 two=$(mktemp -d)
	make_release "$version" "$one"
	step "the same again, elsewhere"
	TMPDIR=$(mktemp -d) make_release "$version" "$two"
	diff -r "$one" "$two" || fail "two builds differ"
	rm -rf "$two"
	echo "two builds are the same: $(sha256sum <"$one/SHA256SUMS" | cut -c1-16)"
	step "trying what was made"
	local root=()
	((EUID == 0)) || root=(sudo --preserve-env=PATH,HOME)
	"${root[@]}" scripts/release/try.sh "$one" "${version#v}"
}

# fixtures VERSION runs the pincheck of .build/release/VERSION on a simulated GPU, and keeps what it writes.
fixtures() {
	local kept=testdata/released/$1 work status name
	work=$(mktemp -d)
	tar -xf ".build/release/$1/pincheck_${1#v}_linux_$(go env GOHOSTARCH).tar.gz" -C "$work" --strip-components=1
	rm -rf "$kept"
	mkdir -p "$kept"
	write() {
		name=$1 status=0
		shift
		"$work/pincheck" "$@" --no-host-name --quiet --format json >"$work/$name.json" || status=$?
		((status < 64)) || fail "pincheck $*: status $status"
		gzip -9nc "$work/$name.json" >"$kept/$name.json.gz"
	}
	write no-gpu
	write check --sim
	write verify verify --sim
	write bench bench bandwidth memory alloc calls --quick --duration 100ms --sizes 1MiB --sim
	write report report --sim
	"$work/pincheck" capture --sim --quiet --output "$kept/capture.tar.gz" || (($? < 64))
	rm -rf "$work"
	ls -l "$kept"
}

case ${1:-} in
fixtures) fixtures "${2:?release: want a version}" ;;
crane) mkdir -p "$tools" && tool "$crane" ;; # for the workflow
check) check "${2:?release: want a version}" ;;
v*)
	make_release "$1" "$PWD/.build/release/$1"
	ls -l ".build/release/$1"
	;;
*) fail "want a version, such as v0.1.0: see the head of this file" ;;
esac
