"""From a run file to what every node is told: defaults filled in, secrets read, `job.json` made. Touches no machine."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mgpu_train import launchers
from mgpu_train.agent.host.layout import LEASE, NOTICE, RunLayout
from mgpu_train.config import CheckpointTarget, Job, Resume, Secrets, Share, TrainConfig
from mgpu_train.strategies import entry as strategies
from mgpu_train.tasks import entry as tasks
from mgpu_train.timeouts import Timeouts

from mgpu import paths
from mgpu.errors import ProviderError
from mgpu.events import Emit, Warned
from mgpu.iac.outputs import StackOutput
from mgpu.providers.base import Provider
from mgpu.run.job.on_sale import sellers
from mgpu.run.job.stack_output import provider_for, provider_of
from mgpu.run.job.store_credentials import StoreKeys
from mgpu.spec import environment
from mgpu.spec.model import DEFAULT_EVERY_STEPS, Checkpoint, RunSpec

EMULATED = "MGPU_EMULATED_GPUS"  # set where machines only say that they have GPUs, as in the demo of AWS
QUIET_S = 7200.0  # a program of the user's own


@dataclass(frozen=True)
class Request:
    """A run as it will be sent: one `Job` a node differs from the next only in `node_rank`."""

    run_id: str
    spec: RunSpec
    base: Path  # the run file's folder: what `code.workdir` is relative to
    checkpoint: CheckpointTarget | None
    timeouts: Timeouts
    code_folder: str = ""  # on the node, where the code is in the image; empty: it is sent

    @property
    def workdir(self) -> Path | None:
        """The user's folder that is sent."""
        if not self.spec.own_code or self.code_folder:
            return None
        return (self.base / (self.spec.code.workdir if self.spec.code else ".")).resolve()

    @property
    def folders(self) -> tuple[str, ...]:
        """Stores of the run that are folders of the node."""
        urls = [self.checkpoint.to] if self.checkpoint else []
        urls += [item.source for item in self.spec.data]
        return tuple(url.removeprefix("file://") for url in urls if url.startswith("file://"))

    def jobs(
        self,
        fleet: StackOutput,
        *,
        attempt: int,
        writer: str,
        ports: Sequence[int],
        resume: Resume | None,
        share: Share | None = None,
    ) -> tuple[Job, ...]:
        """One job a node, in rank order. `ports` are free on node 0: for the launchers, the agents
        and what is measured before; `share`: what the run has of each node."""
        spec, provider = self.spec, provider_of(fleet)
        addresses = tuple(node.private_address or node.address for node in fleet.nodes)
        notices = provider.capabilities.notices if provider else "file"
        return tuple(
            Job(
                run_id=self.run_id,
                attempt=attempt,
                writer=writer,
                node_rank=node.rank,
                nodes=len(fleet.nodes),
                processes_per_node=spec.processes,
                gpus=_gpus(spec.gpus_per_node if share else max(spec.gpus_per_node, fleet.gpus_per_node)),
                share=share,
                master_addr=addresses[0],
                master_port=ports[0],
                addresses=addresses,
                peer_port=ports[1] if len(fleet.nodes) > 1 else None,
                preflight=spec.preflight,
                preflight_port=ports[2],
                # trials start their ranks themselves, once a node
                launcher=launchers.PYTHON if spec.trials else launchers.installed().found[spec.launcher],
                train=_told(spec),
                command=spec.command,
                trials=spec.trials,
                env=spec.env,
                secrets=spec.secrets,
                workdir=(self.code_folder or str(RunLayout(self.run_id).work)) if spec.own_code else None,
                requirements=spec.code.requirements if spec.code else None,
                data=spec.data,
                setup=spec.setup,
                outputs=spec.outputs,
                checkpoint=self.checkpoint,
                resume=resume,
                lease_file=str(LEASE),
                notices=notices,
                notice_file=str(NOTICE),
                timeouts=self.timeouts,
            )
            for node in fleet.nodes
        )


def _gpus(wanted: int) -> int:
    """How many GPUs a node has to have: what was rented, or is asked for. Emulated ones are demanded of nobody."""
    return 0 if os.environ.get(EMULATED) else wanted


def _told(spec: RunSpec) -> TrainConfig | None:
    """`train:` as nodes are told: they have no entry points, so what packages bring goes by its import path."""
    if spec.train is None:
        return None
    paths = {"task": tasks.told(spec.train.task), "strategy": strategies.told(spec.train.strategy)}
    return spec.train.model_copy(update=paths)


def resolve(spec: RunSpec, run_id: str, base: Path, *, store: str | None = None, timeouts: Timeouts) -> Request:
    """Fills in the defaults that depend on the provider. `store` is the stack's own default for `checkpoint.to`."""
    return Request(run_id, spec, base, _target(spec, store), _timeouts(spec, timeouts))


def _timeouts(spec: RunSpec, timeouts: Timeouts) -> Timeouts:
    """How long the program may be quiet: what MGPU_TIMEOUTS says, else the run file, else what suits its kind.

    The bundled trainer says often where it is. Of another program a line an hour is all that can be asked.
    """
    given = spec.timeouts
    minutes = {
        "building_s": given.building_minutes,
        "first_step_s": given.first_step_minutes,
        "stall_s": given.training_minutes,
        "validation_s": given.validation_minutes,
        "save_s": given.saving_minutes,
        "finishing_s": given.finishing_minutes,
    }
    usual_s = None if spec.train else QUIET_S
    changes = {name: usual_s if value is None else 60 * value for name, value in minutes.items()}
    left = {name: s for name, s in changes.items() if s is not None and name not in timeouts.model_fields_set}
    return timeouts.model_copy(update=left)


def _target(spec: RunSpec, store: str | None) -> CheckpointTarget | None:
    if not isinstance(spec.checkpoint, Checkpoint):
        return None
    given = spec.checkpoint
    every_steps = given.every_steps
    if spec.train and not (every_steps or given.every_minutes):
        every_steps = DEFAULT_EVERY_STEPS
    return CheckpointTarget(
        # `prune` asks what it leaves out
        **given.model_dump(exclude={"to", "every_steps", "writers"}, exclude_unset=True),
        to=(given.to or store or default_store()).rstrip("/"),
        every_steps=every_steps,
        writers=given.writers or ("all" if spec.train else "rank0"),
    )


def default_store() -> str:
    """Where checkpoints of provider local go when the run file names no place: a folder of this user."""
    return f"file://{paths.data_dir() / 'checkpoints'}"


def store_keys(request: Request, environ: Mapping[str, str], provider: Provider | None) -> StoreKeys:
    """What opens the run's stores on the machines of this provider; None: machines that are not mgpu's."""
    writes = [f"{request.checkpoint.to}/{request.run_id}"] if request.checkpoint else []
    return StoreKeys(
        request.run_id, environ, provider, reads=[item.source for item in request.spec.data], writes=writes
    )


def require_secrets(request: Request, environ: Mapping[str, str], provider: Provider | None) -> None:
    """Looks whether `secrets_of` could answer; gives no rights yet. Raises what `secrets_of` raises."""
    environment.values(request.spec.secrets, "secrets", environ)
    store_keys(request, environ, provider).require()


def require_all_secrets(request: Request, environ: Mapping[str, str], emit: Emit) -> None:
    """As `require_secrets`, for the machines of each provider that the run file names. Of several, one that cannot be
    asked is told."""
    names = sellers(request.spec)
    for name in names:
        try:
            require_secrets(request, environ, provider_for(request.spec.of(name)))
        except ProviderError as error:
            if len(names) == 1:
                raise
            emit(Warned(f"{name}: whether its machines get at the store is not known: {error.what}"))


def env_secrets(request: Request, environ: Mapping[str, str]) -> Secrets:
    """The values of the run's secrets alone. Raises InputError: one that the run file names is not set."""
    return Secrets(env=environment.values(request.spec.secrets, "secrets", environ))


def secrets_of(request: Request, environ: Mapping[str, str], provider: Provider | None) -> Secrets:
    """The values of the run's secrets, from the operator's environment, and what opens the store to its nodes.

    Raises:
        InputError: a secret that the run file names is not set, all of them named; the store cannot be opened to nodes.
        ProviderError: the provider cannot give the machines their rights.
    """
    return env_secrets(request, environ).model_copy(update={"store": store_keys(request, environ, provider).now()})


def build_secrets(spec: RunSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """The values of the secrets that building the image takes, from the operator's environment; no node gets them.

    Raises:
        InputError: one of them is not set; all of these are named.
    """
    return environment.values(spec.image.secrets if spec.image else (), "image.secrets", environ)


def writer_token(run_id: str, attempt: int) -> str:
    """A token that no other writer of this run's commit log has."""
    return hashlib.sha256(f"{run_id}/{attempt}/{os.urandom(16).hex()}".encode()).hexdigest()[:24]
