"""The fake AWS does what it says."""

from __future__ import annotations

import os

import boto3
from fakes.aws import FakeAws


def test_machines_are_on_the_bill_until_the_reset(aws: FakeAws):
    made = aws.client("ec2").run_instances(ImageId=aws.image(), InstanceType="g5.xlarge", MinCount=1, MaxCount=1)
    assert [row.id for row in aws.bill()] == [made["Instances"][0]["InstanceId"]]
    aws.reset()
    assert aws.bill() == []
    assert aws.calls() == []


def test_its_environment_is_all_that_boto3_needs(aws: FakeAws):
    assert boto3.Session().client("sts").get_caller_identity()["Account"] == "123456789012"
    assert [call.action for call in aws.calls()] == ["GetCallerIdentity"]
    assert os.environ["AWS_ENDPOINT_URL"] == aws.endpoint
