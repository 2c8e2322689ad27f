# What provider slurm does on the login node. The first word is the work folder; the others are each function's own.
set -u
umask 077
echo "@mgpu begins" >&2 # what stands before it on stderr is no word of Slurm's: banners, start-up files
command -v sbatch >/dev/null 2>&1 || . /etc/profile >/dev/null 2>&1
# the user's own settings of Slurm's commands, and the job that this may run in, would change what is asked
for name in $(env | sed -n 's/^\(S[A-Z]*_[A-Za-z0-9_]*\)=.*/\1/p'); do
    case $name in
        SLURM_CONF* | SLURM_JWT) ;;
        SLURM_* | SALLOC_* | SBATCH_* | SCANCEL_* | SCONTROL_* | SINFO_* | SQUEUE_* | SRUN_*) unset "$name" ;;
    esac
done
work=$1 me=$(id -un)
shift
case $work in "~/"*) work=$HOME/${work#"~/"} ;; esac
gangs=$work/gangs # a folder each; beside it everything is the user's own
say() { printf '%s\n' "@mgpu $*"; }
lines() { printf '%s\n' "$1"; } # what `echo` prints depends on the shell
fail() {
    lines "mgpu: $*" >&2
    exit 1
}
# -a: jobs and nodes of hidden partitions, too
named() { squeue -a -u "$me" -h -t all --name="mgpu-$1" -o "$2"; } # TOKEN FORMAT: whatever Slurm still knows of a gang

ended() { # STATE: the job runs nowhere any more, and will not again
    case $1 in @ENDED@) return 0 ;; esac
    return 1
}

locked() { # TOKEN: one at a time, for this gang
    gang=$gangs/$1
    mkdir -p "$gang" && exec 9>"$gang/lock" || exit 1
    flock -w 60 -E 75 9
    case $? in
        0) ;;
        75) fail "timed out waiting for the lock of $gang" ;;
        *) fail "no locks in $gang" ;;
    esac
}

job_of() { # TOKEN: sets job to the gang's, as written down or as Slurm has it; empty: none
    job=$(cat "$gangs/$1/job" 2>/dev/null)
    [ "$job" ] && return
    job=$(named "$1" %i) || exit 1
    job=${job%%
*}
}

claim() { # JOB: the first one counts; 1: nothing could be written
    echo "$1" >"$gang/job.$1"
    [ -s "$gang/job.$1" ] && ln "$gang/job.$1" "$gang/job" 2>/dev/null
    [ -s "$gang/job" ] && job=$(cat "$gang/job")
}

submit() { # TOKEN DIGEST sbatch's arguments: one job, whoever asks again
    token=$1 digest=$2
    shift 2
    locked "$token"
    if [ -s "$gang/digest" ] && [ "$(cat "$gang/digest")" != "$digest" ]; then
        say conflict
        return
    fi
    job_of "$token"
    if [ "$job" = none ]; then
        say conflict # it was given up: another token may do
        return
    fi
    if [ "$job" ]; then
        made_here
    else
        base64 -d <<'MGPU_FILES' | tar -xzf - -C "$gang" || exit 1
@FILES@
MGPU_FILES
        echo "$digest" >"$gang/digest"
        [ -s "$gang/digest" ] || fail "cannot write to $gang"
        job=$(sbatch --parsable --chdir=/ --output="$gang/out" --export="ALL,MGPU_GANG=$gang" "$@" "$gang/batch.sh") ||
            exit 1
        job=${job%%;*}
        forget
    fi
    claim "$job" # the job does so, too, and ends where it cannot
    say "$job $(stat -c %Y "$gang/digest")"
}

made_here() { # the gang's folder is the one that its job was made with
    [ -s "$gang/digest" ] || fail "job $job has this token, and was made with another work folder"
}

forget() { # removes the folders of gangs that Slurm has forgotten, a month after they were last used
    jobs=$(squeue -a -u "$me" -h -t all -o '%i %j') || return 0
    find "$gangs" -mindepth 1 -maxdepth 1 -type d -mtime +30 | while IFS= read -r old; do
        name=${old##*/}
        case $name in *[!0-9a-f]*) continue ;; esac
        [ ${#name} = 40 ] && [ -f "$old/digest" ] || continue
        lines "$jobs" | grep -q -e " mgpu-$name\$" -e "^$(cat "$old/job" 2>/dev/null) " || rm -rf "$old"
    done
}

look() { # TOKEN: what was made by it
    [ -d "$gangs/$1" ] && locked "$1"
    gang=$gangs/$1
    job_of "$1"
    if [ "$job" ] && [ "$job" != none ]; then
        made_here
        nodes=$(sed -n 's/.*"nodes": \([0-9]*\).*/\1/p' "$gang/asked.json")
        say "$job $(stat -c %Y "$gang/digest") $nodes"
    fi
}

give_up() { # TOKEN: what was made by it; from now on it makes nothing
    locked "$1"
    look "$1"
    [ "$job" ] || claim none || fail "cannot write to $gang"
}

tell() { # TOKEN: Slurm's word on the job, and the nodes' own
    job_of "$1"
    found=$(named "$1" '%i|%T|%r|%N') || exit 1
    lines "$found" | while IFS= read -r line; do
        case $line in "$job|"*) say "job|$line" ;; esac
    done
    down=$(sinfo -a -h -N -t down,fail,no_respond -o %N) || exit 1
    for node in $(lines "$down" | sort -u); do say "down|$node"; done
    for file in asked.json $(cd "$gangs/$1" 2>/dev/null && ls -d node-*.json ended-*.json 2>/dev/null); do
        [ -f "$gangs/$1/$file" ] && say "file|$file|$(stat -c %Y "$gangs/$1/$file")|$(cat "$gangs/$1/$file")"
    done
    return 0
}

give_back() { # TOKEN: asks all jobs of this token to end; a node that can clears itself first
    jobs=$(named "$1" '%T:%i') || exit 1
    # a task that has just begun hears no USR2; in a shell of its own, which a file that cannot be made ends
    if [ -d "$gangs/$1" ]; then (: >"$gangs/$1/given-back") 2>/dev/null; fi
    stays=
    for job in $jobs; do
        ended "${job%%:*}" && continue
        # to a job that waits scancel would try to send it for a minute and a half
        case $job in RUNNING:*) scancel --signal=USR2 "${job#*:}" 2>/dev/null ;; esac
        scancel "${job#*:}" || stays=yes
    done
    [ -z "$stays" ]
}

owned() { # all jobs of mgpu's that have not ended; other names and comments may hold anything, newlines too
    jobs=$(squeue -a -u "$me" -h -t all -o '%i|%j|%T|%k') || exit 1
    lines "$jobs" | grep '^[0-9]*|mgpu-[0-9a-f]*|[A-Z_]*|' | while IFS='|' read -r _ name state about; do
        ended "$state" || say "$name|$about"
    done
}

on_sale() {
    partitions=$(scontrol -a show partition -o) || exit 1
    nodes=$(sinfo -a -h -e -o '%R|%c|%m|%G|%D|%t') || exit 1
    lines "$partitions" | while IFS= read -r line; do say "partition|$line"; done
    lines "$nodes" | while IFS= read -r line; do say "nodes|$line"; done
}

try_request() { # sbatch's arguments: Slurm's word on them, without a job
    words=$(sbatch --test-only "$@" --wrap=true 2>&1)
    status=$?
    [ "$status" = 0 ] || { lines "$words" >&2 && exit 1; }
    say "$(lines "$words" | sed -n 's/^sbatch: *//p' | head -n 1)"
}

try_node() { # srun's arguments: what one node has, where it can be had at once
    mkdir -p "$gangs" && probe=$(mktemp "$gangs/probe.XXXXXX") || exit 1
    flock -n "$probe" true || { rm -f "$probe" && fail "no locks in $gangs"; }
    # shellcheck disable=SC2016
    tried='say() { echo "@mgpu $*"; }
        say "name $(hostname)"; [ -e "$1" ] && say "shared yes"
        PATH=$PATH:/usr/sbin; lacks=
        for name in sshd ssh-keygen flock timeout; do command -v "$name" >/dev/null || lacks="$lacks $name"; done
        python3 -c "import sys; sys.exit(sys.version_info < (3, 9))" || lacks="$lacks python3-of-3.9-or-newer"
        say "lacks $lacks"; say "python $(python3 -c "import platform; print(platform.python_version())")"'
    why=$(srun --immediate=10 --time=1 --nodes=1 --ntasks=1 --job-name=mgpu-check "$@" sh -c "$tried" sh "$probe" \
        2>&1 </dev/null) || say "why $(lines "$why" | tail -n 1)"
    lines "$why" | grep '^@mgpu '
    rm -f "$probe"
    return 0
}
