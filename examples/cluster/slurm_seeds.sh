#!/bin/bash
# Ten seeds, each a job of its own with one GPU, at most five at a time. Preempted or submitted again, jobs go on.
#     sbatch examples/cluster/slurm_seeds.sh
#SBATCH --job-name=seeds
#SBATCH --array=0-9%5
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=seeds-%A_%a.log

export OMP_NUM_THREADS="$SLURM_CPUS_PER_TASK"
seed="$SLURM_ARRAY_TASK_ID"
srun python examples/cluster/train.py --seed "$seed" --out "runs/$SLURM_JOB_NAME/seed$seed"
