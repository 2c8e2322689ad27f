"""What the machines of a fleet are made of, asked of themselves: can they run the run's image, or its program?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mgpu_train.timeouts import Timeouts

from mgpu.errors import InputError, RemoteError
from mgpu.iac.outputs import StackOutput
from mgpu.image import compat
from mgpu.providers.base import Finding
from mgpu.remote.node import Node
from mgpu.remote.nodeset import NodeSet
from mgpu.run.job.stack_output import targets
from mgpu.run.nodes import agent_client, python_setup
from mgpu.run.nodes.container_setup import docker_cure
from mgpu.run.record.record import Record
from mgpu.spec.provider import starts_from_image

_GIB = 2**30


def findings(record: Record, timeouts: Timeouts) -> tuple[Finding, ...]:
    """One line a subject and node; what trains there is not disturbed.

    Raises:
        InputError: the run has no machines.
        RemoteError: none of them answers.
    """
    if record.fleet is None or record.teardown == "confirmed":
        raise InputError(f"run {record.run_id} has no machines", "", "See `mgpu ls`.")
    fleet = record.fleet_output()
    with NodeSet.reach(targets(fleet), Path(fleet.private_key_file).expanduser(), timeouts) as nodes:
        there = NodeSet([node for node in nodes.nodes if not node.closed])
        if not there.nodes:
            raise RemoteError(f"no node of run {record.run_id} answers over SSH", "", "See `mgpu status --live`.")
        agent_client.send_library(there)
        known = dict(zip((node.target.rank for node in there.nodes), there.each(_asker(fleet, timeouts)), strict=True))
    found = [of_node(rank, known.get(rank), record) for rank in range(len(fleet.nodes))]
    return tuple(line for lines in found for line in lines)


def of_node(rank: int, facts: Mapping[str, Any] | RemoteError | None, record: Record) -> tuple[Finding, ...]:
    """What its facts say of one node; None: it did not answer."""
    name = f"node {rank}"
    if facts is None or isinstance(facts, RemoteError):
        error = facts or RemoteError("no answer over SSH", "", "See `mgpu status --live`.")
        return (Finding.of(name, error),)
    fleet = record.fleet_output()
    return (_gpus(name, facts, fleet.gpus_per_node), _docker(name, facts, record), *_fit(name, facts, record))


def _asker(fleet: StackOutput, timeouts: Timeouts) -> Any:
    def ask(node: Node) -> Mapping[str, Any] | RemoteError:
        try:
            return agent_client.facts(node, python_setup.find(node, fleet.provider, timeouts), timeouts)
        except RemoteError as error:  # the others' word counts all the same
            return error

    return ask


def _gpus(name: str, facts: Mapping[str, Any], asked: int) -> Finding:
    subject, gpus = f"{name}: GPUs", facts.get("gpus") or []
    driver = f"driver {facts['driver']}" if facts.get("driver") else "no driver"
    if len(gpus) < asked:
        detail = f"{len(gpus)} of {asked}, {driver}: {facts.get('gpu_problem') or 'the others are not seen'}"
        cure = "Take a machine image with NVIDIA's driver; a GPU that has fallen off the bus needs another machine."
        return Finding(subject=subject, status="failed", detail=detail, cure=cure)
    if divided := [number for number, each in enumerate(gpus) if each.get("mig")]:
        names = ", ".join(map(str, divided))
        detail = f"{len(gpus)}, {driver}; in MIG mode, where a program sees one part of all of them: {names}"
        cure = "`sudo nvidia-smi -mig 0` on the machine; some GPUs need a reset or a reboot after it."
        return Finding(subject=subject, status="failed", detail=detail, cure=cure)
    if not gpus:
        return Finding(subject=subject, status="ok", detail=f"none, and none are asked for; {driver}")
    kinds = sorted({f"{each['name']} ({each.get('compute_capability') or 'capability unknown'})" for each in gpus})
    return Finding(subject=subject, status="ok", detail=f"{len(gpus)} x {', '.join(kinds)}, {driver}")


def _docker(name: str, facts: Mapping[str, Any], record: Record) -> Finding:
    subject, version, free = f"{name}: Docker", facts.get("docker"), facts.get("docker_free_bytes")
    if version is None:
        why = facts.get("docker_problem") or "none"
        if record.image is None or starts_from_image(record.provider):
            needless = "the node is one of its containers" if record.image else "the run has no image"
            return Finding(subject=subject, status="ok", detail=f"{why}; {needless}")
        return Finding(subject=subject, status="failed", detail=why, cure=docker_cure(record.provider))
    room = f", {free / _GIB:.0f} GiB free in {facts.get('docker_root')}" if free is not None else ""
    return Finding(subject=subject, status="ok", detail=f"version {version}{room}")


def _fit(name: str, facts: Mapping[str, Any], record: Record) -> tuple[Finding, ...]:
    """The table's verdict on the image, or, without one, on the machine's own PyTorch."""
    what, labels = ("image", record.image_labels) if record.image else ("PyTorch", _own_labels(facts))
    subject, driver = f"{name}: {what}", facts.get("driver")
    capabilities = sorted({each.get("compute_capability") for each in facts.get("gpus") or ()} - {None})
    problems = {
        str(each): each for gpu in capabilities or [None] for each in compat.check(labels, driver, gpu)
    }  # the same for each GPU
    if problems:
        return tuple(
            Finding(subject=subject, status="failed", detail=f"{each.what}: {each.why}", cure=each.next_step)
            for each in problems.values()
        )
    if compat.TORCH not in labels:
        return (_unknown(subject, bool(facts.get("gpus")), record),)
    detail = f"PyTorch {labels[compat.TORCH]}, CUDA {labels.get(compat.CUDA) or 'unknown'}: fits, as far as is known"
    return (Finding(subject=subject, status="ok", detail=detail),)


def _unknown(subject: str, gpus: bool, record: Record) -> Finding:
    if record.image is None:
        return Finding(subject=subject, status="ok", detail="none on this machine")
    if not gpus:
        return Finding(subject=subject, status="ok", detail="there are no GPUs that it would have to fit")
    detail = f"not known: the image has no label {compat.TORCH}, so nothing was compared"
    cure = f"Build it with labels {compat.TORCH} and {compat.CUDA}, as the trainer's Dockerfile does."
    return Finding(subject=subject, status="warning", detail=detail, cure=cure)


def _own_labels(facts: Mapping[str, Any]) -> dict[str, str]:
    """The machine's own PyTorch in the words of an image."""
    if facts.get("torch") is None:
        return {}
    return {compat.TORCH: facts["torch"], compat.CUDA: facts.get("cuda") or "cpu", compat.PYTHON: facts["python"]}
