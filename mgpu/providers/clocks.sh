#!/bin/sh
# The two clocks of a machine, which end it: sets them once a boot, and becomes lease.sh. start.sh installs it, and what
# runs it at each boot.
#
#   clocks.sh set|run USER HOME LEASE_S HARD_CAP_S ENDS_BY
#
# After a reboot both go on at what was left of them, so that none prolongs them. The hard cap has run on meanwhile, by
# the machine's wall clock; one that is behind prolongs nothing beyond the time that the machine was off. Nothing here
# fails for a disk that is full or cannot be written to: then each start sets the clocks anew.
set -eu
umask 022
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
how=$1
shift
settings=$* user=$1 home=$2 lease_s=$3 hard_cap_s=$4 ends_by=$5
lib=${0%/*}
run=/run/mgpu
lease=$home/.mgpu/lease

number() { # true for a whole number that sh can calculate with
    case $1 in
        '' | *[!0-9]* | 0?* | ????????????????*) return 1 ;;
    esac
}

least() { # of two numbers, but no less than 0
    set -- $(($1 < $2 ? $1 : $2))
    echo $(($1 > 0 ? $1 : 0))
}

uptime() {
    read -r up _ </proc/uptime
    echo "${up%%.*}"
}

keep() { # LEASE_LEFT CAP_LEFT: for the next boot; a disk that takes nothing is no reason to end here
    new=$lib/left.$how # synced, else a power cut may leave an empty file under the name
    { echo "$1 $2 $(date +%s)" | dd conv=fsync of="$new" && mv -f "$new" "$lib/left"; } 2>/dev/null || :
}

forget_others() { # what a machine image has of the machine that it was made of; a unit of systemd has no INSTANCE_ID
    of=$(cat "$lib/machine" 2>/dev/null) || of=
    machine=$(cat /sys/class/dmi/id/product_uuid 2>/dev/null) || machine=${INSTANCE_ID:-$of}
    [ "$machine" != "$of" ] || return 0
    if [ "$of" ]; then
        [ "$how" = set ] || exit 3 # nobody's, or start.sh comes and has other settings
        rm -f "$lib/left" "$lib/machine" /etc/ssh/mgpu_host_ed25519_key || : # whose host key start.sh leaves
    fi
    echo "$machine" >"$lib/machine" || :
}

set_clocks() { # once a boot: the lease may have been renewed since. Sets cap
    boot="$(cat /proc/sys/kernel/random/boot_id) $settings" # /run is not everywhere empty after a reboot
    if [ "$(cat "$run/boot" 2>/dev/null)" = "$boot" ]; then
        cap=$(cat "$run/hard-cap")
        return
    fi
    forget_others
    now=$(date +%s)
    lease_left=$lease_s cap_left=$hard_cap_s
    if read -r its_lease its_cap at 2>/dev/null <"$lib/left" && number "$its_lease" && number "$its_cap" && number "$at"; then
        lease_left=$its_lease
        cap_left=$(least "$cap_left" $((its_cap - (now > at ? now - at : 0))))
    fi
    [ "$ends_by" = 0 ] || cap_left=$(least "$cap_left" $((ends_by - now)))
    keep "$lease_left" "$cap_left"
    up=$(uptime)
    new=$lease.$$ # this may run twice at once
    if ! { mkdir -p "$home/.mgpu" && echo $((up + lease_left)) >"$new" && mv -f "$new" "$lease"; }; then
        cap_left=$(least "$cap_left" "$lease_left") # an older number may stand there
    fi
    chown "$user:" "$lease" 2>/dev/null || : # who is made only after this, at the first boot
    cap=$((up + cap_left)) new=$run/hard-cap.$$
    { mkdir -p "$run" && echo "$cap" >"$new" && mv -f "$new" "$run/hard-cap" && echo "$boot" >"$run/boot"; } || :
}

keep_on() { # beside lease.sh, which must not wait for a disk
    while kill -0 $$ 2>/dev/null; do
        sleep 15
        if read -r end 2>/dev/null <"$lease" && number "$end"; then
            up=$(uptime)
            keep "$(least $((end - up)) $((cap - up)))" "$(least $((cap - up)) "$hard_cap_s")"
        fi
    done
}

set_clocks
[ "$how" = run ] || exit 0
! grep -qs lease.sh "/proc/$(cat "$run/lease.pid" 2>/dev/null)/cmdline" || exit 0 # it runs
echo $$ >"$run/lease.pid" || :
keep_on &
exec /bin/sh "$lib/lease.sh" "$lease" "$cap" 5 /bin/sh "$lib/end.sh"
