"""What every provider promises (`mgpu.testing.provider`), asked of mgpu's own.

A provider joins by an entry in HARNESSES: how to make one whose world is this test's alone, what to ask it for, and how
to kill one of its machines behind its back. A test holds the registry, the modules and this table together.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from fakes.aws import FakeAws
from fakes.hosts import Rack
from fakes.kube.cluster import IMAGE, Namespace
from fakes.slurm import Cluster

import mgpu.providers
from mgpu.errors import InputError
from mgpu.providers import registry
from mgpu.providers.kubernetes.findings import roles
from mgpu.providers.local import bill, control

pytest.register_assert_rewrite("mgpu.testing.provider")
from mgpu.testing.provider import *  # noqa: E402, F403  it is written anew when it is imported
from mgpu.testing.provider import Harness, end_all  # noqa: E402


def local_harness(_: pytest.FixtureRequest, folder: Path) -> Harness:
    from mgpu.providers.local.provider import LocalProvider

    def kill(name: str) -> None:
        node = next(node for node in bill.read(folder).alive if node.start.instance == name)
        os.kill(node.start.pid, signal.SIGKILL)

    return Harness(
        make=lambda: LocalProvider(root=folder),
        kill=kill,
        billed=lambda: [node.start.instance for node in bill.read(folder).alive],
        sold_out=lambda: control.no_capacity(folder, 3600),
    )


def aws_harness(request: pytest.FixtureRequest, folder: Path) -> Harness:
    from mgpu.providers.aws.provider import AwsProvider

    aws: FakeAws = request.getfixturevalue("aws")
    aws.base("us-east-1")
    aws.quick()  # single calls, whose effect is looked at at once

    def billed() -> list[str]:
        return [name for name in aws.alive() if name.startswith("i-")]

    return Harness(
        make=lambda: AwsProvider(aws.options),
        kill=aws.kill,
        billed=billed,
        needs={"gpu": ("A10G",), "gpus_per_node": 1, "regions": ("us-east-1",)},
        answers=False,
        sold_out=lambda: aws.capacity(1) if billed() else aws.fewer(),  # of a new gang a part comes
    )


def hosts_harness(request: pytest.FixtureRequest, folder: Path) -> Harness:
    rack: Rack = request.getfixturevalue("rack")
    return Harness(
        make=lambda: rack.provider(price_usd_per_hour="0.01"),
        kill=rack.kill_watch,
        billed=lambda: [machine.id for machine in rack.machines if machine.id],
        needs={"market": "on-demand"},
    )


def slurm_harness(request: pytest.FixtureRequest, folder: Path) -> Harness:
    from mgpu.providers.slurm.provider import SlurmProvider

    cluster: Cluster = request.getfixturevalue("slurm")
    options = {**cluster.options, "work_folder": str(folder)}

    def kill(name: str) -> None:
        token, rank = name.split("-")
        (gang,) = folder.glob(f"gangs/{token}*")
        os.kill(json.loads((gang / f"node-{rank}.json").read_text())["pid"], signal.SIGKILL)

    def billed() -> list[str]:
        handles = [handle for owner in ("o-1", "o-2") for handle in SlurmProvider(options).list_owned(owner)]
        return [name for handle in handles for name in handle.ids]

    return Harness(
        make=lambda: SlurmProvider(options),
        kill=kill,
        billed=billed,
        needs={"market": "on-demand", "provider_options": options},
        world=str(folder),
    )


def kubernetes_harness(request: pytest.FixtureRequest, folder: Path) -> Harness:
    from mgpu.providers.kubernetes.manifest import INDEX, TOKEN
    from mgpu.providers.kubernetes.provider import KubernetesProvider

    kube: Namespace = request.getfixturevalue("kube")
    kube.grant(yaml.safe_dump_all(roles(kube.name)))
    options = {"kubeconfig": str(kube.kubeconfig), "price_usd_per_hour": "0.05", "notice_s": "2"}

    def pods() -> dict[str, str]:
        about = [each["metadata"] for each in kube.pods()]
        return {f"{each['labels'][TOKEN][:10]}-{each['labels'][INDEX]}": each["name"] for each in about}

    def kill(name: str) -> None:
        process = kube.process(pods()[name])
        assert process is not None
        process.send(signal.SIGKILL)

    return Harness(
        make=lambda: KubernetesProvider(options),
        kill=kill,
        billed=lambda: [name for name, pod in pods().items() if kube.process(pod)],
        needs={"market": "on-demand", "provider_options": options},
        world=kube.name,
        answers=False,
        image=IMAGE,
    )


HARNESSES: dict[str, Callable[[pytest.FixtureRequest, Path], Harness]] = {
    "local": local_harness,
    "aws": aws_harness,
    "hosts": hosts_harness,
    "slurm": slurm_harness,
    "kubernetes": kubernetes_harness,
}


DRAWN = pytest.mark.drawn("providers x what is asked of them", "mgpu/providers", "mgpu/testing")


@pytest.fixture(params=[pytest.param(name, marks=DRAWN) for name in registry.names()])
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    harness = HARNESSES[request.param](request, tmp_path / "provider")
    yield harness
    if harness.billed():
        end_all(harness)


def test_registry_modules_and_this_suite_agree():
    folder = Path(mgpu.providers.__file__).parent
    modules = {p.stem for p in folder.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert (
        modules - {"__init__", "base", "keeper", "rate_limit", "registry", "shipped", "start"}
        == set(registry.names())
        == set(HARNESSES)
    )


@pytest.mark.parametrize("name", registry.names())
def test_the_registry_gives_what_it_names(name: str):
    assert registry.get(name).name == name


def test_an_unknown_provider_is_refused_with_the_nearest_and_all_names():
    with pytest.raises(InputError) as caught:
        registry.get("locale")
    assert "'local'" in caught.value.why
    assert all(name in caught.value.next_step for name in registry.names())
