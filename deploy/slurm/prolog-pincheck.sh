#!/bin/sh
# A part of Slurm's Prolog (slurm.conf): checks the GPUs of a job before it starts.
#
# A prolog that fails drains the node and requeues the job. So only what pincheck is sure of
# does: that it could not find out is logged, and the job starts. The prolog runs as root, with
# no PATH, on a node where the job's GPUs are idle.
PINCHECK=${PINCHECK:-/usr/local/bin/pincheck}
LOGGER=${LOGGER:-/usr/bin/logger}

[ -n "${SLURM_JOB_GPUS:-}" ] || exit 0 # no GPU in this job

# Slurm counts GPUs in the order of their bus addresses, CUDA by default the fastest first.
message=$(CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=$SLURM_JOB_GPUS "$PINCHECK" --npd --timeout 30s 2>&1)
status=$?
[ "$status" -eq 0 ] && exit 0
"$LOGGER" -t pincheck "job ${SLURM_JOB_ID:-?}, GPUs $SLURM_JOB_GPUS, status $status: $message"
[ "$status" -ne 1 ]
