#!/bin/sh
# Runs pincheck for a scheduler: a plugin of node-problem-detector, which Slurm's scripts beside it use, too.
#
#   pincheck-plugin.sh SECONDS [ARGUMENT]...
#
# It prints one line, and exits with 0 if the GPUs are fine, 1 if they are not, and 2 if that is unknown. It does so
# also where pincheck cannot: if pincheck is missing, cannot be executed, hangs, crashes or is killed, the status
# is 2 and the line has the reason. SECONDS is the limit of the check; it ends within 15 more.
PINCHECK=${PINCHECK:-/usr/bin/pincheck}
TIMEOUT=${TIMEOUT:-/usr/bin/timeout}
unknown() {
	echo "check failed: $1"
	exit 2
}

seconds=${1:-}
case $seconds in
'' | *[!0-9]*) unknown "pincheck-plugin.sh needs a number of seconds, not '$seconds'" ;;
esac
shift
# pincheck ends itself. The other limit is for one that cannot. The shell's own words about a killed program are dropped.
{
	text=$("$TIMEOUT" -k 5 $((seconds + 10)) "$PINCHECK" --npd --timeout "${seconds}s" "$@" 2>&1)
	status=$?
} 2>/dev/null
line=${text%%"
"*}
case $status in
0 | 1 | 2)
	[ -n "$line" ] || unknown "$PINCHECK printed nothing (status $status)" # an empty file does that
	printf '%s\n' "$line"
	exit "$status"
	;;
126 | 127)
	[ -e "$TIMEOUT" ] || unknown "$TIMEOUT is not installed"
	[ -e "$PINCHECK" ] || unknown "$PINCHECK is not installed"
	unknown "$PINCHECK cannot be started: $line"
	;;
124) unknown "$PINCHECK did not end within $((seconds + 10)) s" ;;
137) unknown "$PINCHECK was killed" ;; # by the second limit too
*) unknown "$PINCHECK ended with status $status: $line" ;;
esac
