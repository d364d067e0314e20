#!/usr/bin/env bash
# Tries the files in deploy/ as far as that is possible without a cluster and without a GPU:
#
#   scripts/fleet-check.sh [scripts|unit|npd|manifests|image|package]...
#   scripts/fleet-check.sh schemas     # writes the schemas anew (fetches the sources of Kubernetes, 100 MB; needs python3)
#
# scripts     the shell scripts, with programs in pincheck's place
# unit        systemd's unit, by systemd-analyze; without it the step says that it was not made
# npd         the plugin's configuration, by node-problem-detector's own code: NPD_SOURCE is a
#             directory with its source, without which the step says that it was not made
# manifests   the manifests, by kubeconform, against the schemas in deploy/kubernetes/schemas
# image       the image's files in a chroot, with this machine's glibc, /proc and nothing else
#             (needs root)
# package     a package of a release, in a chroot, with pincheck and without (needs root): DEB names the .deb
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec </dev/null

kubernetes=v1.34.1
kubeconform=v0.8.0

root=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fail() { echo "fleet-check: $*" >&2; exit 1; }

# fake STATUS TEXT makes $work/pincheck, which prints its environment's GPUs and the text.
fake() {
	printf '#!/bin/sh\necho "$*: $CUDA_DEVICE_ORDER $CUDA_VISIBLE_DEVICES %s"\nexit %s\n' "$2" "$1" >"$work/pincheck"
	chmod +x "$work/pincheck"
}

# broken makes files in pincheck's place that cannot run, and prints a line for each: the path, and what the plugin says of it.
broken() {
	echo "$work/none:check failed: $work/none is not installed"
	echo '#!/bin/sh' >"$work/plain"
	echo "$work/plain:check failed: $work/plain cannot be started: *Permission denied"
	printf '#!/nonexistent\n' >"$work/loader"
	chmod +x "$work/loader"
	echo "$work/loader:check failed: $work/loader cannot be started: *No such file or directory"
	: >"$work/empty"
	chmod +x "$work/empty"
	echo "$work/empty:check failed: $work/empty printed nothing (status 0)"
	script crash 'echo "pincheck: symbol lookup error" >&2; exit 127'
	echo "$work/crash:check failed: $work/crash cannot be started: pincheck: symbol lookup error"
	script silent 'exit 1'
	echo "$work/silent:check failed: $work/silent printed nothing (status 1)"
	script killed 'kill -KILL $$'
	echo "$work/killed:check failed: $work/killed was killed"
	script segv 'kill -SEGV $$'
	echo "$work/segv:check failed: $work/segv ended with status 139: *"
	script odd 'echo one; echo two; exit 77'
	echo "$work/odd:check failed: $work/odd ended with status 77: one"
	script hung 'trap "" TERM; while :; do sleep 1; done'
	echo "$work/hung:check failed: $work/hung was killed"
	script slow 'exec sleep 60'
	echo "$work/slow:check failed: $work/slow did not end within 1 s"
}

# script NAME TEXT makes a shell script in $work.
script() {
	printf '#!/bin/sh\n%s\n' "$2" >"$work/$1"
	chmod +x "$work/$1"
}

# plugin ARGUMENT... runs the plugin with the variables before it, and sets out and status.
plugin() {
	status=0
	out=$(env -i PINCHECK="${PINCHECK:-$work/pincheck}" TIMEOUT="${TIMEOUT:-/usr/bin/timeout}" deploy/pincheck-plugin.sh "$@") || status=$?
}

check_scripts() {
	local file status out want wanted line path script
	for file in deploy/*.sh deploy/*/*.sh; do
		sh -n "$file"
		[[ -x $file ]] || fail "$file is not executable"
	done
	for want in 0 1 2; do
		fake "$want" said
		plugin 30 --expect-gpus 8
		[[ $status:$out == "$want:--npd --timeout 30s --expect-gpus 8:   said" ]] || fail "plugin: status $status: $out"
	done
	PINCHECK=$work/pincheck TIMEOUT=/nonexistent plugin 30
	[[ $status:$out == "2:check failed: /nonexistent is not installed" ]] || fail "plugin: without timeout: status $status: $out"
	plugin soon
	[[ $status:$out == 2:*"not 'soon'" ]] || fail "plugin: without a limit: status $status: $out"

	# Whatever keeps pincheck from running, the plugin says so, the prolog fails, and the health check drains the node.
	# timeout's limits are 10 and 5 seconds longer than pincheck's: here they are short.
	script timeout 'shift 3; exec /usr/bin/timeout -k 1 1 "$@"'
	script logger 'echo "$*" >>"$LOG"'
	script scontrol '[ "$1" = show ] && echo "NodeName=gpu7 Arch=x86_64 Gres=$GRES State=$STATE Reason=none" && exit
echo "$*" >>"$LOG"'
	local slurm=(env -i PATH=/usr/bin:/bin TIMEOUT="$work/timeout" LOG="$work/log" PLUGIN="$root/deploy/pincheck-plugin.sh" LOGGER="$work/logger"
		SCONTROL="$work/scontrol" STATE=IDLE GRES=gpu:2 SLURMD_NODENAME=gpu7 SLURM_JOB_ID=7 SLURM_JOB_GPUS=2,3)
	while IFS=: read -r path wanted; do
		PINCHECK=$path TIMEOUT=$work/timeout plugin 1
		wanted=${wanted/within 1 s/within 11 s}
		# shellcheck disable=SC2053
		[[ $status == 2 && $out == $wanted && $out != *$'\n'* ]] || fail "plugin: $path: status $status: $out"
		: >"$work/log"
		status=0
		"${slurm[@]}" PINCHECK="$path" deploy/slurm/prolog-pincheck.sh 2>"$work/stderr" || status=$?
		[[ $status == 1 && $(<"$work/log") == "-p daemon.err -t pincheck job 7, GPUs 2,3, status 2: check failed: $path "* && -s $work/stderr ]] ||
			fail "prolog: $path: status $status, it logged: $(<"$work/log")"
		: >"$work/log"
		status=0
		"${slurm[@]}" PINCHECK="$path" deploy/slurm/healthcheck-pincheck.sh 2>"$work/stderr" || status=$?
		[[ $status == 1 && $(<"$work/log") == *"health check of gpu7: status 2: check failed: $path "*$'\n'"update NodeName=gpu7 State=DRAIN Reason=pincheck: check failed: $path "* ]] ||
			fail "health check: $path: status $status, it logged: $(<"$work/log")"
	done < <(broken)
	for script in prolog healthcheck; do # without the plugin
		: >"$work/log"
		if "${slurm[@]}" PLUGIN=/nonexistent "deploy/slurm/$script-pincheck.sh" 2>/dev/null; then fail "$script: without its plugin it succeeds"; fi
		[[ $(<"$work/log") == *"status 127: "* ]] || fail "$script: without its plugin it logged: $(<"$work/log")"
		status=0
		"${slurm[@]}" LOGGER=/nonexistent PINCHECK=/nonexistent "deploy/slurm/$script-pincheck.sh" 2>"$work/stderr" || status=$?
		[[ $status == 1 ]] && grep -q '^pincheck: ' "$work/stderr" || fail "$script: without a logger: status $status: $(<"$work/stderr")"
	done

	# pincheck's status and text, and the prolog's status.
	for want in '0:fine:0' '1:bad:1' '2:no verdict:1' '2:1 GPU work, speed not judged:0'; do
		line=${want#*:}
		line=${line%:*}
		fake "${want%%:*}" "$line"
		: >"$work/log"
		status=0
		"${slurm[@]}" PINCHECK="$work/pincheck" deploy/slurm/prolog-pincheck.sh 2>/dev/null || status=$?
		[[ $status == "${want##*:}" ]] || fail "prolog: status $status for $want"
		wanted="job 7, GPUs 2,3, status ${want%%:*}: --npd --timeout 30s: PCI_BUS_ID 2,3 $line"
		[[ $want != 0:* ]] || wanted=
		[[ $(<"$work/log") == *"$wanted" && (-n $wanted || ! -s $work/log) ]] || fail "prolog: it logged: $(<"$work/log")"
	done
	"${slurm[@]}" SLURM_JOB_GPUS= PINCHECK=/nonexistent deploy/slurm/prolog-pincheck.sh || fail "prolog: a job without GPUs"

	# The health check: pincheck's status, its text, the node's GPUs and state, and what becomes of the node.
	for want in 0:fine:gpu:2:IDLE: 1:bad:gpu:h100:8:IDLE:drained 1:bad:shard:4,gpu:2:IDLE:drained 1:bad:gpu:2:IDLE+DRAIN: '2:no verdict:gpu:2:IDLE:drained' \
		'2:speed not judged:gpu:2:IDLE:' '1:bad:(null):IDLE:' 1:bad:license:2:IDLE:; do
		IFS=: read -r status line wanted <<<"$want"
		fake "$status" "$line"
		: >"$work/log"
		want=${wanted##*:} wanted=${wanted%:*}
		"${slurm[@]}" GRES="${wanted%:*}" STATE="${wanted##*:}" PINCHECK="$work/pincheck" deploy/slurm/healthcheck-pincheck.sh 2>/dev/null || true
		wanted="update NodeName=gpu7 State=DRAIN Reason=pincheck: --npd --timeout 40s:   $line"
		[[ $want == drained ]] || wanted=
		[[ $(grep '^update' "$work/log" || true) == "$wanted" ]] || fail "health check: $status $line: $(<"$work/log")"
	done
	: >"$work/log"
	if "${slurm[@]}" SCONTROL=/nonexistent deploy/slurm/healthcheck-pincheck.sh 2>/dev/null; then fail "health check: without scontrol it succeeds"; fi
	[[ $(<"$work/log") == *"not checked: "* ]] || fail "health check: without scontrol it logged: $(<"$work/log")"

	# The real pincheck, on a simulated GPU: what it prints where no figure is known is what the prolog lets pass.
	CGO_ENABLED=0 go build -o "$work/real" ./cmd/pincheck
	script sim 'exec "${0%/*}/real" --sim "$@"'
	PINCHECK=$work/sim plugin 60
	[[ $status:$out == 2:*"speed not judged"* ]] || fail "plugin: the simulated GPU: status $status: $out"
	PINCHECK=$work/sim plugin 60 --expect-bandwidth 1
	[[ $status:$out == "0:simulated: 1 GPU healthy"* ]] || fail "plugin: the simulated GPU: status $status: $out"

	# The DaemonSet's loop: one round, then a signal.
	sed -n '/^  loop.sh: |$/,/^---$/p' deploy/kubernetes/daemonset.yaml | sed -e '1d;$d' -e 's/^    //' >"$work/loop.sh"
	sh -n "$work/loop.sh"
	fake 1 said
	mkdir "$work/textfile"
	PATH=$work:$PATH TEXTFILE_DIR=$work/textfile INTERVAL_SECONDS=600 sh "$work/loop.sh" >"$work/loop.log" 2>&1 & # its sleep outlives it, and would keep a pipe open
	local loop=$!
	for _ in {1..100}; do
		[[ -e $work/textfile/pincheck.prom ]] && break
		sleep 0.1
	done
	kill -TERM "$loop"
	wait "$loop" || fail "loop: status $? after SIGTERM"
	grep -q '^pincheck_last_run_exit_status 1$' "$work/textfile/pincheck.prom" || fail "loop: $(<"$work/textfile/pincheck.prom")"
	grep -q '^--format prometheus' "$work/textfile/pincheck.prom" || fail "loop: pincheck's output is missing"
	[[ $(ls -A "$work/textfile") == pincheck.prom ]] || fail "loop: left behind: $(ls -A "$work/textfile")"
}

# verify_unit TREE lets systemd check the unit in a tree, which gets the system's own units. Any word of it is a failure.
verify_unit() {
	local said
	cp -r --update=none /usr/lib/systemd/system/. "$1/usr/lib/systemd/system/" 2>/dev/null || cp -rn /usr/lib/systemd/system/. "$1/usr/lib/systemd/system/"
	said=$(systemd-analyze verify --root="$1" --man=no pincheck-watch.service 2>&1) && [[ -z $said ]] || { echo "$said"; return 1; }
}

check_unit() {
	if ! systemd-analyze verify --help 2>/dev/null | grep -q -- --offline; then
		echo "NOT TRIED: systemd-analyze, of systemd 250 or later"
		return
	fi
	local tree=$work/tree said
	mkdir -p "$tree/usr/bin" "$tree/usr/lib/systemd/system"
	cp deploy/systemd/pincheck-watch.service "$tree/usr/lib/systemd/system/"
	if said=$(verify_unit "$tree"); then fail "unit: without pincheck it is verified"; fi
	[[ $said == *"/usr/bin/pincheck is not executable"* ]] || fail "unit: $said"
	install /bin/true "$tree/usr/bin/pincheck"
	said=$(verify_unit "$tree") || fail "unit: $said"
	systemd-analyze security --offline=true --root="$tree" --threshold=30 --no-pager pincheck-watch.service | tail -1
	[[ ${PIPESTATUS[0]} == 0 ]] || fail "unit: its exposure is more than 3.0"
	# All files name the same directory.
	[[ $(grep -rhoE '/var/lib/node_exporter[a-z_/]*[a-z_]' deploy docs cmd/pincheck/*.go | sed 's,/pincheck.*,,' | sort -u) == /var/lib/node_exporter/textfile_collector ]] ||
		fail "unit: several directories: $(grep -rnE '/var/lib/node_exporter' deploy docs cmd/pincheck/*.go)"
	said=$(grep -rn '/usr/local/bin' deploy docs/fleet.md docs/release.md scripts/release*) && fail "pincheck has two paths: $said"
	return 0
}

# The package is unpacked as dpkg does it, on this machine's libraries and programs.
check_package() {
	((EUID == 0)) || fail "package: needs root, for chroot"
	[[ -n ${DEB:-} ]] || fail "package: DEB must name a .deb of scripts/release.sh"
	local tree=$work/package file library out status=0
	mkdir -p "$tree"/{bin,tmp,proc,dev,etc/slurm}
	dpkg-deb -x "$DEB" "$tree"
	(cd "$tree" && find . -type f -path '*pincheck*' -printf '%m %P\n' | sort -k2)
	ldd /bin/sh /usr/bin/{timeout,uname,cut} "$tree/usr/bin/pincheck" | grep -o '/[^ ]*\.so[^ ]*' | sort -u | while read -r library; do install -D "$library" "$tree$library"; done
	install -D -t "$tree/usr/bin" /usr/bin/{timeout,uname,cut}
	install -D -t "$tree/bin" /bin/sh
	printf '#!/bin/sh\necho "$*" >>/tmp/log\n' >"$tree/usr/bin/logger"
	printf '#!/bin/sh\n[ "$1" = show ] && echo "NodeName=n State=IDLE Gres=gpu:1 X=" && exit\necho "$*" >>/tmp/log\n' >"$tree/usr/bin/scontrol"
	chmod +x "$tree"/usr/bin/{logger,scontrol}
	inside() { status=0; : >"$tree/tmp/log"; out=$(unshare --mount sh -c 'mount -t proc proc "$1/proc" || exit 99; exec chroot "$1" /bin/sh -c "$2"' sh "$tree" "$1" 2>&1) || status=$?; }

	! declare -F verify_unit >/dev/null || ! command -v systemd-analyze >/dev/null || out=$(verify_unit "$tree") || fail "package: unit: $out"
	inside "$(jq -r '[.rules[0].path] + .rules[0].args | join(" ")' "$tree/usr/share/pincheck/node-problem-detector.json")"
	[[ $status == 2 && $out == "no NVIDIA GPU on the PCI bus of this host" ]] || fail "package: the plugin without a GPU: status $status: $out"
	inside 'SLURM_JOB_GPUS=0 /usr/libexec/pincheck/prolog-pincheck.sh'
	[[ $status == 1 && $out == *"status 2: no NVIDIA GPU"* ]] || fail "package: the prolog without a GPU: status $status: $out"
	printf '#!/bin/sh\nexec /usr/bin/pincheck --sim --expect-bandwidth 1 "$@"\n' >"$tree/tmp/sim"
	chmod +x "$tree/tmp/sim"
	inside 'PINCHECK=/tmp/sim SLURM_JOB_GPUS=0 /usr/libexec/pincheck/prolog-pincheck.sh'
	[[ $status == 0 && -z $out ]] || fail "package: the prolog with a healthy GPU: status $status: $out"

	rm "$tree/usr/bin/pincheck"
	! command -v systemd-analyze >/dev/null || ! out=$(verify_unit "$tree") || fail "package: without pincheck the unit is verified"
	for file in 'pincheck-plugin.sh 5:2' prolog-pincheck.sh:1 healthcheck-pincheck.sh:1; do
		inside "SLURM_JOB_GPUS=0 /usr/libexec/pincheck/${file%:*}"
		[[ $status == "${file#*:}" && $out == *"check failed: /usr/bin/pincheck is not installed"* ]] || fail "package: ${file%:*} without pincheck: status $status: $out"
		echo "without pincheck: ${file%:*}: status $status: $out $(<"$tree/tmp/log")"
	done
	grep -q '^update NodeName=[^ ]\+ State=DRAIN Reason=pincheck: check failed: /usr/bin/pincheck is not installed$' "$tree/tmp/log" || fail "package: the health check did: $(<"$tree/tmp/log")"
}

# The configuration is read and validated by the code that will read it, and its rule is run by the code that will run it: with the
# plugin of this tree, and in pincheck's place what works and what cannot.
check_npd() {
	if [[ -z ${NPD_SOURCE:-} ]]; then
		echo "NOT MADE: set NPD_SOURCE to a checkout of github.com/kubernetes/node-problem-detector"
		return
	fi
	mkdir "$work/npd"
	(
		cd "$work/npd"
		cat >main.go <<-'GO'
			package main

			import (
				"bytes"
				"encoding/json"
				"fmt"
				"os"

				"k8s.io/node-problem-detector/pkg/custompluginmonitor/plugin"
				"k8s.io/node-problem-detector/pkg/custompluginmonitor/types"
			)

			func main() {
				text, err := os.ReadFile(os.Args[1])
				if err != nil {
					panic(err)
				}
				var c types.CustomPluginConfig
				d := json.NewDecoder(bytes.NewReader(text))
				d.DisallowUnknownFields()
				if err := d.Decode(&c); err != nil {
					panic(err)
				}
				c.Rules[0].Path = os.Args[2]
				if err := c.ApplyConfiguration(); err != nil {
					panic(err)
				}
				if err := c.Validate(); err != nil {
					panic(err)
				}
				p := plugin.NewPlugin(c)
				go p.Run()
				result := <-p.GetResultChan()
				fmt.Printf("%d:%s\n", result.ExitStatus, result.Message)
			}
		GO
		go mod init npd >/dev/null 2>&1
		go mod edit -require=k8s.io/node-problem-detector@v0.0.0 -replace="k8s.io/node-problem-detector=$NPD_SOURCE"
		go mod tidy 2>"$work/tidy" || { cat "$work/tidy" >&2; exit 1; }
		go build -o "$work/npd/run" .
	)
	local path wanted out
	script timeout 'shift 3; exec /usr/bin/timeout -k 1 1 "$@"'
	script healthy 'echo "$*"'
	{ echo "$work/healthy:" && broken; } | while IFS=: read -r path wanted; do
		out=$(PINCHECK=$path TIMEOUT=$work/timeout "$work/npd/run" deploy/node-problem-detector/pincheck.json "$PWD/deploy/pincheck-plugin.sh" 2>/dev/null)
		echo "$out"
		case $path in
		*/healthy) [[ $out == "0:--npd --timeout 90s" ]] || fail "npd: $path: $out" ;;
		*) [[ $out == "2:check failed: $path"* ]] || fail "npd: $path: $out" ;; # of which it keeps 80 bytes
		esac
	done
}

# Schemas that allow no field that Kubernetes' own document does not have, so that a misspelt one is found.
# deploy/kubernetes/schemas has them.
check_manifests() {
	GOBIN=$work GOFLAGS= CGO_ENABLED=0 go install "github.com/yannh/kubeconform/cmd/kubeconform@$kubeconform"
	local schemas='deploy/kubernetes/schemas/{{ .ResourceKind }}.json'
	"$work/kubeconform" -strict -summary -verbose -schema-location "$schemas" deploy/kubernetes/*.yaml
	# A schema that takes everything would find nothing.
	sed 's/backoffLimit/backofLimit/' deploy/kubernetes/job.yaml >"$work/wrong.yaml"
	if "$work/kubeconform" -strict -schema-location "$schemas" "$work/wrong.yaml"; then
		fail "manifests: the schemas find no misspelt field"
	fi
}

# Writes deploy/kubernetes/schemas: of each kind what the OpenAPI document of Kubernetes says, without descriptions.
make_schemas() {
	go mod download -json "k8s.io/kubernetes@$kubernetes" >"$work/module.json"
	mkdir -p deploy/kubernetes/schemas
	python3 - "$work/module.json" deploy/kubernetes/schemas <<-'PY'
		import json, sys
		module = json.load(open(sys.argv[1]))["Dir"]
		definitions = json.load(open(module + "/api/openapi-spec/swagger.json"))["definitions"]

		def strict(node):
		    """Drops what validates nothing, and forbids other fields than those of the object."""
		    if isinstance(node, list):
		        return [strict(n) for n in node]
		    if not isinstance(node, dict):
		        return node
		    kept = {k: ({n: strict(p) for n, p in v.items()} if k == "properties" else strict(v))
		            for k, v in node.items() if k in ("type", "properties", "additionalProperties", "items", "required", "$ref", "enum")}
		    if "properties" in kept:
		        kept["additionalProperties"] = False
		    return kept

		def schema(name):
		    d = definitions[name]
		    if d.get("format") == "int-or-string" or name.endswith(".Quantity"):
		        return {"type": ["string", "number"]}
		    return strict(d)

		def names(node):
		    if isinstance(node, dict):
		        for key, value in node.items():
		            yield from [value.rpartition("/")[2]] if key == "$ref" else names(value)
		    elif isinstance(node, list):
		        for n in node:
		            yield from names(n)

		for name, d in definitions.items():
		    for kind in d.get("x-kubernetes-group-version-kind", []):
		        if (kind["group"], kind["version"], kind["kind"]) in {("batch", "v1", "Job"), ("apps", "v1", "DaemonSet"), ("", "v1", "ConfigMap")}:
		            used, todo = {}, [name]
		            while todo:
		                n = todo.pop()
		                if n not in used:
		                    used[n] = schema(n)
		                    todo += names(used[n])
		            with open(f"{sys.argv[2]}/{kind['kind'].lower()}.json", "w") as f:
		                json.dump({"$ref": "#/definitions/" + name, "definitions": used}, f, sort_keys=True, separators=(",", ":"))
		                f.write("\n")
	PY
}

# The image has the binary, glibc and libcudart. This machine's glibc stands in for the base's.
check_image() {
	((EUID == 0)) || fail "image: needs root, for chroot"
	local image=$work/image library out status=0
	mkdir -p "$image/usr/bin" "$image/tmp" "$image/proc" "$image/usr/local/cuda/lib64"
	CGO_ENABLED=0 go build -trimpath -ldflags='-s -w' -o "$image/usr/bin/pincheck" ./cmd/pincheck
	ldd "$image/usr/bin/pincheck" /usr/bin/env | grep -o '/[^ ]*\.so[^ ]*' | sort -u | while read -r library; do
		install -D "$library" "$image$library"
	done
	# libcudart also needs librt, which is where libc is.
	library=$(ldd "$image/usr/bin/pincheck" | grep -o '/[^ ]*/libc\.so[^ ]*')
	install "${library%/*}/librt.so.1" "$image${library%/*}/"
	(cd "$image" && find . -type f | sort)

	inside() { unshare --mount sh -c 'mount -t proc proc "$1/proc" || mount --rbind /proc "$1/proc" || exit 99; shift; exec chroot --userspec=65532:65532 "$@"' sh "$image" "$image" /usr/bin/pincheck "$@"; }
	out=$(inside version) || fail "image: version: $out"
	echo "$out"
	out=$(inside --sim --npd --expect-bandwidth 1) || fail "image: --sim: $out"
	echo "$out"
	out=$(inside --npd) || status=$?
	[[ $status == 2 && $out == "no NVIDIA GPU on the PCI bus of this host" ]] || fail "image: without a GPU: status $status: $out"
	echo "$out"
	# NVIDIA's own libcudart, if scripts/fetch-libcudart.sh has fetched one.
	library=$(find .libcudart/ -path "*/$(go env GOARCH)/*" -name 'libcudart.so.*' -type f 2>/dev/null | sort | tail -1)
	if [[ -z $library ]]; then
		echo "NOT TRIED: libcudart in the image (scripts/fetch-libcudart.sh fetches one)"
		return
	fi
	cp "$library" "$image/usr/local/cuda/lib64/"
	status=0
	out=$(inside --format json) || status=$?
	[[ $status == 3 && $out == *"/usr/local/cuda/lib64/$(basename "$library")"* ]] || fail "image: with ${library##*/}: status $status: $out"
	echo "${library##*/} is found and loads, and reports that there is no driver"
}

if [[ ${1:-} == schemas ]]; then
	make_schemas
	exit
fi
steps=("$@")
((${#steps[@]} > 0)) || steps=(scripts unit npd manifests image)
for step in "${steps[@]}"; do
	declare -F "check_$step" >/dev/null || fail "no step $step"
	echo "== $step"
	"check_$step"
done
echo "ok: ${steps[*]}"
