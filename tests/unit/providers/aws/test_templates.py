"""The launch template of a create is found in an account that has many."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from botocore.session import Session
from botocore.stub import Stubber

from mgpu.providers.aws.instances import listing

WANTED = {"Filters": [{"Name": "launch-template-name", "Values": ["mgpu-token"]}]}
SAID = {"HTTPHeaders": {"date": "Fri, 27 Nov 2026 12:00:00 GMT"}}


@pytest.mark.parametrize("names", [["mgpu-token"], []])
def test_a_template_is_looked_for_on_all_pages(names):
    ec2 = Session().create_client(
        "ec2", region_name="us-east-1", aws_access_key_id="none", aws_secret_access_key="none"
    )
    account: Any = SimpleNamespace(client=lambda *_: ec2)
    with Stubber(ec2) as aws:
        aws.add_response("describe_launch_templates", {"LaunchTemplates": [], "NextToken": "more"}, WANTED)
        found = {"LaunchTemplates": [{"LaunchTemplateName": name} for name in names], "ResponseMetadata": SAID}
        aws.add_response("describe_launch_templates", found, {**WANTED, "NextToken": "more"})
        answer = listing.templates(account, "us-east-1", "mgpu-token")
        aws.assert_no_pending_responses()
    assert [each["LaunchTemplateName"] for each in answer["LaunchTemplates"]] == names
    assert answer["ResponseMetadata"] == SAID, "it says when EC2 has told it"
