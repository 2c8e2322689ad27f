# What provider slurm does on the login node. The first word is the work folder; the others are each function's own.
set -u
umask 077
command -v sbatch >/dev/null 2>&1 || . /etc/profile >/dev/null 2>&1
work=$1 me=$(id -un)
shift
case $work in "~/"*) work=$HOME/${work#"~/"} ;; esac
say() { echo "@mgpu $*"; }
named() { squeue -u "$me" -h -t all --name="mgpu-$1" -o "$2"; } # TOKEN FORMAT: whatever Slurm still knows of a gang

locked() { # TOKEN: one at a time, for this gang
    gang=$work/$1
    mkdir -p "$gang" && exec 9>"$gang/lock" || exit 1
    flock -w 60 9 && return
    echo "mgpu: no locks in $gang, or somebody holds this one" >&2
    exit 1
}

job_of() { # TOKEN: sets job to the gang's, as written down or as Slurm has it; empty: none
    job=$(cat "$work/$1/job" 2>/dev/null)
    [ "$job" ] && return
    job=$(named "$1" %i) || exit 1
    job=${job%%
*}
}

claim() { # JOB: the first one counts
    echo "$1" >"$gang/job.$1"
    ln "$gang/job.$1" "$gang/job" 2>/dev/null
    job=$(cat "$gang/job")
}

submit() { # TOKEN DIGEST sbatch's arguments: one job, whoever asks again
    token=$1 digest=$2
    shift 2
    locked "$token"
    if [ -s "$gang/digest" ] && [ "$(cat "$gang/digest")" != "$digest" ]; then
        say conflict
        return
    fi
    known=$(named "$token" %i) || exit 1
    job=$(cat "$gang/job" 2>/dev/null)
    if [ "$job" = none ]; then
        echo "mgpu: this token was given up" >&2
        exit 1
    fi
    [ "$job" ] || job=${known%%
*}
    if [ "$job" ] && [ ! -s "$gang/digest" ]; then
        echo "mgpu: job $job has this token, and was made with another work folder" >&2
        exit 1
    fi
    if [ ! "$job" ]; then
        base64 -d <<'MGPU_FILES' | tar -xzf - -C "$gang" || exit 1
@FILES@
MGPU_FILES
        echo "$digest" >"$gang/digest"
        job=$(MGPU_GANG=$gang sbatch --parsable --chdir=/ --output="$gang/out" "$@" "$gang/batch.sh") || exit 1
        job=${job%%;*}
        find "$work" -mindepth 1 -maxdepth 1 -type d -mtime +30 -exec rm -rf {} + # gangs that ended long ago
    fi
    claim "$job"
    say "$job $(stat -c %Y "$gang/digest")"
}

look() { # TOKEN: what was made by it
    [ -d "$work/$1" ] && locked "$1"
    job_of "$1"
    if [ "$job" ] && [ "$job" != none ]; then
        nodes=$(sed -n 's/.*"nodes": \([0-9]*\).*/\1/p' "$work/$1/asked.json")
        say "$job $(stat -c %Y "$work/$1/digest") $nodes"
    fi
}

give_up() { # TOKEN: what was made by it; from now on it makes nothing
    locked "$1"
    look "$1"
    [ "$job" ] || claim none
}

tell() { # TOKEN: Slurm's word on the job, and the nodes' own
    job_of "$1"
    found=$(named "$1" '%i|%T|%r|%N') || exit 1
    echo "$found" | while IFS= read -r line; do
        case $line in "$job|"*) say "job|$line" ;; esac
    done
    down=$(sinfo -h -N -t down,fail,no_respond -o %N 2>/dev/null | sort -u)
    for node in $down; do say "down|$node"; done
    for file in asked.json $(cd "$work/$1" 2>/dev/null && ls -d node-*.json ended-*.json 2>/dev/null); do
        [ -f "$work/$1/$file" ] && say "file|$file|$(cat "$work/$1/$file")"
    done
    return 0
}

give_back() { # TOKEN: asks all jobs of this token to end; a node that can clears itself first
    jobs=$(squeue -u "$me" -h --name="mgpu-$1" -o '%T:%i') || exit 1
    if [ -d "$work/$1" ]; then : >"$work/$1/given-back"; fi # a task that has just begun hears no USR2
    for job in $jobs; do
        # to a job that waits scancel would try to send it for a minute and a half
        case $job in RUNNING:*) scancel --signal=USR2 "${job#*:}" 2>/dev/null ;; esac
        scancel "${job#*:}" || exit 1
    done
    return 0
}

owned() { # all jobs of mgpu's that have not ended
    jobs=$(squeue -u "$me" -h -o '%i|%j|%k') || exit 1
    echo "$jobs" | while IFS= read -r line; do say "$line"; done
}

on_sale() {
    partitions=$(scontrol show partition -o) && nodes=$(sinfo -h -e -o '%R|%c|%m|%G|%D|%t') || exit 1
    echo "$partitions" | while IFS= read -r line; do say "partition|$line"; done
    echo "$nodes" | while IFS= read -r line; do say "nodes|$line"; done
}

try_request() { # sbatch's arguments: Slurm's word on them, without a job
    sbatch --test-only "$@" --wrap=true 2>"${TMPDIR:-/tmp}/mgpu-test.$$"
    status=$? words=$(cat "${TMPDIR:-/tmp}/mgpu-test.$$")
    rm -f "${TMPDIR:-/tmp}/mgpu-test.$$"
    [ "$status" = 0 ] || { echo "$words" >&2 && exit 1; }
    say "$(echo "$words" | sed -n 's/^sbatch: *//p' | head -n 1)"
}

try_node() { # srun's arguments: what one node has, where it can be had at once
    mkdir -p "$work" && probe=$(mktemp "$work/probe.XXXXXX") && locked probe || exit 1
    # shellcheck disable=SC2016
    tried='say() { echo "@mgpu $*"; }
        say "name $(hostname)"; [ -e "$1" ] && say "shared yes"
        PATH=$PATH:/usr/sbin; lacks=
        for name in sshd ssh-keygen flock timeout; do command -v "$name" >/dev/null || lacks="$lacks $name"; done
        python3 -c "import sys; sys.exit(sys.version_info < (3, 9))" || lacks="$lacks python3-of-3.9-or-newer"
        say "lacks $lacks"; say "python $(python3 -c "import platform; print(platform.python_version())")"'
    why=$(srun --immediate=10 --time=1 --nodes=1 --ntasks=1 --job-name=mgpu-check "$@" sh -c "$tried" sh "$probe" \
        2>&1 </dev/null) || say "why $(echo "$why" | tail -n 1)"
    echo "$why" | grep '^@mgpu '
    rm -rf "$probe" "$work/probe"
    return 0
}
