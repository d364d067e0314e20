#!/usr/bin/env bash
# The project's checks. `scripts/check.sh` makes all of them, `scripts/check.sh lint race` these two;
# `make check` and CI are the first form. A failing step does not stop the ones after it: the
# summary at the end names every step with its time, and the exit status is 1 when any failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
exec </dev/null

all=(format tidy vet lint deploy ecosystem test race arm64 libcudart gpuscript)

# Every target that must build and vet, with no C toolchain. The first two run, the others are
# stubs that return errors.ErrUnsupported. docs/platforms.md lists the same targets.
targets=(linux/amd64 linux/arm64 darwin/arm64 windows/amd64 darwin/amd64 freebsd/amd64)
# Targets that must not build, with one error that says why.
refused=(linux/386 linux/arm windows/386)
why_refused=pinned_needs_a_64_bit_platform

staticcheck_version=v0.8.2
deadcode_version=v0.52.0

host=$(go env GOHOSTARCH)
out=$PWD/.build/check # logs of this run
notes=$out/notes      # what must not be overlooked, repeated at the end

# Without their directory in them, compiled packages serve the steps, gpu-test.sh, the base of bench.sh and other clones.
# Compilers and linkers collect their garbage less often, which takes a sixth off their time; the tests have their own GOGC.
GOFLAGS="$(go env GOFLAGS) -trimpath '-toolexec=env GOGC=400'"
export GOFLAGS

banner() {
	local rule='!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!'
	printf '%s\n!! %s\n%s\n' "$rule" "$*" "$rule"
}

# gotest NAME ARGUMENT... runs `go test ARGUMENT...` without vet, which is a step of its own, writes the whole output to NAME.log and shows
# a line a package, and what the failed tests printed.
gotest() {
	local log=$out/$1.log status=0
	shift
	echo "go test $*"
	go test -v -vet=off "$@" 2>&1 | tee "$log" | { grep -E --line-buffered '^(ok|FAIL|\?|panic:) ' || true; } || status=1
	if ((status != 0)); then
		awk -f "$root/scripts/failures.awk" "$log" | grep . || cat "$log" # which does not build, if nothing failed
		return 1
	fi
	echo "$(grep -cE '^ *--- PASS' "$log" || true) passed, $(grep -cE '^ *--- SKIP' "$log" || true) skipped"
	if ! grep -qE '^--- PASS' "$log"; then
		echo "no test ran: go test $*" >&2
		return 1
	fi
}

check_format() {
	local files
	files=$(gofmt -l .)
	[[ -z $files ]] || { printf 'gofmt would change:\n%s\n' "$files"; return 1; }
	for script in .ci/run scripts/*.sh scripts/release/*.sh; do bash -n "$script"; done
}

check_tidy() {
	go mod tidy -diff
	go mod verify
	scripts/licenses.sh check
}

# files OS/ARCH CGO prints a line a package: its path, and the files that it has there.
files() {
	GOOS=${1%/*} GOARCH=${1#*/} CGO_ENABLED=$2 go list -f '{{.ImportPath}} {{.GoFiles}} {{.CgoFiles}} {{.TestGoFiles}} {{.XTestGoFiles}}' ./... | sort
}

# others TARGET OTHER [CGO] prints the packages that have other files for OTHER (with cgo, if it is 1) than for TARGET.
others() { comm -13 <(files "$1" 0) <(files "$2" "${3:-0}") | cut -d' ' -f1; }

# Code is vetted and compiled once for each set of files: of a target, the packages whose files no earlier target has are
# vetted, and everything is compiled if there is such a package. Of every target but the first, deadcode checks the types of
# all packages and tests, from their sources, which compiles nothing; the step test compiles those of the first.
check_vet() {
	local target errors packages deadcode seen=$out/files
	deadcode=$(tool golang.org/x/tools/cmd/deadcode "$deadcode_version")
	: >"$seen"
	for target in "${targets[@]}"; do
		mapfile -t packages < <(files "$target" 0 | grep -vxFf "$seen" | cut -d' ' -f1)
		files "$target" 0 >>"$seen"
		echo "$target: ${packages[*]#"$(go list -m)/"}"
		export GOOS=${target%/*} GOARCH=${target#*/} CGO_ENABLED=0
		if ((${#packages[@]} > 0)); then # not "|| { a && b; }", whose a may fail without an end
			go vet "${packages[@]}"
			go build '-ldflags=-s -w' ./...
		fi
		[[ $target == "${targets[0]}" ]] || "$deadcode" -test ./... >/dev/null
		unset GOOS GOARCH CGO_ENABLED
	done
	for target in "${refused[@]}"; do
		echo "$target: refused"
		packages=(./cudart) # which refuses
		[[ $target != "${refused[0]}" ]] || packages=(./...) # and nothing beside it fails
		if errors=$(GOOS=${target%/*} GOARCH=${target#*/} CGO_ENABLED=0 go build "${packages[@]}" 2>&1); then
			echo "$target builds: should it be among the targets?" >&2
			return 1
		fi
		errors=$(sed '/^#/d' <<<"$errors")
		if [[ $errors != *"undefined: $why_refused" || $errors == *$'\n'* ]]; then
			printf 'want the one error undefined: %s, got:\n%s\n' "$why_refused" "$errors" >&2
			return 1
		fi
	done
	for target in "${targets[@]}" "${refused[@]}" "$why_refused"; do
		grep -qF "$target" docs/platforms.md || { echo "docs/platforms.md does not mention $target" >&2; return 1; }
	done
	mapfile -t packages < <(others "$(go env GOHOSTOS)/$host" "$(go env GOHOSTOS)/$host" 1)
	echo "$(go env GOHOSTOS)/$host with cgo: ${packages[*]#"$(go list -m)/"}"
	((${#packages[@]} == 0)) || CGO_ENABLED=1 go vet "${packages[@]}"
}

# tool PACKAGE VERSION builds a tool, and prints its path.
tool() {
	local bin=$PWD/.build/tools/${1##*/}-$2
	if [[ ! -x $bin ]]; then
		CGO_ENABLED=0 GOBIN=$PWD/.build/tools go install "$1@$2"
		mv "${bin%-"$2"}" "$bin"
	fi
	echo "$bin"
}

check_lint() {
	local bin target dead packages
	bin=$(tool golang.org/x/tools/cmd/deadcode "$deadcode_version")
	dead=$(CGO_ENABLED=0 "$bin" -test ./...)
	dead=$(sed '/unreachable func: Example/d' <<<"$dead") # those without output are compiled, and not run
	[[ -z $dead ]] || { echo "$dead"; return 1; }
	bin=$(tool honnef.co/go/tools/cmd/staticcheck "$staticcheck_version")
	# Of the other real target and one stub, the packages with other files than the first.
	for target in linux/amd64 linux/arm64 windows/amd64; do
		packages=(./...)
		[[ $target == linux/amd64 ]] || mapfile -t packages < <(others linux/amd64 "$target")
		((${#packages[@]} > 0)) || { echo "$target has the files of linux/amd64: list another target" >&2; return 1; }
		echo "$target: ${packages[*]#"$(go list -m)/"}"
		GOOS=${target%/*} GOARCH=${target#*/} CGO_ENABLED=0 "$bin" "${packages[@]}"
	done
}

# The files for fleets, without fetching or root.
check_deploy() { scripts/fleet-check.sh scripts unit manifests; }

# The examples with modules of other projects, which are modules of their own.
check_ecosystem() {
	(cd examples/ecosystem && go mod tidy -diff && CGO_ENABLED=0 go vet ./... && CGO_ENABLED=0 gotest ecosystem -count=1 -timeout=2m ./...)
	# Not every module proxy has gocudrv.
	cp examples/gocudrv/go.mod "$out/gocudrv.mod"
	if (cd examples/gocudrv && go mod download -modfile="$out/gocudrv.mod" github.com/eitamring/gocudrv) 2>&1; then
		(cd examples/gocudrv && CGO_ENABLED=0 go vet -mod=mod -modfile="$out/gocudrv.mod" ./...)
	else
		banner "gocudrv could not be fetched: examples/gocudrv NOT COMPILED" | tee -a "$notes"
	fi
}

check_test() { CGO_ENABLED=0 gotest test -shuffle=on -count=1 -timeout=5m ./...; }

# The steps below take -short: tests that judge every host there is, one after the other, take one in eight
# (hosttest.Sample); check_test takes all.

# tested lists the packages of the steps below: those that are not in tree-only.txt. The sources of those are looked at, so
# that what is listed there stays so.
tested() {
	local package once shared='^[[:space:]]+(go|select) |"(unsafe|syscall|sync/atomic|golang.org/x/sys/unix)"|[^a-z]chan |sync\.(Mutex|RWMutex|Map|Pool|Cond|WaitGroup)|testgpu"|cudasim"|cudart\.Open\('
	once=$(grep -v '^#' scripts/tree-only.txt)
	for package in $once; do
		[[ $package != internal/rules ]] || continue # it starts programs, to read the sources
		if grep -nE "$shared" "$package"/*.go; then
			echo "$package shares, starts or opens something: take it from scripts/tree-only.txt" >&2
			return 1
		fi
	done
	go list ./... | grep -vxF "$(printf "$(go list -m)/%s\n" $once)"
}

check_race() {
	local packages
	packages=$(tested)
	mapfile -t packages <<<"$packages"
	# Each process, each that a test starts too, would sleep for a second before it exits, for what still races then. The
	# detector's own memory is four times that of large buffers, and each small page of it would fault twice.
	GORACE='atexit_sleep_ms=100 no_huge_pages_for_shadow=0' CGO_ENABLED=1 gotest race -race -short -shuffle=on -count=1 -timeout=10m "${packages[@]}"
}

# native lists the packages, of those on its input, whose code depends on the processor: with assembly, unsafe memory, system
# calls, or files of some targets only.
native() {
	local package dir
	while read -r package; do
		dir=.${package#"$(go list -m)"}
		if compgen -G "$dir/*.s" >/dev/null || grep -qE '"(unsafe|syscall|golang.org/x/sys/unix)"|^//go:build' $(find "$dir" -maxdepth 1 -name '*.go' ! -name '*_test.go'); then
			echo "$package"
		fi
	done
}

# Of the programs, which use everything, arm64 runs the tests that go from end to end.
whole=(cmd/pincheck cmd/pincheck/internal/bench examples/gcn)
ends='^Test(Simulated|AllOnOneDevice|TrainsAsTheCPUDoes)'

# -exec runs a package's test binary under qemu, in the package's own directory: of those with native code. The others do the
# same on every processor; the step vet compiles them for this one.
# PINNED_TEST_EXEC is for tests that start a program which they have built.
check_arm64() {
	scripts/arm64-tools.sh
	local packages run=$PWD/.build/arm64/run
	packages=$(tested | native | grep -vxF "$(printf '%s\n' "${whole[@]/#/$(go list -m)/}")")
	mapfile -t packages <<<"$packages"
	export PINNED_TEST_EXEC=$run GOARCH=arm64 CGO_ENABLED=0
	gotest arm64 -exec "$run" -short -shuffle=on -count=1 -timeout=10m "${packages[@]}"
	gotest arm64-whole -exec "$run" -short -shuffle=on -count=1 -timeout=10m -run "$ends" "${whole[@]/#/./}"
}

# The tests that ask for PINNED_TEST_LIBCUDART, with NVIDIA's own libraries. That a library cannot
# be fetched is not a failure of this tree; everything else here is.
check_libcudart() {
	if ! scripts/fetch-libcudart.sh; then
		banner "libcudart could not be fetched: NOT TESTED against the real libraries" | tee -a "$notes"
		return 0
	fi
	local users
	mapfile -t users < <(grep -rl --include='*_test.go' PINNED_TEST_LIBCUDART . | xargs -r dirname | sort -u)
	((${#users[@]} > 0)) || { echo "no test reads PINNED_TEST_LIBCUDART" >&2; return 1; }

	local libraries run=$PWD/.build/arm64/run
	libraries=$(libcudarts "$host")
	echo "linux/$host: $libraries"
	PINNED_TEST_LIBCUDART=$libraries CGO_ENABLED=0 \
		gotest libcudart -count=1 -timeout=5m "${users[@]}"
	if [[ $host != arm64 ]]; then
		libraries=$(libcudarts arm64)
		echo "linux/arm64 under qemu: $libraries"
		scripts/arm64-tools.sh
		PINNED_TEST_LIBCUDART=$libraries PINNED_TEST_EXEC=$run GOARCH=arm64 CGO_ENABLED=0 \
			gotest libcudart-arm64 -exec "$run" -count=1 -timeout=10m "${users[@]}"
	fi
}

# libcudarts ARCH prints the fetched libraries for this architecture, colon-separated.
libcudarts() {
	local files
	files=$(find "$PWD/.libcudart/$1" -name 'libcudart.so.*' -type f | sort)
	[[ -n $files ]] || { echo "no libcudart.so.* in .libcudart/$1" >&2; return 1; }
	paste -sd: <<<"$files"
}

# The bundles for a GPU host, unpacked and run here without a GPU: the tests must pass outside the source tree, without
# Go, with libcuda instead of libcudart, simulated (the steps above have libcudart), and as on eight cores: what a ring
# has, and who copies, depends on their number. Programs whose code asks neither for the library's API nor for the number
# of cores run the tests that go from end to end. Two builds must compare.
# Benchmarks may differ on a shared host: exit status 1 is accepted here.
check_gpuscript() {
	scripts/gpu-test.sh build -quick
	scripts/bench.sh build -base HEAD -quick
	CGO_ENABLED=0 go test -run XXX -bench . -benchtime 1x -timeout=2m ./internal/benchmarks
	local place package programs=() others=() status=0 compared=0
	place=$(mktemp -d)
	tar -xf .build/gpu/bundle.tar.xz -C "$place"
	for package in $(grep -v '^#' "$place/manifest" | cut -f1); do
		if [[ " ${whole[*]} " == *" $package "* ]] && ! grep -qE 'GOMAXPROCS|NumCPU|cudart\.(AnyAPI|DriverAPI|RuntimeAPI)' $(find "$package" -maxdepth 1 -name '*.go' ! -name '*_test.go'); then
			programs+=(-only "$package")
		else
			others+=(-only "$package")
		fi
	done
	unpacked() { env -u GOROOT -u GOPATH PATH=/usr/bin:/bin GOMAXPROCS=8 "$place/gpu-test.sh" run -no-gpu -libcudart driver "$@" || status=1; }
	unpacked -out "$out/gpuscript" "${others[@]}"
	unpacked -out "$out/gpuscript-whole" -run "$ends" "${programs[@]}"
	rm -rf "$place"
	mkdir "$place"
	tar -xf .build/bench/bundle.tar.xz -C "$place"
	env -u GOROOT -u GOPATH PATH=/usr/bin:/bin "$place/bench.sh" run -no-gpu -rows 'Control|Calls/stream' -count 4 || compared=$?
	((compared <= 1)) && [[ -s $place/results/table.txt ]] || status=1
	rm -rf "$place"
	return "$status"
}

for step in "$@"; do
	[[ " ${all[*]} " == *" $step "* ]] || { echo "there is no step $step; steps are: ${all[*]}" >&2; exit 2; }
done
steps=("$@")
((${#steps[@]} > 0)) || steps=("${all[@]}")

rm -rf "$out"
mkdir -p "$out"
go version
summary=() failed=0 began=$SECONDS TIMEFORMAT='%0U+%0S'
for step in "${steps[@]}"; do
	printf '\n=== %s\n' "$step"
	start=$SECONDS verdict=ok
	# In a subshell that is not a condition, so that errexit holds inside the step.
	set +e
	{ time { (set -e; "check_$step") 2>&1; }; } 2>"$out/cpu"
	status=$?
	set -e
	((status == 0)) || { verdict=FAILED failed=1; }
	summary+=("$(printf '%-10s %-7s %4d s, %4d s of CPU' "$step" "$verdict" $((SECONDS - start)) $(($(tail -n 1 "$out/cpu"))))")
	echo "=== ${summary[-1]}"
done

printf '\n=== summary\n'
if compgen -G "$out/*.log" >/dev/null; then
	skipped=$(awk -f scripts/skips.awk "$out"/*.log)
	[[ -z $skipped ]] || printf 'skipped here:\n%s\n\n' "$skipped"
fi
printf '%s\n' "${summary[@]}"
printf '%-10s %-7s %4d s\n' all "$( ((failed)) && echo FAILED || echo ok)" $((SECONDS - began))
[[ ! -e $notes ]] || cat "$notes"
exit $failed
