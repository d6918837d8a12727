#!/usr/bin/env bash
# One training run on the nodes of a Slurm job, one process on each node:
#
#   sbatch --nodes=4 --gpus-per-node=8 launch/slurm.sh --config=configs/k3.py:proxy_1b --workdir=/shared/runs/proxy --config.mesh.fsdp=32
#
# It goes on from the last checkpoint, as does the same command again. The workdir and the data must be on a file system
# that all nodes see, and the nodes must reach each other on any port.
#SBATCH --job-name=k3jax
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
# TERM two minutes before the end of the time: the step is finished and saved.
#SBATCH --signal=TERM@120
set -euo pipefail

: "${SLURM_JOB_NODELIST:?start this by sbatch}"
read -r first_node < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export K3JAX_PROCESSES=$SLURM_NTASKS
export K3JAX_COORDINATOR=$first_node:$((20000 + SLURM_JOB_ID % 10000))
# A node with a broken card is named at the start, and not found as a run that is an eighth slower.
[ -z "${SLURM_GPUS_ON_NODE:-}" ] || export K3JAX_DEVICES=$SLURM_GPUS_ON_NODE

# What XLA is told, with the reason. Neither changes a number; neither has run on a card of ours yet.
# 2026-12-03: gathers of the next layer and sums of gradients run beside the layer that computes (JAX's performance tips).
export XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_enable_latency_hiding_scheduler=true"
# 2026-12-03: of a card's memory XLA takes 75 % if not told; nothing else runs there, and NCCL needs less than the rest.
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.90}

# One that dies takes all with it. What was stopped before its end (by a preemption, or two minutes before the end of the
# time) or lost a process goes on in a new turn of this job; a mistake (2) or a run without a finite loss (1) does not.
# shellcheck disable=SC2016  # the number of the process is known to the process only
srun --kill-on-bad-exit=1 --label bash -c 'K3JAX_PROCESS=$SLURM_PROCID exec python -m k3jax.train "$@"' train "$@" && exit 0
code=$?
case $code in 1 | 2) ;; *) scontrol requeue "$SLURM_JOB_ID" ;; esac
exit $code
