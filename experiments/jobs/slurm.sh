#!/bin/bash
# k3_1b on two nodes of eight GPUs, one process a GPU: sbatch experiments/jobs/slurm.sh
#
# jax reads the processes from SLURM. Five minutes before the time limit SLURM sends SIGTERM: the run
# saves a checkpoint, ends with code 143, and the job goes back to the queue to resume. A process
# that dies takes the step with it (--kill-on-bad-exit); the next start resumes too. Adjust the
# partition, the paths and the mesh; all processes must see the same --workdir.

#SBATCH --job-name=k3_1b
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append

set -u
srun --kill-on-bad-exit=1 .venv/bin/python -m experiments.train --distributed \
    --config=k3_1b --workdir="${RUNS:-runs}/k3_1b" \
    --set mesh.data=2 --set mesh.fsdp=8 "$@"
code=$?
if [ "$code" -eq 143 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
