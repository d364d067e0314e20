#!/usr/bin/env bash
# Tries the files in deploy/ as far as that is possible without a cluster and without a GPU:
#
#   scripts/fleet-check.sh [scripts|npd|manifests|image]...
#   scripts/fleet-check.sh schemas     # writes the schemas anew (fetches the sources of Kubernetes, 100 MB; needs python3)
#
# scripts     the shell scripts, with programs in pincheck's place
# npd         the plugin's configuration, by node-problem-detector's own code: NPD_SOURCE is a
#             directory with its source, without which the step says that it was not made
# manifests   the manifests, by kubeconform, against the schemas in deploy/kubernetes/schemas
# image       the image's files in a chroot, with this machine's glibc, /proc and nothing else
#             (needs root)
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

check_scripts() {
	sh -n deploy/slurm/prolog-pincheck.sh
	printf '#!/bin/sh\necho "$*" >>"%s/log"\n' "$work" >"$work/logger"
	chmod +x "$work/logger"
	local status want wanted
	# pincheck's status, and the prolog's: only problems drain the node.
	for want in 0:0 1:1 2:0 3:0 130:0; do
		fake "${want%:*}" said
		: >"$work/log"
		status=0
		env -i SLURM_JOB_ID=7 SLURM_JOB_GPUS=2,3 PINCHECK="$work/pincheck" LOGGER="$work/logger" deploy/slurm/prolog-pincheck.sh || status=$?
		[[ $status == "${want#*:}" ]] || fail "prolog: status $status for pincheck's ${want%:*}"
		wanted="-t pincheck job 7, GPUs 2,3, status ${want%:*}: --npd --timeout 30s: PCI_BUS_ID 2,3 said"
		[[ $want == 0:0 ]] && wanted=
		[[ $(<"$work/log") == "$wanted" ]] || fail "prolog: it logged: $(<"$work/log")"
	done
	env -i PINCHECK=/nonexistent LOGGER="$work/logger" deploy/slurm/prolog-pincheck.sh || fail "prolog: a job without GPUs"
	env -i SLURM_JOB_GPUS=0 PINCHECK=/nonexistent LOGGER="$work/logger" deploy/slurm/prolog-pincheck.sh || fail "prolog: without pincheck the job starts"

	# The health check: pincheck's status, the node's state, and what becomes of the node.
	sh -n deploy/slurm/healthcheck-pincheck.sh
	cat >"$work/scontrol" <<-'SH'
		#!/bin/sh
		[ "$1" = show ] && echo "NodeName=n7 State=$FAKE_STATE Reason=none" && exit
		echo "$*" >>"$FAKE_LOG"
	SH
	chmod +x "$work/scontrol"
	for want in 0:IDLE: 1:IDLE:drained 1:IDLE+DRAIN: 2:IDLE: 3:IDLE: 130:IDLE:; do
		fake "${want%%:*}" said
		: >"$work/drained"
		want=${want#*:}
		env -i PATH=/usr/bin:/bin SLURMD_NODENAME=n7 FAKE_STATE="${want%:*}" FAKE_LOG="$work/drained" PINCHECK="$work/pincheck" SCONTROL="$work/scontrol" LOGGER="$work/logger" \
			deploy/slurm/healthcheck-pincheck.sh || fail "health check: status $?"
		wanted="update NodeName=n7 State=DRAIN Reason=pincheck: --npd --timeout 45s:   said"
		[[ ${want#*:} == drained ]] || wanted=
		[[ $(<"$work/drained") == "$wanted" ]] || fail "health check: in state ${want%:*}: $(<"$work/drained")"
	done
	env -i PATH=/usr/bin:/bin SLURMD_NODENAME=n7 PINCHECK=/nonexistent LOGGER="$work/logger" deploy/slurm/healthcheck-pincheck.sh || fail "health check: without pincheck"

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

# The configuration is read and judged by the code that will read it. Its path must exist for
# that, so a file stands in for pincheck.
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
				fmt.Println("node-problem-detector takes it:", c.Source)
			}
		GO
		go mod init npd >/dev/null 2>&1
		go mod edit -require=k8s.io/node-problem-detector@v0.0.0 -replace="k8s.io/node-problem-detector=$NPD_SOURCE"
		go mod tidy 2>"$work/tidy" || { cat "$work/tidy" >&2; exit 1; }
		go run . "$root/deploy/node-problem-detector/pincheck.json" /bin/sh
	)
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
	mkdir -p "$image/usr/local/bin" "$image/tmp" "$image/proc" "$image/usr/local/cuda/lib64"
	CGO_ENABLED=0 go build -trimpath -ldflags='-s -w' -o "$image/usr/local/bin/pincheck" ./cmd/pincheck
	ldd "$image/usr/local/bin/pincheck" /usr/bin/env | grep -o '/[^ ]*\.so[^ ]*' | sort -u | while read -r library; do
		install -D "$library" "$image$library"
	done
	# libcudart also needs librt, which is where libc is.
	library=$(ldd "$image/usr/local/bin/pincheck" | grep -o '/[^ ]*/libc\.so[^ ]*')
	install "${library%/*}/librt.so.1" "$image${library%/*}/"
	(cd "$image" && find . -type f | sort)

	inside() { unshare --mount sh -c 'mount -t proc proc "$1/proc" || mount --rbind /proc "$1/proc" || exit 99; shift; exec chroot --userspec=65532:65532 "$@"' sh "$image" "$image" /usr/local/bin/pincheck "$@"; }
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
((${#steps[@]} > 0)) || steps=(scripts npd manifests image)
for step in "${steps[@]}"; do
	declare -F "check_$step" >/dev/null || fail "no step $step"
	echo "== $step"
	"check_$step"
done
echo "ok: ${steps[*]}"
