#!/bin/bash
# k3_1b on a Cloud TPU pod slice, one process a host: experiments/jobs/tpu_pod.sh NAME ZONE [--set ...]
#
# Every worker runs the same command from the same checkout; jax reads the others from the TPU's
# metadata. On GKE the container's command is that line itself, in a JobSet of one pod a host. RUNS
# is a folder that all workers see (NFS, or a bucket mounted with gcsfuse). The mesh must take all
# chips: v5p-32 has 16. The same call resumes a run that was stopped, preempted or killed.

set -eu
name=$1 zone=$2
shift 2
command="cd k3jax && .venv/bin/python -m experiments.train --distributed --config=k3_1b \
--workdir=${RUNS:?a folder that all workers see}/k3_1b --set mesh.fsdp=16 $*"
gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --command="$command"
