#!/usr/bin/env bash
# Compares the benchmarks of internal/benchmarks between this tree and an earlier commit, on a host with a GPU. That
# host needs bash, tar, xz and awk: no Go and no network.
#
#   scripts/bench.sh build [-arch ARCH] [-base COMMIT] [-quick]
#                                                       make .build/bench/bundle.tar.xz (base: HEAD, or HEAD~1 if the tree
#                                                       is HEAD); -quick packs faster, by less
#   scripts/bench.sh HOST [-base COMMIT] [RUN OPTION].. build, send by ssh, run there, bring the results to .build/bench
#   ./bench.sh run [RUN OPTION]...                      compare, on the GPU host, in the unpacked bundle
#   ./bench.sh selftest [RUN OPTION]...                 show there that one build does not differ from itself, and that
#                                                       one that is made 15 % slower is found
#   ./bench.sh c [SECONDS]                              print what the programs in C measure
# Run options:
#   -quick        the most telling benchmarks, not on two cores and not on a busy host
#   -rows REGEX   only these, as go test -bench takes it: 'Copies/upload/(1MiB|2GiB)$'
#   -count N      measure each build N times, each time in a new process (default 6, or 4 with -quick; fewer show nothing)
#   -time SECONDS begin no turn that would end later (default 480, or 120 with -quick)
#   -no-gpu       simulated GPUs and small sizes: shows that it runs, and no speed
# The builds run in turns: A B B A. The exit status is 1 if a benchmark is worse by more than 10 % with p < 0.05, and 2 if one failed.
set -euo pipefail
benchstat=golang.org/x/perf/cmd/benchstat@v0.0.0-20260908200009-22c9c6c9d4da
die() { echo "bench: $*" >&2; exit 64; }

# test_binary DIRECTORY OUTPUT builds the benchmarks there. Files that do not compile are left out. It fails for a base
# for which none compiles.
test_binary() {
	local errors bad file
	until errors=$(cd "$1" && go test -c -vet=off -trimpath -ldflags='-s -w' -gcflags=-e -o "$2" ./internal/benchmarks 2>&1); do
		mapfile -t bad < <(sed -n 's,^internal/benchmarks/\([a-z]*_test\.go\):[0-9].*,\1,p' <<<"$errors" | sort -u)
		((${#bad[@]} > 0)) && [[ $1 != . ]] || die "the benchmarks do not build in $1:"$'\n'"$errors"
		[[ " ${bad[*]} " != *" bench_test.go "* && " ${bad[*]} " != *" fixture_test.go "* ]] || return 1
		for file in "${bad[@]}"; do
			rm "$1/internal/benchmarks/$file"
			echo "$file is left out of the base: it does not compile there"
		done
	done
}

build() {
	local arch base=HEAD preset=6 dir=$PWD/.build/bench tree=$PWD/.build/bench/tree
	arch=$(go env GOHOSTARCH)
	! git diff --quiet HEAD -- || base=HEAD~1
	while (($# > 0)); do
		case $1 in
		-arch) arch=${2:?} && shift 2 ;;
		-base) base=${2:?} && shift 2 ;;
		-quick) preset=0 && shift ;;
		*) die "build: unknown option $1" ;;
		esac
	done
	rm -rf "$dir"
	mkdir -p "$tree/bin" "$tree/c" "$dir/base" "$dir/tool"
	export CGO_ENABLED=0 GOOS=linux GOARCH=$arch
	git archive "$base" | tar -x -C "$dir/base"
	rm -rf "$dir/base/internal/benchmarks"
	cp -r internal/benchmarks "$dir/base/internal/"
	{
		echo "new $(git describe --always --dirty), old $(git rev-parse --short "$base^{commit}"), $(go version), linux/$arch"
		test_binary . "$tree/bin/new"
		test_binary "$dir/base" "$tree/bin/old" || {
			echo "the base runs its own benchmarks: these do not compile there"
			rm -r "$dir/base/internal/benchmarks"
			git archive "$base" internal/benchmarks | tar -x -C "$dir/base"
			test_binary "$dir/base" "$tree/bin/old" || die "the benchmarks of $base do not compile"
		}
	} | tee "$tree/manifest"
	(cd "$dir/tool" && go mod init tool && go get "$benchstat" && go build -trimpath -o "$tree/bin/benchstat" "${benchstat%@*}") 2>/dev/null || die "$benchstat cannot be built"
	cp testdata/baseline/{calls,fanout,link,loader,pin,ring,transfer}.c testdata/baseline/{launch,managed}.cu "$tree/c/"
	cp scripts/bench.sh "$tree/"
	tar -C "$tree" --owner=0 --group=0 --sort=name -c . | xz -T1 --lzma2=preset=$preset,dict=64MiB >"$dir/bundle.tar.xz"
	rm -rf "$dir/base" "$dir/tool" "$tree"
	ls -lh "$dir/bundle.tar.xz"
}

# build_c builds the programs in C, where there is a compiler for them.
build_c() {
	local cuda nvcc flags=(-O3 -pthread) file out
	[[ $(uname -m) != x86_64 ]] || flags+=(-mavx2)
	for cuda in "${CUDA_HOME:-}" "${CUDA_PATH:-}" /usr/local/cuda /opt/cuda; do [[ ! -e $cuda/include/cuda_runtime_api.h ]] || break; done
	nvcc=$(PATH=$PATH:$cuda/bin command -v nvcc || true)
	for file in c/*.c c/*.cu; do
		out=bin/c-$(basename "${file%.*}")
		{ [[ -n $nvcc ]] && timeout 120 "$nvcc" -O3 -Xcompiler "$(IFS=,; echo "${flags[*]}")" "$file" -o "$out" -lpthread; } ||
			{ [[ $file == *.c ]] && timeout 60 cc "${flags[@]}" -I"$cuda/include" "$file" -o "$out" -L"$cuda/lib64" -Wl,-rpath,"$cuda/lib64" -lcudart; } ||
			echo "$file was not built: it needs nvcc, or a C compiler and CUDA's headers" >&2 &
	done >>results/c.log 2>&1
	wait
}

# run_c SECONDS prints the lines of the programs in C, as many as can be had in that time. Of lines that differ behind
# /by=, the fastest counts.
run_c() {
	local gpus p end=$((SECONDS + $1))
	gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c ^GPU || true)
	local plain="" # memory as that of Go
	grep -qs '\[always\]' /sys/kernel/mm/transparent_hugepage/enabled || plain=plain
	local programs=("ring 2 $plain" "calls 1" "launch 2" "link")
	((quick)) || programs+=("transfer 2 fresh scattered files" "loader 1" "pin 1" "managed 2 1")
	for p in 2 4 8; do ((gpus < p)) || programs+=("fanout -s 2 -t $((p * 4)),$((p * 6 + 4)) -d $p" "fanout -s 2 -t $((p * 4)),$((p * 6 + 4)) -d $p -f $work"); done
	for p in "${programs[@]}"; do
		[[ -x bin/c-${p%% *} ]] && ((SECONDS < end)) || continue
		# shellcheck disable=SC2086 # the arguments are words
		timeout -k 5 $((end - SECONDS)) bin/c-$p 2>>results/c.log || echo "c-$p: exit status $?" >>results/c.log
	done | awk '/^Benchmark/ { sub(/\/by=.*/, "", $1); if (!($1 in ns) || $3 < ns[$1]) { ns[$1] = $3; line[$1] = $0 } } END { for (n in line) print line[n] }'
}

# allowed SECONDS prints the seconds that a command may take: as many, or what is left of the time limit and a minute more.
allowed() { local left=$((limit + 60 - SECONDS)); echo $((left < 1 ? 1 : left < $1 ? left : $1)); }

# turn NAME BINARY VARIANT adds the figures of one process to results/NAME. cores is as many as it may use.
turn() {
	local under=() status=0 cores
	cores=$(nproc)
	[[ $3 != two-cores ]] || { under=(taskset -c "$two") cores=$((cores < 2 ? cores : 2)); }
	[[ $1 != new ]] || under=(env PINNED_BENCH_PLANT="$plant" "${under[@]}")
	local skip=()
	[[ $1 != old ]] || skip=(-test.skip='^BenchmarkMemcpy$') # CUDA alone: once is enough
	PINNED_BENCH_ROWS=$3 timeout -k 5 "$(allowed 300)" "${under[@]}" "bin/$2" -test.run='^$' -test.bench="$rows" -test.benchtime="$benchtime" \
		-test.timeout=10m "${short[@]}" "${skip[@]}" >"$work/out" 2>&1 || status=$?
	((status == 0)) || { failed=2; echo "$1 $3: exit status $status"; grep -A4 -E '^(--- FAIL|panic|[[:space:]]+[a-z]+_test.go)' "$work/out" | head -n 40 || true; } >&2
	{ echo "variant: $3"; sed -n "/ ns\/op/s/^\(Benchmark[^[:space:]]*\)-$cores\([[:space:]]\)/\1\2/p" "$work/out"; } >"$work/lines"
	[[ -n $(sed 1d "$work/lines") ]] || sed -n '/^Benchmark.* ns\/op/p' "$work/out" >>"$work/lines" # one core has no suffix
	grep -v ^BenchmarkMemcpy "$work/lines" >>"results/$1"
	sed -n 's/^BenchmarkMemcpy/BenchmarkCopies/p; /^variant/p' "$work/lines" >>results/cudaMemcpy
}

# compare OLD-BINARY NEW-BINARY PLANT measures both, and prints and judges the result.
compare() {
	local old=$1 new=$2 plant=$3 i longest=0 began v variants=("") load=()
	failed=0
	mkdir -p results
	rm -f results/{old,new,cudaMemcpy,C}
	if ((with_c)); then build_c; { echo "variant: "; run_c $((limit / 4)); } >results/C; fi
	((quick)) || [[ -n $only_all ]] || variants+=(busy two-cores)
	for ((i = 0; i < count; i++)); do
		((SECONDS + longest <= limit || i < 1)) || { echo "bench: $i of $count turns in the time" >&2; break; }
		began=$SECONDS
		((i == 0)) || export PINNED_BENCH_VERIFY=0 # the first turn of each build has compared the bytes
		for v in "${variants[@]}"; do
			load=()
			if [[ $v == busy ]]; then
				for ((k = 0; k < ($(nproc) + 1) / 2; k++)); do
					dd if=/dev/zero of=/dev/null bs=64M 2>/dev/null & # copies memory
					load+=($!)
				done
			fi
			if ((i % 2)); then turn new "$new" "$v"; turn old "$old" "$v"; else turn old "$old" "$v"; turn new "$new" "$v"; fi
			((${#load[@]} == 0)) || { kill "${load[@]}" && wait "${load[@]}" 2>/dev/null || true; }
		done
		longest=$((SECONDS - began > longest ? SECONDS - began : longest))
	done
	unset PINNED_BENCH_VERIFY
	local files=(old=results/old new=results/new) f
	for f in cudaMemcpy C; do ! grep -qs ^Benchmark "results/$f" || files+=("$f=results/$f"); done
	timeout 120 bin/benchstat -table variant "${files[@]}" 2>&1 | tee results/table.txt
	# Of units that end in /s more is better; allocations are shown, and tested elsewhere.
	timeout 60 bin/benchstat -table variant -format csv old=results/old new=results/new 2>/dev/null | awk -F, '
		/^variant:/ { variant = substr($0, 10); sub(/^ /, "", variant) }
		$1 == "" && $2 != "" && $2 != "old" { unit = $2 }
		$7 ~ /^p=/ && unit !~ /^(B|allocs)\/op$/ { change = $6 + 0; split(substr($7, 3), p, " ")
			if (unit ~ /\/s$/) change = (1 / (1 + change / 100) - 1) * 100
			if (change > 10 && p[1] < 0.05) print (variant == "" ? "" : variant "/") $1, unit, $6 }' >results/worse
	echo
	if [[ -s results/worse ]]; then echo "WORSE by more than 10 %:"; cat results/worse; return 1; fi
	((failed == 0)) || return "$failed"
	grep -q ^Benchmark results/new || { echo "bench: no benchmark matches" >&2; return 2; }
	echo "nothing is worse by more than 10 %, of $(grep ^Benchmark results/new | cut -f1 | sort -u | wc -l) benchmarks in $SECONDS s"
}

here() {
	cd "$(dirname "${BASH_SOURCE[0]}")"
	[[ -e manifest ]] || die "no manifest beside this script: run it in an unpacked bundle"
	cat manifest >&2
	quick=0 rows=. plant=0 only_all="" count="" limit="" benchtime=60ms short=() with_c=1
	export PINNED_TEST_GPU=1
	while (($# > 0)); do
		case $1 in
		-quick) quick=1 short=(-test.short) && shift ;;
		-rows) rows=${2:?} && shift 2 ;;
		-count) count=${2:?} && shift 2 ;;
		-time) limit=${2:?} && shift 2 ;;
		-no-gpu) unset PINNED_TEST_GPU && with_c=0 && shift ;;
		*) die "unknown option $1" ;;
		esac
	done
	count=${count:-$((quick ? 4 : 6))} limit=${limit:-$((quick ? 120 : 480))}
	two=$(taskset -cp $$ | awk '{ n = split($NF, part, ","); for (i = 1; i <= n; i++) { split(part[i] "-" part[i], e, "-"); for (c = e[1] + 0; c <= e[2] + 0; c++) if (k++ < 2) printf "%s%d", (k > 1 ? "," : ""), c } }')
	work=$(mktemp -d) && export PINNED_BENCH_DIR=$work && trap 'rm -rf "$work" "/dev/shm/$(basename "$work")"; kill $(jobs -p) 2>/dev/null || true' EXIT
	mkdir -p results
}

selftest() {
	local status=0 row tested=(Control/arithmetic)
	here "$@"
	quick=0 short=() # the rows are named
	# Steady ones, and none whose work goes on during the planted time: a loader on a GPU host reads ahead meanwhile.
	if [[ -n ${PINNED_TEST_GPU:-} ]]; then tested+=(Copies/upload/2GiB Copies/download/2GiB); else tested+=(Loader/slow/64); fi
	rows=$(printf '^Benchmark%s$|' "${tested[@]//\//$/^}") rows=${rows%|}
	only_all=1 with_c=0 count=6 benchtime=200ms
	compare new new 0 || { echo "bench: selftest FAILED: one build differs from itself" && return 1; }
	compare new new 15 || status=$?
	((status == 1)) || { echo "bench: selftest FAILED: exit status $status, not 1" && return 1; }
	for row in "${tested[@]}"; do
		grep -q "^$row sec/op" results/worse || { echo "bench: selftest FAILED: $row is not named" && return 1; }
	done
	echo "bench: selftest passed"
}

# there HOST [-base COMMIT] [RUN OPTION]...
there() {
	local host=$1 place status=0 options=(-arch amd64)
	shift
	[[ $(ssh "$host" uname -m) != aarch64 ]] || options=(-arch arm64)
	[[ ${1:-} != -base ]] || { options+=(-base "${2:?}") && shift 2; }
	build "${options[@]}"
	place=$(ssh "$host" mktemp -d) && [[ $place == /*/* ]] || die "mktemp on $host returned no directory"
	ssh "$host" "tar -xJ -C '$place'" <.build/bench/bundle.tar.xz
	ssh "$host" "cd '$place' && ./bench.sh run $(printf '%q ' "$@")" </dev/null || status=$?
	ssh "$host" "tar -c -C '$place' results; rm -rf '$place'" </dev/null | tar -x -C .build/bench
	return "$status"
}

case ${1:-} in
build) shift && cd "$(dirname "${BASH_SOURCE[0]}")/.." && build "$@" ;;
run) shift && here "$@" && compare old new 0 ;;
selftest) shift && selftest "$@" ;;
c) here -time "${2:-60}" && build_c && run_c "$limit" ;;
"" | -*) sed -n '2,/^set -/{/^set -/!s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" ;;
*) cd "$(dirname "${BASH_SOURCE[0]}")/.." && there "$@" ;;
esac
