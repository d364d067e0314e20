#!/usr/bin/env bash
# Writes cmd/pincheck/internal/licenses/licenses.txt: the licences of all modules that are linked into pincheck, and
# of Go itself. `scripts/licenses.sh check` fails if that file is not what it would write.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

kept=cmd/pincheck/internal/licenses/licenses.txt
made=$(mktemp)
trap 'rm -f "$made"' EXIT

# show NAME DIRECTORY appends the licence files of a directory.
show() {
	local file found=
	for file in "$2"/{LICENSE,LICENCE,COPYING,NOTICE,PATENTS}* "$2"/licenses/*; do
		[[ -f $file ]] || continue
		found=1
		printf '%s\n%s: %s\n%s\n\n' "$line" "$1" "$(basename "$file")" "$line" >>"$made"
		cat "$file" >>"$made"
		printf '\n' >>"$made"
	done
	[[ -n $found ]] || { echo "licenses: $1 has no licence file in $2" >&2; return 1; }
}
line=------------------------------------------------------------------------

printf 'pincheck contains code of these modules.\n\n' >"$made"
show "Go" "$(go env GOROOT)"
while read -r name directory; do
	show "$name" "$directory"
done < <(for os in linux windows; do
	GOOS=$os go list -deps -f '{{with .Module}}{{if not .Main}}{{.Path}} {{.Dir}}{{end}}{{end}}' ./cmd/pincheck
done | LC_ALL=C sort -u)

case ${1:-} in
check) cmp -s "$made" "$kept" || { echo "$kept is not up to date: run scripts/licenses.sh" >&2; exit 1; } ;;
*) cp "$made" "$kept" ;;
esac
