"""What hosts are said to be: names of GPUs, offers by kind, who has which, and what is found missing of them."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from mgpu.errors import NoOffer, Transient
from mgpu.plan import rank
from mgpu.plan.model import Requirements
from mgpu.providers.hosts import machines, ssh
from mgpu.providers.hosts.options import Host

GPU = {"name": "NVIDIA GeForce RTX 4090", "memory_mib": "24564", "driver": "570.10"}


def facts(**changes: Any) -> dict[str, Any]:
    plain = {"held": None, "busy": None, "gpus": [GPU, GPU], "gpu_programs": 0, "vcpus": 32, "memory_gib": 125.5}
    more = {
        "disk_gib": 900,
        "python": "3.12",
        "now": 1000.0,
        "between": (990.0, 1003.0),
        "kills_at_logout": False,
        "unreached": [],
    }
    return {**plain, **more, **changes}


def needed(**changes: Any) -> Requirements:
    asked = {"provider": "hosts", "nodes": 2, "gpus_per_node": 2, "max_price_usd_per_hour": 9, "max_hours": 1}
    return Requirements.model_validate({**asked, **changes})


HOSTS = [Host(address=f"gpu{number}") for number in range(4)]


@pytest.mark.parametrize(
    ("name", "mib", "called"),
    [
        ("NVIDIA A100-SXM4-80GB", 81920, "A100-80GB"),
        ("NVIDIA A100-PCIE-40GB", 40960, "A100-40GB"),
        ("Tesla V100-SXM2-16GB", 16160, "V100-16GB"),
        ("NVIDIA H100 80GB HBM3", 81559, "H100-80GB"),
        ("NVIDIA H200", 143771, "H200"),
        ("NVIDIA GeForce RTX 4090", 24564, "RTX-4090"),
        ("NVIDIA L40S", 46068, "L40S"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 97887, "RTX-PRO-6000"),
        ("NVIDIA RTX 6000 Ada Generation", 49140, "RTX-6000-Ada"),
    ],
)
def test_gpus_are_named_as_run_files_name_them(name, mib, called):
    assert machines.gpu_name({"name": name, "memory_mib": str(mib)}) == called


def test_hosts_of_one_kind_and_price_are_one_offer():
    dear = Host(address="gpu9", price_usd_per_hour=1.5)
    found = [(HOSTS[0], facts()), (HOSTS[1], facts(vcpus=16)), (dear, facts()), (HOSTS[2], facts(gpus=[]))]
    offers = {offer.instance_type: offer for offer in machines.offers(needed(), found)}
    assert offers.keys() == {"2xRTX-4090", "2xRTX-4090-at-1.5", "cpu"}
    plain = offers["2xRTX-4090"]
    assert (plain.stock, plain.vcpus, plain.gpu, plain.gpus, plain.price_usd_per_hour) == (2, 16, "RTX-4090", 2, 0)
    assert offers["2xRTX-4090-at-1.5"].price_usd_per_hour == 1.5


def test_hosts_that_somebody_has_are_waited_for_and_where_there_are_too_few_the_refusal_says_why():
    held = {"by": "anna@desk", "user": "lab", "fleet": "llama", "since": 1.0, "hard_cap_at": 86400.0}
    silent = Transient("host gpu2 does not answer", "Connection refused")
    other = {"user": None, "fleet": None, "since": None, "hard_cap_at": None}
    found = [
        (HOSTS[0], facts()),
        (HOSTS[1], facts(held=held)),
        (HOSTS[2], silent),
        (HOSTS[3], facts(gpu_programs=1)),
        (Host(address="gpu4"), facts(busy=other)),
    ]
    assert rank.plan(needed(nodes=4), machines.offers(needed(nodes=4), found)).best.stock is None
    with pytest.raises(NoOffer) as caught:
        rank.plan(needed(nodes=5), machines.offers(needed(nodes=5), found))
    why = caught.value.why
    assert "4 such hosts in the list, 5 needed" in why
    assert "gpu1 is held by anna@desk (fleet llama) since 1970-01-0" in why
    assert "gpu2 does not answer" in why
    assert "gpu3 has 1 program of somebody else's on its GPUs" in why
    assert "gpu4 is held by somebody (fleet unknown) since ?" in why
    assert "name more hosts" in caught.value.next_step
    assert rank.plan(needed(nodes=1), machines.offers(needed(nodes=1), found)).best.stock == 1


def test_findings_say_of_each_host_what_is_missing():
    bad = facts(python="3.9", disk_gib=3, gpus=[GPU], now=1103.0, kills_at_logout=True, unreached=[["10.0.0.9", 22]])
    silent = Transient("host gpu2 does not answer", "Connection refused", "Look whether it is up.")
    answers = zip(HOSTS, (facts(), bad, silent), strict=False)
    good, wrong, away = machines.findings(needed(), [*answers])
    assert (good.status, good.detail) == ("ok", "2xRTX-4090, driver 570.10, 32 CPUs, 125.5 GiB, free")
    assert wrong.status == "failed"
    for told in (
        "python3 is 3.9",
        "3 GiB to be had",
        "1 GPU, 2 needed",
        "100 s ahead",
        "KillUserProcesses",
        "10.0.0.9:22",
    ):
        assert told in wrong.detail
    for cure in ("python: /path", "folder: /scratch", "NTP", "KillExcludeUsers", "private_address"):
        assert cure in wrong.cure
    assert (away.status, away.detail) == ("failed", "host gpu2 does not answer: Connection refused")
    assert machines.findings(None, [(HOSTS[0], facts(disk_gib=5))])[0].status == "ok", "nothing is asked for"
    (late,) = machines.findings(None, [(HOSTS[0], facts(now=900.0))])
    assert "its clock is 90 s behind" in late.detail


def test_what_hosts_run_is_for_old_pythons_and_their_standard_library():
    tree = ast.parse(ssh.script(), feature_version=(3, 8))
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {name for name in imported if name.split(".")[0] in ("mgpu", "mgpu_train")}
