"""What machines stand on in an account, made by plain boto3 as another program would have made it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

NODE_ROLE, REAPER_ROLE, SECURITY_GROUP = "mgpu-node", "mgpu-reaper", "mgpu-nodes"

# what agents of Systems Manager need
AGENT = [
    "ssm:UpdateInstanceInformation", "ssmmessages:CreateControlChannel", "ssmmessages:CreateDataChannel",
    "ssmmessages:OpenControlChannel", "ssmmessages:OpenDataChannel",
]  # fmt: skip
BUCKETS = ("mgpu-of-this-test", "mgpu-data")  # of the user's, that runs may use
TAGS = [{"Key": "mgpu:base", "Value": "1"}]

Clients = Callable[[str, str], Any]


def make(clients: Clients, region: str) -> dict[str, str]:
    """Security group in the region's default VPC, node role with its instance profile, what bounds roles of runs,
    reaper role; again is fine."""
    iam = clients("iam", region)
    _role(iam, NODE_ROLE, "ec2.amazonaws.com", ["sts:AssumeRole", *AGENT])
    _boundary(iam)
    reaper = _role(iam, REAPER_ROLE, "scheduler.amazonaws.com", ["ec2:TerminateInstances", "ec2:ReleaseAddress"])
    try:
        iam.create_instance_profile(InstanceProfileName=NODE_ROLE, Tags=TAGS)
        iam.add_role_to_instance_profile(InstanceProfileName=NODE_ROLE, RoleName=NODE_ROLE)
    except iam.exceptions.EntityAlreadyExistsException:
        pass  # of another region's base: IAM is global
    group = _group(clients("ec2", region))
    return {"security_group_id": group, "instance_profile": NODE_ROLE, "reaper_role": reaper}


def endpoints(clients: Clients, region: str) -> None:
    """Of Systems Manager, in the default VPC."""
    ec2 = clients("ec2", region)
    vpc = ec2.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"][0]["VpcId"]
    for service in ("ssm", "ssmmessages"):
        name = f"com.amazonaws.{region}.{service}"
        ec2.create_vpc_endpoint(VpcId=vpc, ServiceName=name, VpcEndpointType="Interface")


def _role(iam: Any, name: str, service: str, actions: list[str]) -> str:
    trust = {"Effect": "Allow", "Principal": {"Service": service}, "Action": "sts:AssumeRole"}
    try:
        iam.create_role(RoleName=name, AssumeRolePolicyDocument=_document(trust), Tags=TAGS)
    except iam.exceptions.EntityAlreadyExistsException:
        pass
    if actions:
        allowed = _document({"Effect": "Allow", "Action": actions, "Resource": "*"})
        iam.put_role_policy(RoleName=name, PolicyName=name, PolicyDocument=allowed)
    return iam.get_role(RoleName=name)["Role"]["Arn"]


def _boundary(iam: Any) -> None:
    """Buckets of base, and the one that tests keep checkpoints in."""
    buckets = [f"arn:aws:s3:::{name}" for name in ("mgpu-123456789012-*", *BUCKETS)]
    named = {"Sid": "Buckets", "Effect": "Allow", "Action": "s3:*", "Resource": buckets}
    objects = {"Effect": "Allow", "Action": "s3:*", "Resource": [f"{bucket}/*" for bucket in buckets]}
    text = json.dumps({"Version": "2012-10-17", "Statement": [named, objects]})
    try:
        iam.create_policy(PolicyName="mgpu-run", PolicyDocument=text, Tags=TAGS)
    except iam.exceptions.EntityAlreadyExistsException:
        pass


def _document(statement: dict[str, Any]) -> str:
    return json.dumps({"Version": "2012-10-17", "Statement": [statement]})


def _group(ec2: Any) -> str:
    found = ec2.describe_security_groups(Filters=[{"Name": "group-name", "Values": [SECURITY_GROUP]}])["SecurityGroups"]
    if found:
        return found[0]["GroupId"]
    tagged = [{"ResourceType": "security-group", "Tags": TAGS}]
    made = ec2.create_security_group(GroupName=SECURITY_GROUP, Description="mgpu nodes", TagSpecifications=tagged)
    group = made["GroupId"]
    peers = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}
    ssh = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "203.0.113.7/32"}]}
    ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[peers, ssh])
    return group
