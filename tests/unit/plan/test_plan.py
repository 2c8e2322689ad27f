from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from mgpu.errors import NoOffer
from mgpu.plan.model import Offer, Plan, Requirements
from mgpu.plan.rank import Rank, merged, plan, requirements, turns, up_to
from mgpu.spec.load import loads

WANTED = Requirements(
    provider="p",
    nodes=2,
    gpu=("A100-80GB", "A100-40GB"),
    gpus_per_node=8,
    processes_per_node=8,
    market="spot-then-on-demand",
    max_price_usd_per_hour=70,
    max_hours=12,
)


def wanted(**changes: Any) -> Requirements:
    return Requirements.model_validate(WANTED.model_dump() | changes)


def offer(**changes: Any) -> Offer:
    """An offer that meets WANTED, with changes."""
    good: dict[str, Any] = {
        "provider": "p",
        "instance_type": "big",
        "gpu": "A100-80GB",
        "gpus": 8,
        "market": "spot",
        "price_usd_per_hour": 10,
        "region": "r1",
        "fetched_at": 1000,
    }
    return Offer.model_validate(good | changes)


def refusal(needed: Requirements, *offers: Offer) -> NoOffer:
    with pytest.raises(NoOffer) as caught:
        plan(needed, offers)
    return caught.value


# --- what is computed in


def test_gpus_that_do_not_compute_in_fp8_are_put_aside_and_unknown_ones_stay():
    base = {
        "name": "x", "provider": "aws", "market": "spot", "gpus_per_node": 8, "max_price_usd_per_hour": 90,
        "max_hours": 1, "checkpoint": "none",
    }  # fmt: skip
    needed, other = (
        requirements(loads(yaml.safe_dump(base | {"train": {"strategy": "fsdp", "precision": each}}), "f"))
        for each in ("fp8", "bf16")
    )
    assert (needed.compute_capability, other.compute_capability) == (8.9, 0)
    names = ("A100-80GB", "L4", "h100-80gb", "Unheard-Of", "A10G", "B200")
    offers = [offer(provider="aws", gpu=name) for name in names]
    found = plan(needed, offers)
    assert [each.gpu for each in found.offers] == ["L4", "h100-80gb", "Unheard-Of", "B200"]
    assert [each.reason for each in found.refused] == [
        "A100-80GB has compute capability 8.0, and `train.precision` takes 8.9",
        "A10G has compute capability 8.6, and `train.precision` takes 8.9",
    ]
    assert len(plan(other, offers).offers) == len(names)
    assert "set `train.precision` to bf16" in refusal(needed, offers[0]).next_step


# --- near the run's stores


@pytest.mark.parametrize(
    ("far", "near", "first"),
    [(10.0, 10.4, "near"), (10.0, 10.6, "far"), (10.0, 10.0, "near"), (10.0, 9.0, "near")],
)
def test_machines_near_the_runs_stores_come_first_where_they_cost_a_few_percent_more_at_most(far, near, first):
    there = offer(region="far", price_usd_per_hour=far, near_stores=False)
    here = offer(region="near", price_usd_per_hour=near, near_stores=True)
    for offers in ([there, here], [here, there]):
        assert plan(WANTED, offers).best.region == first


def test_market_and_gpu_come_before_the_place():
    there = offer(region="far", near_stores=False)
    here = offer(region="near", market="on-demand", near_stores=True)
    smaller = offer(region="near", gpu="A100-40GB", near_stores=True)
    assert [each.region for each in plan(WANTED, [here, smaller, there]).offers] == ["far", "near", "near"]


def test_where_nobody_knows_the_places_of_the_stores_the_price_decides():
    cheap = offer(region="z", price_usd_per_hour=10)
    assert plan(WANTED, [offer(region="a", price_usd_per_hour=10.01), cheap]).best == cheap


def test_the_price_cap_is_of_machines_alone():
    near = offer(region="near", price_usd_per_hour=35, near_stores=True)
    far = offer(region="far", price_usd_per_hour=35, near_stores=False)
    assert len(plan(WANTED, [near, far]).offers) == 2


# --- what a provider says that cannot be used


def test_what_cannot_be_used_as_the_run_file_stands_is_set_aside_with_the_providers_reason():
    blocked = offer(price_usd_per_hour=1, obstacle={"reason": "needs a licence", "cure": "Set `licence`."})
    made = plan(WANTED, [blocked, offer(price_usd_per_hour=2)])
    assert made.best.price_usd_per_hour == 2
    assert [each.reason for each in made.refused] == ["needs a licence"]
    error = refusal(WANTED, blocked, offer(gpus=4))
    assert "needs a licence" in error.why
    assert error.next_step == "Set `licence`."


# --- requirements


@pytest.mark.parametrize(
    ("changes", "gib"),
    [
        ("", 18.6),  # 1.667e9 parameters of 12 bytes
        ("checkpoint: {writers: all}", 18.6),
        ("nodes: 2", 9.3),
        ("checkpoint: none", 0),
        ("command: [a.py]", 0),
        ("train: {task: x.y:Z}", 0),
        ("train: {tokens: t, strategy: fsdp, model: {preset: gpt2-124m}}", 1.4),  # 124e6, its vocabulary's among them
    ],
)
def test_a_machine_has_memory_for_what_a_save_copies(changes, gib):
    base = {
        "name": "x", "provider": "local", "max_price_usd_per_hour": 1, "max_hours": 1,
        "checkpoint": {"writers": "rank0"},
        "train": {"strategy": "fsdp", "options": {"model": {"layers": 16, "dim": 2940, "heads": 30}}},
    }  # fmt: skip
    given = yaml.safe_load(changes) or {}
    base |= {"checkpoint": {}} if "nodes" in given else {}
    if "command" in given:
        del base["train"]
    needed = requirements(loads(yaml.safe_dump(base | given), "f"))
    assert needed.memory_gib == gib
    small = offer(provider="local", gpu=None, gpus=0, market="on-demand", price_usd_per_hour=0.1, memory_gib=16)
    unknown, large = (small.model_copy(update={"memory_gib": size}) for size in (0, 32))
    offers = plan(needed, [small, unknown, large]).offers
    assert [each.memory_gib for each in offers] == [0, 32] if gib > 16 else [16, 0, 32]
    if gib > 16:
        error = refusal(needed, small)
        assert "has 16 GiB of memory, and a save copies 18.6 GiB into it" in error.why
        assert "`checkpoint: {writers: all}`" in error.next_step


def test_requirements_are_what_the_run_file_says_of_machines():
    spec = loads(
        """\
name: x
provider: aws
regions: us-east-1
nodes: 3
gpus_per_node: 8
gpu: H100
disk_gib: 500
market: spot
max_price_usd_per_hour: 70
max_hours: 12
lease_minutes: 30
command: [a.py]
checkpoint: none
aws: {subnet_ids: [subnet-1, subnet-2], security_group_id: sg-1}
""",
        "f",
    )
    assert requirements(spec) == Requirements(
        provider="aws",
        nodes=3,
        gpu=("H100",),
        gpus_per_node=8,
        processes_per_node=8,
        disk_gib=500,
        market="spot",
        regions=("us-east-1",),
        max_price_usd_per_hour=70,
        max_hours=12,
        lease_minutes=30,
        provider_options={
            "subnet_ids": "subnet-1,subnet-2",
            "security_group_id": "sg-1",
            "address": "public",
            "network": "auto",
        },
    )


def test_without_gpus_there_are_processes_and_no_options():
    text = "name: x\nprovider: local\nmax_price_usd_per_hour: 1\nmax_hours: 1\ncommand: [a.py]\n"
    assert requirements(loads(text, "f")).provider_options == {}
    one = requirements(loads(text, "f"))
    assert (one.gpus_per_node, one.processes_per_node, one.gpu) == (0, 1, ())
    four = requirements(loads(text + "processes_per_node: 4\nlocal: {}\n", "f"))
    assert (four.gpus_per_node, four.processes_per_node, four.provider_options) == (0, 4, {})


# --- the order


def test_spot_first_then_the_users_ranking_then_the_price():
    expected = [
        offer(price_usd_per_hour=20),
        offer(price_usd_per_hour=21),
        offer(price_usd_per_hour=5, gpu="A100-40GB"),
        offer(price_usd_per_hour=30, market="on-demand"),
        offer(price_usd_per_hour=6, gpu="A100-40GB", market="on-demand"),
    ]
    for seed in range(20):
        shuffled = random.Random(seed).sample(expected, len(expected))
        assert plan(WANTED, shuffled).offers == tuple(expected)


def test_equal_prices_have_one_order():
    offers = [offer(region=r, zone=z, instance_type=t) for r in ("r1", "r2") for z in (None, "za") for t in ("a", "b")]
    plans = {plan(WANTED, random.Random(seed).sample(offers, len(offers))).offers for seed in range(10)}
    assert plans == {tuple(offers)}


def test_without_a_ranking_the_cheapest_gpu_comes_first():
    dear, cheap = offer(gpu="B200", price_usd_per_hour=9), offer(gpu="T4", price_usd_per_hour=1)
    assert plan(wanted(gpu=()), [dear, cheap]).best == cheap


def test_gpu_names_are_compared_without_case():
    assert plan(WANTED, [offer(gpu="a100-80gb")]).best.gpu == "a100-80gb"


# --- what is set aside


@pytest.mark.parametrize(
    ("needed", "bad", "reason", "cure"),
    [
        (WANTED, {"provider": "q"}, "is of provider q", "`provider`"),
        (WANTED, {"gpus": 4}, "has 4 GPUs a machine, not 8", "`gpus_per_node`: 4"),
        (wanted(gpus_per_node=0, gpu=()), {"gpus": 1}, "has 1 GPU a machine, not 0", "`gpus_per_node`: 1"),
        (WANTED, {"gpu": "T4"}, "GPU is T4, not A100-80GB or A100-40GB", "`gpu`: T4"),
        (wanted(regions=("r2", "r3")), {}, "region is r1", "`regions`: r1"),
        (wanted(regions=("r2",)), {"region": "me@login"}, "region is me@login", "Leave `regions` out"),
        (wanted(market="spot"), {"market": "on-demand"}, "market is on-demand", "`market` to on-demand"),
        (wanted(market="on-demand"), {}, "market is spot", "`market` to spot or spot-then-on-demand"),
        (WANTED, {"stock": 1}, "only 1 to be had, 2 needed", "Ask for at most 1 `nodes`, allow more"),
        (WANTED, {"stock": 0}, "only 0 to be had, 2 needed", "Allow more"),
        (WANTED, {"price_usd_per_hour": 35.004}, "$70.01/h for all nodes, above the cap of $70.00/h", "to 70.01"),
    ],
)
def test_every_refusal_has_a_reason_and_a_cure(needed, bad, reason, cure):
    error = refusal(needed, offer(**bad))
    assert reason in error.why
    assert cure in error.next_step
    assert error.exit_code == 3


def test_a_plan_tells_what_it_set_aside():
    made = plan(WANTED, [offer(), offer(gpus=1), offer(price_usd_per_hour=99)])
    assert [each.reason.split()[0] for each in made.refused] == ["$198.00/h", "has"]
    assert made.offers == (offer(),)


def test_what_came_nearest_is_told_first():
    dear, dearest, small = offer(price_usd_per_hour=90), offer(price_usd_per_hour=99), offer(gpus=1)
    made = plan(WANTED, [offer(), small, dearest, dear])
    assert [each.offer for each in made.refused] == [dear, dearest, small]
    lines = refusal(WANTED, small, dearest, dear).why.splitlines()
    assert ["$180.00/h" in lines[0], "$198.00/h" in lines[1], "has 1 GPU" in lines[2]] == [True] * 3


def test_the_cap_is_for_all_nodes_together():
    # a peer's cap of $10 took $19/h: it was asked per machine
    assert "above the cap" in refusal(wanted(max_price_usd_per_hour=10), offer(price_usd_per_hour=9.5)).why
    made = plan(wanted(max_price_usd_per_hour=19), [offer(price_usd_per_hour=9.5)])
    assert (made.price_usd_per_hour, made.max_cost_usd) == (19, 19 * 12)


def test_a_price_that_changes_counts_with_the_most_that_it_may_be():
    made = plan(
        wanted(nodes=2, max_hours=12, max_price_usd_per_hour=70), [offer(price_usd_per_hour=9.8, most_usd_per_hour=35)]
    )
    assert (made.price_usd_per_hour, made.max_cost_usd) == (19.6, 840)


def test_a_price_at_the_cap_is_taken_whatever_binary_fractions_do():
    assert plan(wanted(nodes=3, max_price_usd_per_hour=0.3), [offer(price_usd_per_hour=0.1)]).best
    assert "above" in refusal(wanted(nodes=3, max_price_usd_per_hour=0.3), offer(price_usd_per_hour=0.10001)).why


def test_unknown_stock_is_no_refusal():
    assert plan(WANTED, [offer(stock=None)]).best
    assert plan(WANTED, [offer(stock=2)]).best


def test_the_cure_is_for_the_offer_that_came_nearest():
    error = refusal(WANTED, offer(gpus=1), offer(price_usd_per_hour=50), offer(price_usd_per_hour=40), offer(gpu="T4"))
    assert "`max_price_usd_per_hour` to 80.00" in error.next_step


def test_what_the_cure_says_is_enough():
    for seed in range(200):
        rng = random.Random(seed)
        price = round(rng.uniform(0.001, 99), rng.randint(0, 6))
        nodes = rng.randint(1, 7)
        error = refusal(wanted(nodes=nodes, max_price_usd_per_hour=1e-4), offer(price_usd_per_hour=price))
        said = float(re.findall(r"to ([0-9.]+),", error.next_step)[0])
        assert plan(wanted(nodes=nodes, max_price_usd_per_hour=said), [offer(price_usd_per_hour=price)]).best
        assert said <= price * nodes + 0.01


def test_nothing_on_sale_is_said_so_with_the_regions_that_were_asked_for():
    error = refusal(wanted(regions=("mars",)))
    assert "nothing of this kind on sale" in error.why
    asked = "2 machines with 8 GPUs each in mars, spot-then-on-demand"
    assert error.what == f"no offer of provider p meets the run file: {asked}"
    assert "`gpus_per_node`" in error.next_step


def test_with_nothing_on_sale_what_could_not_be_told_is_told():
    with pytest.raises(NoOffer) as caught:
        plan(WANTED, [], iter(["gpu1 does not answer"]))
    assert caught.value.why.splitlines() == ["It has nothing of this kind on sale.", "gpu1 does not answer"]
    cure = caught.value.next_step
    assert ("`mgpu check p`" in cure, "`gpu`" in cure, "`regions`" in cure) == (True, False, False)


def test_very_many_refusals_are_counted():
    lines = refusal(WANTED, *[offer(gpus=1)] * 100).why.splitlines()
    assert len(lines) == 13
    assert lines[-1] == "and 88 more"


# --- for any offers


def test_any_plan_keeps_its_promises():
    made = 0
    for seed in range(300):
        rng = random.Random(seed)
        offers = [
            offer(
                gpu=rng.choice(["A100-80GB", "A100-40GB", "T4"]),
                gpus=rng.choice([8, 8, 8, 4]),
                market=rng.choice(["spot", "on-demand"]),
                price_usd_per_hour=rng.uniform(0, 60),
                region=rng.choice(["r1", "r2", "r3"]),
                stock=rng.choice([None, 1, 2, 8]),
            )
            for _ in range(rng.randint(1, 12))
        ]
        needed = wanted(
            nodes=rng.randint(1, 4),
            market=rng.choice(["spot", "on-demand", "spot-then-on-demand"]),
            regions=rng.choice([(), ("r1",), ("r1", "r2")]),
            max_price_usd_per_hour=rng.uniform(1, 200),
        )
        try:
            found = plan(needed, offers)
        except NoOffer as error:
            assert error.why, seed  # noqa: PT017 - one of two allowed ends
            assert error.next_step, seed  # noqa: PT017
            continue
        made += 1
        keeps_its_promises(found, needed, offers)
    assert 50 < made < 300


def keeps_its_promises(found: Plan, needed: Requirements, offers: list[Offer]) -> None:
    assert sorted(map(str, (*found.offers, *(each.offer for each in found.refused)))) == sorted(map(str, offers))
    assert all(each.reason for each in found.refused)
    assert found.price_usd_per_hour <= needed.max_price_usd_per_hour * (1 + 1e-6)
    for each in found.offers:
        assert each.gpus == 8
        assert each.gpu in needed.gpu
        assert needed.market in (each.market, "spot-then-on-demand")
        assert not needed.regions or each.region in needed.regions
        assert each.stock is None or each.stock >= needed.nodes
    same_kind = [each for each in found.offers if (each.gpu, each.market) == (found.best.gpu, found.best.market)]
    assert found.best.price_usd_per_hour == min(each.price_usd_per_hour for each in same_kind)


def test_a_price_that_is_no_number_is_no_offer():
    for price in (float("nan"), -1):
        with pytest.raises(ValidationError):
            offer(price_usd_per_hour=price)
    assert "above the cap" in refusal(WANTED, offer(price_usd_per_hour=1e300)).why


# --- several providers


def of(name: str, *offers: Offer) -> Plan:
    needed = wanted(provider=name)
    return plan(needed, [each.model_copy(update={"provider": name}) for each in offers], [f"a note of {name}"])


def test_offers_of_several_providers_are_one_plan_in_one_order():
    one = of("one", offer(price_usd_per_hour=3), offer(price_usd_per_hour=1, market="on-demand"))
    two = of("two", offer(price_usd_per_hour=2), offer(price_usd_per_hour=1, gpu="A100-40GB"))
    both = merged([one, two], ["three: no answer"])
    assert [(each.provider, each.price_usd_per_hour) for each in both.offers] == [
        *(("two", 2), ("one", 3)),  # spot, the GPU that is liked best
        *(("two", 1), ("one", 1)),
    ]
    assert both.requirements.provider == "two"
    assert both.notes == ("one: a note of one", "two: a note of two", "three: no answer")


def test_a_reservation_that_ends_early_bounds_nothing_but_its_own_machines():
    reserved = {
        "id": "cr-1", "kind": "block", "prepaid": True, "state": "active", "instance_type": "big", "region": "r1",
        "zone": "z", "machines": 2, "free": 2, "begins_at": 0, "ends_at": 1000 + 7200, "machines_end_at": 1000 + 7200,
    }  # fmt: skip
    paid = of("one", offer(price_usd_per_hour=0, reservation=reserved))
    assert (paid.hours, paid.max_cost_usd) == (2, 0)
    both = merged([paid, of("two", offer(price_usd_per_hour=30))])
    assert both.best.provider == "one"
    assert (both.hours, both.max_cost_usd) == (12, 2 * 30 * 12), "the other one's machines live until `max_hours`"


def test_providers_take_turns_as_their_offers_rank_and_the_last_turn_of_each_is_open():
    one = of("one", offer(price_usd_per_hour=1), offer(price_usd_per_hour=2), offer(price_usd_per_hour=5))
    two = of("two", offer(price_usd_per_hour=3), offer(price_usd_per_hour=4))
    found = turns(merged([one, two]), ["one", "two"])
    assert [(each.provider, each.up_to and each.up_to.usd_per_hour) for each in found] == [
        *(("one", 3), ("two", None), ("one", None)),
    ]
    first, *_ = found
    assert first.up_to is not None
    assert [each.price_usd_per_hour for each in up_to(one, first.up_to).offers] == [1, 2]
    with pytest.raises(NoOffer, match="better than another"):
        up_to(one, Rank(on_demand=False, preference=0, usd_per_hour=0.5))
    assert Rank.of(json.loads(json.dumps(first.up_to))) == first.up_to


def test_equals_are_of_one_provider_after_the_other():
    """Clusters and hosts cost nothing where their block says nothing."""
    one = of("one", offer(price_usd_per_hour=0, region="a"), offer(price_usd_per_hour=0, region="z"))
    two = of("two", offer(price_usd_per_hour=0, region="m"))
    both = merged([one, two])
    assert [each.provider for each in both.offers] == ["one", "one", "two"]
    assert turns(both, ["one", "two"]) == [("one", None), ("two", None)]


def test_up_to_an_equal_of_who_is_named_later_and_before_one_of_who_is_named_first():
    """Prices change until a provider is asked: what has come to equal the other one's is of who is named first."""
    one = of("one", offer(price_usd_per_hour=0), offer(price_usd_per_hour=9))
    two = of("two", offer(price_usd_per_hour=3))
    now = of("one", offer(price_usd_per_hour=0), offer(price_usd_per_hour=3))
    for order, offers in ((["one", "two"], 2), (["two", "one"], 1)):
        first = turns(merged([one, two] if order[0] == "one" else [two, one]), order)[0]
        assert first.provider == "one"
        assert first.up_to is not None
        passed_on = Rank.of(json.loads(json.dumps(first.up_to)))
        assert len(up_to(now, passed_on).offers) == offers


def test_a_provider_alone_has_one_open_turn():
    assert turns(of("one", offer(), offer(price_usd_per_hour=20)), ["one"]) == [("one", None)]
