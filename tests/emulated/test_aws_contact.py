"""Provider `aws` and first contact together, with Linux machines behind the fake: user data, sshd, tags, repair."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from fakes.aws import FOREIGN, FakeAws

PROGRAM = Path(__file__).with_name("first_contact.py")


def test_the_keys_that_came_with_user_data_are_dead_when_the_fleet_counts(namespaces, tmp_path: Path):
    key = tmp_path / "id"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    with FakeAws.start(tmp_path / "aws", machines=True) as aws:
        aws.base()
        env = {name: value for name, value in os.environ.items() if name not in FOREIGN} | aws.env
        argv = [*aws.prefix, sys.executable, str(PROGRAM), str(tmp_path), str(key), aws.endpoint]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        nodes = json.loads(done.stdout)
        assert [(node["own"], node["first"], node["one_use_key"]) for node in nodes] == [(True, False, "")] * 2
        assert [node["survived"] for node in nodes] == [False, True]
        assert all(node["known"] for node in nodes), "what runs are told is what the provider remembers"
        assert aws.alive() == []
