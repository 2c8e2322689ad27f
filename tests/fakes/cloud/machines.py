"""What the cloud's machines are: nodes of provider `local`, or, where no test logs in, lines on paper."""

from __future__ import annotations

import re
import shlex
import signal
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from mgpu.plan.model import Requirements
from mgpu.providers.base import FleetRequest, Handle
from mgpu.providers.local import bill, control
from mgpu.providers.local.nodes import Instance
from mgpu.providers.local.procs import marked
from mgpu.providers.local.provider import LocalProvider
from mgpu.testing.waiting import until

STATUS = {"pending": "starting", "running": "running", "stopping": "stopping", "terminated": "terminated"}


class Machines(Protocol):
    """Makes machines, tells how they are, and ends them."""

    def start(self, asked: Mapping[str, Any]) -> str:
        """A machine; its id."""
        ...

    def look(self, name: str) -> dict[str, Any]:
        """Its status, and while it runs how it is reached."""
        ...

    def end(self, name: str) -> None:
        """As its owner asks."""
        ...

    def take(self, name: str) -> None:
        """The cloud takes it, without a word."""
        ...

    def close(self) -> None:
        """Ends all of them."""
        ...


class Paper:
    """Machines that run nothing. They are up at the second look, and gone at the third."""

    def __init__(self) -> None:
        self._shown: dict[str, list[str]] = {}  # what the next looks show, the last one for ever
        self._why: dict[str, str] = {}

    def start(self, asked: Mapping[str, Any]) -> str:
        name = f"yd-{len(self._shown)}"
        self._shown[name] = ["starting", "running"]
        return name

    def look(self, name: str) -> dict[str, Any]:
        status, *later = self._shown[name]
        self._shown[name] = later or [status]
        reached = {"ip": "192.0.2.1", "port": 22, "user": "yard", "host_key": f"ssh-ed25519 {name}"}
        up = {"private_ip": "10.0.0.1", **reached} if status == "running" else {}
        return {"status": status, "reason": self._why.get(name, ""), **up}

    def end(self, name: str) -> None:
        if self._shown[name][-1] == "running":
            self._shown[name] = ["stopping", "stopping", "terminated"]
            self._why[name] = "deleted by its owner"

    def take(self, name: str) -> None:
        self._shown[name] = ["terminated"]
        self._why[name] = "reclaimed by the cloud"

    def close(self) -> None:
        pass


def _setting(asked: Mapping[str, Any], name: str) -> str:
    """One of the start script's, which is not run here: `emulated/test_start_script.py` runs it on machines."""
    (value,) = shlex.split(re.findall(rf"^{name}=(.*)$", asked["start_script"], re.MULTILINE)[0])
    return value


class Processes:
    """Nodes of provider `local`, in a folder of the cloud's own."""

    def __init__(self, folder: Path) -> None:
        self._local = LocalProvider(root=folder)
        self._handles: dict[str, Handle] = {}

    def start(self, asked: Mapping[str, Any]) -> str:
        request = FleetRequest(
            fleet="yard",
            generation=1,
            owner="yard",
            requirements=Requirements(provider="local", max_price_usd_per_hour=1, max_hours=1),
            ssh_public_key=_setting(asked, "authorized_key"),
            lease_s=float(_setting(asked, "lease_s")),
            hard_cap_s=asked["hard_cap_s"],
            ends_by=asked["ends_by"],
        )
        offer = self._local.offers(request.requirements).offers[0]
        handle = self._local.create(request, offer, uuid.uuid4().hex)
        self._handles[handle.ids[0]] = handle
        return handle.ids[0]

    def look(self, name: str) -> dict[str, Any]:
        node = self._local.describe(self._handles[name]).nodes[0]
        reached = {"ip": node.address, "port": node.port, "user": node.user, "host_key": node.host_key}
        return {"status": STATUS[node.phase], "reason": node.reason, "private_ip": node.private_address, **reached}

    def end(self, name: str) -> None:
        self._local.destroy(self._handles[name])

    def take(self, name: str) -> None:
        control.kill(self._instance(name))

    def notice(self, name: str, seconds: float) -> None:
        """The cloud takes it in so many seconds, and warns it now."""
        control.notice(self._instance(name), seconds)

    def pause(self, name: str) -> None:
        """It looks as if it ran, and answers nothing."""
        stopped: set[Any] = set()
        while fresh := set(marked().get(name, ())) - stopped:
            for process in fresh:
                process.send(signal.SIGSTOP)
            stopped |= fresh

    def close(self) -> None:
        for handle in self._handles.values():
            until(lambda handle=handle: self._local.destroy(handle))
        assert bill.read(self._local.root).alive == ()

    def _instance(self, name: str) -> Instance:
        return Instance(self._local.root, name)
