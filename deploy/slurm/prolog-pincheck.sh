#!/bin/sh
# Slurm's Prolog, or a part of it: checks the GPUs of a job before it starts. In slurm.conf:
#
#   Prolog=/usr/libexec/pincheck/prolog-pincheck.sh
#
# A prolog that fails drains the node and requeues the job. This one fails if pincheck finds a problem, and also if
# the check could not run or came to no verdict: a check that is off must not look like a healthy node. GPUs that
# work, and whose speed is not judged because no figure is known, let the job start: --expect-bandwidth gives one.
# slurmd runs it as root, with no PATH.
PLUGIN=${PLUGIN:-/usr/libexec/pincheck/pincheck-plugin.sh}
LOGGER=${LOGGER:-/usr/bin/logger}

[ -n "${SLURM_JOB_GPUS:-}" ] || exit 0 # no GPU in this job

# Slurm counts GPUs in the order of their bus addresses, CUDA by default the fastest first.
message=$(CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=$SLURM_JOB_GPUS "$PLUGIN" 30 2>&1)
status=$?
[ "$status" -eq 0 ] && exit 0
message="job ${SLURM_JOB_ID:-?}, GPUs $SLURM_JOB_GPUS, status $status: $message"
case $status:$message in
2:*"speed not judged"*)
	"$LOGGER" -p daemon.notice -t pincheck "$message"
	exit 0
	;;
esac
echo "pincheck: $message" >&2
"$LOGGER" -p daemon.err -t pincheck "$message"
exit 1
