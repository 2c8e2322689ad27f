"""Which machine image is taken, and what is known of its driver before anything is rented."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from fakes.aws import FakeAws
from fakes.registries import Asked, Said, Script, Scripted, scripted

from mgpu.cli import main
from mgpu.errors import NoOffer, PermissionDenied
from mgpu.image import compat
from mgpu.plan.model import Requirements
from mgpu.providers.aws.instances import machine_image
from mgpu.providers.aws.options import Options
from mgpu.providers.aws.provider import AwsProvider
from mgpu.providers.aws.session import Account
from mgpu.providers.base import Handle, MachineDriver
from mgpu.run.record import record

REGION = "us-east-1"
OLD = "Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.6.0 (Ubuntu 22.04) 20250920"  # brings 570.172.08


def find(aws: FakeAws, region: str = REGION, **given: str) -> machine_image.MachineImage:
    options = Options.of({**aws.options, **given})
    return machine_image.find(Account(options), options, region)


def published(aws: FakeAws) -> dict[str, str]:
    names = [machine_image.PARAMETER.format(kind) for kind in machine_image.KINDS]
    return {each["Name"]: each["Value"] for each in aws.client("ssm").get_parameters(Names=names)["Parameters"]}


def test_the_first_published_kind_that_is_known_is_taken(aws: FakeAws):
    by_name = published(aws)
    best = next(
        machine_image.PARAMETER.format(kind)
        for kind in machine_image.KINDS
        if machine_image.PARAMETER.format(kind) in by_name
    )
    found = find(aws)
    assert found.id == by_name[best]
    assert found.root_device.startswith("/dev/")
    assert found.root_gib > 0


def test_the_price_of_the_disks_is_that_of_what_is_made(aws: FakeAws, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine_image, "DEADLINE_S", 600)
    monkeypatch.setattr(machine_image, "_seen", {})
    provider = AwsProvider(aws.options)
    needed = Requirements(provider="aws", max_price_usd_per_hour=99, max_hours=1, regions=(REGION,), disk_gib=1)
    offer = provider.offers(needed).offers[0]
    disks, *_ = provider.other_costs(needed, offer, None)
    assert disks.what == f"disks, 1 x {find(aws).root_gib} GiB gp3, as the machine image has it"
    known = len(aws.calls("DescribeImages"))
    AwsProvider(aws.options).other_costs(needed, offer, None)
    assert len(aws.calls("DescribeImages")) == known, "asked once"


def test_without_parameters_the_newest_image_of_that_name_is_taken(aws: FakeAws, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine_image, "KINDS", ("0.1-ubuntu-00.04",))
    shown = aws.client("ec2").describe_images(
        Owners=["amazon"], Filters=[{"Name": "name", "Values": [machine_image.PATTERN]}]
    )
    newest = max(shown["Images"], key=lambda each: each["CreationDate"])
    assert find(aws).id == newest["ImageId"]


def test_the_run_files_image_is_taken(aws: FakeAws):
    assert find(aws, machine_image=aws.image()).id == aws.image()
    assert aws.calls("DescribeImages")


def test_an_image_that_its_owner_has_deprecated_is_taken_where_the_run_file_names_it(aws: FakeAws):
    aws.deprecate(aws.image())
    assert aws.client("ec2").describe_images(Filters=[{"Name": "image-id", "Values": [aws.image()]}])["Images"] == []
    assert find(aws, machine_image=aws.image()).id == aws.image()


def test_an_image_that_is_not_in_the_region_rules_the_region_out(aws: FakeAws):
    with pytest.raises(NoOffer) as caught:
        find(aws, machine_image="ami-00000000000000000")
    assert (caught.value.scope, "ami-00000000000000000" in caught.value.what) == ("region", True)


def test_a_denied_look_is_a_denial(aws: FakeAws):
    aws.deny("GetParameters")
    with pytest.raises(PermissionDenied, match="GetParameters"):
        find(aws)


# --- its driver -------------------------------------------------------------------------------------------------------


def named(aws: FakeAws, name: str) -> str:
    """The image of this name."""
    (only,) = aws.client("ec2").describe_images(Filters=[{"Name": "name", "Values": [name]}])["Images"]
    return only["ImageId"]


def copied(aws: FakeAws, name: str) -> str:
    """An image of the account's own with that name."""
    return aws.client("ec2").register_image(Name=name, RootDeviceName="/dev/sda1")["ImageId"]


def asked(aws: FakeAws) -> list[str]:
    return [call.action for call in aws.calls() if call.action in ("GetParameters", "DescribeImages")]


def test_the_published_image_is_known_by_its_name(aws: FakeAws):
    driver = find(aws).driver
    assert driver is not None
    assert (driver.version, find(aws).id in driver.why) == ("580.105.08", True)


def test_amazons_name_on_an_image_of_ones_own_says_nothing(aws: FakeAws):
    driver = find(aws, machine_image=named(aws, OLD)).driver
    assert driver is not None
    assert driver.version == "570.172.08"
    assert find(aws, machine_image=copied(aws, OLD)).driver is None


def test_the_first_region_with_an_image_tells_the_driver_by_one_call_each(aws: FakeAws):
    provider = AwsProvider(aws.options)
    for _ in range(2):
        driver = provider.machine_driver([REGION, "eu-west-1", "us-west-2"])
        assert driver is not None
        assert driver.version == "580.105.08"
    assert asked(aws) == ["GetParameters", "DescribeImages"]


def test_a_region_without_the_image_is_passed_over(aws: FakeAws):
    provider = AwsProvider({**aws.options, "machine_image": named(aws, OLD)})
    driver = provider.machine_driver(["eu-west-1", REGION])
    assert driver is not None
    assert driver.version == "570.172.08"
    assert provider.machine_driver(["eu-west-1"]) is None
    assert provider.machine_driver([]) is None


def test_a_refusal_is_no_unknown_driver(aws: FakeAws):
    aws.deny("DescribeImages")
    with pytest.raises(PermissionDenied):
        AwsProvider(aws.options).machine_driver([REGION])


def test_machines_have_the_driver_of_the_image_that_they_were_made_from(aws: FakeAws):
    aws.quick()  # else a machine is shown 0.06 s after it was made: later than a warm client asks
    old, other = (made_from(aws, name) for name in (named(aws, OLD), find(aws).id))
    driver = driver_of(aws, old, old.replace("i-", "eipalloc-"))
    assert driver is not None
    assert driver.version == "570.172.08", "and not that of the image which new machines get"
    assert driver_of(aws, old, other) is None, "they differ"
    assert driver_of(aws, "i-0123456789abcdef0") is None, "it is not shown"
    assert driver_of(aws, made_from(aws, copied(aws, OLD))) is None


def made_from(aws: FakeAws, image_id: str) -> str:
    """A machine."""
    (made,) = aws.client("ec2").run_instances(ImageId=image_id, InstanceType="g5.xlarge", MinCount=1, MaxCount=1)[
        "Instances"
    ]
    return made["InstanceId"]


def driver_of(aws: FakeAws, *ids: str) -> MachineDriver | None:
    handle = Handle(provider="aws", region=REGION, fleet="f", generation=1, token="t", ids=ids)
    return AwsProvider(aws.options).driver_of(handle)


# --- before anything is rented ----------------------------------------------------------------------------------------


def holding(labels: dict[str, str]) -> Script:
    """A registry with one image, `it:1`."""
    config = {"os": "linux", "architecture": "amd64", "config": {"Labels": labels, "WorkingDir": "/app"}}
    inside = json.dumps(config).encode()
    manifest = json.dumps({"layers": [], "config": {"digest": digest(inside), "size": len(inside)}}).encode()

    def answer(request: Asked) -> Said:
        if "/blobs/" in request.path:
            return Said(200, body=inside)
        return Said(200, {"Docker-Content-Digest": digest(manifest)}, manifest)

    return answer


def digest(body: bytes) -> str:
    return f"sha256:{hashlib.sha256(body).hexdigest()}"


def run_file(folder: Path, server: Scripted, machine_image: str) -> None:
    folder.joinpath("Pulumi.yaml").write_text("name: mine\nruntime: python\n")
    folder.joinpath("train.py").write_text("pass\n")
    keys = {
        "name": "it", "provider": "aws", "gpu": "A10G", "gpus_per_node": 1, "nodes": 1, "regions": [REGION],
        "market": "on-demand", "max_price_usd_per_hour": 99, "max_hours": 1,
        "command": ["train.py"], "checkpoint": "none",
        "image": {"reference": f"{server.address}/it:1"}, "aws": {"machine_image": machine_image},
    }  # fmt: skip
    folder.joinpath("mgpu.yaml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in keys.items()))


@pytest.mark.usefixtures("xdg")
def test_a_launch_whose_image_needs_a_newer_driver_ends_with_2_and_bills_nothing(
    aws: FakeAws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    aws.base(REGION)
    old, before = named(aws, OLD), len(aws.calls())
    labels = {compat.TORCH: "2.12.0", compat.CUDA: "13.2", compat.PYTHON: "3.12"}
    monkeypatch.chdir(tmp_path)
    with scripted(holding(labels)) as server:
        run_file(tmp_path, server, old)
        for command in (["launch", "--yes"], ["plan"]):
            with pytest.raises(SystemExit) as end:
                main(command)
            out, err = capfd.readouterr()
            assert end.value.code == 2, err
            words = " ".join(err.split())
            assert "CUDA 13.2 needs a newer NVIDIA driver than 570.172.08" in words
            assert f'Machine image {old} "{OLD}" brings NVIDIA\'s driver 570.172.08.' in words
            assert "`aws: {machine_image: ami-...}` names another." in words
            assert "per hour" in out + err, "the price is known all the same"
    assert aws.bill() == []
    made = {call.action for call in aws.calls()[before:]}
    assert not {action for action in made if action.startswith(("Create", "Run"))}
    assert record.every() == []
