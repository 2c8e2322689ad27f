# The machine's own NVMe disks carry the user's `runs`; start.sh comes before it.
cat >"$lib/disks.sh" <<'EOF'
#!/bin/sh
# The machine's own NVMe disks carry the user's `runs`: USER HOME. The machine image may have mounted them already.
set -eu
base=/opt/dlami/nvme
if ! mountpoint -q "$base"; then
    base=/mnt/mgpu
    disk=$(blkid -L mgpu-runs) || disk=
    if [ ! "$disk" ]; then
        links=/dev/disk/by-id/nvme-Amazon_EC2_NVMe_Instance_Storage_*
        set -- "$1" "$2" $(readlink -f $links | grep -x '/dev/nvme[0-9]*n[0-9]*' | sort -u)
        [ $# -gt 2 ] || exit 0
        disk=$3
        if [ $# -gt 3 ] && command -v mdadm >/dev/null; then
            user=$1 home=$2
            shift 2
            mdadm --create /dev/md/mgpu --run --force --level=0 --raid-devices=$# "$@"
            set -- "$user" "$home"
            disk=/dev/md/mgpu
        fi
        mkfs.ext4 -q -F -m 0 -L mgpu-runs -E nodiscard "$disk"
    fi
    mkdir -p "$base"
    mountpoint -q "$base" || mount -o noatime "$disk" "$base"
fi
mkdir -p "$base/mgpu-runs" "$2/runs"
chown "$1:" "$base/mgpu-runs" "$2/runs"
mountpoint -q "$2/runs" || mount --bind "$base/mgpu-runs" "$2/runs"
EOF

mount_disks() { # before sshd, so that nothing is written below the mount; after the machine image's own attempt
    if [ ! -d "$systemd" ]; then
        /bin/sh "$lib/disks.sh" "$user" "$home"
        return
    fi
    cat >"$systemd/mgpu-disks.service" <<EOF
[Unit]
Description=mgpu: the machine's own disks
After=dlami-nvme.service
Before=ssh.service sshd.service
JobTimeoutSec=120
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/sh $lib/disks.sh $user $home
TimeoutStartSec=120
EOF
    systemctl daemon-reload && systemctl start --no-block mgpu-disks.service
}

mount_disks
