#!/usr/bin/env bash
# Runs the whole test suite and pincheck on a machine with a GPU. That machine needs bash and tar
# and xz, no Go and no compiler; the tests are built here, with no cgo, for linux.
#
#   scripts/gpu-test.sh HOST [RUN OPTION]...          build, send by ssh, run there, bring results back
#   scripts/gpu-test.sh HOST gpus [GPUS OPTION]...    the same for gpus
#   scripts/gpu-test.sh build [-arch ARCH] [-carry FILE]... [-only DIRECTORY]... [-quick]
#                                                     make .build/gpu/bundle.tar.xz, to be sent by other means
#   ./gpu-test.sh run [RUN OPTION]...                 run, on the GPU host, in the unpacked bundle
#   ./gpu-test.sh gpus [GPUS OPTION]...               measure what uses several GPUs of a host, on that host
#
# Build options:
#   -arch ARCH         amd64 or arm64 (default: this machine's; with HOST: that machine's)
#   -carry FILE        a libcudart to put into the bundle, besides those in .libcudart/ARCH; may be
#                      repeated
#   -only DIRECTORY    only the tests of this package; may be repeated. "gpus" stands for those of gpus.
#   -quick             pack faster, by less: for a bundle that is not sent far
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
#   -no-gpu            for a machine without one: GPU tests skip, others take -short, as many packages run at
#                      once as there are cores, pincheck runs the simulated GPU
#
# gpus prints the topology, then a table: BenchmarkGPUs of internal/benchmarks for as many GPUs as there are, with C
# beside them where it can be built; pincheck, pincheck report and pincheck verify on all GPUs with their times; the suites
# that use several devices. The table is table.txt, benchmarks.txt has the samples, and table.json the times of the other steps; topology.txt, report.html and
# the logs are beside them. What does not begin in time is named. Options:
#   -time SECONDS      for all of it (default 540)
#   -rows REGEX        only these benchmarks, as go test -bench takes it
#   -out DIRECTORY     where the files go (default: results)
#   -no-gpu            on eight simulated GPUs, and pincheck on one: shows that it runs, and no speed
#
# Without -no-gpu PINNED_TEST_GPU=1 is set: a GPU test that finds no GPU fails. The exit status is 0 if
# all passed.
set -euo pipefail

die() { echo "gpu-test: $*" >&2; exit 2; }
usage() { sed -n '2,/^set -/{/^set -/!s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; }

# Tests that run at once. A process has callbacks for 16 simulators. With a test for each core of a large host a
# simulator gets those of one that was closed a moment ago, and a last call of that one's test reaches it.
parallel=8
# Packages whose tests use all GPUs that there are.
uses_several=(cudart transfer weights verify cmd/pincheck/internal/bench)

build() {
	local arch="" carry=() only=() preset=6
	while (($# > 0)); do
		case $1 in
		-quick) preset=0 && shift ;;
		-arch) arch=${2:?-arch wants amd64 or arm64} && shift 2 ;;
		-only) only+=("${2:?-only wants a directory}") && shift 2 ;;
		-carry) carry+=("${2:?-carry wants a file}") && shift 2 ;;
		*) die "build: unknown option $1" ;;
		esac
	done
	cd "$(dirname "${BASH_SOURCE[0]}")/.."
	arch=${arch:-$(go env GOHOSTARCH)}
	[[ " ${only[*]} " != *" gpus "* ]] || only+=("${uses_several[@]}" internal/benchmarks)

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

	# Only packages that have tests, and not those that are tested in the source tree alone.
	local packages package name once built=()
	once=$(grep -v '^#' scripts/tree-only.txt)
	packages=$(go list -f '{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}{{end}}' ./...)
	for package in $packages; do
		package=${package#"$(go list -m)"}
		package=${package#/}
		! grep -qxF "$package" <<<"$once" || continue
		((${#only[@]} == 0)) || [[ " ${only[*]} " == *" $package "* ]] || continue
		name=$(basename "$package").test
		mkdir -p "$tree/$package"
		built+=("$package")
		printf '%s\t%s\n' "$package" "$name" >>"$tree/manifest"
	done
	# A directory as -o: the binary there has the name of the manifest.
	printf '%s\n' "${built[@]}" | xargs -P "$(nproc)" -I{} go test -c "${flags[@]}" -o "$tree/{}/" ./{}
	# Tests find their data where they find it in the repository.
	find . -name .git -prune -o -name .build -prune -o -name .libcudart -prune -o \
		\( -type d \( -name testdata -o -name docs -o -path ./cmd/pincheck/internal/findings -o -path ./cmd/pincheck/internal/reference \) -prune -o -name schema.json -o -path './internal/gpukernels/src/*' -o -path './examples/gcn/src/*' -o -path './examples/pytorch/*.py' \) -print0 |
		tar -c --null -T - | tar -x -C "$tree"
	go build "${flags[@]}" -o "$tree/bin/pincheck" ./cmd/pincheck
	mkdir "$tree/c"
	cp testdata/baseline/fanout.c "$tree/c/"

	local library
	[[ -d .libcudart/$arch ]] && mapfile -t -O "${#carry[@]}" carry < <(find ".libcudart/$arch" -name 'libcudart.so.*' -type f)
	for library in "${carry[@]}"; do
		[[ ! -e $tree/libcudart/$(basename "$library") ]] || die "two libraries named $(basename "$library")"
		cp -L "$library" "$tree/libcudart/"
	done
	cp scripts/gpu-test.sh scripts/bench.sh scripts/skips.awk "$tree/"

	# One dictionary for all: the test binaries have most of their code in common.
	tar -C "$tree" --owner=0 --group=0 --sort=name -c . | xz -T1 --lzma2=preset=$preset,dict=64MiB >"$dir/bundle.tar.xz"
	rm -rf "$tree"
	ls -lh "$dir/bundle.tar.xz"
}

run() {
	local libraries=() only=() tests="" bench="" count=1 verify=0 limit=600 results="" gpu=1 carried=0 short=()
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
	local at_once=1 # a GPU that others use is slow, and its memory is not all free
	if ((gpu)); then
		export PINNED_TEST_GPU=1
	else
		unset PINNED_TEST_GPU
		short=(-test.short) at_once=$(nproc)
	fi

	grep '^#' manifest
	((gpu == 0)) || nvidia-smi --query-gpu=name,driver_version,pci.bus_id --format=csv,noheader 2>/dev/null || true
	local library package name rows=() total=0 failed=0 begun=0 log parts
	parts=$(mktemp -d)
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
			step "$package" "./$name" -test.v "${short[@]}" -test.timeout="${limit}s" -test.run="$tests" -test.parallel="$parallel"
			if [[ -n $bench ]] && (cd "$package" && "./$name" -test.list="$bench") | grep -q ^Benchmark; then
				step "$package" "./$name" -test.run='^$' -test.bench="$bench" -test.benchmem \
					-test.count="$count" -test.timeout="${limit}s"
			fi
		done < <(grep -v '^#' manifest)
		await 0
		if ((gpu)); then
			step . bin/pincheck --fail-on problem
			((verify == 0)) || step . bin/pincheck verify --full
		else
			step . bin/pincheck --sim
		fi
		await 0
	done
	rm -rf "$parts"

	{
		printf '\n%-30s %-44s %-6s %6s %6s %6s %6s\n' library what result passed failed skipped seconds
		printf '%s\n' "${rows[@]}"
		skipped=$(awk -f skips.awk "$results"/*.log)
		[[ -z $skipped ]] || printf '\nskipped:\n%s\n' "$skipped"
		if ((failed)); then printf '\nFAILED: %d of %d\n' "$failed" "$total"; else printf '\nall %d passed\n' "$total"; fi
	} | tee "$results/summary.txt"
	((failed == 0))
}

# The table of gpus.
columns='%-41s %11s  %-10s %-50s %6s  %-9s %s\n'

gpus() {
	local budget=540 only='^BenchmarkGPUs$' results="" gpu=1 count device=()
	while (($# > 0)); do
		case $1 in
		-time) budget=${2:?} && shift 2 ;;
		-rows) only=${2:?} && shift 2 ;;
		-out) results=${2:?} && shift 2 ;;
		-no-gpu) gpu=0 && shift ;;
		*) die "gpus: unknown option $1" ;;
		esac
	done
	local end=$((SECONDS + budget)) steps=() failed=0 status=0
	[[ -z $results ]] || { mkdir -p "$results" && results=$(realpath "$results"); }
	cd "$(dirname "${BASH_SOURCE[0]}")"
	[[ -e manifest ]] || die "no manifest beside this script: run it in an unpacked bundle"
	results=${results:-$PWD/results}
	mkdir -p "$results"
	rm -f "$results"/{table.txt,table.json,benchmarks.txt,topology.txt,report.html,pincheck.log,suites.log}
	if ((gpu)); then
		export PINNED_TEST_GPU=1
		count=$(nvidia-smi --list-gpus | grep -c ^GPU || true)
		((count > 1)) || die "gpus: nvidia-smi lists $count GPUs, want 2 or more"
		topology 2>&1 | tee "$results/topology.txt"
		./bench.sh c $((budget / 4)) >"$results/c.txt" 2>/dev/null || true # results/c.log says what was not built
	else
		unset PINNED_TEST_GPU
		count=8 device=(--sim)
		echo "no topology of simulated GPUs" | tee "$results/topology.txt"
	fi
	(cd internal/benchmarks && timeout -k 10 $((budget / 2)) ./benchmarks.test -test.run='^$' -test.bench="$only" -test.benchtime=60ms -test.count=3) \
		>"$results/benchmarks.txt" 2>&1 || status=$?
	((status == 0)) || { failed=1; echo "FAILED: benchmarks: exit status $status"; tail -n 5 "$results/benchmarks.txt"; }
	compared "$results/c.txt" "$results/benchmarks.txt" | tee "$results/table.txt"

	local most=10
	((count <= 4)) || most=15
	timed pincheck $most . bin/pincheck "${device[@]}" --fail-on problem
	timed "pincheck report" 60 . bin/pincheck report "${device[@]}" --fail-on problem -o "$results/report.html"
	timed "pincheck verify" 60 . bin/pincheck verify "${device[@]}" --fail-on problem
	local package name
	for package in "${uses_several[@]}"; do
		name=$(awk -v package="$package" '$1 == package { print $2 }' manifest)
		[[ -n $name ]] || die "gpus: the tests of $package are not in the bundle"
		timed "tests of $package" "" "$package" "./$name" -test.v -test.parallel="$parallel"
	done
	printf '{"schema":1,"steps":[%s]}\n' "$(IFS=,; echo "${steps[*]}")" >"$results/table.json"
	echo
	if ((failed)); then echo "FAILED: see what is named so above, and the logs in $results"; else echo "nothing failed in $SECONDS s"; fi | tee -a "$results/table.txt"
	((failed == 0))
}

# compared C BENCHMARKS prints the medians of benchmarks beside those of C, or of other benchmarks that they should
# reach a share of.
compared() {
	touch "$1"
	awk -v format="$columns" -v cores="$(nproc)" '
		function median(list, n, v, i, j, t) { n = split(list, v, " ")
			for (i = 2; i <= n; i++) for (j = i; j > 1 && v[j] + 0 < v[j - 1] + 0; j--) { t = v[j]; v[j] = v[j - 1]; v[j - 1] = t }
			return n ? v[int((n + 1) / 2)] : 0 }
		function row(name, value, unit, cpu, reference, what, share, least,  ratio) { ratio = reference ? value / reference : 0
			printf format, name, sprintf("%.4g %s", value, unit), cpu, reference ? sprintf("%.4g %s", reference, what) : "",
				ratio ? sprintf("%.2f", ratio) : "", share == "" ? "" : (least ? ">= " : "<= ") share, share == "" ? "" : share && !ratio ? "? no " what : (least ? ratio >= share : share ? ratio <= share : !value) ? "yes" : "NO" }
		/^Benchmark/ { c_file = FILENAME == ARGV[1]; sub(/^Benchmark/, "", $1); if (!c_file) sub("-" cores "$", "", $1)
			for (i = 3; i < NF; i += 2) if (c_file) c[$1, $(i + 1)] = $i; else { if (!(($1, $(i + 1)) in all)) all[$1, $(i + 1)] = ""; all[$1, $(i + 1)] = all[$1, $(i + 1)] " " $i }
			if (!c_file && !seen[$1]++) order[++rows] = $1 }
		END { printf format, "benchmark", "measured", "CPU s/GB", "C or reference", "ratio", "target", "met"
			for (k = 1; k <= rows; k++) { name = order[k]; split(name, part, "/"); top = part[1] "/" part[2] "/"
				cpu = (name, "cpu-s/GB") in all ? sprintf("%.3g", median(all[name, "cpu-s/GB"])) : ""; rate = median(all[name, "GB/s"])
				if (part[3] ~ /^fanout/) row(name, rate, "GB/s", cpu, c[name, "GB/s"], "C", 0.95, 1)
				else if (part[3] ~ /^(upload|download|both-ways)$/) { to = top "pinned/" part[3] "/1GiB"; row(name, rate, "GB/s", cpu, median(all[to, "GB/s"]), to, 0.9, 1) }
				else if (part[3] == "weights") { to = top "fanout-file/2GiB"; row(name, rate, "GB/s", cpu, median(all[to, "GB/s"]), to, 0.9, 1) }
				else if (name ~ /contexts/) row(name, median(all[name, "contexts"]), "contexts", "", 0, "", 0, 0)
				else row(name, rate, "GB/s", cpu, 0, "")
				if (part[3] == "16-goroutines") { to = "GPUs/2/16-goroutines/1MiB"; row(name " p99", median(all[name, "p99-ns"]), "ns", "", median(all[to, "p99-ns"]), to, name == to ? "" : 1.5, 0) } } }' "$1" "$2"
}

# timed NAME SECONDS DIRECTORY COMMAND... runs a command there and adds its row, with how long it took; it uses gpus' variables.
timed() {
	local name=$1 target=$2 part log=$results/suites.log began took=0 note="" met=yes json=true status=0 left=$((end - SECONDS)) seconds
	local dir=$3
	shift 3
	[[ $1 != bin/pincheck ]] || log=$results/pincheck.log
	part=$(mktemp)
	if ((left < 3)); then
		met="FAILED: not begun in time"
	else
		printf '\n--- %s: %s\n' "$name" "$*" >>"$log"
		began=${EPOCHREALTIME/[^0-9]/} # microseconds
		(cd "$dir" && timeout -k 10 "$left" "$@") </dev/null >"$part" 2>&1 || status=$?
		took=$((${EPOCHREALTIME/[^0-9]/} - began))
		cat "$part" >>"$log"
		case $status in
		0) [[ -z $target ]] || ((took <= target * 1000000)) || met=NO ;;
		124 | 137) met="FAILED: ended after $left s" ;;
		*) met="FAILED: exit status $status" ;;
		esac
		[[ $1 == bin/pincheck ]] || note="$(grep -cE '^--- PASS' "$part" || true) passed, $(grep -cE '^--- FAIL' "$part" || true) failed, $(grep -cE '^--- SKIP' "$part" || true) skipped"
	fi
	rm -f "$part"
	[[ $met != FAILED* ]] || failed=1
	[[ $met == yes ]] || json=false
	printf -v seconds '%d.%d' $((took / 1000000)) $((took / 100000 % 10))
	# shellcheck disable=SC2059 # the columns are the format
	printf "$columns" "$name" "$seconds s" "" "$note" "" "${target:+<= $target s}" "$met" | tee -a "$results/table.txt"
	steps+=("{\"row\":\"$name\",\"unit\":\"s\",\"measured\":$seconds,\"target\":\"${target:+<= $target s}\",\"met\":$json,\"note\":\"$note\"}")
}

# topology prints how the GPUs, the CPUs and the memory of the host are linked.
topology() {
	nvidia-smi topo -m || true
	nvidia-smi --query-gpu=index,name,pci.bus_id,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,memory.total,driver_version --format=csv || true
	nvidia-smi nvlink --status || true
	lscpu | grep -E '^(Architecture|Model name|CPU\(s\)|Thread|Core|Socket|NUMA)' || true
	grep -E '^(MemTotal|MemAvailable|HugePages_Total)' /proc/meminfo || true
	cat /sys/kernel/mm/transparent_hugepage/enabled || true
}

# step DIRECTORY COMMAND... begins a command there, when fewer than at_once run; it uses run's variables. Each step is
# reported when it and those before it have ended.
step() {
	await $((at_once - 1))
	local part=$parts/$((begun++)) package=$1
	shift
	printf '%s\n' "$package" "$*" >"$part.step"
	{
		local began=$SECONDS status=0
		# The tests end themselves at the limit, with their stacks; the rest is for a driver that hangs.
		(cd "$package" && timeout -k 10 $((limit + 30)) "$@") </dev/null >"$part" 2>&1 || status=$?
		echo "$status $((SECONDS - began))" >"$part.end.new"
		mv "$part.end.new" "$part.end"
	} &
}

# await N waits until at most N steps run, and reports those that have ended, in their order.
await() {
	local running=$(($1 + 1))
	while ((running > $1)); do
		running=$(jobs -rp | wc -l) # first: what has ended by now has written so
		while ((total < begun)) && [[ -e $parts/$total.end ]]; do
			report "$parts/$total"
			total=$((total + 1))
		done
		((running <= $1)) || wait -n || true
	done
	(($1 > 0 || total == begun)) || die "$(head -n 1 "$parts/$total.step") was ended from outside"
}

# report PART adds the row of a step that has ended.
report() {
	local part=$1 status seconds verdict=ok what package command
	read -r status seconds <"$part.end"
	{ read -r package && read -r command; } <"$part.step"
	what="$package ${command%% *}"
	[[ $command != bin/pincheck* ]] || what=${command#bin/}
	[[ $command != *-test.bench=* ]] || what="$package benchmarks"
	printf '\n--- %s: %s\n' "$package" "$command" >>"$log"
	cat "$part" >>"$log"
	((status == 0)) || verdict="FAIL" failed=$((failed + 1))
	if ((status != 0)); then
		echo "FAIL (exit status $status): $package: $command"
		grep -vE '^ *(=== (RUN|PAUSE|CONT|NAME)|--- (PASS|SKIP))' "$part" | tail -n 200 || true
	elif [[ $command == *-test.bench=* || $command == bin/pincheck* ]]; then
		cat "$part"
	else
		echo "ok $package"
	fi
	rows+=("$(printf '%-30s %-44s %-6s %6d %6d %6d %6d' "$(basename "$library")" "$what" "$verdict" \
		"$(grep -cE '^ *--- PASS' "$part" || true)" "$(grep -cE '^ *--- FAIL' "$part" || true)" \
		"$(grep -cE '^ *--- SKIP' "$part" || true)" "$seconds")")
	rm "$part" "$part.step" "$part.end"
}

# there HOST RUN-OPTION... builds, sends, runs and fetches the logs, by ssh.
there() {
	local host=$1 machine arch place status=0 command=run options=()
	shift
	[[ ${1:-} != gpus ]] || { shift && command=gpus options=(-only gpus); }
	machine=$(ssh "$host" uname -m)
	case $machine in
	x86_64) arch=amd64 ;;
	aarch64) arch=arm64 ;;
	*) die "$host is $machine: CUDA is for x86_64 and aarch64" ;;
	esac
	(build -arch "$arch" "${options[@]}")
	cd "$(dirname "${BASH_SOURCE[0]}")/.."
	place=$(ssh "$host" mktemp -d)
	[[ $place == /*/* ]] || die "mktemp on $host returned no directory"
	ssh "$host" "tar -xJ -C '$place'" <.build/gpu/bundle.tar.xz
	ssh "$host" "cd '$place' && ./gpu-test.sh $command $(printf '%q ' "$@") -out results" </dev/null || status=$?
	ssh "$host" "tar -c -C '$place' results; rm -rf '$place'" </dev/null | tar -x -C .build/gpu &&
		echo "logs: .build/gpu/results"
	return "$status"
}

case ${1:-} in
build) shift && build "$@" ;;
run) shift && run "$@" ;;
gpus) shift && gpus "$@" ;;
"" | -h | -help | --help) usage ;;
-*) die "unknown option $1: build, run or a host comes first" ;;
*) there "$@" ;;
esac
