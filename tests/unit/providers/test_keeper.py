"""What the keeper of a node gives to SSH sessions; no server is started."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from mgpu.providers.keeper import Keeper, Terms


@pytest.mark.parametrize("shell", [name for name in ("bash", "dash") if Path("/bin", name).exists()])  # what sh is
def test_a_session_runs_whatever_the_jobs_environment_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: str):
    for name in ("UID", "EUID", "PPID", "SHELLOPTS", "BASHOPTS", "BASH_VERSINFO", "größe"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MODULEPATH", os.fsdecode(b"/opt/it's here\n/opt/b\xfc"))  # a Latin-1 name on a UTF-8 machine
    keeper = Keeper("n-0", tmp_path / "node", tmp_path, Terms(300, 600, 0, "ssh-ed25519 AAAA"))
    keeper.furnish()
    (tmp_path / "sh").symlink_to(f"/bin/{shell}")
    asked = {"PATH": os.environ["PATH"], "SSH_ORIGINAL_COMMAND": 'echo "$MGPU_INSTANCE in $HOME: $MODULEPATH"'}
    argv = [tmp_path / "sh", keeper.folder / "session"]
    done = subprocess.run(argv, env=asked, capture_output=True, timeout=10)
    assert done.stdout == f"n-0 in {keeper.home}: /opt/it's here\n/opt/b".encode() + b"\xfc\n", done.stderr
