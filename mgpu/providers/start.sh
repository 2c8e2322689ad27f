# What a machine does at each boot, as root; mgpu.providers.start puts the settings before it:
#
#   user authorized_key host_key lease_s hard_cap_s ends_by lease_script clocks_script end
#
# cloud-init runs it as a boothook: before sshd listens, so that nobody meets another host key than the pinned one, and
# at every boot. What is done already is left as it is. The clocks come first: whatever fails afterwards, the machine
# ends itself. They come back at each boot also where this script does not.
set -eu
umask 022
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
lib=/usr/local/lib/mgpu
systemd=/run/systemd/system
home=$(getent passwd "$user" | cut -d: -f6) || home=
home=${home:-/home/$user}
lease=$home/.mgpu/lease
key=/etc/ssh/mgpu_host_ed25519_key
sshd_config=/etc/ssh/sshd_config
settings="$user $home $lease_s $hard_cap_s $ends_by"

# Each way in the background: one that hangs in the kernel keeps the next from nothing.
power_off='for way in "systemctl poweroff -ff" "poweroff -f" "shutdown -P now"; do
    $way &
    sleep 10
done'

put() { # FILE CONTENT: whole or as it was, also on a full disk and while it runs
    [ "$(cat "$1" 2>/dev/null)" = "$2" ] || { printf '%s\n' "$2" >"$1.new" && mv -f "$1.new" "$1"; }
}

install_scripts() {
    mkdir -p "$lib" && put "$lib/lease.sh" "$lease_script" && put "$lib/clocks.sh" "$clocks_script" &&
        put "$lib/end.sh" "${end:-$power_off}"
}

install_unit() { # also for a boot that comes no further than the emergency shell; clocks of an image exit with 3
    unit="[Unit]
Description=mgpu: ends this machine when its lease or its hard cap does
DefaultDependencies=no
After=local-fs.target
IgnoreOnIsolate=yes
StartLimitIntervalSec=0
[Service]
ExecStart=$run_clocks
Restart=always
RestartSec=1
RestartPreventExitStatus=3
SuccessExitStatus=3
OOMScoreAdjust=-1000"
    for units in /etc/systemd/system "$systemd"; do # the second for this boot, at least
        mkdir -p "$units/sysinit.target.wants" "$units/emergency.target.wants" &&
            put "$units/mgpu-lease.service" "$unit" &&
            ln -sf ../mgpu-lease.service "$units/sysinit.target.wants" &&
            ln -sf ../mgpu-lease.service "$units/emergency.target.wants" && return
    done
    return 1
}

install_elsewhere() { # in each place that some system without systemd looks at: a second start does nothing
    start="setsid $run_clocks </dev/null >/dev/null 2>&1 &"
    [ ! -d /etc/cron.d ] || put /etc/cron.d/mgpu "@reboot root $run_clocks >/dev/null 2>&1"
    [ ! -d /etc/local.d ] || { put /etc/local.d/mgpu.start "#!/bin/sh
$start" && chmod 755 /etc/local.d/mgpu.start; }
    if ! grep -qsF "$run_clocks" /etc/rc.local; then # its last line may be `exit`, and it may be a link
        first=$(head -n 1 /etc/rc.local 2>/dev/null | grep '^#!') || first='#!/bin/sh'
        rest=$(sed '1{/^#!/d;}' /etc/rc.local 2>/dev/null) || :
        put "$lib/rc.local" "$first
$start
$rest" && cat "$lib/rc.local" >/etc/rc.local && chmod 755 /etc/rc.local
    fi
}

arm() {
    if [ -d "$systemd" ]; then
        if install_unit && systemctl daemon-reload && systemctl restart --no-block mgpu-lease.service; then return; fi
    else
        install_elsewhere || : # this boot has them all the same
    fi
    # shellcheck disable=SC2086
    setsid $run_clocks </dev/null >/dev/null 2>&1 &
}

let_in() { # the user, and the one key that may log in
    set -- "$user"
    ! getent group "$user" >/dev/null || set -- -g "$user" "$user"
    id "$user" >/dev/null 2>&1 || useradd -d "$home" -s /bin/bash "$@"
    mkdir -p "$home/.ssh" "$home/runs"
    keys=$home/.ssh/authorized_keys
    if ! grep -qxF "$authorized_key" "$keys" 2>/dev/null; then
        [ ! -s "$keys" ] || [ ! "$(tail -c 1 "$keys")" ] || echo >>"$keys" # the last line may lack its end
        printf '%s\n' "$authorized_key" >>"$keys"
    fi
    chmod 700 "$home/.ssh"
    chmod 600 "$keys"
    for path in "$home" "$home/.ssh" "$keys" "$home/.mgpu" "$lease" "$home/runs"; do
        [ ! -e "$path" ] || chown "$user:" "$path"
    done
    # Docker, where the machine image has it: no more than sudo gives, and it is asked without a terminal
    ! getent group docker >/dev/null || usermod -aG docker "$user"
    mkdir -p /etc/sudoers.d
    (umask 227 && printf '%s ALL=(ALL) NOPASSWD:ALL\n' "$user" >"/etc/sudoers.d/.mgpu")
    mv -f /etc/sudoers.d/.mgpu /etc/sudoers.d/90-mgpu
}

own_host_key() { # ours alone, under a name that cloud-init does not make anew; one that was replaced stays
    if [ ! -s "$key" ]; then
        (umask 077 && printf '%s\n' "$host_key" >"$key.new")
        mv "$key.new" "$key"
    fi
    rm -f /etc/ssh/ssh_host_*_key /etc/ssh/ssh_host_*_key.pub
    [ ! -e "$sshd_config" ] || sed -i "\|^HostKey $key\$|!s/^[[:space:]]*HostKey[[:space:]]/#&/I" "$sshd_config"
    settings="HostKey $key
$settings"
}

set_up_sshd() { # no passwords, and the host key, where it is not the machine's own, which its cloud tells
    settings='PasswordAuthentication no
KbdInteractiveAuthentication no
ChallengeResponseAuthentication no' # the third is the second's older name, and wins in sshd before 8.7
    mkdir -p /etc/ssh/sshd_config.d
    [ ! "$host_key" ] || own_host_key
    first=$(sed -n '/^[[:space:]]*[^#[:space:]]/{p;q;}' "$sshd_config" 2>/dev/null) || first=
    if [ ! -e "$sshd_config" ] || echo "$first" | grep -qi '^[[:space:]]*Include[[:space:]].*/sshd_config\.d/'; then
        printf '%s\n' "$settings" >/etc/ssh/sshd_config.d/00-mgpu.conf
    else # what comes first counts, and sshd before 8.2 has no Include
        cp -p "$sshd_config" "$sshd_config.new"
        { printf '%s\n' "$settings" && { grep -vxF "$settings" "$sshd_config" || true; }; } >"$sshd_config.new"
        mv "$sshd_config.new" "$sshd_config"
    fi
    if command -v restorecon >/dev/null; then # SELinux: sshd may read files by their labels
        restorecon "$home" && restorecon -R "$home/.ssh" /etc/ssh || true
    fi
    if [ -d "$systemd" ]; then
        for unit in ssh.service sshd.service; do
            systemctl try-reload-or-restart --no-block "$unit" || true
        done
    elif [ -s /run/sshd.pid ]; then
        kill -HUP "$(cat /run/sshd.pid)" || true
    fi
}

install_scripts || { lib=/run/mgpu-scripts && install_scripts; } # for this boot, at least
run_clocks="/bin/sh $lib/clocks.sh run $settings"
# shellcheck disable=SC2086
/bin/sh "$lib/clocks.sh" set $settings || : # they set themselves, too
arm
let_in
set_up_sshd
