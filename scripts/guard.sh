#!/usr/bin/env bash
# Shows whether this tree is slower than an earlier commit, on a machine with a GPU, with C beside it. That
# machine needs bash, tar and xz; where it has nvcc, or a C compiler and CUDA's headers, the programs of
# testdata/baseline are built there.
#
#   scripts/guard.sh HOST [-base COMMIT] [RUN OPTION]...  build, send by ssh, run there, bring the result back into
#                                                         testdata/results
#   scripts/guard.sh build [-arch ARCH] [-base COMMIT]    make .build/guard/bundle.tar.xz, to be sent by other means
#   ./guard.sh run [RUN OPTION]...                        compare, on the GPU host, in the unpacked bundle
#   ./guard.sh selftest [RUN OPTION]...                   show there that two runs of one build are the same, and that
#                                                         one that was made 15 % slower is found
#   ./guard.sh c                                          build the programs of the folder c, as run does
#
# Build options:
#   -arch ARCH     amd64 or arm64 (default: this machine's; with HOST: that machine's)
#   -base COMMIT   the earlier commit (default: HEAD if files have changed since, else HEAD~1)
# Run options, which are those of guard compare:
#   -quick         the most telling rows, in 2 minutes in place of 6
#   -rows REGEX    only these rows; bin/guard-new rows lists them, and two-cores/ and busy/ stand before their names
#   -samples N     at least N pairs of samples of each row
#   -time TIME     for all of it, about, such as 10m
#   -out FILE      where the JSON goes (default: results/guard-GPU-DATE.json)
#   -sim           on simulated GPUs: shows that it runs, and no speed
#
# The exit status is 0 if nothing is worse, 1 if something is worse by more than its spread and 10 %, which is
# named then, and 2 if a row could not be measured.
set -euo pipefail

die() { echo "guard: $*" >&2; exit 64; }
usage() { sed -n '2,/^set -/{/^set -/!s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; }

# Programs in C that rows are compared with.
programs=(calls.c fanout.c launch.cu link.c loader.c managed.cu pin.c ring.c transfer.c)
# Rows that selftest measures, each of which is to be found.
selftest_rows=(control/arithmetic calls/stream-query copies/upload/1MiB copies/download/1MiB copies/upload/2GiB
	copies/download/2GiB loader/slow/64 pool/get-release/1MiB)

# build_guard DIRECTORY OUTPUT COMMIT [PLANTED]
build_guard() {
	(cd "$1" && CGO_ENABLED=0 GOOS=linux GOARCH=$arch go build -trimpath \
		-ldflags="-s -w -X main.commit=$3 -X main.planted=${4:-0}" -o "$2" ./scripts/guard)
}

# overlay COMMIT DIRECTORY puts COMMIT there, with this tree's guard, so that both builds measure in the same way.
# Files of rows that do not build with COMMIT are COMMIT's own, or are left out.
overlay() {
	local commit=$1 dir=$2 file bad errors own
	rm -rf "$dir"
	mkdir -p "$dir"
	git archive "$commit" | tar -x -C "$dir"
	own=$dir/.own
	mkdir -p "$own" "$dir/scripts/guard"
	mv "$dir"/{scripts,internal}/guard/*.go "$own" 2>/dev/null || true # older commits have it in internal/guard
	for file in scripts/guard/*.go; do
		[[ $file == *_test.go ]] || cp "$file" "$dir/scripts/guard/"
	done
	until errors=$(cd "$dir" && CGO_ENABLED=0 GOOS=linux GOARCH=$arch go build -gcflags=-e -o /dev/null ./scripts/guard 2>&1); do
		mapfile -t bad < <(grep -oE '(rows|reference)_[a-z_]+\.go' <<<"$errors" | sort -u)
		((${#bad[@]} > 0)) || die "the guard does not build with $commit:"$'\n'"$errors"
		for file in "${bad[@]}"; do
			rm "$dir/scripts/guard/$file"
			if [[ -e $own/$file ]]; then
				mv "$own/$file" "$dir/scripts/guard/"
				echo "$file is that of $commit"
			else
				echo "$file is left out: it does not build with $commit"
			fi
		done
	done
}

build() {
	arch="" base=""
	while (($# > 0)); do
		case $1 in
		-arch) arch=${2:?-arch wants amd64 or arm64} && shift 2 ;;
		-base) base=${2:?-base wants a commit} && shift 2 ;;
		*) die "build: unknown option $1" ;;
		esac
	done
	cd "$(dirname "${BASH_SOURCE[0]}")/.."
	arch=${arch:-$(go env GOHOSTARCH)}
	if [[ -z $base ]]; then
		base=HEAD
		! git diff --quiet HEAD -- || base=HEAD~1
	fi
	base=$(git rev-parse --short "$base^{commit}")
	local dir=$PWD/.build/guard commit
	commit=$(git describe --always --dirty)
	rm -rf "$dir"
	mkdir -p "$dir/tree/bin" "$dir/tree/c"
	{
		echo "guard bundle: new $commit, old $base, $(go version), linux/$arch, no cgo"
		overlay "$base" "$dir/base"
	} | tee "$dir/tree/manifest"
	build_guard . "$dir/tree/bin/guard-new" "$commit"
	build_guard . "$dir/tree/bin/guard-planted" "$commit" 15
	build_guard "$dir/base" "$dir/tree/bin/guard-old" "$base"
	cp "${programs[@]/#/testdata/baseline/}" "$dir/tree/c/"
	[[ $arch != "$(go env GOHOSTARCH)" ]] || build_c "$dir/tree/c" >"$dir/c.log" 2>&1 || true
	cp scripts/guard.sh "$dir/tree/"
	tar -C "$dir/tree" --owner=0 --group=0 --sort=name -c . | xz -T1 -6 --lzma2=preset=6,dict=64MiB >"$dir/bundle.tar.xz"
	rm -rf "$dir/base" "$dir/tree"
	ls -lh "$dir/bundle.tar.xz"
}

# build_c DIRECTORY builds the programs there into its bin, where there is a compiler for them. What is there already stays if
# it does not build.
build_c() {
	local dir=$1 file flags=(-O3 -pthread) cuda nvcc
	[[ $(uname -m) != x86_64 ]] || flags+=(-mavx2)
	mkdir -p "$dir/bin"
	for cuda in "${CUDA_HOME:-}" "${CUDA_PATH:-}" /usr/local/cuda /opt/cuda; do
		[[ ! -e $cuda/include/cuda_runtime_api.h ]] || break
	done
	nvcc=$(PATH=$PATH:$cuda/bin command -v nvcc || true)
	for file in "$dir"/*.c "$dir"/*.cu; do
		build_program "$file" "$dir/bin/$(basename "${file%.*}")" &
	done
	wait
	rmdir "$dir/bin" 2>/dev/null || true
}

# build_program FILE OUTPUT is for build_c alone, whose variables it uses.
build_program() {
	if [[ -n $nvcc ]] && "$nvcc" -O3 -Xcompiler "$(IFS=,; echo "${flags[*]}")" "$1" -o "$2.new" -lpthread; then
		mv "$2.new" "$2"
	elif [[ $1 == *.c ]] && cc "${flags[@]}" -I"$cuda/include" "$1" -o "$2.new" -L"$cuda/lib64" -Wl,-rpath,"$cuda/lib64" -lcudart; then
		mv "$2.new" "$2"
	else
		echo "guard: $(basename "$1") was not built: it needs nvcc, or a C compiler and CUDA's headers" >&2
	fi
}

# c_here builds the programs in C of the folder c beside this script.
c_here() {
	cd "$(dirname "${BASH_SOURCE[0]}")"
	build_c "$PWD/c"
}

# here changes into the bundle, and builds the programs in C.
here() {
	cd "$(dirname "${BASH_SOURCE[0]}")"
	[[ -e manifest ]] || die "no manifest beside this script: run it in an unpacked bundle"
	cat manifest >&2
	[[ " $* " == *" -sim "* || -e c/built ]] || build_c "$PWD/c" || true
	touch c/built
}

# result_name names a result after the GPUs and the date.
result_name() {
	local gpus count name
	gpus=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null || true)
	count=$(grep -c . <<<"$gpus" || true)
	name=$(head -n 1 <<<"$gpus" | tr '[:upper:]' '[:lower:]' | sed 's/nvidia //; s/[^a-z0-9]\+/-/g; s/-$//')
	((count < 2)) || name=${count}x$name
	echo "guard-${name:-simulated}-$(date +%F)"
}

run() {
	local name out="" i
	name=$(result_name)
	[[ " $* " != *" -quick "* ]] || name+=-quick
	for ((i = 1; i < $#; i++)); do # relative to where it was called
		[[ ${!i} != -out ]] || { i=$((i + 1)) && out=$(realpath -m "${!i}"); }
	done
	here "$@"
	bin/guard-new compare -old bin/guard-old -new bin/guard-new -c c/bin "$@" -out "${out:-results/$name.json}"
}

selftest() {
	local rows status=0 row text
	# Simulated copies are the work of threads that share the cores with all else.
	[[ " $* " != *" -sim "* ]] || selftest_rows=(control/arithmetic loader/slow/64)
	rows="^($(IFS='|'; echo "${selftest_rows[*]}"))\$"
	here "$@"
	echo "--- one build twice"
	bin/guard-new compare -old bin/guard-new -new bin/guard-new -rows "$rows" -time 60s "$@" -out results/selftest-same.json || status=$?
	((status == 0)) || { echo "guard: selftest FAILED: one build differs from itself, exit status $status" && return 1; }
	echo "--- a build that is 15 % slower"
	text=$(bin/guard-new compare -old bin/guard-new -new bin/guard-planted -rows "$rows" -time 90s "$@" -out results/selftest-planted.json) || status=$?
	echo "$text"
	((status == 1)) || { echo "guard: selftest FAILED: exit status $status, not 1" && return 1; }
	for row in "${selftest_rows[@]}"; do
		[[ ", $(sed -n 's/^WORSE .*: //p' <<<"$text")," == *", $row,"* ]] || { echo "guard: selftest FAILED: $row is not named" && status=2; }
	done
	((status == 1)) || return 1
	echo "guard: selftest passed: one build is the same as itself, and 15 % were found in each row"
}

# there HOST OPTION... builds, sends, runs and brings the result back, by ssh.
there() {
	local host=$1 machine options=() place status=0
	shift
	machine=$(ssh "$host" uname -m)
	case $machine in
	x86_64) options=(-arch amd64) ;;
	aarch64) options=(-arch arm64) ;;
	*) die "$host is $machine: CUDA is for x86_64 and aarch64" ;;
	esac
	if [[ ${1:-} == -base ]]; then
		options+=(-base "${2:?-base wants a commit}")
		shift 2
	fi
	(build "${options[@]}")
	cd "$(dirname "${BASH_SOURCE[0]}")/.."
	place=$(ssh "$host" mktemp -d)
	[[ $place == /*/* ]] || die "mktemp on $host returned no directory"
	ssh "$host" "tar -xJ -C '$place'" <.build/guard/bundle.tar.xz
	ssh "$host" "cd '$place' && ./guard.sh run $(printf '%q ' "$@")" </dev/null || status=$?
	ssh "$host" "cd '$place' && mkdir -p results && tar -c results; rm -rf '$place'" </dev/null | tar -x -C testdata
	git status --short testdata/results
	return "$status"
}

case ${1:-} in
build) shift && build "$@" ;;
run) shift && run "$@" ;;
c) c_here ;;
selftest) shift && selftest "$@" ;;
"" | -h | -help | --help) usage ;;
-*) die "unknown option $1: build, run, selftest or a host comes first" ;;
*) there "$@" ;;
esac
