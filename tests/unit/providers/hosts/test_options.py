"""The block `hosts:` and the inventory: every mistake is told at once, with its line; files are found from anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mgpu.errors import InputError, SpecError
from mgpu.plan import rank
from mgpu.providers.hosts.options import Host, HostsOptions
from mgpu.spec.load import load, loads

RUN = {"name": "x", "provider": "hosts", "command": ["t.py"], "max_price_usd_per_hour": 1, "max_hours": 1}


def run_file(**block) -> str:
    return yaml.safe_dump({**RUN, "checkpoint": "none", "hosts": block})


def test_a_host_is_what_the_block_says_and_what_its_line_says_otherwise(tmp_path: Path):
    inventory = tmp_path / "hosts.txt"
    inventory.write_text(
        "# the rack\n\nanna@gpu2:2222  price_usd_per_hour=1.5 folder=/scratch  # new\n"
        "[fe80::1]:22 private_address=10.0.0.3\n"
    )
    options = HostsOptions(addresses=("gpu1",), inventory=str(inventory), python="/opt/py")
    first, second, third = options.hosts()
    assert first == Host(address="gpu1", python="/opt/py")
    assert (second.parts, second.price_usd_per_hour, second.folder) == (("anna", "gpu2", "2222"), 1.5, "/scratch")
    assert (third.parts, third.private_address, third.python) == (("", "fe80::1", "22"), "10.0.0.3", "/opt/py")


def test_all_mistakes_of_an_inventory_are_told_at_once(tmp_path: Path):
    inventory = tmp_path / "hosts.txt"
    inventory.write_text(
        "gpu1 price=3\ngpu2 fast\n-oProxyCommand=x\ngpu3 folder=scratch price_usd_per_hour=-1\ngpu1\ngpu1\n"
    )
    with pytest.raises(InputError) as caught:
        HostsOptions(inventory=str(inventory)).hosts()
    told = caught.value.what.replace(str(inventory), "hosts.txt").splitlines()
    assert [line.split(": ")[0] for line in told] == [f"hosts.txt:{number}" for number in (1, 2, 3, 4, 4, 6)]
    assert "there is no such key; there are folder, python, price_usd_per_hour, private_address" in told[0]
    assert "`fast` is not key=value" in told[1]
    assert "user@host:port" in told[2], "ssh would take it for an option"
    assert "given twice" in told[5]


def test_an_inventory_that_is_not_there_is_named_with_a_cure(tmp_path: Path):
    with pytest.raises(InputError) as caught:
        HostsOptions(inventory=str(tmp_path / "none")).hosts()
    assert str(tmp_path / "none") in caught.value.what
    assert "folder of the run file" in caught.value.next_step


@pytest.mark.parametrize(
    ("block", "more", "told"),
    [
        ({}, {}, "needs `addresses`, `inventory`, or both"),
        ({"addresses": ["gpu 1", "-x"]}, {}, "`gpu 1`: must be an SSH address"),
        ({"addresses": ["gpu1", "gpu1"]}, {}, "one is given twice"),
        ({"addresses": ["gpu1"]}, {"market": "spot"}, "hosts are on-demand"),
        ({"addresses": ["gpu1"]}, {"regions": ["here"]}, "hosts are in none"),
        ({"addresses": ["gpu1"], "folder": "scratch"}, {}, "an absolute path on the host, or ~/..."),
        ({"addresses": ["gpu1"], "python": "/x'y"}, {}, "an absolute path on the host, or python3"),
    ],
)
def test_what_a_run_file_cannot_say(block, more, told):
    text = yaml.safe_dump({**RUN, "checkpoint": "none", "hosts": block, **more})
    with pytest.raises(SpecError) as caught:
        loads(text, "mgpu.yaml")
    assert told in caught.value.why


def test_files_are_named_from_the_run_files_folder_whoever_reads_them(tmp_path: Path, monkeypatch):
    (tmp_path / "t.py").touch()
    (tmp_path / "mgpu.yaml").write_text(run_file(addresses="gpu1", inventory="hosts.txt", ssh_config="~/ssh"))
    monkeypatch.chdir("/")
    flat = rank.requirements(load(tmp_path / "mgpu.yaml")).provider_options
    assert flat["inventory"] == str(tmp_path / "hosts.txt")
    assert flat["ssh_config"] == str(Path.home() / "ssh")
    assert HostsOptions.of(flat).flat() == flat
    monkeypatch.chdir(tmp_path)
    assert rank.requirements(load(Path("mgpu.yaml"))).provider_options == flat, "no matter from where"
