#!/bin/sh
# torchrun: sh launch/torchrun.sh   on every node at about the same time (edit the two places marked EDIT)
set -eu
# EDIT 1: how many nodes, and where the first one can be reached by the others.
: "${NODES:=1}" "${FIRST:=localhost:29400}"
# EDIT 2: what to train. Arguments of this script go to launch/train.py.
: "${CONFIG:=ds_configs/demo.json}"

cd "$(dirname "$0")/.."
run_dir="${RUN_DIR:-runs/$(basename "$CONFIG" .json)}"
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
# Without GPUs two processes share the CPU.
: "${PROCESSES:=$([ "${gpus:-0}" -gt 0 ] && echo "$gpus" || echo 2)}"

. launch/resume_me.sh
code=0
.venv/bin/torchrun --nnodes "$NODES" --nproc_per_node "$PROCESSES" --max-restarts 0 \
    --rdzv_backend c10d --rdzv_endpoint "$FIRST" --rdzv_id "$(basename "$CONFIG")" \
    launch/train.py --config "$CONFIG" --set "run.dir=$run_dir" "$@" || code=$?
# torchrun turns every code into 1; the run's own state shows how it ended.
exit "$(ended "$code" "$@")"
