# One gang: Slurm starts this on its first node, and each node gets one task, which keeps it (node.py).
trap 'exit 0' TERM # given back before it has begun
unset SLURM_JWT # whoever submitted it is logged in by that for minutes; nodes have a way of their own
echo "$SLURM_JOB_ID" >"$MGPU_GANG/job.$SLURM_JOB_ID"
if [ -s "$MGPU_GANG/job.$SLURM_JOB_ID" ]; then # a full disk leaves an empty one
    ln "$MGPU_GANG/job.$SLURM_JOB_ID" "$MGPU_GANG/job" 2>/dev/null # fails where there is one
fi
own=$(cat "$MGPU_GANG/job" 2>/dev/null)
if [ -z "$own" ]; then
    echo "nothing can be written to $MGPU_GANG: job $SLURM_JOB_ID ends" >&2
    exit 1
fi
if [ "$own" != "$SLURM_JOB_ID" ]; then
    echo "job $own was made by the same token: this one ends" >&2
    exit 0
fi
MGPU_KILL_WAIT=$(scontrol show config 2>/dev/null | sed -n 's/^KillWait *= *\([0-9]*\).*/\1/p')
export MGPU_KILL_WAIT="${MGPU_KILL_WAIT:-30}"
task() { # bound to no core: a site may bind a task to one (TaskPluginParam), and the node is all that runs in this one
    srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit=1 --cpu-bind=none \
        bash -c ". '$MGPU_GANG/prologue.sh' && exec python3 '$MGPU_GANG/node.py' $1"
}
trap '' TERM USR2 # they are for the tasks; this script ends when they have
task || task sweep
