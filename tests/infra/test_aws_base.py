"""Stack `base` as the engine meets it: previews, diffs by property, drift, updates in place, a true end."""

from __future__ import annotations

import io
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import grpc
import pulumi
import pytest
from mgpu_train.timeouts import Timeouts
from pulumi.runtime.proto import provider_pb2
from pydantic.alias_generators import to_camel

from mgpu.cli import main
from mgpu.cli.common import own_address
from mgpu.iac import environment, plugin, schema, tokens
from mgpu.iac.aws import bootstrap as aws_bootstrap
from mgpu.iac.aws import kinds, resources
from mgpu.iac.engine import install
from mgpu.iac.engine.event_log import Change
from mgpu.iac.protocol.wire import UNKNOWN, from_struct

ACCOUNT, HERE, THERE = "123456789012", "us-east-1", "us-west-2"
PROGRAM = Path(__file__).parents[2] / "infra" / "base" / "__main__.py"
WANTED = {
    tokens.BUCKET: {"keep": False},
    tokens.REPOSITORY: {},
    tokens.NODE_ROLE: {"bucket": "mgpu-1", "repository": "mgpu/trainer"},
    tokens.REAPER_ROLE: {},
    tokens.SECURITY_GROUP: {"ssh": ["203.0.113.7"]},
}
every = pytest.mark.parametrize("token", WANTED)


@pytest.fixture
def handlers():
    from mgpu.iac.aws.handler import _account

    _account.cache_clear()
    return plugin.Handlers(Timeouts().scaled(0.02))


@pytest.fixture
def wire(serve, aws, handlers):
    return serve(handlers, account=ACCOUNT, region=HERE)


@pytest.fixture
def make(wire, at):
    def create(token, **given):
        inputs = wire.inputs(at(token), WANTED[token] | given)
        answer = wire.create(at(token), inputs)
        return answer.id, inputs, from_struct(answer.properties)

    return create


def changes(aws):
    reads = ("Describe", "Get", "List", "Head")
    return [call.action for call in aws.calls() if not call.action.startswith(reads)]


# ---- check and preview


@every
def test_what_nobody_sets_and_what_does_not_exist_is_refused(wire, at, token):
    answer = wire.check(at(token), WANTED[token] | {"lacks": [], "noSuch": 1})
    assert {failure.property for failure in answer.failures} == {"lacks", "noSuch"}


@pytest.mark.parametrize("name", ["publicAccessBlocked", "tlsOnly", "versioned"])
def test_the_buckets_guards_cannot_be_turned_off(wire, at, name):
    answer = wire.check(at(tokens.BUCKET), {name: False})
    assert [failure.property for failure in answer.failures] == [name]


def test_a_value_of_the_wrong_kind_names_its_property(wire, at):
    answer = wire.check(at(tokens.BUCKET), {"oldVersionsDays": 0})
    assert [failure.property for failure in answer.failures] == ["oldVersionsDays"]


@every
def test_without_account_and_region_nothing_is_made(serve, handlers, at, token):
    answer = serve(handlers).check(at(token), WANTED[token])
    assert {failure.property for failure in answer.failures} == {"account", "region"}


def test_the_world_is_refused_unless_it_is_forced(wire, at):
    with pytest.raises(grpc.RpcError, match="whole world"):
        wire.check(at(tokens.SECURITY_GROUP), {"ssh": ["0.0.0.0/0"]})
    assert wire.inputs(at(tokens.SECURITY_GROUP), {"ssh": ["0.0.0.0/0"], "allowWorld": True})["ssh"] == ["0.0.0.0/0"]


@every
def test_credentials_of_another_account_are_refused(serve, aws, handlers, at, token):
    wire = serve(handlers, account="999999999999", region=HERE)
    with pytest.raises(grpc.RpcError, match="belong to account 123456789012"):
        wire.create(at(token), wire.inputs(at(token), WANTED[token]))
    assert changes(aws) == []


@every
def test_a_preview_makes_nothing_and_knows_the_names(wire, aws, at, token):
    inputs = wire.inputs(at(token), WANTED[token])
    answer = wire.create(at(token), inputs, preview=True)
    shown = from_struct(answer.properties)
    assert answer.id == ""
    assert changes(aws) == []
    facts = {key: shown[key] for key in _facts(token)}
    if token == tokens.SECURITY_GROUP:
        assert facts == {"groupId": UNKNOWN, "vpc": UNKNOWN}
    else:
        made = from_struct(wire.create(at(token), inputs).properties)
        assert facts == {key: made[key] for key in facts}


def test_a_preview_goes_on_where_another_resource_is_not_known_yet(wire, aws, at):
    inputs = wire.inputs(at(tokens.NODE_ROLE), {"bucket": UNKNOWN, "repository": "r"})
    shown = from_struct(wire.create(at(tokens.NODE_ROLE), inputs, preview=True).properties)
    assert shown["bucket"] == shown["arn"] == UNKNOWN
    assert changes(aws) == []


def test_a_preview_refuses_what_another_has_made(wire, aws, at):
    aws.client("ecr").create_repository(repositoryName="mgpu/trainer")
    inputs = wire.inputs(at(tokens.REPOSITORY), {})
    with pytest.raises(grpc.RpcError, match="mgpu did not make it"):
        wire.create(at(tokens.REPOSITORY), inputs, preview=True)


# ---- the life of a resource


@every
def test_a_second_up_changes_nothing(wire, aws, at, make, token):
    resource_id, inputs, state = make(token)
    before = changes(aws)
    read = wire.read(at(token), resource_id, state, inputs)
    assert read.id == resource_id
    assert from_struct(read.inputs) == inputs
    assert from_struct(read.properties) == state
    diff = wire.diff(at(token), from_struct(read.inputs), state, wire.inputs(at(token), WANTED[token], inputs))
    assert diff.changes == diff.DIFF_NONE
    assert changes(aws) == before


@every
def test_an_up_looks_before_it_compares(wire, at, token):
    inputs = wire.inputs(at(token), WANTED[token])
    assert wire.create(at(token), inputs).refresh_before_update


@every
def test_one_that_is_gone_is_gone_and_one_that_cannot_be_asked_for_is_not(wire, aws, at, make, token):
    resource_id, inputs, state = make(token)
    aws.unavailable()
    with pytest.raises(grpc.RpcError, match="Transient"):
        wire.read(at(token), resource_id, state, inputs)
    aws.calm()
    wire.delete(at(token), resource_id, state)
    assert wire.read(at(token), resource_id, state, inputs).id == ""
    wire.delete(at(token), resource_id, state)


def test_somebody_opened_22_to_the_world_it_shows_and_up_closes_it(wire, aws, at, make):
    here = at(tokens.SECURITY_GROUP)
    group, inputs, state = make(tokens.SECURITY_GROUP)
    way = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}
    aws.client("ec2").authorize_security_group_ingress(GroupId=group, IpPermissions=[way])
    read = wire.read(here, group, state, inputs)
    seen = from_struct(read.inputs)
    assert seen["ssh"] == ["0.0.0.0/0", "203.0.113.7/32"]
    diff = wire.diff(here, seen, from_struct(read.properties), inputs)
    assert (list(diff.detailedDiff), list(diff.replaces)) == (["ssh"], [])
    assert diff.detailedDiff["ssh"].kind == provider_pb2.PropertyDiff.UPDATE
    wire.update(here, group, from_struct(read.properties), inputs)
    found = aws.client("ec2").describe_security_groups(GroupIds=[group])["SecurityGroups"][0]
    assert [each["CidrIp"] for way in found["IpPermissions"] for each in way["IpRanges"]] == ["203.0.113.7/32"]


def test_a_preview_of_an_update_changes_nothing(wire, aws, at, make):
    here = at(tokens.BUCKET)
    name, _, state = make(tokens.BUCKET)
    before = changes(aws)
    new = wire.inputs(here, {"keep": False, "oldVersionsDays": 5})
    assert wire.update(here, name, state, new, preview=True)["oldVersionsDays"] == 5
    assert changes(aws) == before


@pytest.mark.parametrize(
    ("token", "change"),
    [
        (tokens.BUCKET, {"name": "other-bucket"}),
        (tokens.BUCKET, {"existing": "other-bucket"}),
        (tokens.REPOSITORY, {"name": "other"}),
        (tokens.SECURITY_GROUP, {"vpcId": "vpc-1"}),
        (tokens.NODE_ROLE, {"existing": "theirs"}),
    ],
)
def test_another_name_or_network_is_another_thing(wire, at, make, token, change):
    _, inputs, state = make(token)
    diff = wire.diff(at(token), inputs, state, wire.inputs(at(token), WANTED[token] | change))
    assert set(change) <= set(diff.replaces)


def test_a_bucket_is_kept_by_default(wire, aws, at, make):
    name, _, state = make(tokens.BUCKET, keep=True)
    wire.delete(at(tokens.BUCKET), name, state)
    assert name in [each["Name"] for each in aws.client("s3").list_buckets()["Buckets"]]


def test_a_group_in_use_fails_its_delete_and_stays_in_state(wire, aws, at, make):
    group, inputs, state = make(tokens.SECURITY_GROUP)
    aws.errors("DeleteSecurityGroup", "DependencyViolation")
    with pytest.raises(grpc.RpcError, match="CleanupFailed"):
        wire.delete(at(tokens.SECURITY_GROUP), group, state)
    assert wire.read(at(tokens.SECURITY_GROUP), group, state, inputs).id == group


def test_one_of_the_users_that_went_bad_shows_and_stops_the_up(wire, aws, at):
    here, group = at(tokens.SECURITY_GROUP), None
    ec2 = aws.client("ec2")
    group = ec2.create_security_group(GroupName="theirs", Description="theirs")["GroupId"]
    everything = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}
    ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[everything])
    inputs = wire.inputs(here, {"existing": group})
    made = wire.create(here, inputs)
    ec2.revoke_security_group_ingress(GroupId=group, IpPermissions=[everything])
    read = wire.read(here, group, from_struct(made.properties), inputs)
    diff = wire.diff(here, from_struct(read.inputs), from_struct(read.properties), inputs)
    assert list(diff.detailedDiff) == ["lacks"]
    with pytest.raises(grpc.RpcError, match="cannot be used"):
        wire.update(here, group, from_struct(read.properties), inputs)


@every
def test_an_import_is_refused_with_what_does_the_same(wire, at, token):
    with pytest.raises(grpc.RpcError, match="bootstrap"):
        wire.read(at(token), "anything")


# ---- the program, and the SDK


@every
def test_the_sdk_has_what_the_schema_says(token):
    described = schema.package()["resources"][token]
    cls = getattr(resources, token.rpartition(":")[2])
    assert {to_camel(name) for name in cls.__annotations__} == described["properties"].keys()
    arguments = set(cls.__init__.__annotations__) - {"resource_name", "opts", "return"}
    assert {to_camel(name) for name in arguments} == described["inputProperties"].keys()


def _facts(token):
    return kinds.MANAGERS[token].resource.facts


class Mocks(pulumi.runtime.Mocks):
    def __init__(self):
        self.made = {}

    def new_resource(self, args):
        self.made[args.name] = args
        facts = {name: f"{args.name}-{name}" for name in (*_facts(args.typ), "name")} if args.typ in WANTED else {}
        return f"{args.name}-id", {**args.inputs, **facts}

    def call(self, args):
        return {}


@pytest.fixture
def program(monkeypatch):
    """Runs infra/base/__main__.py; what was asked for, by name, and what was exported."""

    def run(**config):
        from pulumi.runtime.mocks import MockMonitor

        asked, exported, mocks = {}, {}, Mocks()
        pulumi.runtime.set_mocks(mocks, project="mgpu-base", stack="s")
        monkeypatch.setattr(pulumi, "export", exported.__setitem__)
        register = MockMonitor.RegisterResource

        def spy(self, request):
            asked[request.name] = request
            return register(self, request)

        monkeypatch.setattr(MockMonitor, "RegisterResource", spy)
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in config.items()}
        pulumi.runtime.set_all_config({f"mgpu-base:{key}": value for key, value in texts.items()})
        runpy.run_path(str(PROGRAM))
        import asyncio

        values = {key: asyncio.get_event_loop().run_until_complete(out.future()) for key, out in exported.items()}
        return mocks.made, asked, values

    return run


def test_the_program_makes_all_five_protected_and_the_group_last(program):
    made, asked, exported = program(account=ACCOUNT, region=HERE, ssh=["203.0.113.7/32"])
    assert {args.typ for args in made.values()} >= WANTED.keys()
    assert all(request.protect for request in asked.values() if request.type in WANTED)
    after = {urn.rpartition("::")[2] for urn in asked["group"].dependencies}
    assert after == {"nodes", "reaper"}, "what comes last goes first: nothing goes while a machine is in the group"
    assert dict(made["nodes"].inputs) == {"bucket": "bucket-name", "repository": "repository-name"}
    assert dict(made["group"].inputs) == {"ssh": ["203.0.113.7/32"]}
    assert (exported.pop("tags"), exported.pop("ssm")) == (None, None)
    assert exported == {
        "bucket": "bucket-name",
        "checkpoints": "bucket-url",
        "repository": "repository-uri",
        "instance_profile": "nodes-profile",
        "reaper_role": "reaper-arn",
        "security_group": "group-groupId",
        "vpc": "group-vpc",
    }


def test_the_program_hands_on_what_exists(program):
    given = {"bucket": "b", "repository": "r", "instanceProfile": "p", "reaperRole": "a", "securityGroup": "sg-1"}
    made, _, _ = program(account=ACCOUNT, region=HERE, **given)
    existing = {name: args.inputs.get("existing") for name, args in made.items() if name != "aws"}
    assert existing == {"bucket": "b", "repository": "r", "nodes": "p", "reaper": "a", "group": "sg-1"}


def test_the_program_hands_session_manager_on_and_then_nobody_has_to_be_let_in(program):
    made, _, exported = program(account=ACCOUNT, region=HERE, ssm=True)
    assert made["nodes"].inputs["ssm"] is True
    assert dict(made["group"].inputs) == {"allowNobody": True}
    assert exported["ssm"] is True


def test_the_program_hands_the_tags_on_to_all_that_it_makes(program):
    made, _, exported = program(account=ACCOUNT, region=HERE, ssh=["203.0.113.7/32"], tags=["cost_center=4711"])
    assert {args.typ for args in made.values() if args.inputs.get("tags") == ["cost_center=4711"]} == WANTED.keys()
    assert exported["tags"] == ["cost_center=4711"]


# ---- the real engine, by the command that users type


class Operator:
    """A machine that `mgpu` runs on: its own state folder."""

    def __init__(self, folder: Path, xdg: str = "a") -> None:
        self.folder = folder
        names = ("STATE", "CONFIG", "DATA")
        self.env = {**os.environ, **{f"XDG_{kind}_HOME": str(folder / xdg / kind.lower()) for kind in names}}

    def bootstrap(self, *arguments, code=0):
        command = [sys.executable, "-m", "mgpu", "bootstrap", "aws", *arguments]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            timeout=600,
        )
        assert done.returncode == code, done.stderr
        return done

    def up(self, *arguments):
        """The results of the regions."""
        return json.loads(self.bootstrap("--yes", "--json", "--allow-ssh", "203.0.113.7", *arguments).stdout)["regions"]


@pytest.fixture
def operator(require, aws, tmp_path):
    require("engine", install.find_engine() is not None, "no Pulumi engine; `make setup` installs one")
    return Operator(tmp_path)


def test_base_is_made_kept_in_line_taken_over_and_taken_down(operator, aws, tmp_path, monkeypatch):
    iam, ec2, s3 = (aws.client(service) for service in ("iam", "ec2", "s3"))

    done = operator.bootstrap("--allow-ssh", "203.0.113.7", code=2)  # nobody agreed
    assert "create SecurityGroup" in done.stderr
    assert "costs" in done.stderr
    assert changes(aws) == []

    (made,) = operator.up()
    assert len(made["changes"]) == 5
    assert made["checkpoints"] == "s3://mgpu-123456789012-us-east-1/runs"
    assert operator.up()[0]["changes"] == []

    way = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}
    ec2.authorize_security_group_ingress(GroupId=made["security_group"], IpPermissions=[way])
    done = operator.bootstrap("--allow-ssh", "203.0.113.7", code=2)
    assert 'ssh: ["0.0.0.0/0", "203.0.113.7/32"] => ["203.0.113.7/32"]' in done.stderr
    assert len(operator.up()[0]["changes"]) == 1
    assert operator.up()[0]["changes"] == []

    other = Operator(tmp_path, "b")  # knows nothing, and takes over what is there
    (taken,) = other.up("--region", HERE)
    assert taken["security_group"] == made["security_group"]
    (there,) = other.up("--region", THERE, "--tags", "cost_center=4711")
    tagged = s3.get_bucket_tagging(Bucket=there["bucket"])["TagSet"]
    assert {"Key": "cost_center", "Value": "4711"} in tagged

    aws.quick()  # it is listed
    tags = [{"ResourceType": "instance", "Tags": [{"Key": "mgpu:owner", "Value": "o-1"}]}]
    machine = ec2.run_instances(
        ImageId=aws.image(), InstanceType="g4dn.xlarge", MinCount=1, MaxCount=1, TagSpecifications=tags
    )["Instances"][0]["InstanceId"]
    before = changes(aws)
    done = operator.bootstrap("--destroy", "--yes", code=2)  # it is in use
    assert machine in done.stderr
    assert changes(aws) == before
    ec2.terminate_instances(InstanceIds=[machine])

    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, operator.env[name])
    done = plainly_destroyed(f"{ACCOUNT}-{HERE}")
    assert done.returncode != 0
    assert "protected" in done.stdout + done.stderr
    assert iam.get_role(RoleName="mgpu-node")

    operator.bootstrap("--destroy", "--yes")
    assert not ec2.describe_security_groups(Filters=[{"Name": "group-name", "Values": ["mgpu-nodes"]}])[
        "SecurityGroups"
    ]
    assert iam.list_role_policies(RoleName="mgpu-node")["PolicyNames"] == ["mgpu-base-us-west-2"]
    assert [each["Name"] for each in s3.list_buckets()["Buckets"]] == [
        "mgpu-123456789012-us-east-1",
        "mgpu-123456789012-us-west-2",
    ]
    other.bootstrap("--region", THERE, "--destroy", "--delete-bucket", "--yes")
    assert [each["Name"] for each in s3.list_buckets()["Buckets"]] == ["mgpu-123456789012-us-east-1"]
    assert iam.list_roles()["Roles"] == []


def plainly_destroyed(stack):
    """What `pulumi destroy` says, as a user's own hands would type it."""
    engine = install.find_engine()
    return subprocess.run(
        [engine.pulumi, "destroy", "--yes", "--skip-preview", "--non-interactive", "--stack", stack],
        cwd=Path(os.environ["XDG_STATE_HOME"]) / "mgpu" / "base" / "program",
        env=environment.process_env(environment.engine_env(engine.path)),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


BAD = {
    "a region that is none": (["--region", "us-est-1"], "us-est-1"),
    "another account": (["--account", "999999999999"], "123456789012"),
    "the whole world": (["--allow-ssh", "0.0.0.0/0"], "whole world"),
    "no address": (["--allow-ssh", "here"], "no network"),
    "no such group": (["--security-group", "sg-00000000"], "sg-00000000"),
    "no such bucket": (["--allow-ssh", "203.0.113.7", "--bucket", "nobodys"], "nobodys"),
    "no such network": (["--allow-ssh", "203.0.113.7", "--vpc", "vpc-00000000"], "vpc-00000000"),
    "a bucket that goes alone": (["--delete-bucket"], "--destroy"),
    "one network for two regions": (["--vpc", "vpc-1", "--region", HERE, "--region", THERE], "--vpc"),
    "addresses for a group of theirs": (["--security-group", "sg-1", "--allow-ssh", "203.0.113.7"], "--allow-ssh"),
    "nothing to take down": (["--destroy"], "knows no base"),
}


@pytest.fixture
def bootstrap(aws, tmp_path, monkeypatch, capsys):
    """The command in this very process, for what needs no engine: its exit code, its words, what it printed."""
    for name in ("STATE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["bootstrap", "aws", *arguments])
        out, err = capsys.readouterr()
        return ended.value.code or 0, err, out

    return call


@pytest.mark.parametrize(("arguments", "says"), BAD.values(), ids=BAD)
def test_bad_input_is_told_before_anything_is_made(bootstrap, aws, arguments, says):
    code, said, _ = bootstrap("--yes", *arguments)
    assert code == 2
    assert said.startswith("error: ")
    assert says in said
    assert "Traceback" not in said
    assert changes(aws) == []


def test_credentials_that_have_expired_are_told(bootstrap, aws):
    aws.expire()
    code, said, _ = bootstrap("--allow-ssh", "203.0.113.7", "--yes")
    assert code == 3
    assert "expired" in said


# ---- the command without an engine: what is agreed to, and in which order things go


@pytest.fixture
def stacks(monkeypatch):
    """The stacks of base, by name what is in each; `stacks.asked`: every call that would change something."""

    class Stacks(dict):
        def __init__(self):
            self.asked = []

    made = Stacks()

    class Stack:
        def __init__(self, _program, name, *_, config, **__):
            self.name, self.config = name, config

        def init(self):
            made.setdefault(self.name, {})

        def exists(self):
            return self.name in made

        def preview(self):
            if not made[self.name]:
                return (Change("create", "mgpu:aws:SecurityGroup", "nodes"),)
            return made[self.name].get("drift", ())

        def values(self):
            return made[self.name]

        def up(self):
            made.asked.append(f"up {self.name}")
            made[self.name] = {"security_group": "sg-1", **self.config}

        def unprotect(self):
            made.asked.append("unprotect")

        def destroy(self):
            made.asked.append("destroy")
            made[self.name] = {}

        def remove(self):
            made.asked.append(f"remove {self.name}")
            assert not made.pop(self.name), "a stack with resources is never forgotten"

    monkeypatch.setattr(aws_bootstrap, "Stack", Stack)
    monkeypatch.setattr(own_address, "own_address", lambda: "198.51.100.9/32")
    return made


US, EU = f"{ACCOUNT}-{HERE}", f"{ACCOUNT}-{THERE}"


@pytest.mark.parametrize("typed", [None, "n\n"], ids=["nobody there", "no"])
def test_without_a_yes_nothing_is_made_and_what_was_looked_at_alone_is_forgotten(bootstrap, stacks, monkeypatch, typed):
    stdin = io.StringIO(typed or "")
    stdin.isatty = lambda: typed is not None
    monkeypatch.setattr(sys, "stdin", stdin)
    stacks[EU] = there = {"drift": (Change("update", "mgpu:aws:SecurityGroup", "nodes", ('ssh: [] => ["a"]',)),)}
    code, said, _ = bootstrap("--region", HERE, "--region", THERE)
    assert (code, stacks, stacks.asked) == (2, {EU: there}, [f"remove {US}"])
    for words in ("create SecurityGroup", 'ssh: [] => ["a"]', "none of it costs", "Nothing was made or changed."):
        assert words in said
    assert ("Add `--yes`" in said) == (typed is None)


@pytest.mark.parametrize(
    ("arguments", "says", "ssh"),
    [
        ((), "SSH is let in from 198.51.100.9/32", ["198.51.100.9/32"]),
        (("--ssm",), "nobody is let in", None),
        (("--ssm", "--allow-ssh", "203.0.113.7"), "", ["203.0.113.7/32"]),
    ],
)
def test_who_is_let_in_is_said_and_asked_for(bootstrap, stacks, arguments, says, ssh):
    code, said, out = bootstrap("--yes", "--json", *arguments)
    (region,) = json.loads(out)["regions"]
    assert (code, region["changes"], region["region"]) == (0, ["create SecurityGroup"], HERE)
    assert region.get("mgpu-base:ssh") == ssh
    assert says in said
    assert ("let in" in said) == bool(says)
    assert "nothing to change" in bootstrap(*arguments)[1]  # and nobody is asked


def test_a_group_of_theirs_is_used_as_it_is(bootstrap, stacks, aws):
    group = aws.client("ec2").create_security_group(GroupName="theirs", Description="theirs")["GroupId"]
    to_itself = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}
    aws.client("ec2").authorize_security_group_ingress(GroupId=group, IpPermissions=[to_itself])
    code, said, _ = bootstrap("--yes", "--security-group", group)
    config = stacks[US]
    assert (code, config["mgpu-base:securityGroup"]) == (0, group)
    assert not config.keys() & {"mgpu-base:ssh", "mgpu-base:vpc"}
    assert "let in" not in said


def test_it_is_taken_down_in_all_regions_and_the_bucket_stays(bootstrap, stacks, aws):
    stacks.update({US: {"bucket": "b"}, EU: {"bucket": "c"}})
    regions = ("--region", HERE, "--region", THERE)
    code, said, _ = bootstrap("--destroy", *regions)
    assert (code, stacks.asked) == (2, [])
    assert "Nothing was deleted." in said
    code, _, out = bootstrap("--destroy", "--yes", *regions)
    assert code == 0
    assert stacks.asked == ["unprotect", "destroy", f"remove {US}", "unprotect", "destroy", f"remove {EU}"]
    assert f"taken down, confirmed by AWS: {HERE}, {THERE}; the bucket stays as it is" in " ".join(out.split())
    assert changes(aws) == []


def test_the_bucket_goes_too_where_it_is_asked_for_and_only_if_it_is_empty(bootstrap, stacks, aws):
    bucket, s3 = f"mgpu-{ACCOUNT}-{HERE}", aws.client("s3")
    s3.create_bucket(Bucket=bucket)
    s3.put_object(Bucket=bucket, Key="runs/a", Body=b"a")
    stacks[US] = {"bucket": bucket}
    code, said, _ = bootstrap("--destroy", "--delete-bucket", "--yes")
    assert code != 0
    assert "not empty" in said
    assert stacks.asked == []  # before anything else is gone
    s3.delete_object(Bucket=bucket, Key="runs/a")
    code, _, out = bootstrap("--destroy", "--delete-bucket", "--yes", "--json")
    assert json.loads(out)["regions"] == [{"account": ACCOUNT, "region": HERE, "destroyed": True}]
    assert s3.list_buckets()["Buckets"] == []
    assert stacks == {}


def test_what_machines_stand_on_is_not_taken_down(bootstrap, stacks, aws):
    stacks[US] = {"bucket": "b"}
    tags = [{"ResourceType": "instance", "Tags": [{"Key": "mgpu:owner", "Value": "o-1"}]}]
    aws.quick()  # it is listed
    run = {"ImageId": aws.image(), "InstanceType": "g4dn.xlarge", "MinCount": 1, "MaxCount": 1}
    machine = aws.client("ec2").run_instances(**run, TagSpecifications=tags)["Instances"][0]["InstanceId"]
    code, said, _ = bootstrap("--destroy", "--yes")
    assert (code, stacks.asked) == (2, [])
    assert f"Machines of mgpu's live there: {machine}." in said
