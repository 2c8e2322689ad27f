#!/bin/sh
# Powers this machine off when its lease or its hard cap ends, by a clock that nobody can set (seconds since boot).
#
#   lease.sh LEASE_FILE HARD_CAP POLL_S COMMAND [ARGUMENT...]
#
# LEASE_FILE holds one whole number, the second since boot at which the lease ends; whoever may prolong it replaces the
# file. A missing file or one with anything else in it changes nothing: the last good number stands. Nothing passes
# HARD_CAP, a second since boot too. At the end COMMAND powers the machine off; it is repeated until this script is gone
# with the machine, whatever it answers: it has to end by itself (`timeout` before one that may hang). POLL_S is 1 or
# more. MGPU_UPTIME_FILE (for tests) stands in for /proc/uptime.
set -u

number() { # true for a whole number that sh can calculate with
    case $1 in
        '' | *[!0-9]* | 0?* | ????????????????*) return 1 ;;
    esac
}

if [ $# -lt 4 ] || ! number "$2" || ! number "$3" || [ "$3" -eq 0 ]; then
    echo "usage: lease.sh LEASE_FILE HARD_CAP POLL_S COMMAND [ARGUMENT...]" >&2
    exit 2
fi
lease_file=$1 end=$2 hard_cap=$2 poll=$3
shift 3

left() { # sets left: seconds until the end
    # a pipe would never answer, also one that is put there just now, and a huge file would keep this script from the clock
    if [ -f "$lease_file" ] && lease=$(timeout 5 dd if="$lease_file" bs=32 count=1 2>/dev/null) && number "$lease"; then
        end=$((lease < hard_cap ? lease : hard_cap))
    fi
    read -r up _ <"${MGPU_UPTIME_FILE:-/proc/uptime}"
    left=$((end - ${up%%.*}))
}

left
while [ "$left" -gt 0 ]; do
    sleep $((left < poll ? left : poll))
    left
done
while :; do
    "$@"
    sleep "$poll"
done
