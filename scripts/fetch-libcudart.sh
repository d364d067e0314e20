#!/usr/bin/env bash
# Puts NVIDIA's own libcudart 11.8 and 12.4 into .libcudart/amd64 and .libcudart/arm64, for the tests
# that need real libraries: from Debian's non-free packages, checked against Debian's keys. Needs no
# root, installs nothing, leaves the system's apt as it is, and does nothing for libraries that are
# there already.
#
#   scripts/fetch-libcudart.sh [amd64|arm64]...     default: both
#
# The mirror is the one this system's apt uses. On a system that is not Debian, or to use another,
# set DEBIAN_MIRROR to its address, and DEBIAN_KEYRING to Debian's archive keyring.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
dir=$PWD/.libcudart
suites=(bookworm trixie) # libcudart11.0 is in the first, libcudart12 in the second
packages=(libcudart11.0 libcudart12)
libraries=('libcudart.so.11.8.*' 'libcudart.so.12.*.*') # files that the packages must contain

die() {
	echo "fetch-libcudart: $*" >&2
	exit 1
}

# complete DIRECTORY: are all libraries there, as files that are not empty?
complete() {
	local pattern
	for pattern in "${libraries[@]}"; do
		[[ -d $1 && -n $(find "$1" -name "$pattern" -type f -size +0) ]] || return 1
	done
}

# debian_mirror prints the address of the first Debian archive among apt's sources.
debian_mirror() {
	local release site
	while read -r release site; do
		case $release in
		bookworm | trixie | forky | sid | oldstable | stable | testing | unstable) echo "$site" && return ;;
		esac
	done < <(# shellcheck disable=SC2016 # apt's own variables
		apt-get indextargets --no-release-info --format '$(RELEASE) $(SITE)' 'Created-By: Packages')
	return 1
}

debian_keyring() {
	local file
	for file in /usr/share/keyrings/debian-archive-keyring.{gpg,pgp}; do
		[[ -r $file ]] && echo "$file" && return
	done
	return 1
}

wanted=()
(($# > 0)) || set -- amd64 arm64
for arch; do
	[[ $arch == amd64 || $arch == arm64 ]] || die "no such architecture: $arch (amd64 and arm64 are known)"
	complete "$dir/$arch" || wanted+=("$arch")
done
if ((${#wanted[@]} == 0)); then
	echo "fetch-libcudart: all there already, in $dir"
	exit 0
fi

for tool in apt-get dpkg-deb; do
	command -v "$tool" >/dev/null || die "no $tool here: on another system put the libraries into $dir/{amd64,arm64} by hand"
done
mirror=${DEBIAN_MIRROR:-$(debian_mirror)} || die "no Debian archive among apt's sources: name one with DEBIAN_MIRROR"
keyring=${DEBIAN_KEYRING:-$(debian_keyring)} || die "no Debian keyring here (package debian-archive-keyring): name one with DEBIAN_KEYRING"

mkdir -p "$dir"
tmp=$(mktemp -d "$dir/tmp.XXXXXX")
trap 'rm -rf "$tmp"' EXIT
mkdir -p "$tmp/lists/partial" "$tmp/cache/archives/partial" "$tmp/debs" "$tmp/none"
: >"$tmp/status"
for suite in "${suites[@]}"; do
	echo "deb [arch=$(IFS=, && echo "${wanted[*]}") signed-by=$keyring] $mirror $suite non-free"
done >"$tmp/sources.list"
apt=(apt-get -qq
	-o Dir::Etc::SourceList="$tmp/sources.list" -o Dir::Etc::SourceParts="$tmp/none" -o Dir::Etc::PreferencesParts="$tmp/none"
	-o Dir::State="$tmp" -o Dir::State::Lists="$tmp/lists" -o Dir::State::status="$tmp/status" -o Dir::Cache="$tmp/cache"
	-o APT::Sandbox::User= -o APT::Update::Error-Mode=any -o Acquire::Languages=none -o Acquire::Retries=2)
for arch in "${wanted[@]}"; do
	apt+=(-o "APT::Architectures::=$arch")
done

"${apt[@]}" update || die "the package lists of ${suites[*]} (non-free) could not be fetched from $mirror"
for arch in "${wanted[@]}"; do
	for package in "${packages[@]}"; do
		(cd "$tmp/debs" && "${apt[@]}" download "$package:$arch") || die "package $package for $arch could not be fetched from $mirror"
	done
	new=$tmp/$arch
	mkdir "$new"
	for deb in "$tmp"/debs/*_"$arch".deb; do
		dpkg-deb -x "$deb" "$tmp/unpacked-$arch"
	done
	find "$tmp/unpacked-$arch" -name 'libcudart.so.*' -exec cp -P {} "$new" \;
	complete "$new" || die "the packages for $arch lack ${libraries[*]}: they hold $(ls "$new")"
	rm -rf "${dir:?}/$arch"
	mv "$new" "$dir/$arch"
	find "$dir/$arch" -type f | sort
done
