#!/bin/sh
# Slurm's HealthCheckProgram, or a part of it: checks all GPUs of an idle node, and drains the node if pincheck
# finds a problem, or if the check could not run or came to no verdict. In slurm.conf:
#
#   HealthCheckProgram=/usr/libexec/pincheck/healthcheck-pincheck.sh
#   HealthCheckInterval=21600
#   HealthCheckNodeState=IDLE,CYCLE
#
# IDLE: a check takes some of the link, which belongs to the job where there is one. CYCLE: not all nodes at once.
# slurmd runs it as root on all nodes, and ends it after 60 seconds. It does not act on the exit status, so this
# script drains the node itself. Nodes that Slurm gives no GPU (Gres) are not checked.
PLUGIN=${PLUGIN:-/usr/libexec/pincheck/pincheck-plugin.sh}
SCONTROL=${SCONTROL:-/usr/bin/scontrol}
LOGGER=${LOGGER:-/usr/bin/logger}
node=${SLURMD_NODENAME:-$(uname -n | cut -d. -f1)}
report() {
	echo "pincheck: $1" >&2
	"$LOGGER" -p daemon.err -t pincheck "health check of $node: $1"
}

state=$("$SCONTROL" show node --oneliner "$node" 2>&1) || {
	report "not checked: scontrol show node: $state"
	exit 1
}
gres=${state#* Gres=}
[ "$gres" != "$state" ] || exit 0
case ${gres%% *} in
*gpu*) ;;
*) exit 0 ;;
esac

message=$("$PLUGIN" 40 2>&1)
status=$?
case $status:$message in
0:* | 2:*"speed not judged"*) exit 0 ;; # no figure is known: --expect-bandwidth gives one
esac
report "status $status: $message"
# A node that is drained already keeps the reason of whoever drained it.
case $state in
*State=*DRAIN*) exit 1 ;;
esac
"$SCONTROL" update NodeName="$node" State=DRAIN Reason="pincheck: $message" || report "it could not be drained"
exit 1
