"""Machines of provider aws without an address, through Session Manager: the fake AWS, with an SSH server behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fakes import awslife
from fakes.aws import PROGRAMS, FakeAws
from fakes.awslife import insist
from waiting import until

from mgpu.errors import ConnectionFailed, InputError, PermissionDenied, Transient
from mgpu.plan.model import Offer, Requirements
from mgpu.providers.aws import names, session_proxy
from mgpu.providers.aws.iam import operator_policies
from mgpu.providers.aws.instances import session_manager
from mgpu.providers.aws.options import Options
from mgpu.providers.aws.provider import AwsProvider
from mgpu.providers.aws.session import Account
from mgpu.providers.base import FleetRequest, Handle, NodePhase, NodeState
from mgpu.remote.nodeset import NodeSet
from mgpu.remote.proxy import ProxyStream
from mgpu.remote.sshconfig import ssh_config
from mgpu.remote.targets import Target, hop

HERE = awslife.HERE
OFFER = Offer(
    provider="aws", instance_type="g5.xlarge", market="spot", price_usd_per_hour=1, region=HERE, zone=f"{HERE}a",
    fetched_at=1,
)  # fmt: skip
SOON = 8  # seconds that a proxy command waits for an agent


@pytest.fixture
def cloud(aws: FakeAws, monkeypatch) -> FakeAws:
    """What machines stand on, and AWS's program on this machine."""
    aws.base()
    aws.endpoints()
    aws.quick()
    monkeypatch.setenv("PATH", f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}")
    return aws


@pytest.fixture
def provider(cloud) -> AwsProvider:
    return AwsProvider({**cloud.options, "address": "ssm"})


def rent(provider: AwsProvider, nodes: int = 1, offer: Offer = OFFER) -> Handle:
    needed = Requirements(
        provider="aws", nodes=nodes, market="spot", max_price_usd_per_hour=99, max_hours=1, gpus_per_node=1
    )
    request = FleetRequest(
        fleet="demo", generation=1, owner="me", requirements=needed, ssh_public_key=awslife.KEY, lease_s=600,
        hard_cap_s=3600,
    )  # fmt: skip
    return insist(lambda: provider.create(request, offer, awslife.TOKENS[0]))


@pytest.fixture
def handle(provider) -> Handle:
    return rent(provider)


@pytest.fixture
def node(cloud, provider, handle, server) -> NodeState:
    """A machine as its provider tells of it, with that SSH server on it."""
    cloud.server(handle.ids[0], server.port)
    (found,) = provider.describe(handle).nodes
    return found


def target(node: NodeState, server: Any) -> Target:
    assert node.via is not None
    return Target(node.rank, node.address, 22, server.user, server.host_key, hop(node.via.model_dump()))


def program(node: Any) -> int:
    """The process id of what carries this connection."""
    return node._connection._wire._stream._process.pid


# --- all of the way ---------------------------------------------------------------------------------------------------


def test_commands_and_files_go_through_a_session_and_another_one_takes_its_place(cloud, node, server, keys, timeouts):
    folder = server.folder / "code"
    folder.mkdir()
    (folder / "main.py").write_bytes(os.urandom(300_000))
    with NodeSet.connect([target(node, server)], keys.file, timeouts) as nodes:
        (ssh,) = nodes.nodes
        assert ssh.run(["pwd"], timeout=20).stdout.decode().strip() == str(server.home)
        nodes.sync(folder, "code", python=sys.executable)
        assert ssh.read("code/main.py") == (folder / "main.py").read_bytes()
        carrier = Path(f"/proc/{program(ssh)}/cmdline").read_bytes().split(b"\0")
        assert b"StartSession" in carrier, "it has taken the place of the interpreter that began the session"
        assert not any(b"TokenValue" in word for word in carrier), "others can read arguments"
        os.kill(program(ssh), signal.SIGKILL)
        with pytest.raises(ConnectionFailed):
            ssh.run(["sleep", "60"], timeout=60)
        ssh.reconnect()
        assert ssh.run(["echo", "again"], timeout=20).stdout == b"again\n"
    first, second = cloud.sessions()
    assert second["joined"] == {
        "key": "AKIAFAKEFAKEFAKEFAKE", "region": HERE, "profile": "", "endpoint": cloud.endpoint, "target": node.id,
    }  # fmt: skip
    assert first["open"], "whoever is killed says nothing: AWS keeps the session for a while"
    until(lambda: not cloud.sessions()[1]["open"], 10)


def test_the_systems_own_client_goes_there_too(cloud, node, server, keys, tmp_path, require):
    require("ssh", shutil.which("ssh") is not None, "OpenSSH's client is not installed")
    config, known = ssh_config([target(node, server)], keys.file, "demo", tmp_path / "known_hosts")
    (tmp_path / "config").write_text(config)
    (tmp_path / "known_hosts").write_text(known)
    done = subprocess.run(
        ["ssh", "-F", tmp_path / "config", "demo-0", "pwd"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == str(server.home), done.stderr
    until(lambda: not cloud.sessions()[0]["open"], 10)


def test_a_token_is_good_for_its_own_session_alone(cloud, handle, server):
    cloud.server(handle.ids[0], server.port)
    (command, variables), (_, others) = (
        session_proxy.begin(Account(Options.of({})), HERE, handle.ids[0]) for _ in "ab"
    )
    (name,) = variables
    told = {**json.loads(variables[name]), "TokenValue": json.loads(others[name])["TokenValue"]}
    with pytest.raises(ConnectionError, match="the token is not valid"):
        ProxyStream(["env", f"{name}={json.dumps(told)}", *command], 10)


@pytest.mark.parametrize("kind", ["g5.xlarge", "p4d.24xlarge"])
def test_no_public_address_is_asked_for_whatever_the_network_cards(cloud, provider, kind):
    rent(provider, 2, OFFER.model_copy(update={"instance_type": kind, "market": "on-demand"}))
    (template,) = [call.parameters["LaunchTemplateData"] for call in cloud.calls("CreateLaunchTemplate")]
    assert not any(card.get("AssociatePublicIpAddress") for card in template["NetworkInterfaces"])
    assert cloud.calls("AllocateAddress") == []
    reservations = cloud.client("ec2").describe_instances()["Reservations"]
    assert not any(machine.get("PublicIpAddress") for each in reservations for machine in each["Instances"])


# --- not yet ----------------------------------------------------------------------------------------------------------


def test_a_machine_is_ready_once_its_agent_has_registered_and_nobody_asks_later(cloud, provider, handle):
    cloud.pace(agent_s=3600)
    state = provider.describe(handle)
    assert not state.ready
    assert (state.nodes[0].phase, state.nodes[0].one_use_key) == (NodePhase.RUNNING, "")
    assert "mgpu check aws" in state.nodes[0].reason
    cloud.pace(agent_s=0)
    state = provider.describe(handle)
    assert state.ready
    assert state.nodes[0].one_use_key
    provider.rekeyed(handle, handle.ids[0], awslife.KEY, used=True)
    asked = len(cloud.calls("DescribeInstanceInformation"))
    cloud.pace(agent_s=3600)
    assert provider.describe(handle).ready, "what is lost later is the monitor's to find"
    assert len(cloud.calls("DescribeInstanceInformation")) == asked


def test_machines_are_asked_about_by_the_page(cloud, provider):
    handle = rent(provider, 60)
    assert provider.describe(handle).ready
    assert len(cloud.calls("DescribeInstanceInformation")) <= 7


def test_an_agent_that_comes_and_goes_is_waited_for(cloud, handle):
    cloud.pace(agent_flaps_s=3600)
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] >= SOON / 2:
            cloud.pace(agent_flaps_s=0)

    command, _ = session_proxy.begin(Account(Options.of({})), HERE, handle.ids[0], lambda: now[0], sleep)
    assert command[0] == str(PROGRAMS / session_manager.PROGRAM)


def test_one_that_stays_away_is_told_of_before_an_ssh_client_gives_up(cloud, handle):
    cloud.pace(agent_flaps_s=3600)
    now = [0.0]
    with pytest.raises(Transient, match="has not registered"):
        session_proxy.begin(
            Account(Options.of({})), HERE, handle.ids[0], lambda: now[0], lambda seconds: now.__setitem__(0, now[0] + 1)
        )
    assert now[0] <= SOON + 1


# --- who may, and with what -------------------------------------------------------------------------------------------


@pytest.fixture
def profile(cloud, monkeypatch, tmp_path):
    """A profile `work` whose user has the printed policy, with or without what Session Manager needs."""
    iam = cloud.client("iam")
    iam.create_user(UserName="me")
    key = iam.create_access_key(UserName="me")["AccessKey"]
    file = tmp_path / "credentials"
    file.write_text(
        f"[work]\naws_access_key_id = {key['AccessKeyId']}\naws_secret_access_key = {key['SecretAccessKey']}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))

    def may(*, ssm: bool = True) -> str:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name, raising=False)
        cloud.enforce()
        document = operator_policies.documents(awslife.ACCOUNT)["sessions" if ssm else "machines"]
        # moto judges calls as if their resource were `*`: that one is the fake's own, with resources and conditions
        statements = [{**each, "Resource": "*"} if "ssm:StartSession" not in each["Action"] else each
                      for each in document["Statement"]]  # fmt: skip
        every = {"Effect": "Allow", "Action": "ssm:StartSession", "Resource": "*", "Condition": NEVER}
        text = json.dumps({**document, "Statement": [*statements, *([every] if ssm else ())]})
        iam.put_user_policy(UserName="me", PolicyName="mgpu", PolicyDocument=text)
        return key["AccessKeyId"]

    return may


NEVER = {"Null": {"aws:PrincipalArn": "false"}}  # that moto does not read


def test_the_profile_reaches_aws_program_and_the_printed_policy_is_enough(cloud, profile, node, server, keys, timeouts):
    key = profile()
    options = Options.of({**cloud.options, "address": "ssm", "profile": "work"})
    via = session_manager.proxy_command(options, HERE, node.id)
    to = Target(0, node.address, 22, server.user, server.host_key, hop(via.model_dump()))
    with NodeSet.connect([to], keys.file, timeouts) as nodes:
        assert nodes.nodes[0].run(["true"], timeout=20).status == 0
    joined = cloud.sessions()[-1]["joined"]
    assert (joined["profile"], joined["key"]) == ("work", key)


def test_the_policy_opens_no_machine_of_others_and_without_it_none(cloud, profile, handle):
    account = Account(Options.of({"profile": "work"}))
    profile()
    session_proxy.begin(account, HERE, handle.ids[0])
    cloud.client("ec2").delete_tags(Resources=list(handle.ids), Tags=[{"Key": names.OWNER}])
    with pytest.raises(PermissionDenied, match="ssm:StartSession"):
        session_proxy.begin(account, HERE, handle.ids[0])
    profile(ssm=False)
    with pytest.raises(PermissionDenied, match="ssm:StartSession"):
        session_proxy.begin(account, HERE, handle.ids[0])


@pytest.mark.parametrize(
    ("version", "words"), [("1.2.707.0", "is too old: 1.2.707.0"), ("nonsense", "does not say its version")]
)
def test_aws_program_has_to_be_new_enough(provider, monkeypatch, version, words):
    provider.check()
    monkeypatch.setenv("FAKE_PLUGIN_VERSION", version)
    with pytest.raises(InputError, match=words):
        provider.check()


def test_without_aws_program_nothing_is_made_and_it_says_where_to_get_it(cloud, provider, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    for call in (provider.check, lambda: rent(provider)):
        with pytest.raises(InputError, match="no session-manager-plugin on PATH") as caught:
            call()
        assert "https://docs.aws.amazon.com/" in caught.value.next_step
    assert cloud.bill() == []
    AwsProvider(cloud.options).check()
