# What a machine does at each boot, as root; mgpu.providers.start puts the settings before it:
#
#   user authorized_key host_key lease_s hard_cap_s ends_by lease_script end
#
# cloud-init runs it as a boothook: before sshd listens, so that nobody meets another host key than the pinned one, and
# at every boot. What is done already is left as it is. The clocks come first: whatever fails afterwards, the machine
# ends itself.
set -eu
umask 022
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
lib=/usr/local/lib/mgpu
run=/run/mgpu # is empty after a reboot, as the seconds since boot begin anew
systemd=/run/systemd/system
home=$(getent passwd "$user" | cut -d: -f6) || home=
home=${home:-/home/$user}
lease=$home/.mgpu/lease

install_scripts() {
    mkdir -p "$lib" "$run"
    printf '%s\n' "$lease_script" >"$lib/lease.sh"
    if [ "$end" ]; then
        printf '%s\n' "$end" >"$lib/end.sh"
        return
    fi
    cat >"$lib/end.sh" <<'EOF'
#!/bin/sh
# Each way in the background: one that hangs in the kernel keeps the next from nothing.
for way in 'systemctl poweroff -ff' 'poweroff -f' 'shutdown -P now'; do
    $way &
    sleep 10
done
EOF
}

set_clocks() { # once a boot: the lease may have been renewed since
    [ ! -s "$run/hard-cap" ] || return 0
first_end() { # sets ends_by, where nobody has: hard_cap_s from the first boot, and no reboot prolongs it
    machine=${INSTANCE_ID:-$(cat /sys/class/dmi/id/product_uuid 2>/dev/null)} || machine=
    read -r ends_by of 2>/dev/null <"$lib/ends-by" || ends_by=
    case $ends_by in '' | *[!0-9]*) of=nobody ;; esac
    [ "$of" != "$machine" ] || return 0
    ends_by=$(($(date +%s) + hard_cap_s)) # also where a machine image was made of another machine
    echo "$ends_by $machine" >"$lib/ends-by.new" && mv "$lib/ends-by.new" "$lib/ends-by"
}

    read -r up _ </proc/uptime
    up=${up%%.*}
    [ "$ends_by" -gt 0 ] || first_end
    left=$((ends_by - $(date +%s)))
    left=$((left < hard_cap_s ? left : hard_cap_s)) # a clock that is behind prolongs nothing
    mkdir -p "$home/.mgpu"
    echo $((up + lease_s)) >"$lease.new" && mv "$lease.new" "$lease"
    echo $((up + (left > 0 ? left : 0))) >"$run/hard-cap.new" && mv "$run/hard-cap.new" "$run/hard-cap"
}

arm() {
    set -- /bin/sh "$lib/lease.sh" "$lease" "$(cat "$run/hard-cap")" 5 /bin/sh "$lib/end.sh"
    if [ -d "$systemd" ]; then
        cat >"$systemd/mgpu-lease.service" <<EOF
[Unit]
Description=mgpu: ends this machine when its lease or its hard cap does
DefaultDependencies=no
StartLimitIntervalSec=0
[Service]
ExecStart=$*
Restart=always
RestartSec=1
OOMScoreAdjust=-1000
EOF
        if systemctl daemon-reload && systemctl restart --no-block mgpu-lease.service; then return; fi
    fi
    if [ -s "$run/lease.pid" ] && kill -0 "$(cat "$run/lease.pid")"; then return; fi
    setsid "$@" </dev/null >/dev/null 2>&1 &
    echo $! >"$run/lease.pid"
}

let_in() { # the user, and the one key that may log in
    id "$user" >/dev/null 2>&1 || useradd -d "$home" -s /bin/bash "$user"
    mkdir -p "$home/.ssh" "$home/runs"
    grep -qxF "$authorized_key" "$home/.ssh/authorized_keys" 2>/dev/null ||
        printf '%s\n' "$authorized_key" >>"$home/.ssh/authorized_keys"
    chmod 700 "$home/.ssh"
    chmod 600 "$home/.ssh/authorized_keys"
    for path in "$home" "$home/.ssh" "$home/.ssh/authorized_keys" "$home/.mgpu" "$lease" "$home/runs"; do
        [ ! -e "$path" ] || chown "$user:" "$path"
    done
    # Docker, where the machine image has it: no more than sudo gives, and it is asked without a terminal
    ! getent group docker >/dev/null || usermod -aG docker "$user"
    mkdir -p /etc/sudoers.d
    (umask 227 && printf '%s ALL=(ALL) NOPASSWD:ALL\n' "$user" >"/etc/sudoers.d/.mgpu")
    mv -f /etc/sudoers.d/.mgpu /etc/sudoers.d/90-mgpu
}

show_host_key() { # ours alone, under a name that cloud-init does not make anew; one that was replaced stays
    key=/etc/ssh/mgpu_host_ed25519_key
    [ "$host_key" ] || return 0 # the machine's own; whoever rents it tells them
    mkdir -p /etc/ssh/sshd_config.d
    if [ ! -s "$key" ]; then
        (umask 077 && printf '%s\n' "$host_key" >"$key.new")
        mv "$key.new" "$key"
    fi
    rm -f /etc/ssh/ssh_host_*_key /etc/ssh/ssh_host_*_key.pub
    printf '%s\n' "HostKey $key" 'PasswordAuthentication no' 'KbdInteractiveAuthentication no' \
        >/etc/ssh/sshd_config.d/00-mgpu.conf
    sed -i 's/^[[:space:]]*HostKey[[:space:]]/#&/I' /etc/ssh/sshd_config
    grep -qi '^[[:space:]]*Include[[:space:]]*/etc/ssh/sshd_config\.d/' /etc/ssh/sshd_config ||
        sed -i '1i Include /etc/ssh/sshd_config.d/*.conf' /etc/ssh/sshd_config
    if [ -d "$systemd" ]; then
        for unit in ssh.service sshd.service; do
            systemctl try-reload-or-restart --no-block "$unit" || true
        done
    elif [ -s /run/sshd.pid ]; then
        kill -HUP "$(cat /run/sshd.pid)" || true
    fi
}

install_scripts
set_clocks
arm
let_in
show_host_key
