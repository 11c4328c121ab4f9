#!/bin/sh
# deepspeed with a hostfile: sh launch/deepspeed.sh   on the first node (edit the two places marked EDIT)
set -eu
# EDIT 1: a file with one line for each node, such as `node-1 slots=8`; nodes are reached by ssh, and pdsh is needed.
: "${HOSTFILE:=hostfile}"
# EDIT 2: what to train. Arguments of this script go to launch/train.py.
: "${CONFIG:=ds_configs/demo.json}"

cd "$(dirname "$0")/.."
[ -f "$HOSTFILE" ] || { echo "error: there is no $HOSTFILE; write one line for each node, as in: node-1 slots=8" >&2; exit 2; }
PATH="$PWD/.venv/bin:$PATH"
export PATH
run_dir="${RUN_DIR:-runs/$(basename "$CONFIG" .json)}"
. launch/resume_me.sh
code=0
deepspeed --hostfile "$HOSTFILE" --master_port "${MASTER_PORT:-29500}" \
    launch/train.py --config "$CONFIG" --set "run.dir=$run_dir" "$@" || code=$?
# Exit codes of remote nodes do not always arrive; the run's own state shows how it ended.
exit "$(ended "$code" "$@")"
