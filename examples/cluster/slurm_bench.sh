#!/bin/bash
# A bench of ten seeds, shared by four jobs on any machines that mount the folder: each trains what no other is at.
# All wait for the last run and write the same report. A run whose job was killed is taken over by another.
#     sbatch examples/cluster/slurm_bench.sh
# Without Slurm: start the last line by hand on every machine, at any time.
#SBATCH --job-name=bench
#SBATCH --array=0-3
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=08:00:00
#SBATCH --output=bench-%A_%a.log

srun dissensus bench digits --seeds 10 --out runs/digits
