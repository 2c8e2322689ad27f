"""The texts for the system's ssh: they log in with our key and refuse another host key."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from mgpu.errors import InputError
from mgpu.remote.sshconfig import ssh_config
from mgpu.remote.targets import ProxyCommand


@pytest.fixture
def ssh(require, keys, tmp_path):
    """Runs the system's ssh with our texts for these targets."""
    require("ssh", shutil.which("ssh") is not None, "OpenSSH's client is not installed")
    folder = tmp_path / "two words"
    folder.mkdir()
    key = folder / "id 100%"
    key.write_bytes(keys.file.read_bytes())
    key.chmod(0o600)

    def run(targets, *arguments: str) -> subprocess.CompletedProcess[str]:
        config, known = ssh_config(targets, key, "demo", folder / "known_hosts")
        # not in the folder with the space: ssh itself does not quote this path for the ssh it starts for a jump host
        (tmp_path / "config").write_text(config)
        (folder / "known_hosts").write_text(known)
        command = ["ssh", "-F", str(tmp_path / "config"), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=60, stdin=subprocess.DEVNULL
        )

    return run


def test_logs_in(ssh, server):
    done = ssh([server.target(3)], "demo-3", "pwd")
    assert done.stdout.strip() == str(server.home), done.stderr


def test_refuses_another_host_key_and_sends_no_login(ssh, new_server):
    server, other = new_server(), new_server()
    done = ssh([server.target(host_key=other.host_key)], "demo-0", "pwd")
    assert done.returncode == 255
    assert "Host key verification failed" in done.stderr
    assert server.seen == ["connection"]


def test_goes_through_the_jump_host(ssh, new_server):
    jump, server, other = new_server("jump"), new_server("inner"), new_server("other")
    done = ssh([server.target(via=jump.jump())], "demo-0", "pwd")
    assert done.stdout.strip() == str(server.home), done.stderr
    assert f"tunnel {server.port}" in jump.seen
    done = ssh([server.target(via=jump.jump(), host_key=other.host_key)], "demo-0", "pwd")
    assert done.returncode == 255
    assert server.seen.count("connection") == 2
    assert server.seen.count(f"auth {server.user}") == 1


def test_goes_by_the_proxy_command_which_gets_its_arguments_as_they_are(ssh, server, tmp_path):
    odd = tmp_path / "it's 100%h $HOME"
    relay = str(Path(__file__).with_name("relay.py"))
    via = ProxyCommand(("{python}", relay, str(odd), str(server.port)))
    done = ssh([server.target(address="192.0.2.1", via=via)], "demo-0", "pwd")
    assert done.stdout.strip() == str(server.home), done.stderr
    assert odd.exists()


def test_reads_nothing_of_the_users_own_set_up(ssh, server):
    settings = ssh([server.target()], "-G", "demo-0").stdout.splitlines()
    for line in (
        "stricthostkeychecking true",
        "identitiesonly yes",
        "identityagent none",
        "globalknownhostsfile /dev/null",
        "updatehostkeys false",
        "passwordauthentication no",
    ):
        assert line in settings


def test_a_machine_that_is_gone_is_not_waited_for_in_silence(ssh, server):
    settings = ssh([server.target()], "-G", "demo-0").stdout.splitlines()
    assert {"connecttimeout 15", "serveraliveinterval 5", "serveralivecountmax 4"} <= set(settings)


def test_refuses_names_that_ssh_would_misread(server, tmp_path):
    for prefix in ("", "-x", "a b", "a*", "a\nHost b"):
        with pytest.raises(InputError):
            ssh_config([server.target()], tmp_path / "id", prefix)
    for name in ('a"b', "a\nb", "${HOME}", "a\\b", "~/id"):
        with pytest.raises(InputError):
            ssh_config([server.target()], Path(name), "demo")


def test_a_folder_with_an_apostrophe_is_quoted(server):
    config, _ = ssh_config([server.target()], Path("/home/o'brien/id"), "demo", Path("/home/o'brien/known_hosts"))
    assert """IdentityFile "/home/o'brien/id"\n""" in config
    assert """UserKnownHostsFile "/home/o'brien/known_hosts"\n""" in config


def test_the_default_known_hosts_file(server, tmp_path):
    config, known = ssh_config([server.target(1)], tmp_path / "id", "demo")
    assert "UserKnownHostsFile known_hosts\n" in config
    assert known == f"demo-1 {' '.join(server.host_key.split()[:2])}\n"
