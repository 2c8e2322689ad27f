"""The two clocks of a machine over its boots: they come back, no reboot prolongs them, and they end nobody else's."""

from __future__ import annotations

import pytest
from fakes.booted import HARD_CAP_S, HOST_KEY, LEASE_S, Boot, request, script

from mgpu.providers.start import start_script

# what starts the clocks at a boot, where the cloud does not run the script again
RC_LOCAL = "sh /etc/rc.local"
CRON = "sh -c \"$(sed -n 's/^@reboot root //p' /etc/cron.d/mgpu)\" &"
LOCAL_D = "/etc/local.d/mgpu.start"
UNIT = (
    "setsid sh -c \"exec $(sed -n 's/^ExecStart=//p' /etc/systemd/system/sysinit.target.wants/mgpu-lease.service)\" &"
)
EMERGENCY = UNIT.replace("sysinit", "emergency")


@pytest.mark.parametrize(
    ("system", "started"),
    [
        ("", RC_LOCAL),
        ("printf '#!/bin/bash\\n[ -e /tmp ]\\nexit 0' >/etc/rc.local", f"head -n 1 /etc/rc.local; {RC_LOCAL}"),
        ("mkdir -p /etc/rc.d; echo : >/etc/rc.d/rc.local; ln -s rc.d/rc.local /etc/rc.local", "sh /etc/rc.d/rc.local"),
        ("mkdir -p /etc/cron.d", CRON),
        ("mkdir -p /etc/local.d", LOCAL_D),
        ("mkdir -p /run/systemd/system", UNIT),
        ("mkdir -p /run/systemd/system", EMERGENCY),
    ],
    ids=["rc.local", "their rc.local", "a link", "cron", "OpenRC", "systemd", "a boot that fails"],
)
def test_a_machine_that_reboots_has_clocks_though_its_cloud_runs_the_script_once(boot: Boot, system: str, started: str):
    out = boot(
        f"""
        {system}
        sh /tmp/user-data
        sh /tmp/user-data
        [ ! -d /run/systemd ] || {UNIT}
        reboot
        {started}
        tr '\\0' ' ' </proc/$(clocks)/cmdline; echo
        left /run/mgpu/hard-cap
        left /home/plain/.mgpu/lease
        stat -c %U /home/plain/.mgpu/lease
        """,
        start_script(request(), "plain"),
    )
    *_, command, cap, lease, owner = out.splitlines()
    assert command.startswith("/bin/sh /usr/local/lib/mgpu/lease.sh /home/plain/.mgpu/lease ")
    assert HARD_CAP_S - 60 <= int(cap) <= HARD_CAP_S + 3
    assert LEASE_S - 60 <= int(lease) <= LEASE_S + 3
    assert owner == "plain"
    assert ("#!/bin/bash" in out) == ("bash" in system)


def test_after_a_reboot_the_lease_goes_on_and_the_replaced_key_stays(boot: Boot):
    """Also one that was renewed: what is left is written down as time goes by."""
    out = boot("""
        sed -i 's/sleep 15/sleep 0.1/' /tmp/user-data
        sh /tmp/user-data
        clocks
        read -r up _ </proc/uptime
        echo $((${up%%.*} + 100)) >/home/ubuntu/.mgpu/lease
        until grep -qE '^(100|9[0-9]) ' /usr/local/lib/mgpu/left; do sleep 0.1; done
        echo not a number >/home/ubuntu/.mgpu/lease
        echo replaced >/etc/ssh/mgpu_host_ed25519_key
        reboot
        sh /tmp/user-data
        left /home/ubuntu/.mgpu/lease
        cat /etc/ssh/mgpu_host_ed25519_key
        stat -c %U /home/ubuntu/.mgpu/lease
        kill -0 $(clocks) && echo armed
    """)
    _, left, key, owner, armed = out.split()
    assert 80 <= int(left) <= 100
    assert (key, owner, armed) == ("replaced", "ubuntu", "armed")


def test_a_lease_that_is_over_is_over_after_a_reboot(boot: Boot):
    out = boot(
        """
        sh /tmp/user-data
        clocks
        echo "0 100 $(date +%s)" >/usr/local/lib/mgpu/left
        reboot
        sh /etc/rc.local
        until grep -qs poweroff /tmp/called; do sleep 0.1; done
        """,
        start_script(request(), "plain"),
    )
    assert out.split()


def test_no_reboot_prolongs_the_hard_cap(boot: Boot):
    """Of a new fleet, too, whose end nobody has told the machine. What was made from an image of it is another one."""
    out = boot(
        """
        printf '#!/bin/sh\\ncat /tmp/now\\n' >/usr/local/sbin/date
        chmod 755 /usr/local/sbin/date
        boot() {
            echo $1 >/tmp/now
            INSTANCE_ID=$2 sh /tmp/user-data
            left /run/mgpu/hard-cap
            reboot
        }
        boot 1000000 i-1
        boot 1003000 i-1
        boot 1003600 i-1
        boot 1003600 i-2
        printf 'half a li' >/usr/local/lib/mgpu/left
        boot 1003600 i-2
        """,
        start_script(request(), "plain"),
    )
    left = map(int, out.split())
    assert [round(seconds, -1) for seconds in left] == [HARD_CAP_S, 600, 0, HARD_CAP_S, HARD_CAP_S]


@pytest.mark.parametrize(("first", "then"), [(5, 1000000), (1000000, 5)], ids=["put right", "begins anew"])
def test_a_wall_clock_that_is_wrong_at_a_boot_prolongs_nothing(boot: Boot, first: int, then: int):
    """The seconds that it ran are written down; to such a machine the cap of the operator's clock is far away."""
    out = boot(
        f"""
        sed -i 's/sleep 15/sleep 0.1/' /tmp/user-data
        printf '#!/bin/sh\\ncat /tmp/now\\n' >/usr/local/sbin/date
        chmod 755 /usr/local/sbin/date
        echo {first} >/tmp/now
        sh /tmp/user-data
        clocks
        echo 1000000 >/tmp/now
        until grep -q ' 1000000$' /usr/local/lib/mgpu/left; do sleep 0.1; done
        reboot
        echo 300 700 1000000 >/usr/local/lib/mgpu/left
        echo {then} >/tmp/now
        sh /tmp/user-data
        left /run/mgpu/hard-cap
        """,
        script(hard_cap_at=4e9),
    )
    assert abs(int(out.split()[-1]) - 700) <= 3


def test_what_stays_in_run_of_another_boot_is_not_believed(boot: Boot):
    out = boot("""
        sh /tmp/user-data
        kill $(clocks)
        echo another >/run/mgpu/boot
        echo 999999999 >/run/mgpu/hard-cap
        echo $$ >/run/mgpu/lease.pid
        sh /tmp/user-data
        clocks >/dev/null
        left /run/mgpu/hard-cap
    """)
    assert abs(int(out) - HARD_CAP_S) <= 3


def test_where_no_lease_can_be_written_the_hard_cap_stands_for_it(boot: Boot):
    """As in the emergency shell, whose disks may not be written to: the number of another boot may stand there."""
    out = boot(
        """
        sh /tmp/user-data
        reboot
        rm -r /home/plain/.mgpu
        touch /home/plain/.mgpu
        sh /etc/rc.local 2>/dev/null
        clocks >/dev/null
        left /run/mgpu/hard-cap
        """,
        start_script(request(), "plain"),
    )
    assert abs(int(out) - LEASE_S) <= 3


def test_a_machine_image_of_such_a_machine_ends_nobody_until_a_script_of_its_own_runs(boot: Boot):
    """Also where the end of the first one has passed long ago, and the new one has other settings."""
    out = boot(
        f"""
        mkdir -p /run/systemd/system /sys/class/dmi/id
        echo the-first >/sys/class/dmi/id/product_uuid
        sh /tmp/user-data
        {UNIT}
        reboot
        echo another >/sys/class/dmi/id/product_uuid
        status=0
        timeout 5 sh -c "exec $(sed -n 's/^ExecStart=//p' /etc/systemd/system/mgpu-lease.service)" || status=$?
        echo $status; grep ExitStatus=$status /etc/systemd/system/mgpu-lease.service
        [ ! -e /run/mgpu ] && echo nothing
        sed -i 's/^hard_cap_s=.*/hard_cap_s=7200/; s/^lease_s=.*/lease_s=900/; s/^ends_by=.*/ends_by=0/' /tmp/user-data
        sh /tmp/user-data
        left /run/mgpu/hard-cap
        left /home/plain/.mgpu/lease
        {UNIT}
        kill -0 $(clocks) && echo armed
        """,
        start_script(request(ends_by=1e9), "plain"),
    )
    *first, cap, lease, armed = out.splitlines()
    assert first == ["3", "RestartPreventExitStatus=3", "SuccessExitStatus=3", "nothing"]
    assert 7100 <= int(cap) <= 7203
    assert 800 <= int(lease) <= 903
    assert armed == "armed"


def test_where_no_machine_can_be_told_from_its_image_the_scripts_own_settings_hold(boot: Boot):
    """What an image brings has set the clocks before the script runs."""
    out = boot(
        f"""
        mkdir -p /run/systemd/system
        INSTANCE_ID=i-1 sh /tmp/user-data
        {UNIT}
        reboot
        {UNIT}
        clocks
        sed -i 's/^hard_cap_s=.*/hard_cap_s=7200/; s/^lease_s=.*/lease_s=900/' /tmp/user-data
        INSTANCE_ID=i-2 sh /tmp/user-data
        left /run/mgpu/hard-cap
        left /home/plain/.mgpu/lease
        """,
        start_script(request(), "plain"),
    )
    cap, lease = map(int, out.split()[-2:])
    assert 7100 <= cap <= 7203
    assert 800 <= lease <= 903


@pytest.mark.parametrize("made", ["i-1", "i-2"], ids=["a reboot", "from an image"])
def test_a_machine_from_an_image_shows_the_host_key_that_it_was_given(boot: Boot, made: str):
    """And not the one of the machine that the image was made of, which nobody has pinned for it."""
    out = boot(f"""
        INSTANCE_ID=i-1 sh /tmp/user-data
        echo replaced >/etc/ssh/mgpu_host_ed25519_key
        reboot
        INSTANCE_ID={made} sh /tmp/user-data
        cat /etc/ssh/mgpu_host_ed25519_key
    """)
    assert out.strip() == ("replaced" if made == "i-1" else HOST_KEY.private.strip())


def test_two_starts_at_once_leave_the_machine_its_whole_hard_cap(boot: Boot):
    """As cloud-init and the unit do at a reboot: the second comes while the first writes the lease."""
    out = boot(
        f"""
        cat >/usr/local/sbin/mv <<'EOF'
        #!/bin/sh
        case $* in
            */.mgpu/lease) [ -e /tmp/twice ] || {{
                touch /tmp/twice
                sh /usr/local/lib/mgpu/clocks.sh set plain /home/plain {LEASE_S} {HARD_CAP_S} 0
            }} ;;
        esac
        exec /bin/mv "$@"
        EOF
        chmod 755 /usr/local/sbin/mv
        sh /tmp/user-data
        ls /tmp/twice
        left /run/mgpu/hard-cap
        """,
        start_script(request(), "plain"),
    )
    twice, cap = out.split()
    assert twice == "/tmp/twice"
    assert int(cap) >= HARD_CAP_S - 60


@pytest.mark.parametrize("place", ["/usr/local/lib", "/run"])
@pytest.mark.parametrize("how", ["ro", "size=16k"])
def test_a_disk_that_takes_nothing_does_not_leave_the_machine_without_clocks(boot: Boot, place: str, how: str):
    out = boot(
        f"""
        mount -t tmpfs -o {how} none {place}
        head -c 100000 /dev/zero >{place}/full 2>/dev/null || true
        sh /tmp/user-data 2>/dev/null || true
        until grep -qs poweroff /tmp/called; do sleep 0.1; done
        cat /tmp/called
        """,
        start_script(request(lease_s=1), "plain"),
    )
    assert "poweroff" in out


def test_a_full_disk_at_a_reboot_leaves_the_scripts_as_they_were(boot: Boot):
    """They run meanwhile, and are there at the next boot."""
    out = boot(
        """
        sh /tmp/user-data
        mount -t tmpfs -o size=64k none /mnt
        cp -a /usr/local/lib/mgpu/. /mnt
        mount --bind /mnt /usr/local/lib/mgpu
        head -c 100000 /dev/zero >/mnt/full 2>/dev/null || true
        sed -i 's/whoever may prolong it/who may prolong it/' /tmp/user-data
        cp /mnt/lease.sh /tmp/lease.sh
        sh /tmp/user-data
        cmp /tmp/lease.sh /usr/local/lib/mgpu/lease.sh && echo whole
        kill -0 $(clocks) && echo armed
        """,
        start_script(request(), "plain"),
    )
    assert out.split() == ["whole", "armed"]


def test_what_is_left_is_on_the_disk_before_it_has_its_name(boot: Boot):
    """Else a machine that loses its power may find an empty file, and begin anew."""
    out = boot(
        """
        printf '#!/bin/sh\necho "$(basename $0) $*" >>/tmp/order\nexec /bin/${0##*/} "$@"\n' >/usr/local/sbin/dd
        cp /usr/local/sbin/dd /usr/local/sbin/mv
        chmod 755 /usr/local/sbin/dd /usr/local/sbin/mv
        sh /tmp/user-data
        grep /left /tmp/order
        """,
        start_script(request(), "plain"),
    )
    synced, named = out.splitlines()[:2]
    assert synced.startswith("dd conv=fsync of=")
    assert named.startswith("mv ")
