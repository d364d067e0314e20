#!/usr/bin/env bash
# Runs the whole test suite and pincheck on a machine with a GPU. That machine needs bash and tar
# and xz, no Go and no compiler; the tests are built here, with no cgo, for linux.
#
#   scripts/gpu-test.sh HOST [RUN OPTION]...          build, send by ssh, run there, bring results back
#   scripts/gpu-test.sh build [-arch ARCH] [-carry FILE]...
#                                                     make .build/gpu/bundle.tar.xz, to be sent by other means
#   ./gpu-test.sh run [RUN OPTION]...                 run, on the GPU host, in the unpacked bundle
#
# Build options:
#   -arch ARCH         amd64 or arm64 (default: this machine's; with HOST: that machine's)
#   -carry FILE        a libcudart to put into the bundle, besides those in .libcudart/ARCH; may be
#                      repeated
# Run options:
#   -libcudart PATH    run everything with this library, through PINNED_CUDART; repeated: once with
#                      each. "default" is the one that cudart.Open finds, "driver" is libcuda alone,
#                      through PINNED_CUDA_API: no libcudart is searched.
#   -carried           the same for every libcudart in the bundle
#   -only DIRECTORY    only this package, such as hostmem or cudart/cudasim; may be repeated
#   -run REGEX         only these tests
#   -bench REGEX       these benchmarks too
#   -count N           each benchmark N times
#   -verify            pincheck verify --full too
#   -timeout SECONDS   for each package's tests, benchmarks and each pincheck (default 600)
#   -out DIRECTORY     where the logs go (default: results)
#   -no-gpu            for a machine without one: GPU tests skip, pincheck runs the simulated GPU
#
# Without -no-gpu PINNED_TEST_GPU=1 is set: a GPU test that finds no GPU fails. The exit status is 0 if
# all passed.
set -euo pipefail

die() { echo "gpu-test: $*" >&2; exit 2; }
usage() { sed -n '2,/^set -/{/^set -/!s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; }

# Packages whose tests read the source tree, which is not in a bundle.
needs_source=(internal/rules)

build() {
	local arch="" carry=()
	while (($# > 0)); do
		case $1 in
		-arch) arch=${2:?-arch wants amd64 or arm64} && shift 2 ;;
		-carry) carry+=("${2:?-carry wants a file}") && shift 2 ;;
		*) die "build: unknown option $1" ;;
		esac
	done
	cd "$(dirname "${BASH_SOURCE[0]}")/.."
	arch=${arch:-$(go env GOHOSTARCH)}

	local dir=.build/gpu tree=.build/gpu/tree
	rm -rf "$dir"
	mkdir -p "$tree/bin" "$tree/libcudart"
	export GOOS=linux GOARCH=$arch CGO_ENABLED=0
	local flags=(-trimpath "-ldflags=-s -w")
	{
		echo "# pinned test bundle"
		echo "# commit $(git describe --always --dirty 2>/dev/null || echo unknown)"
		echo "# $(go version), linux/$arch, no cgo"
	} >"$tree/manifest"

	# Only packages that have tests.
	local packages package name
	packages=$(go list -f '{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}{{end}}' ./...)
	for package in $packages; do
		package=${package#"$(go list -m)"}
		package=${package#/}
		package=${package:-.}
		[[ " ${needs_source[*]} " == *" $package "* ]] && continue
		name=$(basename "$package").test
		[[ $package == . ]] && name=root.test
		mkdir -p "$tree/$package"
		go test -c "${flags[@]}" -o "$tree/$package/$name" "./$package"
		printf '%s\t%s\n' "$package" "$name" >>"$tree/manifest"
	done
	# Tests find their data where they find it in the repository.
	find . -name .git -prune -o -name .build -prune -o -name .libcudart -prune -o \
		\( -type d \( -name testdata -o -name docs -o -path ./reference \) -prune -o -name schema.json -o -path './kernel/src/*' -o -path './examples/gcn/src/*' -o -path './examples/pytorch/*.py' \) -print0 |
		tar -c --null -T - | tar -x -C "$tree"
	go build "${flags[@]}" -o "$tree/bin/pincheck" ./cmd/pincheck

	local library
	[[ -d .libcudart/$arch ]] && mapfile -t -O "${#carry[@]}" carry < <(find ".libcudart/$arch" -name 'libcudart.so.*' -type f)
	for library in "${carry[@]}"; do
		[[ ! -e $tree/libcudart/$(basename "$library") ]] || die "two libraries named $(basename "$library")"
		cp -L "$library" "$tree/libcudart/"
	done
	cp scripts/gpu-test.sh scripts/skips.awk "$tree/"

	# One dictionary for all: the test binaries have most of their code in common.
	tar -C "$tree" --owner=0 --group=0 --sort=name -c . | xz -T1 -6 --lzma2=preset=6,dict=64MiB >"$dir/bundle.tar.xz"
	rm -rf "$tree"
	ls -lh "$dir/bundle.tar.xz"
}

run() {
	local libraries=() only=() tests="" bench="" count=1 verify=0 limit=600 results="" gpu=1 carried=0
	while (($# > 0)); do
		case $1 in
		-libcudart) libraries+=("${2:?}") && shift 2 ;;
		-carried) carried=1 && shift ;;
		-only) only+=("${2:?}") && shift 2 ;;
		-run) tests=${2:?} && shift 2 ;;
		-bench) bench=${2:?} && shift 2 ;;
		-count) count=${2:?} && shift 2 ;;
		-verify) verify=1 && shift ;;
		-timeout) limit=${2:?} && shift 2 ;;
		-out) results=${2:?} && shift 2 ;;
		-no-gpu) gpu=0 && shift ;;
		*) die "run: unknown option $1" ;;
		esac
	done
	[[ -z $results ]] || { mkdir -p "$results" && results=$(realpath "$results"); }
	cd "$(dirname "${BASH_SOURCE[0]}")"
	[[ -e manifest ]] || die "no manifest beside this script: run it in an unpacked bundle"
	results=${results:-$PWD/results}
	mkdir -p "$results"
	rm -f "$results"/*.log "$results/summary.txt"

	((carried == 0)) || mapfile -t -O "${#libraries[@]}" libraries < <(find "$PWD/libcudart" -type f | sort)
	((carried == 0 || ${#libraries[@]} > 0)) || die "-carried: there is no libcudart in the bundle"
	((${#libraries[@]} > 0)) || libraries=(default)
	if ((gpu)); then
		export PINNED_TEST_GPU=1
	else
		unset PINNED_TEST_GPU
	fi

	grep '^#' manifest
	((gpu == 0)) || nvidia-smi --query-gpu=name,driver_version,pci.bus_id --format=csv,noheader 2>/dev/null || true
	local library package name rows=() total=0 failed=0 log
	for library in "${libraries[@]}"; do
		log=$results/$(tr -c 'A-Za-z0-9.\n' - <<<"${library#/}").log
		unset PINNED_CUDART PINNED_CUDA_API
		if [[ $library == driver ]]; then
			export PINNED_CUDA_API=driver
		elif [[ $library != default ]]; then
			[[ -e $library ]] || die "no such library: $library"
			PINNED_CUDART=$(realpath "$library")
			export PINNED_CUDART
		fi
		printf '\n=== libcudart: %s\n' "${PINNED_CUDART:-$library}"
		while IFS=$'\t' read -r package name; do
			((${#only[@]} == 0)) || [[ " ${only[*]} " == *" $package "* ]] || continue
			step "$package" "./$name" -test.v -test.timeout="${limit}s" -test.run="$tests"
			if [[ -n $bench ]] && (cd "$package" && "./$name" -test.list="$bench") | grep -q ^Benchmark; then
				step "$package" "./$name" -test.run='^$' -test.bench="$bench" -test.benchmem \
					-test.count="$count" -test.timeout="${limit}s"
			fi
		done < <(grep -v '^#' manifest)
		if ((gpu)); then
			step . bin/pincheck --fail-on problem
			((verify == 0)) || step . bin/pincheck verify --full
		else
			step . bin/pincheck --sim
		fi
	done

	{
		printf '\n%-30s %-44s %-6s %6s %6s %6s %6s\n' library what result passed failed skipped seconds
		printf '%s\n' "${rows[@]}"
		skipped=$(awk -f skips.awk "$results"/*.log)
		[[ -z $skipped ]] || printf '\nskipped:\n%s\n' "$skipped"
		if ((failed)); then printf '\nFAILED: %d of %d\n' "$failed" "$total"; else printf '\nall %d passed\n' "$total"; fi
	} | tee "$results/summary.txt"
	((failed == 0))
}

# step DIRECTORY COMMAND... runs a command there and adds its row; it uses run's variables.
step() {
	local package=$1 began=$SECONDS status=0 verdict=ok part what
	shift
	what="$package ${*:1:1}"
	[[ $1 == bin/pincheck ]] && what="${*#bin/}"
	[[ $* == *-test.bench=* ]] && what="$package benchmarks"
	part=$(mktemp)
	printf '\n--- %s: %s\n' "$package" "$*" >>"$log"
	# The tests end themselves at the limit, with their stacks; the rest is for a driver that hangs.
	(cd "$package" && timeout -k 10 $((limit + 30)) "$@") </dev/null >"$part" 2>&1 || status=$?
	cat "$part" >>"$log"
	((status == 0)) || verdict="FAIL" failed=$((failed + 1))
	total=$((total + 1))
	if ((status != 0)); then
		echo "FAIL (exit status $status): $package: $*"
		grep -vE '^ *(=== (RUN|PAUSE|CONT|NAME)|--- (PASS|SKIP))' "$part" | tail -n 200 || true
	elif [[ $* == *-test.bench=* || $1 == bin/pincheck ]]; then
		cat "$part"
	else
		echo "ok $package"
	fi
	rows+=("$(printf '%-30s %-44s %-6s %6d %6d %6d %6d' "$(basename "$library")" "$what" "$verdict" \
		"$(grep -cE '^ *--- PASS' "$part" || true)" "$(grep -cE '^ *--- FAIL' "$part" || true)" \
		"$(grep -cE '^ *--- SKIP' "$part" || true)" $((SECONDS - began)))")
	rm -f "$part"
}

# there HOST RUN-OPTION... builds, sends, runs and fetches the logs, by ssh.
there() {
	local host=$1 machine arch place status=0
	shift
	machine=$(ssh "$host" uname -m)
	case $machine in
	x86_64) arch=amd64 ;;
	aarch64) arch=arm64 ;;
	*) die "$host is $machine: CUDA is for x86_64 and aarch64" ;;
	esac
	(build -arch "$arch")
	cd "$(dirname "${BASH_SOURCE[0]}")/.."
	place=$(ssh "$host" mktemp -d)
	[[ $place == /*/* ]] || die "mktemp on $host returned no directory"
	ssh "$host" "tar -xJ -C '$place'" <.build/gpu/bundle.tar.xz
	ssh "$host" "cd '$place' && ./gpu-test.sh run $(printf '%q ' "$@") -out results" </dev/null || status=$?
	ssh "$host" "tar -c -C '$place' results; rm -rf '$place'" </dev/null | tar -x -C .build/gpu &&
		echo "logs: .build/gpu/results"
	return "$status"
}

case ${1:-} in
build) shift && build "$@" ;;
run) shift && run "$@" ;;
"" | -h | -help | --help) usage ;;
-*) die "unknown option $1: build, run or a host comes first" ;;
*) there "$@" ;;
esac
