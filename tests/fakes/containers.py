"""A node with an engine, and what a run does to it: over SSH, as the operator would."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from mgpu_train.agent.host.layout import LEASE, RunLayout
from mgpu_train.config import Job, Secrets
from waiting import until

from mgpu.errors import RemoteError
from mgpu.events import Note
from mgpu.iac.outputs import NodeOutput, StackOutput
from mgpu.remote.nodeset import NodeSet
from mgpu.run.job.images import ImageToRun
from mgpu.run.nodes import agent_client, container_setup, python_setup
from mgpu.spec.model import RunSpec

RUN, OWNER = "run-1", "me-1"
BASE = {"name": "a", "provider": "aws", "max_hours": 1, "max_price_usd_per_hour": 1, "launcher": "python"}
WANTED = {"owner": OWNER, "seconds": 60, "stop_s": 1, "run": RUN}  # of `container.py`, where a test calls it itself


@dataclass
class Machine:
    """A node with an engine, and what a run does to it."""

    engine: object
    server: object
    node: object
    timeouts: object
    log: Path  # a line for each call of `docker`
    events: list = field(default_factory=list)

    @property
    def nodes(self) -> NodeSet:
        return NodeSet([self.node])

    @property
    def home(self) -> Path:
        return self.server.home

    @property
    def work(self) -> Path:
        return self.home / RunLayout(RUN).work

    def fleet(self, owner: str = OWNER) -> StackOutput:
        target = self.node.target
        node = NodeOutput(rank=0, id="i", address="127.0.0.1", user="trainer", host_key=target.host_key)
        return StackOutput(
            version=1, fleet="f-1", owner=owner, provider="aws", private_key_file="/k", nodes=(node,)
        )  # fmt: skip

    def up(self, image: ImageToRun | str, run: str = RUN, *, owner: str = OWNER, times=None, send=True, **spec) -> None:
        if send:
            agent_client.send_library(self.nodes)
        program = {} if "train" in spec else {"command": ["prog.py"]}
        made = RunSpec.model_validate(BASE | program | spec)
        image = ImageToRun(image) if isinstance(image, str) else image
        times = self.timeouts.model_copy(update=times or {})
        container_setup.up(self.nodes, image, made, self.fleet(owner), run, times, self.events.append)

    def equip(self, run: str = RUN, *, owner: str = OWNER) -> None:
        """As a run without an image makes the node ready."""
        agent_client.send_library(self.nodes)
        spec = RunSpec.model_validate(BASE | {"command": ["prog.py"]})
        python_setup.equip(
            self.nodes, spec, self.timeouts, self.events.append, agent_client.claim(run, self.fleet(owner))
        )

    def refused(self, image: ImageToRun | str, what: str, **more) -> RemoteError:
        with pytest.raises(RemoteError, match=what) as caught:
            self.up(image, **more)
        assert caught.value.next_step
        return caught.value

    def down(self, run: str = RUN, **times) -> int:
        return container_setup.down(self.nodes, self.fleet(), run, self.timeouts.model_copy(update=times))

    def ids(self, owner: str = OWNER) -> list[str]:
        filters = [f"--filter=label=dev.mgpu.{key}={value}" for key, value in (("owner", owner), ("home", self.home))]
        return self.engine.docker("ps", "--all", "--quiet", "--no-trunc", *filters).stdout.split()

    @property
    def container(self):
        (one,) = self.ids()
        return json.loads(self.engine.docker("inspect", one).stdout)[0]

    def inside(self, *argv: str, check: bool = True):
        return self.engine.docker("exec", self.container["Id"], *argv, check=check)

    def until(self, ready: Callable[[], object], seconds: float = 60) -> None:
        """Waits for it to be true; what it reads may not be there yet."""

        def there() -> object:
            with suppress(FileNotFoundError):
                return ready()
            return None

        until(there, seconds, lambda: self.calls)

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    @property
    def pulls(self) -> int:
        """How often `docker pull` was called."""
        return sum(call.startswith("pull") for call in self.calls)

    @property
    def noted(self) -> str:
        return "\n".join(event.text for event in self.events if isinstance(event, Note))

    # --- the agent

    def start(self, program: str, run: str = RUN, **changes) -> None:
        work = self.home / RunLayout(run).work
        work.mkdir(parents=True, exist_ok=True)
        (work / "prog.py").write_text(program)
        job = Job.model_validate(
            {
                "run_id": run, "attempt": 1, "writer": "w", "node_rank": 0, "nodes": 1, "processes_per_node": 1,
                "master_addr": "127.0.0.1", "master_port": 29999, "launcher": "python", "command": ["prog.py"],
                "workdir": str(RunLayout(run).work), "lease_file": str(LEASE), "timeouts": self.timeouts,
            } | changes
        )  # fmt: skip
        agent_client.send_job(self.node, job)
        agent_client.start(self.node, run, Secrets(env={"TOKEN": "canary"}), self.timeouts)

    @property
    def status(self) -> dict:
        return agent_client.status(self.node, RUN, self.timeouts)

    @property
    def said(self) -> str:
        return self.node.read(str(RunLayout(RUN).log)).decode()


def script(home: Path) -> Path:
    """`container.py` in a home that the library was sent to."""
    return home / agent_client.library()[1] / "mgpu_train" / "agent" / "host" / "container.py"
