"""What stack `base` asks of AWS: resources found, made, taken over, brought in line, deleted; judged by AWS's
answers.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from fakes.aws import base
from fakes.clock import Clock
from mgpu_train.checkpoint.log import keys

from mgpu.errors import CleanupFailed, InputError, PermissionDenied, ProviderError, Transient
from mgpu.providers.aws.bootstrap import resource
from mgpu.providers.aws.bootstrap.bucket import Bucket, BucketManager
from mgpu.providers.aws.bootstrap.repository import Repository, RepositoryManager
from mgpu.providers.aws.bootstrap.resource import Site
from mgpu.providers.aws.bootstrap.roles import NodeRole, NodeRoleManager, ReaperRole, ReaperRoleManager
from mgpu.providers.aws.bootstrap.security_group import SecurityGroup, SecurityGroupManager, network
from mgpu.providers.aws.iam import policies
from mgpu.providers.aws.options import Options
from mgpu.providers.aws.session import Account

DAY = 86400.0
HERE, THERE = "us-east-1", "us-west-2"
OPEN = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}
MANAGERS: dict[type, Any] = {
    Bucket: BucketManager,
    Repository: RepositoryManager,
    NodeRole: NodeRoleManager,
    ReaperRole: ReaperRoleManager,
    SecurityGroup: SecurityGroupManager,
}
ALL = [
    Bucket(keep=False),
    Repository(),
    NodeRole(bucket="mgpu-1", repository="mgpu/trainer"),
    ReaperRole(),
    SecurityGroup(ssh=("203.0.113.7/32",)),
]
kinds = pytest.mark.parametrize("asked", ALL, ids=lambda asked: type(asked).__name__)


class World:
    """One account, and managers for each region of it."""

    def __init__(self, aws) -> None:
        self.aws = aws
        self.account = Account(Options.of({}), attempts=1)
        self.clock = Clock()

    def manager(self, asked, region=HERE):
        return MANAGERS[type(asked)](Site(self.account, region, 300, self.clock, self.clock.sleep))

    def wanted(self, asked, region=HERE):
        return self.manager(asked, region).complete(asked)

    def ensure(self, asked, region=HERE):
        return resource.ensure(self.manager(asked, region), self.wanted(asked, region))

    def look(self, asked, region=HERE):
        return resource.look(self.manager(asked, region), self.wanted(asked, region))

    def remove(self, asked, region=HERE):
        resource.remove(self.manager(asked, region), self.wanted(asked, region))

    def drift(self, asked):
        """The properties that are not as they should be."""
        found, wanted = self.look(asked), self.wanted(asked)
        return {name for name in type(asked).model_fields if getattr(found.state, name) != getattr(wanted, name)}

    def changing(self):
        """Calls that change something, so far."""
        reads = ("Describe", "Get", "List", "Head", "Assume")
        return [call.action for call in self.aws.calls() if not call.action.startswith(reads)]


@pytest.fixture
def world(aws):
    return World(aws)


BUCKET, REPOSITORY, NODES, REAPER, GROUP = ALL
ACCOUNT = "123456789012"
RUN_BOUNDARY = f"arn:aws:iam::{ACCOUNT}:policy/mgpu-run"
TAGGED_NODES = NODES.model_copy(update={"tags": ("Team=ml",)})


# ---- what all kinds do


@kinds
def test_what_was_made_is_as_it_should_be_and_ours(world, asked):
    assert world.look(asked) is None
    made = world.ensure(asked)
    found = world.look(asked)
    assert found.state == world.wanted(asked)
    assert found.ours
    assert (found.id, found.facts) == (made.id, made.facts)
    assert found.facts.keys() == type(asked).facts.keys()


@kinds
def test_what_is_in_line_is_left_alone(world, asked):
    world.ensure(asked)
    before = world.changing()
    world.ensure(asked)
    assert world.changing() == before


@kinds
def test_what_is_known_before_it_is_there_is_true_then(world, asked):
    expected = world.manager(asked).expected(world.wanted(asked))
    made = world.ensure(asked)
    assert made.facts | {key: value for key, value in expected.items() if value} == made.facts


@kinds
def test_the_users_tags_are_set_on_what_is_made_and_on_what_is_there(world, asked):
    tagged = asked.model_copy(update={"tags": ("CostCenter=4711", "Team=ml=research")})
    world.ensure(asked)
    assert world.drift(tagged) == {"tags"}
    world.ensure(tagged)
    assert world.drift(tagged) == set()
    assert world.look(tagged).ours
    world.ensure(asked)
    assert world.drift(tagged) == set(), "tags that are not asked for stay"
    world.remove(asked)
    world.ensure(tagged)
    assert world.drift(tagged) == set()


@kinds
def test_a_deleted_thing_is_gone_and_absent_is_success(world, asked):
    world.ensure(asked)
    world.remove(asked)
    assert world.look(asked) is None
    world.remove(asked)


@kinds
def test_another_machine_takes_over_what_is_there(world, asked):
    made = world.ensure(asked)
    other = World(world.aws)
    assert other.ensure(asked).id == made.id


@kinds
def test_a_call_that_fails_concludes_nothing(world, asked):
    world.ensure(asked)
    world.aws.unavailable()
    with pytest.raises(Transient):
        world.look(asked)


@kinds
def test_a_missing_permission_is_named(world, asked):
    world.wanted(asked)
    world.aws.deny("*")
    with pytest.raises(PermissionDenied):
        world.look(asked)


FIRST_CALLS = {
    "CreateBucket": BUCKET,
    "PutPublicAccessBlock": BUCKET,
    "PutBucketPolicy": BUCKET,
    "CreateRepository": REPOSITORY,
    "PutLifecyclePolicy": REPOSITORY,
    "CreateRole": NODES,
    "PutRolePolicy": REAPER,
    "CreateInstanceProfile": NODES,
    "AddRoleToInstanceProfile": NODES,
    "CreateSecurityGroup": GROUP,
    "AuthorizeSecurityGroupIngress": GROUP,
}


@pytest.mark.drawn("calls of AWS x errors", "mgpu/providers/aws")
@pytest.mark.parametrize(("action", "asked"), FIRST_CALLS.items(), ids=FIRST_CALLS)
def test_what_was_cut_off_anywhere_is_completed(world, action, asked):
    world.aws.unavailable(action)
    with pytest.raises(ProviderError):
        world.ensure(asked)
    world.aws.calm()
    world.ensure(asked)
    assert world.drift(asked) == set()


@pytest.mark.parametrize("action", ["CreateBucket", "CreateRepository", "CreateRole", "CreateSecurityGroup"])
def test_what_was_made_though_the_answer_was_lost_is_found(world, action):
    world.aws.unavailable(action, after=True)
    asked = FIRST_CALLS[action]
    with suppress(ProviderError, InputError):
        world.ensure(asked)
    world.aws.calm()
    made = world.ensure(asked)
    assert made.id == world.look(asked).id
    assert world.drift(asked) == set()


def test_one_without_our_tag_is_refused_and_left_alone(world):
    aws = world.aws
    aws.client("iam").create_role(RoleName="mgpu-reaper", AssumeRolePolicyDocument=json.dumps(OPEN))
    aws.client("ecr").create_repository(repositoryName="mgpu/trainer")
    aws.client("ec2").create_security_group(GroupName="mgpu-nodes", Description="theirs")
    s3, name = aws.client("s3"), "mgpu-123456789012-us-east-1"
    s3.create_bucket(Bucket=name)
    s3.put_object(Bucket=name, Key="theirs")
    before = world.changing()
    for asked in (REAPER, REPOSITORY, GROUP, BUCKET):
        with pytest.raises(InputError, match="mgpu did not make it"):
            world.ensure(asked)
    assert world.changing() == before


# ---- drift


def _open_bucket(aws, name):
    aws.client("s3").delete_public_access_block(Bucket=name)


def _drop_policy(aws, name):
    aws.client("s3").delete_bucket_policy(Bucket=name)


def _stop_versions(aws, name):
    aws.client("s3").put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Suspended"})


def _drop_rules(aws, name):
    aws.client("s3").delete_bucket_lifecycle(Bucket=name)


def _widen_parts_rule(aws, name):
    """Small objects go as early as large ones."""
    s3 = aws.client("s3")
    rules = s3.get_bucket_lifecycle_configuration(Bucket=name)["Rules"]
    (parts,) = (each for each in rules if each["ID"] == "mgpu-expire-old-parts")
    parts["Filter"] = {"Prefix": "runs/"}
    s3.put_bucket_lifecycle_configuration(Bucket=name, LifecycleConfiguration={"Rules": rules})


def _untag_profile(aws, name):
    aws.client("iam").untag_instance_profile(InstanceProfileName=name, TagKeys=["Team"])


def _move_tags(aws, name):
    aws.client("ecr").put_image_tag_mutability(repositoryName=name, imageTagMutability="MUTABLE")


def _stop_scans(aws, name):
    scan = {"scanOnPush": False}
    aws.client("ecr").put_image_scanning_configuration(repositoryName=name, imageScanningConfiguration=scan)


def _keep_images(aws, name):
    aws.client("ecr").delete_lifecycle_policy(repositoryName=name)


def _widen_role(aws, name):
    document = json.dumps(OPEN)
    aws.client("iam").put_role_policy(RoleName=name, PolicyName="mgpu-base-us-east-1", PolicyDocument=document)


def _add_policies(aws, name):
    iam = aws.client("iam")
    iam.put_role_policy(RoleName=name, PolicyName="more", PolicyDocument=json.dumps(OPEN))
    arn = iam.create_policy(PolicyName="all", PolicyDocument=json.dumps(OPEN))["Policy"]["Arn"]
    iam.attach_role_policy(RoleName=name, PolicyArn=arn)


def _trust_lambda(aws, name):
    trust = {"Effect": "Allow", "Principal": {"Service": "lambda.amazonaws.com"}, "Action": "sts:AssumeRole"}
    aws.client("iam").update_assume_role_policy(RoleName=name, PolicyDocument=json.dumps(OPEN | {"Statement": [trust]}))


def _empty_profile(aws, name):
    aws.client("iam").remove_role_from_instance_profile(InstanceProfileName=name, RoleName=name)


def _drop_profile(aws, name):
    _empty_profile(aws, name)
    aws.client("iam").delete_instance_profile(InstanceProfileName=name)


def let_in(aws, group, port, **source):
    rule = {"IpProtocol": "tcp", "FromPort": port, "ToPort": port, **source}
    aws.client("ec2").authorize_security_group_ingress(GroupId=group, IpPermissions=[rule])


def _ssh_for_all(aws, name):
    let_in(aws, name, 22, IpRanges=[{"CidrIp": "0.0.0.0/0"}])


def _web_for_all(aws, name):
    let_in(aws, name, 443, Ipv6Ranges=[{"CidrIpv6": "::/0"}])
    let_in(aws, name, 80, UserIdGroupPairs=[{"GroupId": name}])


def _shut(aws, name):
    ec2 = aws.client("ec2")
    found = ec2.describe_security_groups(GroupIds=[name])["SecurityGroups"][0]
    ec2.revoke_security_group_ingress(GroupId=name, IpPermissions=found["IpPermissions"])


def _shut_out(aws, name):
    ec2 = aws.client("ec2")
    found = ec2.describe_security_groups(GroupIds=[name])["SecurityGroups"][0]
    ec2.revoke_security_group_egress(GroupId=name, IpPermissions=found["IpPermissionsEgress"])


def _part_members(aws, name):
    """What EFA needs is taken away; all that goes by address stays open."""
    rule = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": name}]}
    aws.client("ec2").revoke_security_group_egress(GroupId=name, IpPermissions=[rule])


def _boundary(aws, *statements):
    version = {"PolicyArn": RUN_BOUNDARY, "PolicyDocument": json.dumps(OPEN | {"Statement": list(statements)})}
    aws.client("iam").create_policy_version(**version, SetAsDefault=True)


def _widen_boundary(aws, _name):
    _boundary(aws, {"Effect": "Allow", "Action": "*", "Resource": "*"})


def _forget_bucket(aws, _name):
    _boundary(aws, *policies.run_boundary(HERE, ACCOUNT)["Statement"])


def _drop_boundary(aws, _name):
    aws.client("iam").delete_policy(PolicyArn=RUN_BOUNDARY)


DRIFTS = [
    (BUCKET, _open_bucket, {"public_access_blocked"}),
    (BUCKET, _drop_policy, {"guarded"}),
    (BUCKET, _stop_versions, {"versioned"}),
    (BUCKET, _drop_rules, {"abort_uploads_days", "old_versions_days", "old_parts_days"}),
    (BUCKET, _widen_parts_rule, {"old_parts_days"}),
    (TAGGED_NODES, _untag_profile, {"tags"}),
    (REPOSITORY, _move_tags, {"immutable_tags"}),
    (REPOSITORY, _stop_scans, {"scan_on_push"}),
    (REPOSITORY, _keep_images, {"lifecycle"}),
    (NODES, _widen_role, {"policy"}),
    (NODES, _add_policies, {"other_policies"}),
    (REAPER, _trust_lambda, {"trust"}),
    (NODES, _empty_profile, {"in_profile"}),
    (NODES, _drop_profile, {"in_profile"}),
    (NODES, _widen_boundary, {"bounded", "buckets"}),
    (NODES, _forget_bucket, {"buckets"}),
    (NODES, _drop_boundary, {"bounded", "buckets"}),
    (GROUP, _ssh_for_all, {"ssh"}),
    (GROUP, _web_for_all, {"others"}),
    (GROUP, _shut, {"ssh", "within"}),
    (GROUP, _shut_out, {"out", "within"}),
    (GROUP, _part_members, {"within"}),
]


@pytest.mark.drawn("kinds of drift", "mgpu/providers/aws")
@pytest.mark.parametrize(("asked", "harm", "shows"), DRIFTS, ids=lambda value: getattr(value, "__name__", ""))
def test_drift_shows_by_its_property_and_is_closed(world, asked, harm, shows):
    made = world.ensure(asked)
    harm(world.aws, made.id)
    assert world.drift(asked) == shows
    world.ensure(asked)
    assert world.drift(asked) == set()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (BUCKET, Bucket(keep=False, abort_uploads_days=9, old_versions_days=90, old_parts_days=7)),
        (REPOSITORY, Repository(untagged_days=1, keep_images=5)),
        (NODES, NodeRole(bucket="mgpu-2", repository="other")),
        (GROUP, SecurityGroup(ssh=("198.51.100.0/24", "2001:db8::/32"))),
    ],
    ids=["bucket", "repository", "nodes", "group"],
)
def test_other_settings_are_taken_over_in_place(world, before, after):
    made = world.ensure(before)
    assert world.ensure(after).id == made.id
    assert world.drift(after) == set()


def test_what_others_have_set_on_the_bucket_stays(world):
    name, s3 = world.ensure(BUCKET).id, world.aws.client("s3")
    theirs = {"Sid": "Theirs", "Effect": "Allow", "Principal": {"AWS": "arn:aws:iam::123456789012:root"}}
    theirs |= {"Action": "s3:GetObject", "Resource": f"arn:aws:s3:::{name}/*"}
    s3.put_bucket_policy(Bucket=name, Policy=json.dumps({"Version": "2012-10-17", "Statement": [theirs]}))
    rule = {"ID": "theirs", "Status": "Enabled", "Filter": {"Prefix": "tmp/"}, "Expiration": {"Days": 1}}
    s3.put_bucket_lifecycle_configuration(Bucket=name, LifecycleConfiguration={"Rules": [rule]})
    s3.put_bucket_tagging(Bucket=name, Tagging={"TagSet": [{"Key": "theirs", "Value": "1"}, *base.TAGS]})
    world.ensure(BUCKET.model_copy(update={"tags": ("Team=ml",)}))
    statements = json.loads(s3.get_bucket_policy(Bucket=name)["Policy"])["Statement"]
    rules = s3.get_bucket_lifecycle_configuration(Bucket=name)["Rules"]
    assert {"Key": "theirs", "Value": "1"} in s3.get_bucket_tagging(Bucket=name)["TagSet"]
    assert [each["Sid"] for each in statements] == ["Theirs", policies.TLS_ONLY, policies.COMMITTED_ONCE]
    assert {each["ID"] for each in rules} == {
        "theirs",
        "mgpu-abort-uploads",
        "mgpu-expire-old-versions",
        "mgpu-expire-old-parts",
    }
    assert world.drift(BUCKET) == set()


# ---- the bucket


def test_a_bucket_that_is_not_empty_is_not_deleted(world):
    name, s3 = world.ensure(BUCKET).id, world.aws.client("s3")
    s3.delete_bucket_policy(Bucket=name)  # moto denies whatever a statement denies, also if its condition is not met
    s3.put_object(Bucket=name, Key="runs/a")
    s3.delete_object(Bucket=name, Key="runs/a")  # its old version lies there
    with pytest.raises(CleanupFailed, match="not empty"):
        world.remove(BUCKET)
    assert world.look(BUCKET)


def test_of_checkpoints_that_retention_deleted_only_the_newest_days_are_billed(world):
    name, s3, days = world.ensure(BUCKET).id, world.aws.client("s3"), 8
    s3.delete_bucket_policy(Bucket=name)  # moto denies whatever a statement denies, also if its condition is not met
    part = lambda day: f"runs/{keys.file('demo', f'a001-step-{day}', 0, 'weights')}"  # noqa: E731
    commit = lambda day: f"runs/{keys.commit('demo', day)}"  # noqa: E731
    for day in range(days):
        s3.put_object(Bucket=name, Key=part(day), Body=bytes(2**20 + 1))
        s3.put_object(Bucket=name, Key=commit(day), Body=b"{}")
        if day:  # as `keep_last: 1` would
            s3.delete_object(Bucket=name, Key=part(day - 1))
            s3.delete_object(Bucket=name, Key=commit(day - 1))
        world.aws.age(DAY)
    billed = {each["Key"] for each in s3.list_object_versions(Bucket=name)["Versions"]}
    assert part(days - 1) in billed
    assert part(days - 2) in billed  # yesterday's can be brought back
    assert not billed & {part(day) for day in range(days - 4)}
    assert billed >= {commit(day) for day in range(days)}
    world.aws.age(31 * DAY)
    (left,) = {commit(day) for day in range(days)} & {
        each["Key"] for each in s3.list_object_versions(Bucket=name)["Versions"]
    }
    assert left == commit(days - 1)
    assert "DeleteMarkers" not in s3.list_object_versions(Bucket=name)


def test_a_base_of_an_older_mgpu_gets_the_rule_for_parts(world):
    name, s3 = world.ensure(BUCKET).id, world.aws.client("s3")
    rules = s3.get_bucket_lifecycle_configuration(Bucket=name)["Rules"]
    older = [each for each in rules if each["ID"] != "mgpu-expire-old-parts"]
    s3.put_bucket_lifecycle_configuration(Bucket=name, LifecycleConfiguration={"Rules": older})
    assert world.drift(BUCKET) == {"old_parts_days"}
    world.ensure(BUCKET)
    assert s3.get_bucket_lifecycle_configuration(Bucket=name)["Rules"] == rules


def test_a_bucket_is_kept_unless_told_otherwise(world):
    world.ensure(Bucket())
    world.remove(Bucket())
    assert world.look(BUCKET)


def test_a_bucket_of_another_account_is_refused(world):
    world.ensure(BUCKET)
    asked = [call.parameters for call in world.aws.calls("HeadBucket")]
    assert {each["ExpectedBucketOwner"] for each in asked} == {"123456789012"}, "S3 is asked whose it is"
    world.aws.deny("HeadBucket")  # what it says then
    with pytest.raises(PermissionDenied, match="another account"):
        world.ensure(BUCKET)


# ---- roles


def test_one_role_serves_two_regions_and_goes_with_the_last(world):
    iam = world.aws.client("iam")
    for asked in (NODES, REAPER):
        here, there = world.ensure(asked), world.ensure(asked, THERE)
        assert here.id == there.id
        names = iam.list_role_policies(RoleName=here.id)["PolicyNames"]
        assert sorted(names) == ["mgpu-base-us-east-1", "mgpu-base-us-west-2"]
        assert world.drift(asked) == set()
        world.remove(asked)
        assert iam.list_role_policies(RoleName=here.id)["PolicyNames"] == ["mgpu-base-us-west-2"]
        assert world.look(asked, THERE).state == world.wanted(asked, THERE)
        world.remove(asked, THERE)
        assert world.look(asked, THERE) is None


def test_buckets_that_were_named_once_stay_named(world):
    """Each region's base, and each call of bootstrap, may name others."""
    world.ensure(NodeRole(bucket="one", repository="r"))
    world.ensure(NodeRole(bucket="two", buckets=("three",), repository="r"), THERE)
    world.ensure(NodeRole(repository="r"))
    iam = world.aws.client("iam")
    version = iam.get_policy(PolicyArn=RUN_BOUNDARY)["Policy"]["DefaultVersionId"]
    document = iam.get_policy_version(PolicyArn=RUN_BOUNDARY, VersionId=version)["PolicyVersion"]["Document"]
    assert policies.bounded(document) == {"one", "two", "three"}
    before = len(world.changing())
    world.ensure(NodeRole(bucket="two", repository="r"))
    assert len(world.changing()) == before


@pytest.mark.parametrize("asked", [NODES, REAPER], ids=["nodes", "reaper"])
def test_a_role_is_bounded_by_the_users_policy_and_by_no_other_without_being_asked(world, asked):
    iam, arn = world.aws.client("iam"), f"arn:aws:iam::{ACCOUNT}:policy/theirs"
    bounded = asked.model_copy(update={"boundary": arn})
    name = world.ensure(bounded).id
    bound = lambda: iam.get_role(RoleName=name)["Role"].get("PermissionsBoundary", {}).get("PermissionsBoundaryArn")  # noqa: E731
    assert bound() == arn
    world.ensure(asked)
    assert bound() == arn, "what others have set is theirs"
    iam.delete_role_permissions_boundary(RoleName=name)
    assert world.drift(bounded) == {"boundary"}
    world.ensure(bounded)
    assert bound() == arn


@pytest.mark.parametrize("asked", [NODES, REAPER], ids=["nodes", "reaper"])
def test_a_role_stays_while_machines_of_ours_live_in_the_region(world, asked):
    world.aws.quick()  # it is listed
    world.ensure(asked)
    ec2 = world.aws.client("ec2")
    tags = [{"ResourceType": "instance", "Tags": [{"Key": "mgpu:owner", "Value": "o-anybody"}]}]
    machine = ec2.run_instances(
        ImageId=world.aws.image(), InstanceType="g4dn.xlarge", MinCount=1, MaxCount=1, TagSpecifications=tags
    )["Instances"][0]["InstanceId"]
    with pytest.raises(CleanupFailed, match=r"in use(.|\n)*" + machine):
        world.remove(asked)
    assert world.look(asked).state == world.wanted(asked)
    world.aws.kill(machine)
    world.aws.age(60)
    world.remove(asked)
    assert world.look(asked) is None


def test_a_role_with_everything_that_others_put_in_it_goes(world):
    name = world.ensure(NODES).id
    _add_policies(world.aws, name)
    world.remove(NODES)
    assert world.look(NODES) is None


# ---- the group


def test_the_world_is_shut_out_before_anybody_is_let_in(world):
    made = world.ensure(GROUP)
    _ssh_for_all(world.aws, made.id)
    world.ensure(SecurityGroup(ssh=("198.51.100.1/32",)))
    rules = [action for action in world.changing() if "SecurityGroupIngress" in action][-3:]
    assert rules == ["RevokeSecurityGroupIngress", "RevokeSecurityGroupIngress", "AuthorizeSecurityGroupIngress"]


def test_a_group_in_use_is_tried_again_until_it_goes(world):
    world.ensure(GROUP)
    world.aws.errors("DeleteSecurityGroup", "DependencyViolation", 20)
    world.remove(GROUP)
    assert world.look(GROUP) is None
    assert world.clock.now >= 20
    assert len(world.aws.calls("DeleteSecurityGroup")) == 21


def test_a_group_that_stays_in_use_is_never_reported_gone(world):
    made = world.ensure(GROUP)
    world.aws.errors("DeleteSecurityGroup", "DependencyViolation")
    with pytest.raises(CleanupFailed, match=made.id):
        world.remove(GROUP)
    assert 300 <= world.clock.now < 310
    assert world.look(GROUP)


def test_who_uses_a_group_is_named(world):
    made = world.ensure(GROUP)
    ec2 = world.aws.client("ec2")
    subnet = ec2.describe_subnets(Filters=[{"Name": "vpc-id", "Values": [made.facts["vpc"]]}])["Subnets"][0]
    card = ec2.create_network_interface(SubnetId=subnet["SubnetId"], Groups=[made.id])
    world.aws.errors("DeleteSecurityGroup", "DependencyViolation")
    with pytest.raises(CleanupFailed) as stays:
        world.remove(GROUP)
    assert card["NetworkInterface"]["NetworkInterfaceId"] in stays.value.why


def test_without_a_default_vpc_the_command_that_makes_one_is_named(world):
    ec2 = world.aws.client("ec2")
    vpc = ec2.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"][0]["VpcId"]
    for subnet in ec2.describe_subnets(Filters=[{"Name": "vpc-id", "Values": [vpc]}])["Subnets"]:
        ec2.delete_subnet(SubnetId=subnet["SubnetId"])
    ec2.delete_vpc(VpcId=vpc)
    with pytest.raises(InputError) as none:
        world.ensure(GROUP)
    assert "aws ec2 create-default-vpc --region us-east-1" in none.value.next_step
    assert world.look(GROUP) is None
    made = ec2.create_vpc(CidrBlock="10.1.0.0/16")["Vpc"]["VpcId"]
    assert world.ensure(GROUP.model_copy(update={"vpc_id": made})).facts["vpc"] == made


def test_a_network_that_is_not_there_is_refused(world):
    with pytest.raises(InputError, match="no network vpc-12345678"):
        network(world.manager(GROUP).site, "vpc-12345678")


# ---- those of the user


@pytest.fixture
def theirs(world):
    """Good ones of the user's, without a tag of ours."""
    s3, iam, ec2 = (world.aws.client(service) for service in ("s3", "iam", "ec2"))
    s3.create_bucket(Bucket="their-bucket")
    blocked = dict.fromkeys(("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy", "RestrictPublicBuckets"), True)
    s3.put_public_access_block(Bucket="their-bucket", PublicAccessBlockConfiguration=blocked)
    world.aws.client("ecr").create_repository(repositoryName="theirs")
    iam.create_role(RoleName="their-nodes", AssumeRolePolicyDocument=json.dumps(policies.node_trust()))
    iam.create_instance_profile(InstanceProfileName="their-profile")
    iam.add_role_to_instance_profile(InstanceProfileName="their-profile", RoleName="their-nodes")
    trust = json.dumps(policies.reaper_trust("123456789012"))
    reaper = iam.create_role(RoleName="their-reaper", AssumeRolePolicyDocument=trust)["Role"]["Arn"]
    group = ec2.create_security_group(GroupName="theirs", Description="theirs")["GroupId"]
    everything = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}
    ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[everything])
    return {
        Bucket: Bucket(existing="their-bucket", keep=False),
        Repository: Repository(existing="theirs"),
        NodeRole: NodeRole(existing="their-profile"),
        ReaperRole: ReaperRole(existing=reaper),
        SecurityGroup: SecurityGroup(existing=group),
    }


@kinds
def test_one_of_the_users_is_used_never_changed_and_never_deleted(world, theirs, asked):
    given = theirs[type(asked)]
    before = world.changing()
    used = world.ensure(given)
    assert used.id == given.existing
    assert used.facts.keys() == type(asked).facts.keys()
    world.remove(given)
    assert world.changing() == before
    assert world.look(given)


@pytest.mark.parametrize(
    "given",
    [
        Bucket(existing="nobodys"),
        Repository(existing="nobodys"),
        NodeRole(existing="nobodys"),
        ReaperRole(existing="arn:aws:iam::123456789012:role/nobodys"),
        SecurityGroup(existing="sg-00000000"),
    ],
    ids=lambda given: type(given).__name__,
)
def test_one_of_the_users_that_is_not_there_is_refused(world, given):
    with pytest.raises(InputError, match="there is no"):
        world.ensure(given)


def _no_role(aws, given):
    aws.client("iam").remove_role_from_instance_profile(InstanceProfileName=given, RoleName="their-nodes")


LACKS = [
    (Bucket, lambda aws, given: _open_bucket(aws, given), "public access"),
    (NodeRole, lambda aws, given: _trust_lambda(aws, "their-nodes"), "ec2.amazonaws.com"),
    (NodeRole, _no_role, "no role"),
    (ReaperRole, lambda aws, given: _trust_lambda(aws, "their-reaper"), "scheduler.amazonaws.com"),
    (SecurityGroup, _shut, "members"),
    (SecurityGroup, _ssh_for_all, "whole world"),
]


@pytest.mark.parametrize(("kind", "harm", "says"), LACKS, ids=[says for _, _, says in LACKS])
def test_one_of_the_users_that_lacks_something_is_refused(world, theirs, kind, harm, says):
    given = theirs[kind]
    harm(world.aws, given.existing)
    with pytest.raises(InputError) as refused:
        world.ensure(given)
    assert says in refused.value.why
    assert world.look(given).state.lacks, "a refresh shows it"


def test_a_group_of_the_users_may_be_open_to_the_world_if_it_is_forced(world, theirs):
    given = theirs[SecurityGroup]
    _ssh_for_all(world.aws, given.existing)
    assert world.ensure(given.model_copy(update={"allow_world": True}))
