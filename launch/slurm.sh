#!/bin/sh
# Slurm: sbatch launch/slurm.sh   (from the repository; edit the two places marked EDIT)
# EDIT 1: the nodes, the GPUs of each (in both lines: one task for each GPU) and the longest time of a job.
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
#SBATCH --time=24:00:00
# Whole nodes: the slowest rank sets the pace of all, and other jobs would slow one down.
#SBATCH --exclusive
# Cores of each task: one for the trainer, the others decode pictures (docs/reading.md says how many are worth having).
#SBATCH --cpus-per-task=12
#SBATCH --job-name=murmuration
#SBATCH --requeue
#SBATCH --open-mode=append
# Three minutes before the time limit every rank gets a signal: the run is saved, ends with 75, and is queued again.
#SBATCH --signal=USR1@180
set -eu
# EDIT 2: what to train. Further arguments of sbatch after the script's name go to launch/train.py.
: "${CONFIG:=ds_configs/dpcap_large.json}"

cd "${SLURM_SUBMIT_DIR:?start this with sbatch, from the repository}"
# In a container (its own Python, and this folder at the same path):
#   apptainer: PYTHON="apptainer exec --nv --bind $PWD murmuration.sif python"
#   pyxis:     PYTHON=python SRUN="--container-image=murmuration.sqsh --container-mounts=$PWD:$PWD --container-workdir=$PWD"
: "${PYTHON:=.venv/bin/python}" "${SRUN:=}"
run_dir="${RUN_DIR:-runs/$(basename "$CONFIG" .json)}"
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT
lines() { wc -l < "$run_dir/ledger.jsonl" 2>/dev/null || echo 0; }

. launch/resume_me.sh
before=$(lines)
code=0
on_all() {
    # shellcheck disable=SC2086  # several words
    srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" $SRUN sh -c '
        export RANK="$SLURM_PROCID" WORLD_SIZE="$SLURM_NTASKS" LOCAL_RANK="$SLURM_LOCALID"
        export LOCAL_WORLD_SIZE="${SLURM_NTASKS_PER_NODE:-1}"
        exec "$@"' rank $PYTHON "$@"
}
# CHECK=1 sbatch launch/slurm.sh: examines the nodes and trains nothing.
[ -z "${CHECK:-}" ] || { on_all launch/doctor.py --config "$CONFIG" "$@"; exit; }
on_all launch/train.py --config "$CONFIG" --set "run.dir=$run_dir" "$@" || code=$?

# srun returns the largest code of all ranks; that of a rank that died exceeds the 75 of those that noticed.
launched=$code
code=$(ended "$launched" "$@")
if [ "$code" = 75 ]; then
    if [ "$(lines)" -gt "$before" ]; then
        echo "stopped (code $launched): queued again, to continue from the last checkpoint"
        scontrol requeue "$SLURM_JOB_ID"
        exit 75
    fi
    echo "error: stopped (code $launched) before anything was done, so it is not queued again; see above for why" >&2
    [ "$launched" = 0 ] || code=$launched
fi
exit "$code"
