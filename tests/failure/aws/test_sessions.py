"""A whole run at AWS without a public address and without any way in: base, machines and user meet through Session
Manager alone, one session is lost in between, and the relay's own record says who was there."""

from __future__ import annotations

import os
import signal
import sys

import pytest
from fakes.aws import PROGRAMS
from fakes.aws.operator import Operator, left_behind
from waiting import until


def through_session_manager(user: Operator) -> None:
    user.env["PATH"] = f"{PROGRAMS}{os.pathsep}{user.env['PATH']}"
    user.aws.endpoints()
    user.aws.pace(agent_s=1, agent_flaps_s=1)
    done = user.mgpu("bootstrap", "aws", "--ssm", "--yes")
    assert done.returncode == 0, done.stderr
    ec2 = user.aws.client("ec2")
    (group,) = ec2.describe_security_groups(GroupNames=["mgpu-nodes"])["SecurityGroups"]
    assert [each["IpProtocol"] for each in group["IpPermissions"]] == ["-1"], "its own members, and nobody else"
    block = {"endpoint_url": user.aws.endpoint, "python": sys.executable, "address": "ssm"}
    user.write(command=["count.py", "40", "0.25"], aws=block, env={"COUNT_UNTIL": "/tmp/may-end"})
    launch = user.start("launch", "--yes")
    try:
        until(user.trains, 200)
        run = user.run()["run_id"]
        said = user.mgpu("exec", run, "--", "echo here")
        assert (said.returncode, said.stdout.count("here")) == (0, 2), said.stderr
        carriers = [pid for pid, line in user.processes.items() if "plugin.py" in line]
        os.kill(carriers[0], signal.SIGKILL)
        assert user.mgpu("exec", run, "--", "touch /tmp/may-end").returncode == 0
        _, err = launch.communicate(timeout=600)
    finally:
        launch.kill()
    assert launch.returncode == 0, err
    assert (user.run()["state"], user.run()["teardown"], user.run()["interruptions"]) == ("succeeded", "confirmed", [])
    shown = [each for group in ec2.describe_instances()["Reservations"] for each in group["Instances"]]
    assert not any(each.get("PublicIpAddress") for each in shown)
    sessions = user.aws.sessions()
    assert {each["instance"] for each in sessions} == {each["InstanceId"] for each in shown}
    assert not any(each["open"] for each in sessions)
    assert not [line for line in user.processes.values() if "plugin.py" in line]
    assert not any(left_behind(user.aws).values()), left_behind(user.aws)


STORIES = {"through Session Manager": through_session_manager}


@pytest.mark.story("through Session Manager")
def test_a_run_needs_no_address_and_no_way_in(told):
    told("through Session Manager")
