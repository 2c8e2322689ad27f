"""Files that a run file names for a cluster are found by every process, wherever it works."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgpu.errors import InputError, InvalidRequest
from mgpu.plan import rank
from mgpu.providers import registry
from mgpu.providers.aws.provider import AwsProvider
from mgpu.providers.hosts.options import HostsOptions
from mgpu.providers.kubernetes.options import KubernetesOptions
from mgpu.providers.local import interpreter
from mgpu.providers.slurm.login import Login
from mgpu.providers.slurm.options import SlurmOptions
from mgpu.spec.load import load

IMAGE = f"image: {{reference: 'r.test/t@sha256:{'0' * 64}'}}\n"


@pytest.mark.parametrize(
    ("provider", "key", "block", "more", "at_home"),
    [
        ("slurm", "ssh_config", "login: me@c, ", "", "~/cluster"),
        ("kubernetes", "kubeconfig", "", IMAGE, Path.home() / "cluster"),
    ],
)
def test_they_are_named_from_the_run_files_folder(provider, key, block, more, at_home, tmp_path: Path, monkeypatch):
    """What they are named is part of what a token asks for, and a fleet of another name is another one: each stays what
    it was in stacks of before."""
    text = "name: a\nmax_hours: 1\nmax_price_usd_per_hour: 1\ncommand: [t.py]\ncheckpoint: none\n"
    folder = tmp_path / "runs"
    folder.mkdir()
    (folder / "t.py").touch()
    monkeypatch.chdir(tmp_path)
    for said, found in (("cluster", folder / "cluster"), ("~/cluster", at_home)):
        (folder / "a.yaml").write_text(f"{text}{more}provider: {provider}\n{provider}: {{{block}{key}: {said}}}\n")
        for path in (Path("runs", "a.yaml"), folder / "a.yaml"):
            assert rank.requirements(load(path)).provider_options[key] == str(found)


def test_one_of_sshs_below_the_users_home_is_that_of_whoever_asks(monkeypatch):
    monkeypatch.setenv("HOME", "/home/other")
    argv = Login(SlurmOptions.of({"login": "me@c", "ssh_config": "~/cluster"}).in_folder(Path("/runs"))).ssh()
    assert argv[:3] == ("ssh", "-F", "/home/other/cluster")


NOBODYS = "~no-such-user/x"


@pytest.mark.parametrize("options", [KubernetesOptions, HostsOptions, SlurmOptions], ids=lambda kind: kind.block)
def test_one_in_the_home_of_a_user_that_there_is_not_is_a_file_that_is_not_there(options, monkeypatch):
    keys = {"kubernetes": "kubeconfig", "hosts": "inventory", "slurm": "ssh_config"}
    more = {"slurm": {"login": "me@c"}}.get(options.block, {})
    found = options.of({keys[options.block]: NOBODYS, **more}).in_folder(Path("/runs"))
    assert str(getattr(found, keys[options.block])).endswith(NOBODYS)
    monkeypatch.setenv("KUBECONFIG", NOBODYS)
    monkeypatch.setenv("AWS_CONFIG_FILE", NOBODYS)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", NOBODYS)
    registry.get(options.block, found.flat()).configured()
    AwsProvider().configured()


def test_what_nobody_finds_is_said_as_it_was_written():
    with pytest.raises(InputError, match="no-such-user"):
        HostsOptions.of({"inventory": NOBODYS}).hosts()
    with pytest.raises(InvalidRequest, match="no-such-user"):
        interpreter.find(NOBODYS)
