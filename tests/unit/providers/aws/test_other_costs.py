"""What a plan shows beside the price of the machines."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest

from mgpu.errors import AuthError, InputError, NoOffer
from mgpu.plan import rank
from mgpu.plan.model import Cost, Offer, Requirements, Saves
from mgpu.providers.aws.catalog.other_costs import PRICES, ImageDisks, other_costs
from mgpu.providers.aws.instances import machine_image
from mgpu.providers.aws.instances.machine_image import MachineImage
from mgpu.providers.aws.options import Options
from mgpu.providers.aws.provider import AwsProvider
from mgpu.providers.aws.session import Account
from mgpu.spec.load import loads

BASE, THEIRS = "s3://mgpu-123456789012-us-west-2/runs", "s3://theirs/runs"
REGIONS = {"s3://theirs": "eu-west-1", "s3://mgpu-123456789012-us-west-2": "us-west-2", "s3://near": "us-east-2"}
MONTH_S = 730 * 3600
OFFER = Offer(
    provider="aws", instance_type="g5.xlarge", market="spot", price_usd_per_hour=1, region="us-east-1", fetched_at=1
)


SMALL = ImageDisks(80)


@pytest.fixture(autouse=True)
def unseen(monkeypatch: pytest.MonkeyPatch):
    """No test knows a machine image by another one's answer."""
    monkeypatch.setattr(machine_image, "_seen", {})


def costs(
    *stores: str, region: str = "us-east-1", saves: Saves | None = None, image: Any = SMALL, **options: str
) -> list[Cost]:
    needed = Requirements(provider="aws", nodes=4, disk_gib=250, max_price_usd_per_hour=9, max_hours=1, stores=stores)
    offer = OFFER.model_copy(update={"region": region})
    return list(other_costs(needed, offer, Options.of(options), saves, lambda url: REGIONS.get(url, ""), image))


def the(found: list[Cost], word: str) -> Cost:
    (cost,) = (each for each in found if word in each.what)
    return cost


def spec(checkpoint: str, more: str = "") -> Any:
    text = "name: a\nprovider: aws\nmax_price_usd_per_hour: 1\nmax_hours: 24\ncommand: [x.py]\n"
    return loads(f"{text}checkpoint: {checkpoint}\n{more}", "run file")


def test_the_disks_of_all_nodes_are_billed_by_the_month():
    disks = the(costs(), "disks")
    assert disks.per == "hour"
    assert math.isclose(disks.usd * MONTH_S / 3600, 4 * 250 * PRICES.gp3_gib_month)


@pytest.mark.parametrize(
    ("disk", "usd_a_month"),
    [
        ({"iops": 4000, "throughput_mib_s": 1000}, 250 * 0.08 + 1000 * 0.005 + 875 * 0.04),
        ({"type": "io2", "iops": 40_000}, 250 * 0.125 + 32_000 * 0.065 + 8_000 * 0.0455),
    ],
    ids=["gp3", "io2"],
)
def test_a_faster_disk_costs_what_its_speed_does(disk: dict[str, Any], usd_a_month: float):
    disks = the(costs(disk=json.dumps(disk)), "disks")
    assert math.isclose(disks.usd * MONTH_S / 3600, 4 * usd_a_month)


def test_a_disk_is_billed_as_large_as_the_machine_image_makes_it():
    disks = the(costs(image=ImageDisks(400)), "disks")
    assert "4 x 400 GiB gp3" in disks.what
    assert (math.isclose(disks.usd * MONTH_S / 3600, 4 * 400 * PRICES.gp3_gib_month), disks.estimate) == (True, False)
    assert the(costs(image=None), "disks").estimate, "it may be larger"


def test_disks_that_a_machine_image_brings_besides_are_billed_too():
    others = (
        {"VolumeSize": 500, "VolumeType": "io1", "Iops": 9000},
        {"VolumeSize": 20, "VolumeType": "gp2", "Iops": 100},
    )
    found = the(costs(image=ImageDisks(80, others)), "besides")
    assert (found.per, found.estimate) == ("hour", True)
    assert math.isclose(found.usd * MONTH_S / 3600, 4 * (500 * 0.125 + 9000 * 0.065 + 20 * 0.08))


@pytest.mark.parametrize("answer", [NoOffer("there is no image"), AuthError("expired"), InputError("another account")])
def test_a_price_is_told_where_nobody_says_which_machine_image_it_will_be(answer, monkeypatch):
    def find(*_):
        raise answer

    monkeypatch.setattr(machine_image, "_find", find)
    for credentials in ("", "AKIA"):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", credentials)
        needed = Requirements(provider="aws", disk_gib=250, max_price_usd_per_hour=9, max_hours=1)
        assert "1 x 250 GiB" in the([*AwsProvider().other_costs(needed, OFFER, None)], "disks").what


def test_the_machine_image_is_the_one_that_launches_take(monkeypatch):
    image = MachineImage("ami-1", "/dev/sda1", 400, others=(("/dev/sdf", {"VolumeSize": 9}),))
    monkeypatch.setattr(AwsProvider, "configured", lambda _: True)
    monkeypatch.setattr(machine_image, "_find", lambda *_: image)
    needed = Requirements(provider="aws", max_price_usd_per_hour=9, max_hours=1)
    found = [*AwsProvider().other_costs(needed, OFFER, None)]
    assert "1 x 400 GiB" in the(found, "disks, ").what
    assert the(found, "besides").usd > 0


def test_nobody_without_credentials_is_asked_for_the_machine_image(monkeypatch):
    asked = list[object]()
    monkeypatch.setattr(AwsProvider, "configured", lambda _: bool(asked))
    monkeypatch.setattr("mgpu.providers.aws.instances.machine_image.glance", lambda *_: asked.append(1))
    needed = Requirements(provider="aws", max_price_usd_per_hour=9, max_hours=1)
    AwsProvider().other_costs(needed, OFFER, None)
    assert asked == []


def test_who_does_not_tell_the_machine_image_is_waited_for_once(monkeypatch):
    """A plan, a limit and a budget ask for the same price, each with a provider of its own."""
    asked, answers = list[object](), threading.Event()
    image = MachineImage("ami-1", "/dev/sda1", 400)

    def find(*_: object) -> MachineImage:
        asked.append(1)
        answers.wait()
        return image

    monkeypatch.setattr(machine_image, "_find", find)
    monkeypatch.setattr(machine_image, "DEADLINE_S", 0)
    options = Options.of({})
    looks = [machine_image.glance(Account(options), options, "eu-west-1") for _ in range(3)]
    assert looks == [None] * 3
    answers.set()
    for each in threading.enumerate():
        if each.name == "machine image in eu-west-1":
            each.join()
    assert len(asked) == 1
    assert machine_image.glance(Account(options), options, "eu-west-1") == image, "late, and known all the same"


def test_what_a_launch_has_found_is_known_to_its_bill(monkeypatch):
    """Whoever has rented the machines has the answer, whatever a price before has not got."""
    options, image = Options.of({}), MachineImage("ami-1", "/dev/sda1", 400)
    machine_image._seen[machine_image._asked(options, "eu-west-1")] = None
    monkeypatch.setattr(machine_image, "_find", lambda *_: image)
    machine_image.find(Account(options), options, "eu-west-1")
    assert machine_image.glance(Account(options), options, "eu-west-1") == image


@pytest.mark.parametrize(
    ("profile", "asked"),
    [("role", False), ("of-a-role", False), ("plain", True), ("itself", True), ("not-there", True)],
)
def test_nobody_types_a_code_for_a_price(profile: str, asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """botocore asks at the terminal, and a thread that is left behind would leave that without an echo."""
    role = "role_arn = arn:aws:iam::123456789012:role/r\n"
    (tmp_path / "config").write_text(
        f"[profile role]\n{role}mfa_serial = m\nsource_profile = plain\n"
        f"[profile of-a-role]\n{role}source_profile = role\n"
        f"[profile itself]\n{role}source_profile = itself\n"
        "[profile plain]\naws_access_key_id = a\naws_secret_access_key = b\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    found, options = list[object](), Options.of({"profile": profile})
    monkeypatch.setattr(machine_image, "_find", lambda *_: found.append(1))
    machine_image.glance(Account(options), options, "us-east-1")
    assert bool(found) == asked


def test_a_machine_image_that_is_read_in_at_a_promised_speed_is_billed_by_its_data():
    once = the(costs(disk=json.dumps({"initialization_mib_s": 300})), "read in")
    assert (once.per, math.isclose(once.usd, 4 * 0.0036)) == ("GiB of its data", True)
    assert not [each for each in costs() if "read in" in each.what]


def test_public_addresses_are_billed_where_nodes_have_them():
    assert math.isclose(the(costs(), "IPv4").usd, 4 * PRICES.address_hour)
    for address in ("private", "ssm"):
        assert not [each for each in costs(address=address) if "IPv4" in each.what]


@pytest.mark.parametrize("address", ["private", "ssm"])
def test_without_a_public_address_what_goes_to_stores_may_have_a_price(address: str):
    """A NAT gateway asks for it in either direction: checkpoints of 80 GiB every ten minutes are $500 a day."""
    nat = the(costs(BASE, region="us-west-2", address=address), "NAT")
    assert (nat.usd, nat.per, nat.estimate, nat.avoidable) == (0.045, "GiB", True, "")
    assert "gateway endpoint" in nat.what
    assert not [each for each in (*costs(BASE), *costs(address=address)) if "NAT" in each.what]


@pytest.mark.parametrize(
    ("store", "usd"), [(THEIRS, PRICES.traffic_gib), ("s3://near", PRICES.near_traffic_gib)], ids=["far", "near"]
)
def test_traffic_with_another_region_has_a_price_and_a_cure(store: str, usd: float):
    traffic = the(costs(store, f"{store}/more"), "traffic")
    assert (traffic.usd, traffic.per) == (usd, "GiB")
    assert f"regions: [{REGIONS['/'.join(store.split('/')[:3])]}]" in traffic.avoidable


@pytest.mark.parametrize(("store", "region"), [(BASE, "us-west-2"), ("s3://unknown", "us-east-1")])
def test_traffic_within_a_region_is_free_and_of_an_unknown_one_nothing_is_said(store: str, region: str):
    assert not [each for each in costs(store, region=region) if "traffic" in each.what]


def test_what_retention_deletes_is_billed_for_as_long_as_the_bucket_of_base_keeps_it():
    found = costs(saves=Saves(to=BASE, kept=3, made=144))
    assert math.isclose(the(found, "kept").usd, 3 * PRICES.s3_gib_month)
    deleted = the(found, "deleted")
    assert "141" in deleted.what
    assert math.isclose(deleted.usd, 141 * PRICES.s3_gib_month * 3 / (730 / 24))
    assert deleted.estimate


@pytest.mark.parametrize(
    "saves",
    [Saves(to=THEIRS, kept=3, made=144), Saves(to=BASE, kept=3), Saves(to=BASE, kept=3, made=2)],
    ids=["a bucket of the user's", "by steps", "none deleted"],
)
def test_nothing_is_said_of_deleted_ones_where_nobody_knows(saves: Saves):
    found = costs(saves=saves)
    assert not [each for each in found if "deleted" in each.what]
    assert math.isclose(the(found, "kept").usd, min(3, saves.made or 3) * PRICES.s3_gib_month)


@pytest.mark.parametrize(
    ("endpoint", "host"),
    [
        ("https://x.r2.example:9000", "x.r2.example"),
        ("https://notamazonaws.com", "notamazonaws.com"),
        ("https://bucket.vpce-1.s3.us-east-1.vpce.amazonaws.com", ""),
        ("https://amazonaws.com", ""),
        ("http://[::1", ""),
        ("", ""),
    ],
)
def test_a_store_that_is_not_s3_has_no_price_of_s3s(endpoint, host, monkeypatch):
    """Nor is a bucket there in the region of one of S3's that has its name."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    monkeypatch.setattr(AwsProvider, "configured", lambda _: False)
    needed = Requirements(provider="aws", max_price_usd_per_hour=9, max_hours=1, stores=(BASE,))
    found = [*AwsProvider().other_costs(needed, OFFER, Saves(to=BASE, kept=3, made=144))]
    assert bool([each for each in found if "S3" in each.what]) == (host == "")
    traffic = the(found, "traffic")
    assert (traffic.usd, traffic.per) == ((0.09 if host else 0.02), "GiB")
    assert (host in traffic.what, bool(traffic.avoidable)) == (True, not host)


def test_a_run_file_says_which_stores_it_uses_and_how_much_its_retention_keeps():
    data = 'data: [{from: "s3://my-data/tokens", to: d}, {from: "s3://my-data/tokens", to: e}]\n'
    found = spec("{to: 's3://bucket/runs', every_minutes: 10, keep_last: 2, keep_best: 1, keep_every_hours: 6}", data)
    assert rank.requirements(found).stores == ("s3://bucket/runs", "s3://my-data/tokens")
    assert rank.saves(found) == Saves(to="s3://bucket/runs", kept=7, made=144)


@pytest.mark.parametrize(
    ("every", "made"),
    [
        ("every_minutes: 1000", 2),  # of 24 h: one in between, and the last
        ("every_minutes: 2000", 1),  # a run that succeeds has saved
        ("every_minutes: 10, every_steps: 50", None),  # whichever comes first
    ],
)
def test_how_many_checkpoints_are_made_counts_the_last_one_and_none_whose_time_nobody_knows(every, made):
    found = rank.saves(spec(f"{{to: 's3://bucket/runs', {every}}}"))
    assert found is not None
    assert found.made == made


def test_a_run_without_checkpoints_keeps_nothing():
    assert rank.saves(spec("none")) is None
    assert rank.requirements(spec("none")).stores == ()
