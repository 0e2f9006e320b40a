#!/bin/bash
# One training on four nodes of eight GPUs. Ended by the scheduler, it writes a checkpoint and goes on in the next slot.
#     sbatch examples/cluster/slurm_nodes.sh
#SBATCH --job-name=ensemble
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=12:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export OMP_NUM_THREADS=8

# The batch shell gets the signal: it passes it on to the processes, waits for their checkpoint, and asks for another slot.
trap 'scancel --signal=TERM "$SLURM_JOB_ID.0"; wait "$step"; scontrol requeue "$SLURM_JOB_ID"' TERM

srun torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node 8 --max-restarts 10 \
    --rdzv-id "$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" --rdzv-backend c10d --rdzv-endpoint "$head:29400" \
    examples/cluster/train.py --out "runs/$SLURM_JOB_NAME" &
step=$!
wait "$step"
