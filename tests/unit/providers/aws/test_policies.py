"""Every policy and every group that mgpu can put into an account, read: nothing is wider than it has to be."""

from __future__ import annotations

import inspect
import re

import pytest

from mgpu.errors import InputError
from mgpu.providers.aws import names
from mgpu.providers.aws.bootstrap import ingress_rules
from mgpu.providers.aws.bootstrap.resource import Site
from mgpu.providers.aws.bootstrap.security_group import SecurityGroup, SecurityGroupManager
from mgpu.providers.aws.iam import operator_policies, policies
from mgpu.providers.aws.options import Options
from mgpu.providers.aws.session import Account

ACCOUNT, REGION = "123456789012", "eu-west-1"
SAMPLES = {
    "region": REGION, "account": ACCOUNT, "bucket": "mgpu-1", "repository": "mgpu/trainer", "secret": "of-run-1",
    "reads": ["s3://data/tokens/"], "writes": ["s3://mgpu-1/runs/run-1"], "buckets": ["theirs"],
}  # fmt: skip
# what changes nothing and shows nothing of anybody's: AWS knows no narrower resource for these
HARMLESS = re.compile(r"ecr:GetAuthorizationToken|ec2:Describe\w+|sts:GetCallerIdentity|pricing:\w+")


def emitted():
    """Every document that a function of the module makes of plain arguments, by the function's name."""
    found = {}
    for name, function in inspect.getmembers(policies, inspect.isfunction):
        wanted = inspect.signature(function).parameters
        makes = inspect.signature(function).return_annotation == "Document" and not name.startswith("_")
        given = {key: SAMPLES[key] for key in wanted if key in SAMPLES}
        if makes and all(key in given or each.default is not each.empty for key, each in wanted.items()):
            found[name] = function(**given)
    return found


def listed(value):
    return value if isinstance(value, list) else [value]


def too_wide(document):
    """What is wider in a document than it may be."""
    for each in document["Statement"]:
        if each["Effect"] == "Deny":
            continue
        if "*" in listed(each.get("Principal", "")) or each.get("Principal") == {"AWS": "*"}:
            yield "anybody"
        if each.keys() & {"NotAction", "NotResource", "NotPrincipal"}:
            yield "all but something"
        for action in listed(each["Action"]):
            if "*" in action:
                yield action
            for resource in listed(each.get("Resource", [])):
                yield from _wide_resource(action, resource, each.get("Condition", {}))


def _wide_resource(action, resource, condition):
    if HARMLESS.fullmatch(action):
        return
    if re.fullmatch(r"arn:aws:ec2:[a-z0-9*-]+:\d{12}:(instance|elastic-ip)/\*", resource):
        if not _by_tag(condition):
            yield f"{action} on all of them"
        return
    head, _, tail = resource.partition("*")
    if "*" in resource and (tail or not head.endswith("/")):
        yield f"{action} on {resource}"


def _by_tag(condition):
    return {"Null": {f"aws:ResourceTag/{names.OWNER}": "false"}} == condition


def test_every_document_is_looked_at():
    wanted = {"node", "node_trust", "reaper", "reaper_trust", "run", "run_boundary", "run_trust", "of_bucket"}
    assert emitted().keys() >= wanted


# a boundary gives nothing: it is the most that others may give
@pytest.mark.parametrize("name", sorted(emitted().keys() - {"run_boundary"}))
def test_nothing_is_wider_than_it_has_to_be(name):
    assert list(too_wide(emitted()[name])) == []


@pytest.mark.parametrize(
    "statement",
    [
        {"Effect": "Allow", "Action": "s3:*", "Resource": "arn:aws:s3:::b"},
        {"Effect": "Allow", "Action": ["s3:GetObject", "s3:Put*"], "Resource": "arn:aws:s3:::b/runs/*"},
        {"Effect": "Allow", "Action": "s3:DeleteObject", "Resource": "*"},
        {"Effect": "Allow", "Action": "s3:PutObject", "Resource": "arn:aws:s3:::b*"},
        {"Effect": "Allow", "Action": "iam:PassRole", "Resource": "arn:aws:iam::*:role/mgpu-node"},
        {"Effect": "Allow", "Action": "ec2:TerminateInstances", "Resource": "arn:aws:ec2:*:123456789012:instance/*"},
        {"Effect": "Allow", "Action": "ec2:TerminateInstances", "Resource": "arn:aws:ec2:*:*:instance/*"},
        {"Effect": "Allow", "Principal": "*", "Action": "sts:AssumeRole"},
        {"Effect": "Allow", "NotAction": "iam:CreateUser", "Action": "s3:GetObject", "Resource": "arn:aws:s3:::b/c"},
    ],
)
def test_a_document_that_is_too_wide_is_seen(statement):
    assert list(too_wide({"Statement": [statement]}))


def actions(name):
    return [action for each in emitted()[name]["Statement"] for action in listed(each["Action"])]


def test_a_node_by_itself_pulls_its_image_and_opens_no_bucket():
    assert {action.partition(":")[0] for action in actions("node")} == {"ecr", "sts"}
    (takes_on,) = [each for each in emitted()["node"]["Statement"] if each["Action"] == "sts:AssumeRole"]
    assert takes_on["Resource"] == f"arn:aws:iam::{ACCOUNT}:role/mgpu/run/*"


def test_a_nodes_agent_may_register_and_carry_sessions_where_that_is_asked_for_and_nothing_more():
    plain, more = (policies.node(REGION, ACCOUNT, "r", ssm=ssm)["Statement"] for ssm in (False, True))
    (agent,) = [each for each in more if each not in plain]
    verbs = {"CreateControlChannel", "CreateDataChannel", "OpenControlChannel", "OpenDataChannel"}
    assert set(agent["Action"]) == {"ssm:UpdateInstanceInformation", *(f"ssmmessages:{verb}" for verb in verbs)}


def test_a_runs_role_is_taken_on_by_nodes_that_know_its_secret_alone():
    (only,) = emitted()["run_trust"]["Statement"]
    assert only["Principal"] == {"AWS": f"arn:aws:iam::{ACCOUNT}:role/mgpu-node"}
    assert only["Condition"] == {"StringEquals": {"sts:ExternalId": "of-run-1"}}


def allowed(action):
    return [
        place
        for each in emitted()["run"]["Statement"]
        for place in listed(each["Resource"])
        if action in listed(each["Action"]) and each["Effect"] == "Allow"
    ]


def test_a_run_writes_below_its_own_prefix_and_reads_what_it_names():
    own = "arn:aws:s3:::mgpu-1/runs/run-1"
    assert allowed("s3:PutObject") == [f"{own}/*"]
    assert allowed("s3:GetObject") == [f"{own}/*", "arn:aws:s3:::data/tokens/*", "arn:aws:s3:::data/tokens"]


def test_a_run_deletes_what_retention_deletes_and_neither_commits_nor_versions():
    own = "arn:aws:s3:::mgpu-1/runs/run-1"
    assert allowed("s3:DeleteObject") == [f"{own}/checkpoints/*", f"{own}/index/*"]
    assert not allowed("s3:DeleteObjectVersion")


def test_what_was_committed_is_replaced_by_nobody():
    (of_run,) = [each for each in emitted()["run"]["Statement"] if each["Effect"] == "Deny"]
    of_bucket = emitted()["of_bucket"]["Statement"][1]
    once = {"Null": {"s3:if-none-match": "true"}, "Bool": {"s3:ObjectCreationOperation": "true"}}
    for each, where in ((of_run, "mgpu-1/runs/run-1"), (of_bucket, "mgpu-1/runs/*")):
        assert "s3:PutObject" in listed(each["Action"])
        assert each["Resource"] == f"arn:aws:s3:::{where}/commits/*"
        assert each["Condition"] == once
    assert of_bucket["Principal"] == "*"


def test_a_run_lists_its_own_places_and_still_hears_that_a_key_is_not_there():
    listing = [each for each in emitted()["run"]["Statement"] if "s3:ListBucket" in each["Action"]]
    # without IfExists, S3 answers 403 instead of 404 for a key that is not there
    assert [each["Condition"] for each in listing] == [
        {"StringLikeIfExists": {"s3:prefix": ["runs/run-1", "runs/run-1/*"]}},
        {"StringLikeIfExists": {"s3:prefix": ["tokens", "tokens/*"]}},
    ]


def test_no_run_may_ever_be_given_more_than_objects_of_base_and_of_the_buckets_that_were_named():
    document = emitted()["run_boundary"]
    assert {action.partition(":")[0] for action in actions("run_boundary")} == {"s3"}
    places = {place for each in document["Statement"] for place in listed(each["Resource"])}
    ours = f"arn:aws:s3:::mgpu-{ACCOUNT}-*"
    assert places == {ours, f"{ours}/runs/*", "arn:aws:s3:::theirs", "arn:aws:s3:::theirs/*"}
    assert policies.bounded(document) == {"theirs"}
    assert "s3:DeleteObjectVersion" not in actions("run_boundary")


def test_the_reaper_ends_machines_and_addresses_of_ours_in_this_account_and_does_nothing_else():
    machines, addresses = emitted()["reaper"]["Statement"]
    assert machines["Action"] == "ec2:TerminateInstances"
    assert machines["Resource"] == f"arn:aws:ec2:*:{ACCOUNT}:instance/*"
    assert addresses["Action"] == "ec2:ReleaseAddress"
    assert addresses["Resource"] == f"arn:aws:ec2:*:{ACCOUNT}:elastic-ip/*"
    assert _by_tag(machines["Condition"])
    assert _by_tag(addresses["Condition"])


def test_the_reaper_is_taken_on_for_schedules_of_this_account_alone():
    (only,) = emitted()["reaper_trust"]["Statement"]
    assert only["Principal"] == {"Service": "scheduler.amazonaws.com"}
    assert only["Condition"] == {"StringEquals": {"aws:SourceAccount": ACCOUNT}}


def test_without_tls_everything_is_denied():
    only = emitted()["of_bucket"]["Statement"][0]
    assert (only["Effect"], only["Principal"], only["Action"]) == ("Deny", "*", "s3:*")
    assert only["Resource"] == ["arn:aws:s3:::mgpu-1", "arn:aws:s3:::mgpu-1/*"]
    assert only["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}


@pytest.mark.parametrize(
    ("region", "first"), [("us-east-1", "aws"), ("cn-north-1", "aws-cn"), ("us-gov-west-1", "aws-us-gov")]
)
def test_arns_begin_as_they_do_in_that_part_of_aws(region, first):
    document = policies.node(region, ACCOUNT, "r")
    arns = [each["Resource"] for each in document["Statement"] if each["Resource"] != "*"]
    assert {arn.split(":")[1] for arn in arns} == {first}


# ---- documents of others


def test_our_statement_joins_others_and_replaces_an_older_one_of_ours():
    other = {"Sid": "Theirs", "Effect": "Allow", "Principal": {"AWS": "arn:aws:iam::1:root"}, "Action": "s3:GetObject"}
    old = {"Sid": policies.TLS_ONLY, "Effect": "Deny", "Principal": "*", "Action": "s3:GetObject"}
    ours = policies.of_bucket(REGION, "b")
    merged = policies.merged({"Statement": [other, old]}, ours)
    assert merged["Statement"] == [other, *ours["Statement"]]
    assert policies.holds(merged, ours)
    assert not policies.holds({"Statement": [other, old]}, ours)
    assert not policies.holds(None, ours)


def test_two_ways_to_write_a_document_are_one():
    one = {"Statement": [{"Action": ["s3:GetObject"], "Resource": ["b", "a"]}]}
    assert policies.canonical(one) == policies.canonical(
        {"Statement": {"Resource": ["a", "b"], "Action": "s3:GetObject"}}
    )
    assert policies.canonical(one) != policies.canonical({"Statement": {"Resource": "a", "Action": "s3:GetObject"}})


@pytest.mark.parametrize(
    ("statement", "may"),
    [
        (policies.node_trust()["Statement"][0], True),
        ({"Effect": "Allow", "Principal": {"Service": ["x", "ec2.amazonaws.com"]}, "Action": ["sts:AssumeRole"]}, True),
        ({"Effect": "Deny", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}, False),
        ({"Effect": "Allow", "Principal": {"Service": "lambda.amazonaws.com"}, "Action": "sts:AssumeRole"}, False),
        ({"Effect": "Allow", "Principal": {"AWS": "arn:aws:iam::1:root"}, "Action": "sts:AssumeRole"}, False),
        ({"Effect": "Allow", "Principal": "*", "Action": "sts:AssumeRole"}, False),
    ],
)
def test_who_may_take_a_role_on_is_read_from_it(statement, may):
    assert policies.trusts({"Statement": statement}, "ec2.amazonaws.com") is may


# ---- groups


def completed(**properties):
    site = Site(Account(Options()), REGION)
    return SecurityGroupManager(site).complete(SecurityGroup(**properties))


@pytest.mark.parametrize(
    "world", ["0.0.0.0/0", "::/0", "0.0.0.0/1", "128.0.0.0/1", "2000::/3", "1.2.3.4/0", " 0.0.0.0/0 "]
)
def test_no_group_is_open_to_the_world_unless_forced(world):
    with pytest.raises(InputError, match="whole world"):
        completed(ssh=("203.0.113.7/32", world))
    assert completed(ssh=(world,), allow_world=True).ssh == (ingress_rules.cidr(world),)


def test_a_group_that_nobody_could_log_in_through_is_refused():
    with pytest.raises(InputError, match="nobody"):
        completed()
    assert completed(allow_nobody=True).ssh == ()


@pytest.mark.parametrize("text", ["", "here", "1.2.3", "1.2.3.4/33", "1.2.3.4;id", "$(id)"])
def test_an_address_that_is_none_is_refused(text):
    with pytest.raises(InputError, match="no network"):
        completed(ssh=(text,))


def test_networks_are_written_as_aws_does_and_each_once():
    assert completed(ssh=("203.0.113.7", "10.1.2.3/8", "203.0.113.7/32", "2001:DB8::1")).ssh == (
        "10.0.0.0/8",
        "2001:db8::1/128",
        "203.0.113.7/32",
    )


def test_the_ways_in_that_mgpu_can_make_are_ssh_and_its_own_members():
    assert ingress_rules.ssh_from("203.0.113.7/32") == {
        "IpProtocol": "tcp",
        "FromPort": 22,
        "ToPort": 22,
        "IpRanges": [{"CidrIp": "203.0.113.7/32"}],
    }
    assert ingress_rules.everything("sg-1") == {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": "sg-1"}]}


def test_who_rents_may_start_all_that_a_fleet_takes():
    allowed = {
        (action, resource.split(":")[-1].split("/")[0])
        for statement in operator_policies.documents(ACCOUNT)["machines"]["Statement"]
        for action in listed(statement["Action"])
        for resource in listed(statement["Resource"])
    }
    kinds = ("instance", "volume", "image", "launch-template", "network-interface", "security-group", "subnet")
    for kind in (*kinds, "placement-group", "spot-instances-request"):
        assert ("ec2:RunInstances", kind) in allowed
        assert ("ec2:CreateFleet", kind) in allowed
