#!/usr/bin/env bash
# Tests the HTML report in a real browser, headless: at the widths of a phone, a tablet and a desk,
# light and dark, and on paper. No overflow, no error, no request, all text of plots whole; contrast, names, headings,
# landmarks, tables and keyboard access as axe-core's rules have them, with folds closed and open.
# `scripts/report-browser.sh DIRECTORY` also keeps the pictures and the PDFs there: look at them after
# each change of the page.
#
# It needs a Chromium: that of the distribution (apt-get install chromium), or the one that CHROMIUM
# names. It is no step of check.sh, because a clean machine has none.
set -euo pipefail

case ${1:-} in
-h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
esac
out=
if (($# > 0)); then
	mkdir -p "$1"
	out=$(cd "$1" && pwd)
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."

browser=${CHROMIUM:-}
for name in chromium chromium-browser google-chrome google-chrome-stable; do
	[[ -n $browser ]] || browser=$(command -v "$name" || true)
done
if [[ -z $browser ]]; then
	echo "no Chromium here: apt-get install chromium, or set CHROMIUM to its path" >&2
	exit 1
fi
"$browser" --version
PINNED_TEST_BROWSER=$browser PINNED_TEST_BROWSER_OUT=$out CGO_ENABLED=0 \
	go test -count=1 -timeout=5m -run '^(TestInABrowser|TestAccess)' -v ./cmd/pincheck/internal/report
[[ -z $out ]] || ls "$out"
