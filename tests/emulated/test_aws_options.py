"""The `aws:` block as the provider gets it."""

from __future__ import annotations

import json

import pytest

from mgpu.errors import InputError
from mgpu.plan import rank
from mgpu.providers.aws.options import Options
from mgpu.spec.model import RunSpec

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIFvi7L40q/vYaVhACb5d0TRFZqE5AALq7nnbIRJJODYY"
BLOCK = {
    "account": "123456789012",
    "profile": "work",
    "endpoint_url": "http://127.0.0.1:4566",
    "subnet_ids": ["subnet-1", "subnet-2"],
    "security_group_id": "sg-1",
    "instance_profile": "my-nodes",
    "reaper_role": "arn:aws:iam::123456789012:role/path/reaper",
    "instance_type": "p6-b200.48xlarge",
    "disk": {"type": "gp3", "throughput_mib_s": 1000, "iops": 4000},
    "machine_image": "ami-0123456789abcdef0",
    "python": "/opt/conda/bin/python",
    "address": "private",
    "jump_host": "me@bastion.example.org:2222",
    "jump_host_key": KEY,
    "network": "plain",
    "tags": {"cost-center": "4711", "Team": "ml research"},
}


def flattened(block: dict[str, object]) -> dict[str, str]:
    spec = RunSpec.model_validate(
        {"name": "a", "provider": "aws", "max_price_usd_per_hour": 1, "max_hours": 1, "command": ["x"], "aws": block}
    )
    return rank.requirements(spec).provider_options


def test_a_run_files_block_arrives_whole():
    options = Options.of(flattened(BLOCK))
    disk = {**BLOCK["disk"], "initialization_mib_s": None}
    dumped = options.model_dump(include=set(BLOCK))
    assert dumped == {**BLOCK, "disk": disk, "subnet_ids": ("subnet-1", "subnet-2")}


def test_nothing_set_is_the_block_of_an_empty_run_file():
    assert Options.of({}) == Options.of(flattened({})) == Options.of({"profile": "", "subnet_ids": ""}) == Options()


def test_a_jump_host_is_pinned():
    via = Options.of(flattened(BLOCK)).via
    assert via is not None
    assert (via.user, via.address, via.port, via.host_key) == ("me", "bastion.example.org", 2222, KEY)


@pytest.mark.parametrize(
    ("written", "address", "port"), [("me@10.0.0.1", "10.0.0.1", 22), ("me@[2001:db8::1]:23", "2001:db8::1", 23)]
)
def test_a_jump_host_has_port_22_unless_it_says_so(written: str, address: str, port: int):
    via = Options.of({"jump_host": written, "jump_host_key": KEY}).via
    assert via is not None
    assert (via.address, via.port) == (address, port)


@pytest.mark.parametrize(
    ("disk", "gib", "fits"),
    [
        ({}, 1, True),
        ({}, 65_537, False),
        ({"iops": 16_000}, 32, True),
        ({"iops": 16_000}, 31, False),
        ({"throughput_mib_s": 2000, "iops": 8000}, 16, True),
        ({"type": "io2", "iops": 4000}, 4, True),
        ({"type": "io2", "iops": 100}, 3, False),
        ({"type": "io2", "iops": 256_000}, 255, False),
    ],
)
def test_a_disk_is_as_large_as_its_speed_needs(disk: dict[str, object], gib: int, fits: bool):
    options = Options.of(flattened({"disk": disk}))
    assert options.disk is not None
    assert (options.disk.wrong_size(gib) == "") == fits


def test_tags_may_be_as_long_and_as_many_as_aws_takes_beside_those_of_mgpu():
    tags = {f"{'a' * 126}{number}": "é" * 256 for number in range(10, 49)}
    assert Options.of(flattened({"tags": tags})).tags == tags


@pytest.mark.parametrize("one", ["jump_host", "jump_host_key"])
def test_a_jump_host_whose_key_is_not_known_is_refused(one: str):
    with pytest.raises(InputError, match="belong together"):
        Options.of({one: str(BLOCK[one])})


@pytest.mark.parametrize("block", [{"jump_host": "me@bastion", "jump_host_key": KEY}, {"jump_host": "me@bastion"}])
def test_session_manager_goes_through_no_jump_host(block: dict[str, str]):
    with pytest.raises(InputError, match="`address: ssm` and `jump_host` exclude each other"):
        Options.of({"address": "ssm", **block})
    assert Options.of(flattened({"address": "ssm"})).via is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("account", "12345"),
        ("endpoint_url", "ftp://x"),
        ("endpoint_url", "https://user:secret@host"),
        ("subnet_ids", "subnet-1,vpc-2"),
        ("security_group_id", "default"),
        ("instance_profile", "-x"),
        ("profile", "a b"),
        ("reaper_role", "reaper"),
        ("machine_image", "ubuntu"),
        ("python", "python3"),
        ("python", "/bin/x\n/bin/y"),
        ("address", "both"),
        ("jump_host", "-oProxyCommand=x@host"),
        ("jump_host", "me@-oProxyCommand=x"),
        ("jump_host", "bastion"),
        ("jump_host_key", "ssh-ed25519"),
        ("network", "efa"),
        ("machine_images", "ami-1"),
        ("instance_type", "p5"),
        ("instance_type", "p5.48xlarge,p4d.24xlarge"),
        ("reservation", "cb-0123"),
        ("disk", "gp3"),
        ("disk", '{"type": "gp2"}'),
        ("disk", '{"size": 3}'),
        ("disk", '{"iops": 2999}'),
        ("disk", '{"iops": 80001}'),
        ("disk", '{"throughput_mib_s": 124}'),
        ("disk", '{"throughput_mib_s": 2001, "iops": 80000}'),
        ("disk", '{"throughput_mib_s": 751}'),
        ("disk", '{"throughput_mib_s": 1001, "iops": 4000}'),
        ("disk", '{"type": "io2"}'),
        ("disk", '{"type": "io2", "iops": 99}'),
        ("disk", '{"type": "io2", "iops": 256001}'),
        ("disk", '{"type": "io2", "iops": 4000, "throughput_mib_s": 500}'),
        ("tags", "Team=ml"),
        ("tags", '["Team"]'),
        ("tags", '{"aws:x": "y"}'),
        ("tags", '{"AWS:x": "y"}'),
        ("tags", '{"mgpu:owner": "somebody"}'),
        ("tags", '{"Name": "mine"}'),
        ("tags", '{"a*": "y"}'),
        ("tags", '{"": "y"}'),
        ("tags", json.dumps({"a" * 129: "y"})),
        ("tags", json.dumps({"a": "y" * 257})),
        ("tags", json.dumps({f"a{number}": "y" for number in range(40)})),
    ],
)
def test_what_means_nothing_is_refused_by_name(key: str, value: str):
    with pytest.raises(InputError) as caught:
        Options.of({key: value})
    assert key in str(caught.value)
    assert caught.value.next_step
