#!/bin/sh
# Slurm's HealthCheckProgram, or a part of it: checks all GPUs of an idle node, and drains the node if pincheck
# is sure of a problem. In slurm.conf:
#
#   HealthCheckProgram=/etc/slurm/healthcheck-pincheck.sh
#   HealthCheckInterval=21600
#   HealthCheckNodeState=IDLE,CYCLE
#
# IDLE: a check takes some of the link, which belongs to the job where there is one. CYCLE: not all nodes at once.
# slurmd runs it as root, ends it after 60 seconds, and does nothing about its exit status.
PINCHECK=${PINCHECK:-/usr/local/bin/pincheck}
SCONTROL=${SCONTROL:-/usr/bin/scontrol}
LOGGER=${LOGGER:-/usr/bin/logger}
node=${SLURMD_NODENAME:-$(uname -n | cut -d. -f1)}

message=$("$PINCHECK" --npd --timeout 45s 2>&1)
status=$?
[ "$status" -eq 0 ] && exit 0
"$LOGGER" -t pincheck "health check of $node, status $status: $message"
[ "$status" -eq 1 ] || exit 0

# A node that is drained already keeps the reason of whoever drained it.
case $("$SCONTROL" show node --oneliner "$node") in
*State=*DRAIN*) exit 0 ;;
esac
"$SCONTROL" update NodeName="$node" State=DRAIN Reason="pincheck: $message" || "$LOGGER" -t pincheck "health check of $node: it could not be drained"
