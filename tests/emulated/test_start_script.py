"""What a machine does at its boot: the script itself, as root, in namespaces and on an overlay of this system's root.
Most of it with EC2's disks.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from fakes.booted import HARD_CAP_S, HOST_KEY, LEASE_S, LOGIN, Boot, request, script

from mgpu.errors import InvalidRequest
from mgpu.providers.aws.instances.user_data import MAX_BYTES, user_data
from mgpu.providers.start import HOST_KEY_FILE, HostKey, start_script
from mgpu.remote import rekey


def test_the_user_logs_in_with_one_key_and_may_become_root(boot: Boot):
    out = boot("""
        sh /tmp/user-data
        stat -c '%U %a' /home/ubuntu /home/ubuntu/.ssh /home/ubuntu/.ssh/authorized_keys /home/ubuntu/.mgpu
        cat /home/ubuntu/.ssh/authorized_keys /etc/sudoers.d/90-mgpu
        ls /etc/sudoers.d /tmp
    """)
    owners = out.splitlines()[:4]
    assert [line.split()[0] for line in owners] == ["ubuntu"] * 4
    assert [line.split()[1] for line in owners][1:3] == ["700", "600"]
    assert LOGIN in out.splitlines(), "as it was given, and nothing of it was run"
    assert "hacked" not in out.split("NOPASSWD")[1]
    assert "ubuntu ALL=(ALL) NOPASSWD:ALL" in out


def test_a_lease_for_ever_leaves_the_machine_its_clocks(boot: Boot):
    out = boot("sh /tmp/user-data; cat /home/ubuntu/.mgpu/lease /run/mgpu/hard-cap", script(lease_s=6e21))
    lease, hard_cap = map(int, out.split()[-2:])
    assert abs(lease - hard_cap) <= 1


def test_nobody_logs_in_to_a_plain_machine_by_a_password(boot: Boot, require):
    require("sshd", Path("/usr/sbin/sshd").exists(), "OpenSSH's server is not installed")
    out = boot(
        """
        mkdir -p /run/sshd
        /usr/sbin/sshd -T | grep ^hostkey >/tmp/before
        sed -i 's/^.*PasswordAuthentication .*/PasswordAuthentication yes/' /etc/ssh/sshd_config
        sh /tmp/user-data
        /usr/sbin/sshd -T >/tmp/after
        grep ^hostkey /tmp/after | diff - /tmp/before
        cat /tmp/after
        """,
        start_script(request(), "plain"),
    )
    assert {"passwordauthentication no", "kbdinteractiveauthentication no"} < set(out.splitlines())


@pytest.mark.parametrize("docker", [True, False])
def test_the_user_may_speak_to_docker_where_the_machine_image_has_it(boot: Boot, docker: bool):
    out = boot(f"""
        groupdel docker 2>/dev/null || true
        {"groupadd docker" if docker else ":"}
        sh /tmp/user-data
        sh /tmp/user-data
        id -nG ubuntu
    """)
    assert ("docker" in out.split()) == docker


def test_the_key_stands_in_a_line_of_its_own(boot: Boot):
    out = boot("""
        mkdir -p /home/ubuntu/.ssh
        printf 'ssh-ed25519 AAAA theirs' >/home/ubuntu/.ssh/authorized_keys
        sh /tmp/user-data
        sh /tmp/user-data
        cat /home/ubuntu/.ssh/authorized_keys
    """)
    assert out.splitlines() == ["ssh-ed25519 AAAA theirs", LOGIN]


def test_a_user_is_made_also_where_there_is_a_group_of_that_name(boot: Boot):
    out = boot(
        """
        groupadd admin
        sh /tmp/user-data
        id -ng admin
        stat -c '%U %G' /home/admin/.ssh/authorized_keys
        """,
        start_script(request(), "admin"),
    )
    assert out.splitlines() == ["admin", "admin admin"]


@pytest.mark.parametrize("include", ["Include /etc/ssh/sshd_config.d/*.conf", ""], ids=["sshd", "before 8.2"])
def test_sshd_shows_the_one_use_key_and_no_other(boot: Boot, require, include: str):
    require("sshd", Path("/usr/sbin/sshd").exists(), "OpenSSH's server is not installed")
    out = boot(f"""
        mkdir -p /run/sshd
        touch /etc/ssh/ssh_host_ed25519_key /etc/ssh/ssh_host_ed25519_key.pub
        cd /etc/ssh
        printf '# theirs\\n{include}\\nHostKey /etc/ssh/ssh_host_rsa_key\\n' >sshd_config
        printf 'PasswordAuthentication yes\\nKbdInteractiveAuthentication yes\\n' >>sshd_config
        sh /tmp/user-data
        cp sshd_config /tmp
        sh /tmp/user-data
        cmp sshd_config /tmp/sshd_config
        grep -i ^include sshd_config || echo Include nothing
        /usr/sbin/sshd -T | grep -E '^(hostkey|passwordauthentication|kbdinteractive)'
        ssh-keygen -y -f /etc/ssh/mgpu_host_ed25519_key
        stat -c %a /etc/ssh/mgpu_host_ed25519_key
        ls /etc/ssh
    """)
    assert [line for line in out.splitlines() if line.startswith("hostkey ")] == [f"hostkey {HOST_KEY_FILE}"]
    assert "passwordauthentication no" in out
    assert "kbdinteractiveauthentication no" in out
    assert HOST_KEY.public in out
    assert (include or "Include nothing") in out.splitlines(), "what sshd does not know it would not start with"
    assert "600" in out.splitlines()
    assert "ssh_host_ed25519_key" not in out, "the image's own are gone"


def test_without_a_configuration_of_sshds_in_etc_ours_lies_beside(boot: Boot):
    out = boot("rm -f /etc/ssh/sshd_config; sh /tmp/user-data; cat /etc/ssh/sshd_config.d/*; ls /etc/ssh")
    assert f"HostKey {HOST_KEY_FILE}" in out.splitlines()
    assert "sshd_config" not in out.splitlines()


def test_where_selinux_is_sshd_may_read_what_was_written(boot: Boot):
    out = boot("""
        printf '#!/bin/sh\\necho "restorecon $*"\\n' >/usr/local/sbin/restorecon
        chmod 755 /usr/local/sbin/restorecon
        sh /tmp/user-data
    """)
    assert out.splitlines()[:2] == ["restorecon /home/ubuntu", "restorecon -R /home/ubuntu/.ssh /etc/ssh"]


def test_the_clocks_run_with_the_lease_and_the_hard_cap(boot: Boot):
    out = boot("""
        read -r up _ </proc/uptime
        sh /tmp/user-data
        echo "${up%%.*} $(cat /home/ubuntu/.mgpu/lease) $(cat /run/mgpu/hard-cap)"
        tr '\\0' ' ' </proc/$(clocks)/cmdline
    """)
    up, lease, cap = map(int, out.splitlines()[0].split())
    assert lease - up in (LEASE_S, LEASE_S + 1, LEASE_S + 2)
    assert cap - up in range(HARD_CAP_S - 1, HARD_CAP_S + 3)
    assert f"/usr/local/lib/mgpu/lease.sh /home/ubuntu/.mgpu/lease {cap} " in out


@pytest.mark.parametrize(
    ("changed", "left_s"),
    [({"hard_cap_at": 4e9}, HARD_CAP_S), ({"hard_cap_at": 1e9}, 0), ({"hard_cap_s": 9e8}, HARD_CAP_S)],
    ids=["a clock that is behind", "a cap that has passed", "a cap on the wall clock"],
)
def test_the_earlier_of_the_two_hard_caps_holds(boot: Boot, changed: dict[str, float], left_s: int):
    out = boot(
        """
        sh /tmp/user-data
        read -r up _ </proc/uptime
        echo "${up%%.*} $(cat /run/mgpu/hard-cap)"
        """,
        script(**changed),
    )
    up, cap = map(int, out.split())
    assert abs(cap - up - left_s) <= 3


def test_the_end_of_the_lease_powers_the_machine_off_in_more_than_one_way(boot: Boot):
    out = boot(
        """
        sed -i 's/sleep 10/sleep 0.2/' /tmp/user-data
        sh /tmp/user-data
        for i in 1 2 3 4 5 6 7 8 9 10; do grep -q shutdown /tmp/called 2>/dev/null && break; sleep 1; done
        cat /tmp/called
        """,
        script(lease_s=1),
    )
    assert out.splitlines()[:3] == ["systemctl poweroff -ff", "poweroff -f", "shutdown -P now"]


def test_where_power_off_would_not_end_the_bill_the_clouds_own_end_is_called_until_it_comes(boot: Boot):
    out = boot(
        """
        sed -i 's/^while :; do$/while sleep 0.1; do/; s/sleep "$poll"/:/' /tmp/user-data
        sh /tmp/user-data
        for i in 1 2 3 4 5 6 7 8 9 10; do grep -q again /tmp/called 2>/dev/null && break; sleep 1; done
        cat /tmp/called
        """,
        start_script(
            request(lease_s=1), "root", end='[ ! -e /tmp/called ] || again=again\necho "it\'s $again" >>/tmp/called'
        ),
    )
    assert out.splitlines()[:2] == ["it's ", "it's again"]
    assert "poweroff" not in out


def test_a_plain_machine_keeps_the_host_keys_that_its_cloud_tells_and_its_disks(boot: Boot):
    out = boot(
        """
        ls /etc/ssh >/tmp/before
        sh /tmp/user-data
        ls /etc/ssh | diff - /tmp/before && echo same
        ls /usr/local/lib/mgpu
        cat /home/plain/.ssh/authorized_keys
        read -r up _ </proc/uptime
        echo "$(($(cat /run/mgpu/hard-cap) - ${up%%.*})) last"
        """,
        start_script(request(), "plain", more="echo $user $home >>/tmp/more; cat /tmp/more\n"),
    )
    first, *names, key, left = out.splitlines()
    assert first == "plain /home/plain", "what is the cloud's own comes at the end"
    assert names == ["same", "clocks.sh", "end.sh", "lease.sh", "left", "rc.local"]
    assert key == LOGIN
    assert abs(int(left.split()[0]) - HARD_CAP_S) <= 2


def test_a_renewed_lease_is_heeded(boot: Boot):
    out = boot(
        """
        sh /tmp/user-data
        read -r up _ </proc/uptime
        echo $((${up%%.*} + 100)) >/home/ubuntu/.mgpu/lease
        sleep 4
        ls /tmp
        """,
        script(lease_s=2),
    )
    assert "called" not in out.split()


def test_the_clocks_run_also_where_the_rest_fails(boot: Boot):
    out = boot(
        """
        printf '#!/bin/sh\\nexit 1\\n' >/usr/local/sbin/useradd
        chmod 755 /usr/local/sbin/useradd
        sed -i '/^ubuntu:/d' /etc/passwd
        sh /tmp/user-data && echo went well
        kill -0 $(clocks) && echo armed
        cat /home/ubuntu/.mgpu/lease
    """.replace("sh /tmp/user-data && echo went well", "! sh /tmp/user-data")
    )
    assert out.splitlines()[0] == "armed"
    assert int(out.splitlines()[1]) > 0


def test_a_second_run_changes_nothing_that_was_done(boot: Boot):
    out = boot("""
        sh /tmp/user-data
        pid=$(clocks) cap=$(cat /run/mgpu/hard-cap)
        echo 123456789 >/home/ubuntu/.mgpu/lease
        echo replaced >/etc/ssh/mgpu_host_ed25519_key
        sleep 1.1
        sh /tmp/user-data
        [ "$pid" = "$(clocks)" ] && [ "$cap" = "$(cat /run/mgpu/hard-cap)" ] && echo same
        cat /home/ubuntu/.mgpu/lease /etc/ssh/mgpu_host_ed25519_key
        grep -c . /home/ubuntu/.ssh/authorized_keys
    """)
    assert out.split() == ["same", "123456789", "replaced", "1"]


def test_with_systemd_the_clocks_are_a_unit_that_comes_back_and_sshd_waits_for_the_disks(boot: Boot):
    out = boot("""
        mkdir -p /run/systemd/system
        sh /tmp/user-data
        cat /tmp/called
        cat /etc/systemd/system/mgpu-lease.service /run/systemd/system/mgpu-disks.service
        ls /run/mgpu
    """)
    lines = out.splitlines()
    assert lines[:2] == ["systemctl daemon-reload", "systemctl restart --no-block mgpu-lease.service"]
    assert "systemctl start --no-block mgpu-disks.service" in lines
    assert "Restart=always" in lines
    clocks = rf"^ExecStart=/bin/sh /usr/local/lib/mgpu/clocks.sh run ubuntu /home/ubuntu {LEASE_S} {HARD_CAP_S} \d+$"
    assert re.search(clocks, out, re.M)
    assert "Before=ssh.service sshd.service" in lines
    assert "After=dlami-nvme.service" in lines
    assert "lease.pid" not in lines, "not a second time by hand"


@pytest.mark.parametrize("system", ["systemd", ""])
def test_where_etc_cannot_be_written_to_this_boot_has_its_clocks(boot: Boot, system: str):
    out = boot(f"""
        mkdir -p /run/{system or "nothing"}/system /etc/systemd/system
        mount -t tmpfs -o ro none /etc/systemd/system
        mount --bind /etc /etc && mount -o remount,ro,bind /etc
        sh /tmp/user-data 2>/dev/null || true
        [ "{system}" ] || clocks
        cat /run/systemd/system/mgpu-lease.service /tmp/called || true
    """)
    lines = out.splitlines()
    if system:
        assert "systemctl restart --no-block mgpu-lease.service" in lines
        assert any(line.startswith("ExecStart=/bin/sh /usr/local/lib/mgpu/clocks.sh run ") for line in lines)
    else:
        assert lines[0].isdecimal(), "by hand"


def test_where_systemd_refuses_the_clocks_run_by_hand(boot: Boot):
    out = boot("""
        mkdir -p /run/systemd/system
        printf '#!/bin/sh\\nexit 1\\n' >/usr/local/sbin/systemctl
        sh /tmp/user-data || true
        kill -0 $(clocks) && echo armed
    """)
    assert "armed" in out


def test_runs_lie_on_the_disks_that_the_image_has_mounted(boot: Boot):
    out = boot("""
        mkdir -p /opt/dlami/nvme
        mount -t tmpfs none /opt/dlami/nvme
        sh /tmp/user-data
        sh /tmp/user-data
        touch /home/ubuntu/runs/here
        ls /opt/dlami/nvme/mgpu-runs
        stat -c %U /home/ubuntu/runs
        grep -c ' /home/ubuntu/runs ' /proc/mounts
    """)
    assert out.split() == ["here", "ubuntu", "1"]


def test_several_bare_disks_become_one_file_system(boot: Boot):
    out = boot("""
        mkdir -p /dev/shm/by-id
        cd /usr/local/sbin
        printf '#!/bin/sh\\necho /dev/nvme2n1; echo /dev/nvme1n1; echo /dev/nvme1n1; echo /dev/nvme1n1p1\\n' >readlink
        printf '#!/bin/sh\\necho mdadm "$@"\\n' >mdadm
        printf '#!/bin/sh\\necho mkfs "$@"\\n' >mkfs.ext4
        printf '#!/bin/sh\\nexit 2\\n' >blkid
        printf '#!/bin/sh\\nexit 1\\n' >mountpoint
        printf '#!/bin/sh\\necho mount "$@"\\n' >mount
        chmod 755 *
        sh /tmp/user-data
    """)
    lines = out.splitlines()
    assert lines[0].startswith("mdadm --create /dev/md/mgpu")
    assert lines[0].endswith("--raid-devices=2 /dev/nvme1n1 /dev/nvme2n1")
    assert lines[1].startswith("mkfs")
    assert lines[1].endswith("/dev/md/mgpu")
    assert lines[2:] == [
        "mount -o noatime /dev/md/mgpu /mnt/mgpu",
        "mount --bind /mnt/mgpu/mgpu-runs /home/ubuntu/runs",
    ]


def test_it_is_a_boothook_that_fits_and_that_shells_can_read(tmp_path: Path):
    text = script()
    assert text.startswith("#cloud-boothook\n#!/bin/sh\n")
    assert len(text.encode()) < MAX_BYTES - 2000
    (tmp_path / "script").write_text(text)
    for shell in filter(shutil.which, ("dash", "bash", "busybox")):
        subprocess.run([shell, *(["sh"] if shell == "busybox" else []), "-n", tmp_path / "script"], check=True)


def test_whoever_replaces_the_host_key_knows_where_it_lies():
    assert rekey.HOST_KEY_FILE == HOST_KEY_FILE
    assert f"key={HOST_KEY_FILE}\n" in script()


@pytest.mark.parametrize(
    "key", ["", "not a key", "ssh-ed25519 AAAA\nssh-ed25519 BBBB", "ssh-ed25519 AAAA " + "x" * 20000]
)
def test_what_is_no_key_or_too_large_is_refused(key: str):
    with pytest.raises(InvalidRequest):
        user_data(request(ssh_public_key=key), "ubuntu", HOST_KEY, 1)


def test_a_host_keys_private_half_is_not_shown():
    key = HostKey.make()
    assert key.private not in repr(key)
    assert key.public != HostKey.make().public
