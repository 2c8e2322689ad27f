"""A node that was taken over, with the credentials that it really has: it reaches its own run, and nothing that others
trust. The fake judges the policies that mgpu makes as AWS does: actions, resources, conditions, boundary, trust."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from botocore.exceptions import ClientError
from fakes.aws import FakeAws
from fakes.awslife import ACCOUNT, BUCKET, HERE, Here

from mgpu.providers.aws import names
from mgpu.providers.aws.bootstrap import resource
from mgpu.providers.aws.bootstrap.bucket import Bucket, BucketManager
from mgpu.providers.aws.bootstrap.resource import Site
from mgpu.providers.aws.bootstrap.roles import NodeRole, NodeRoleManager
from mgpu.providers.aws.iam import run_role
from mgpu.providers.aws.options import Options

DATA = "their-data"
OURS, THEIRS = "runs/ours", "runs/theirs"
ONCE = {"IfNoneMatch": "*"}
REFUSED = {"AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "Forbidden", "403", "PreconditionFailed"}


class Node:
    """A machine of run `ours`: what its metadata service gives, and the session of its run's role."""

    def __init__(self, aws: FakeAws) -> None:
        self.aws = aws
        account = Here(Options.of({}))
        for made in (Bucket(), NodeRole(bucket=BUCKET, buckets=(DATA,), repository=names.REPOSITORY)):
            manager: Any = (BucketManager if isinstance(made, Bucket) else NodeRoleManager)(Site(account, HERE))
            resource.ensure(manager, manager.complete(made))
        s3 = aws.client("s3")
        s3.create_bucket(Bucket=DATA)
        granted = {
            run: run_role.grant(account, Options.of({}), run, [f"s3://{DATA}/tokens"], [f"s3://{BUCKET}/runs/{run}"])
            for run in ("ours", "theirs")
        }
        for key in (f"{OURS}/commits/00000000.json", f"{THEIRS}/commits/00000000.json"):
            s3.put_object(Bucket=BUCKET, Key=key, Body=b"committed", **ONCE)
        for key in (f"{OURS}/checkpoints/a/part", f"{THEIRS}/checkpoints/a/part"):
            s3.put_object(Bucket=BUCKET, Key=key, Body=b"part")
        for key in ("tokens/0", "secret/0"):
            s3.put_object(Bucket=DATA, Key=key, Body=b"data")
        self.theirs = granted["theirs"]["MGPU_STORE_ROLE"]
        self.secret = granted["ours"]["MGPU_STORE_EXTERNAL_ID"]
        machine = f"arn:aws:iam::{ACCOUNT}:role/{names.NODE_ROLE}"
        aws.enforce()
        self.own = self._session(aws.client("sts"), RoleArn=machine)
        self.run = self._session(
            self.by_itself("sts"), RoleArn=granted["ours"]["MGPU_STORE_ROLE"], ExternalId=self.secret
        )

    def _session(self, sts: Any, **role: str) -> dict[str, str]:
        made = sts.assume_role(RoleSessionName="i-1", **role)["Credentials"]
        return {
            "aws_access_key_id": made["AccessKeyId"],
            "aws_secret_access_key": made["SecretAccessKey"],
            "aws_session_token": made["SessionToken"],
        }

    def by_itself(self, service: str) -> Any:
        """A client with the credentials of the metadata service."""
        return self.aws.client(service, **self.own)

    @property
    def s3(self) -> Any:
        """S3 with the session of its run's role."""
        return self.aws.client("s3", **self.run)

    def takes_on(self, **more: str) -> Any:
        """Tries to take on the other run's role."""
        return self.by_itself("sts").assume_role(RoleArn=self.theirs, RoleSessionName="i-1", **more)


@pytest.fixture(scope="module")
def node(aws_server: FakeAws) -> Iterator[Node]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in aws_server.env.items():
            patch.setenv(name, value)
        aws_server.reset()
        yield Node(aws_server)
        aws_server.reset()


def _multipart(s3: Any, key: str) -> Any:
    """Goes all the way: what begins an upload makes no object yet."""
    upload = s3.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"]
    part = s3.upload_part(Bucket=BUCKET, Key=key, UploadId=upload, PartNumber=1, Body=b"x")["ETag"]
    done = {"Parts": [{"ETag": part, "PartNumber": 1}]}
    return s3.complete_multipart_upload(Bucket=BUCKET, Key=key, UploadId=upload, MultipartUpload=done)


def _copy(s3: Any, source: str, key: str) -> Any:
    return s3.copy_object(Bucket=BUCKET, Key=key, CopySource={"Bucket": BUCKET, "Key": source})


def _versions(node: Node) -> str:
    shown = node.aws.client("s3").list_object_versions(Bucket=BUCKET, Prefix=OURS)["Versions"]
    return shown[0]["VersionId"]


COMMIT, PART = "commits/00000000.json", "checkpoints/a/part"
ATTACKS: dict[str, Callable[[Node], Any]] = {
    # with what every machine has
    "reads a checkpoint": lambda n: n.by_itself("s3").get_object(Bucket=BUCKET, Key=f"{OURS}/{PART}"),
    "lists the bucket": lambda n: n.by_itself("s3").list_objects_v2(Bucket=BUCKET),
    "writes into the bucket": lambda n: n.by_itself("s3").put_object(Bucket=BUCKET, Key=f"{THEIRS}/x", Body=b"x"),
    "reads data": lambda n: n.by_itself("s3").get_object(Bucket=DATA, Key="tokens/0"),
    "takes on another run's role": lambda n: n.takes_on(),
    "takes it on with its own secret": lambda n: n.takes_on(ExternalId=n.secret),
    "looks another run's secret up": lambda n: n.by_itself("iam").get_role(RoleName=names.run_role("theirs")),
    "lists the roles": lambda n: n.by_itself("iam").list_roles(),
    "gives its own role more": lambda n: n.by_itself("iam").put_role_policy(
        RoleName=names.NODE_ROLE, PolicyName="more", PolicyDocument="{}"
    ),
    "ends machines": lambda n: n.by_itself("ec2").terminate_instances(InstanceIds=["i-1"]),
    "looks at machines": lambda n: n.by_itself("ec2").describe_instances(),
    "pushes an image": lambda n: n.by_itself("ecr").put_image(repositoryName=names.REPOSITORY, imageManifest="{}"),
    # with what its run has
    "reads another run's commit": lambda n: n.s3.get_object(Bucket=BUCKET, Key=f"{THEIRS}/{COMMIT}"),
    "lists another run": lambda n: n.s3.list_objects_v2(Bucket=BUCKET, Prefix=f"{THEIRS}/"),
    "lists all runs": lambda n: n.s3.list_objects_v2(Bucket=BUCKET, Prefix="runs/"),
    "commits for another run": lambda n: n.s3.put_object(
        Bucket=BUCKET, Key=f"{THEIRS}/commits/00000001.json", Body=b"x", **ONCE
    ),
    "replaces another run's part": lambda n: n.s3.put_object(Bucket=BUCKET, Key=f"{THEIRS}/{PART}", Body=b"x"),
    "uploads another run's part in pieces": lambda n: _multipart(n.s3, f"{THEIRS}/{PART}"),
    "copies over another run's part": lambda n: _copy(n.s3, f"{OURS}/{PART}", f"{THEIRS}/{PART}"),
    "deletes another run's part": lambda n: n.s3.delete_object(Bucket=BUCKET, Key=f"{THEIRS}/{PART}"),
    "deletes another run's commit": lambda n: n.s3.delete_object(Bucket=BUCKET, Key=f"{THEIRS}/{COMMIT}"),
    "deletes a commit": lambda n: n.s3.delete_object(Bucket=BUCKET, Key=f"{OURS}/{COMMIT}"),
    "replaces a commit": lambda n: n.s3.put_object(Bucket=BUCKET, Key=f"{OURS}/{COMMIT}", Body=b"x"),
    "replaces it as if it were new": lambda n: n.s3.put_object(
        Bucket=BUCKET, Key=f"{OURS}/{COMMIT}", Body=b"x", **ONCE
    ),
    "replaces it in pieces": lambda n: _multipart(n.s3, f"{OURS}/{COMMIT}"),
    "copies over it": lambda n: _copy(n.s3, f"{OURS}/{PART}", f"{OURS}/{COMMIT}"),
    "deletes an old version": lambda n: n.s3.delete_object(Bucket=BUCKET, Key=f"{OURS}/{PART}", VersionId=_versions(n)),
    "reads data that its run does not name": lambda n: n.s3.get_object(Bucket=DATA, Key="secret/0"),
    "writes data": lambda n: n.s3.put_object(Bucket=DATA, Key="tokens/0", Body=b"x"),
    "opens the bucket": lambda n: n.s3.put_bucket_policy(Bucket=BUCKET, Policy=json.dumps({"Statement": []})),
    "suspends versioning": lambda n: n.s3.put_bucket_versioning(
        Bucket=BUCKET, VersioningConfiguration={"Status": "Suspended"}
    ),
    "takes on a role with its run's session": lambda n: n.aws.client("sts", **n.run).assume_role(
        RoleArn=n.theirs, RoleSessionName="i-1", ExternalId=n.secret
    ),
}


def _trusted(node: Node) -> dict[str, bytes]:
    """All that any run goes by, as it lies there."""
    s3 = node.aws.client("s3")
    keys = [each["Key"] for each in s3.list_objects_v2(Bucket=BUCKET)["Contents"]]
    return {key: s3.get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in keys}


@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_that_it_tries_succeeds(node: Node, attack: str):
    before = _trusted(node)
    with pytest.raises(ClientError) as caught:
        ATTACKS[attack](node)
    assert caught.value.response["Error"]["Code"] in REFUSED, caught.value
    assert _trusted(node) == before


def test_more_attacks_are_tried_than_the_issue_of_trust_asks_for():
    assert len(ATTACKS) >= 20


def test_what_its_run_needs_it_may_do(node: Node):
    s3, own = node.s3, {"Bucket": BUCKET}
    s3.put_object(**own, Key=f"{OURS}/commits/00000001.json", Body=b"next", **ONCE)
    assert s3.get_object(**own, Key=f"{OURS}/commits/00000001.json")["Body"].read() == b"next"
    s3.put_object(**own, Key=f"{OURS}/checkpoints/b/part", Body=b"x")
    _multipart(s3, f"{OURS}/checkpoints/b/large")
    upload = s3.create_multipart_upload(**own, Key=f"{OURS}/checkpoints/b/hangs")["UploadId"]
    s3.abort_multipart_upload(**own, Key=f"{OURS}/checkpoints/b/hangs", UploadId=upload)
    listed = s3.list_objects_v2(**own, Prefix=f"{OURS}/checkpoints/b/")["Contents"]
    assert [each["Key"].rpartition("/")[2] for each in listed] == ["large", "part"]
    s3.list_multipart_uploads(**own, Prefix=f"{OURS}/checkpoints/")
    for each in listed:
        s3.delete_object(**own, Key=each["Key"])
    with pytest.raises(ClientError) as caught:
        s3.head_object(**own, Key=f"{OURS}/checkpoints/b/part")
    assert caught.value.response["Error"]["Code"] == "404", "not there, instead of forbidden"
    assert s3.get_object(Bucket=DATA, Key="tokens/0")["Body"].read() == b"data"
    assert [each["Key"] for each in s3.list_objects_v2(Bucket=DATA, Prefix="tokens/")["Contents"]] == ["tokens/0"]


def test_when_the_run_is_over_its_session_opens_nothing_more(node: Node):
    account = Here(Options.of({}))
    with suppress(ClientError):
        node.s3.get_object(Bucket=BUCKET, Key=f"{OURS}/{PART}")
    granted = run_role.grant(account, Options.of({}), "over", [], [f"s3://{BUCKET}/runs/over"])
    known = {"RoleArn": granted["MGPU_STORE_ROLE"], "ExternalId": granted["MGPU_STORE_EXTERNAL_ID"]}
    session = node._session(node.by_itself("sts"), **known)
    node.aws.client("s3", **session).put_object(Bucket=BUCKET, Key="runs/over/x", Body=b"x")
    run_role.revoke(account, Options.of({}), "over")
    run_role.revoke(account, Options.of({}), "over")
    for late in (
        lambda: node._session(node.by_itself("sts"), **known),
        lambda: node.aws.client("s3", **session).get_object(Bucket=BUCKET, Key="runs/over/x"),
    ):
        with pytest.raises(ClientError):
            late()
