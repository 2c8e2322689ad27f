"""`mgpu offers`: what is on sale, as a table and as JSON, and how a refresh is told."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mgpu.cli import cli
from mgpu.errors import AuthError, InputError, ProviderError, Transient
from mgpu.plan.model import Headroom, Offer, Requirements
from mgpu.providers import registry
from mgpu.providers.aws.catalog import offers as aws_offers
from mgpu.providers.aws.catalog import snapshot as snapshots
from mgpu.providers.aws.options import Options
from mgpu.providers.base import Offers, Refreshed
from mgpu.providers.local.provider import LocalProvider

Mgpu = Callable[..., Result]


class Seller:
    """A provider that sells what the snapshot says."""

    name = "aws"

    def __init__(self) -> None:
        self.blocks: dict[str, dict[str, str]] = {}
        self.ready = True
        self.refuses: ProviderError | None = None
        self.asked = 0
        self.refreshed = Refreshed(regions=("us-east-1",))
        self.change: Callable[[Offer], Offer] = lambda offer: offer

    def configured(self) -> bool:
        return self.ready

    def offers(self, needed: Requirements) -> Offers:
        if self.refuses:
            raise self.refuses
        answer = aws_offers.offers(needed, Options())
        return answer.model_copy(update={"offers": tuple(map(self.change, answer.offers))})

    def refresh_offers(self) -> Refreshed:
        self.asked += 1
        return self.refreshed


@pytest.fixture
def seller(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, xdg: Path) -> Seller:
    for name in ("AWS_ENDPOINT_URL", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = Seller()

    def get(name: str, options: dict[str, str] | None = None) -> Any:
        made.blocks[name] = options or {}
        return made if name == "aws" else LocalProvider()

    monkeypatch.setattr(registry, "get", get)
    monkeypatch.setattr(registry, "names", lambda: ("aws", "local"))
    return made


@pytest.fixture
def mgpu(seller: Seller) -> Mgpu:
    def run(*args: str) -> Result:
        return CliRunner().invoke(cli, ["offers", *args], standalone_mode=False)

    return run


def rows(result: Result) -> list[str]:
    """The table's rows, without its head."""
    return [line for line in result.stdout.splitlines() if line.startswith(("aws", "local"))]


def test_every_provider_is_listed_with_both_markets_in_one_row(mgpu: Mgpu):
    done = mgpu()
    assert done.return_value == 0
    places = [tuple(row.split())[:2] for row in rows(done)]
    assert ("local", "cpu-node") in places
    assert sum(place == ("aws", "p4d.24xlarge") for place in places) == 4  # zones
    row = next(row for row in rows(done) if "p4d.24xlarge" in row)
    assert "8 x A100-40GB" in row
    assert "NVSwitch" in row
    assert row.split()[-4:] == ["21.958", "21.958", row.split()[-2], "d"]
    assert "< 21.958" in row


def test_filters_leave_what_passes_all_of_them(mgpu: Mgpu):
    done = mgpu("aws", "--gpu", "l4", "--gpus", "4", "--region", "us-east-1", "--market", "on-demand")
    assert done.return_value == 0
    assert rows(done)
    assert all("4 x L4 " in row and "us-east-1" in row and "<" not in row for row in rows(done))


def test_nothing_that_passes_the_filters_is_no_offer(mgpu: Mgpu):
    done = mgpu("aws", "--gpu", "T4", "--gpus", "3")
    assert done.stdout == "nothing on sale meets this\n"
    assert done.return_value == 3


def test_a_mistake_is_one_where_one_provider_was_named(mgpu: Mgpu):
    assert "there is no GPU `RTX4090`" in str(mgpu("aws", "--gpu", "RTX4090").exception)
    done = mgpu("--gpu", "RTX4090")  # another provider may have it
    assert (done.exception, done.return_value) == (None, 3)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--gpu", "A100 80GB"), "gpu: there is no GPU `A100 80GB` (did you mean `A100-80GB`?)"),
        (("--region", "us east 2"), "regions: there is no region `us east 2` (did you mean `us-east-2`?)"),
    ],
)
def test_a_word_that_no_run_file_could_have_gets_the_nearest_name(mgpu: Mgpu, words: tuple[str, str], told: str):
    assert told in str(mgpu("aws", *words).exception)


def test_more_gpus_than_any_run_file_asks_for_are_no_offer(mgpu: Mgpu):
    done = mgpu("aws", "--gpus", "32")
    assert (done.stdout, done.return_value) == ("nothing on sale meets this\n", 3)


def test_where_nobody_has_it_the_nearest_name_is_told(mgpu: Mgpu):
    assert "aws: gpu: there is no GPU `H100` (did you mean `H100-80GB`?)" in mgpu("--gpu", "H100").stderr
    assert "did you mean" not in mgpu("--gpu", "H100-80GB").stderr


def test_a_provider_that_does_not_answer_hides_no_other(mgpu: Mgpu, seller: Seller):
    seller.refuses = Transient("aws: no answer", "timed out")
    done = mgpu("--json")
    assert {offer["provider"] for offer in json.loads(done.stdout)["offers"]} == {"local"}
    assert "warning: aws: no answer: timed out" in done.stderr
    assert done.return_value == 3, "it is not all that is on sale"
    seller.ready = False
    done = mgpu()
    assert (len(rows(done)), done.return_value) == (1, 0), "nobody who has not set it up wants to know"
    assert "no answer" not in done.stderr
    assert isinstance(mgpu("aws").exception, Transient)


def test_the_age_of_the_prices_is_told_with_what_renews_them(mgpu: Mgpu):
    done = mgpu("aws", "--gpu", "T4")
    days = int((time.time() - 1768780800) / 86400)
    assert f"prices of 2026-01-19: {days} days old; `mgpu offers aws --refresh`" in done.stderr
    assert "on-demand prices of us-east-1: AWS Price List API" in done.stderr


def test_new_prices_are_not_called_old(mgpu: Mgpu, seller: Seller):
    seller.change = lambda offer: offer.model_copy(update={"fetched_at": time.time() - 3 * 3600})
    done = mgpu("aws", "--gpu", "T4")
    assert "old" not in done.stderr
    assert all(row.endswith("3 h") for row in rows(done))


def test_json_is_every_offer_whole(mgpu: Mgpu):
    found = json.loads(mgpu("aws", "--gpu", "H100-80GB", "--json").stdout)["offers"]
    assert {offer["gpu"] for offer in found} == {"H100-80GB"}
    assert [Offer.model_validate(offer) for offer in found]


def test_refresh_asks_first_and_says_who_answered(mgpu: Mgpu, seller: Seller):
    done = mgpu("aws", "--gpu", "T4", "--refresh")
    assert (done.return_value, seller.asked) == (0, 1)
    assert "asked 1 region for its prices" in done.stderr


def test_a_refresh_that_did_not_reach_all_names_them_and_ends_with_3(mgpu: Mgpu, seller: Seller):
    seller.refreshed = Refreshed(regions=("us-east-1",), failed={"eu-west-1": "no full answer within 120 s"})
    done = mgpu("aws", "--gpu", "T4", "--refresh")
    assert done.return_value == 3
    assert "warning: aws eu-west-1: no full answer within 120 s; what was known of it stays" in done.stderr
    assert rows(done)


def test_a_provider_that_is_not_set_up_is_asked_only_by_name(mgpu: Mgpu, seller: Seller):
    seller.ready = False
    assert (mgpu("--refresh").return_value, seller.asked) == (0, 0)
    mgpu("aws", "--refresh")
    assert seller.asked == 1


def test_a_refresh_without_credentials_is_that_error(mgpu: Mgpu, seller: Seller, monkeypatch: pytest.MonkeyPatch):
    def refuse() -> Refreshed:
        raise AuthError("aws: no credentials")

    monkeypatch.setattr(seller, "refresh_offers", refuse)
    assert isinstance(mgpu("aws", "--refresh").exception, AuthError)


def test_quotas_are_shown_once_each_with_what_they_leave(mgpu: Mgpu, seller: Seller):
    room = Headroom(name="All P", limit_vcpus=192, left_vcpus=96, at=time.time(), raise_command="x")
    seller.change = lambda offer: offer.model_copy(update={"headroom": room if offer.quota == "L-7212CCBC" else None})
    done = mgpu("aws", "--quota")
    (row,) = rows(done)
    assert row.split() == ["aws", "us-east-1", "L-7212CCBC", "All", "P", "192", "96", "now"]


def test_quotas_that_nobody_knows_are_not_made_up(mgpu: Mgpu):
    assert "no quotas are known" in mgpu("aws", "--quota").stdout


def test_a_profile_is_given_to_aws_alone(mgpu: Mgpu, seller: Seller):
    mgpu("aws", "--profile", "work")
    assert seller.blocks == {"aws": {"profile": "work"}}
    assert "has no profiles" in str(mgpu("local", "--profile", "work").exception)


@pytest.mark.parametrize("named", [("aws",), ()])
def test_keys_of_a_providers_block_are_given_to_it_alone(mgpu: Mgpu, seller: Seller, named: tuple[str, ...]):
    keys = ("--set", 'aws.account="123456789012"', "--set", "aws.subnet_ids=[subnet-1, subnet-2]")
    done = mgpu(*named, *keys, "--set", "aws.disk.type=gp3")
    assert (done.exception, done.return_value) == (None, 0)
    wanted = {"account": "123456789012", "subnet_ids": "subnet-1,subnet-2", "disk": '{"type": "gp3"}'}
    assert seller.blocks["aws"] == {**wanted, "address": "public", "network": "auto"}, "as a run file's block is"
    assert Options.of(wanted).disk is not None, "as the provider reads it"
    assert seller.blocks.get("local", {}) == {}


def test_all_mistakes_in_keys_of_a_block_are_told_at_once_as_a_run_files_are(mgpu: Mgpu, seller: Seller):
    wrong = ("aws.subnet_ids=[1, 2]", "aws.profile=on", "aws.acount=1", "aws.disk.iops=5", "aws.network=", "local.x=*a")
    error = mgpu(*(word for each in wrong for word in ("--set", each))).exception
    assert isinstance(error, InputError)
    assert error.what == "--set: 7 mistakes"
    assert {line.rpartition(" (did you")[0] or line for line in error.why.splitlines()} >= {
        '--set: aws.subnet_ids[0]: text is needed, and YAML reads `1` as a number: write it in quotes, "1"',
        '--set: aws.profile: text is needed, and YAML reads `on` as yes or no: write it in quotes, "on"',
        "--set: aws.acount: unknown key",
        "--set: aws.network: has no value: give one, or leave the key out",
    }
    assert "--set: aws.acount: unknown key (did you mean `account`?)" in error.why
    assert "run file" not in str(error)
    assert seller.blocks == {}


@pytest.mark.parametrize("key", ["nodes=2", "aws=1", "gcp.zone=a", "local.python=python3"])
def test_a_key_of_no_block_that_is_asked_is_refused(mgpu: Mgpu, seller: Seller, key: str):
    error = mgpu("aws", "--set", key).exception
    assert f"--set {key}: no key of a block of aws" in str(error)
    assert seller.blocks == {}


def test_a_run_files_block_is_given_to_its_provider_and_set_beats_it(mgpu: Mgpu, seller: Seller, tmp_path: Path):
    (tmp_path / "train.py").touch()
    (tmp_path / "a.yaml").write_text(PLAN + "aws: {account: '123456789012', network: plain}\n")
    done = mgpu("aws", str(tmp_path / "a.yaml"), "--set", "aws.network=auto")
    assert done.exception is None
    assert seller.blocks == {"aws": {**seller.blocks["aws"], "account": "123456789012", "network": "auto"}}
    assert {row.split()[1] for row in rows(done)} > {"p4d.24xlarge"}, "what it asks for is the plan's"


def test_a_run_file_for_another_provider_is_refused(mgpu: Mgpu, seller: Seller, tmp_path: Path):
    (tmp_path / "train.py").touch()
    (tmp_path / "a.yaml").write_text(PLAN)
    error = mgpu("local", str(tmp_path / "a.yaml")).exception
    assert f"`mgpu offers aws {tmp_path / 'a.yaml'}`" in str(error)
    assert seller.blocks == {}


PLAN = (
    "name: a\nprovider: aws\ngpus_per_node: 8\ngpu: [A100-40GB]\nmarket: spot\nmax_price_usd_per_hour: 30\n"
    "max_hours: 1\ncommand: [train.py]\ncheckpoint: none\nregions: [us-east-1, us-west-2]\n"
)


def test_a_plan_says_how_old_its_prices_are_and_where_none_are_known(seller: Seller, tmp_path: Path):
    (tmp_path / "train.py").touch()
    (tmp_path / "mgpu.yaml").write_text(PLAN)
    done = CliRunner().invoke(cli, ["plan", str(tmp_path / "mgpu.yaml")], standalone_mode=False)
    assert done.exception is None
    assert "prices of 2026-01-19" in done.stderr
    assert "no prices are known in us-west-2" in done.stderr
    row = next(line for line in done.stdout.splitlines() if "p4d.24xlarge" in line)
    assert row.count("< $21.96") == 2, "no spot price is known, and it is not shown as one"


def test_a_long_list_is_cut_and_says_so(mgpu: Mgpu, seller: Seller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shipped = snapshots.current(Options())
    region = shipped.regions["us-east-1"]
    many = shipped.model_copy(update={"regions": {f"xx-{number}": region for number in range(12)}})
    monkeypatch.setattr(snapshots, "current", lambda _: many)
    done = mgpu("aws", "--market", "on-demand")
    assert len(rows(done)) == 300
    more = len(json.loads(mgpu("aws", "--market", "on-demand", "--json").stdout)["offers"]) - 300
    assert more > 300
    assert f"and {more} more: filter with" in done.stdout
    (tmp_path / "train.py").touch()
    (tmp_path / "mgpu.yaml").write_text(PLAN.replace("regions: [us-east-1, us-west-2]\n", ""))
    planned = CliRunner().invoke(cli, ["plan", str(tmp_path / "mgpu.yaml")], standalone_mode=False)
    lines = [line for line in planned.stdout.splitlines() if "p4d.24xlarge" in line]
    assert (len(lines), planned.stdout.splitlines()[-1]) == (20, "and 28 more: `mgpu plan --json`")
