#!/bin/sh
# Ends a node of provider `local`; lease.sh runs it when the lease or the hard cap has ended. Python is not needed.
#
#   poweroff.sh PROCESS_PID PROCESS_START_TICKS INSTANCE GRACE_S
#
# The node process ends its node on SIGTERM. One that does not within GRACE_S seconds, or that is gone already, is not waited
# for: every process that carries the instance's mark is killed, again for those that were being forked meanwhile, and
# last of all lease.sh itself.
set -u
pid=$1 ticks=$2 instance=$3 grace=$4

process_lives() { # the same pid is not enough: the start time has to agree
    read -r stat 2>/dev/null <"/proc/$pid/stat" || return 1
    set -- ${stat##*) }
    [ "${1:-}" != Z ] && [ "${20:-}" = "$ticks" ]
}

if process_lives; then
    kill -TERM "$pid"
    while process_lives && [ "$grace" -gt 0 ]; do
        sleep 1
        grace=$((grace - 1))
    done
    if process_lives; then kill -KILL "$pid"; fi
fi
for _ in 1 2 3 4 5; do
    killed=
    for environment in $(grep -lsxz "MGPU_INSTANCE=$instance" /proc/[0-9]*/environ); do
        other=${environment#/proc/}
        other=${other%/environ}
        case $other in "$$" | "$PPID") ;; *) kill -KILL "$other" 2>/dev/null && killed=1 ;; esac
    done
    [ "$killed" ] || break
    sleep 1
done
kill -KILL "$PPID"
