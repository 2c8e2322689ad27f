"""Every deadline of mgpu in one value (invariant I6). All fields are seconds; tests scale them."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field

VARIABLE = "MGPU_TIMEOUTS"


class Timeouts(BaseModel):
    """Deadlines, intervals and graces, in seconds. RUNNING's own deadline is the run file's `max_hours`."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")

    provision_s: float = Field(600, description="from the first create to all nodes ready")
    destroy_s: float = Field(300, description="until the provider says that every machine is terminated")
    engine_s: float = Field(120, description="for one call of the Pulumi engine, beyond what its resources take")
    describe_every_s: float = Field(0.5, description="between two looks at machines that are coming or going")
    listing_s: float = Field(
        0, description="after a request to a provider, until its listings show what was made; 0: the provider's own"
    )
    sold_out_s: float = Field(
        15, description="before machines that were sold out are asked for again; it doubles, to eight times as long"
    )
    connect_s: float = Field(60, description="until SSH to every node stands")
    ssh_banner_s: float = Field(15, description="for one SSH handshake")
    keepalive_s: float = Field(5, description="between SSH keep-alives; four unanswered ones end a connection")
    command_s: float = Field(60, description="for a short command on a node")
    sync_s: float = Field(1800, description="for code and config to reach the nodes")
    prepare_s: float = Field(1800, description="on the node: requirements installed, data fetched")
    gpus_s: float = Field(120, description="on the node: for a driver that still starts to show the GPUs")
    preflight_s: float = Field(
        180, description="on the node: for each part of what is measured of its machine before the program"
    )
    resume_s: float = Field(1800, description="on the node: the checkpoint to resume from, fetched and verified")
    rendezvous_s: float = Field(1800, description="for the launchers of all nodes to meet")
    first_step_s: float = Field(
        1800,
        description="before the first step, without a sign of progress on any node, until an attempt is hung",
    )
    building_s: float = Field(1800, description="... while the model is built, and loaded from a checkpoint")
    stall_s: float = Field(780, description="... while training")
    validation_s: float = Field(1800, description="... while validating")
    finishing_s: float = Field(600, description="... when all is done, until the ranks have ended")
    trial_s: float = Field(600, description="for one trial of `--smoke`, `--tune` or `--lr-range`, all its steps")
    heartbeat_s: float = Field(10, description="between two words of a node's agent to node 0's on how alive it is")
    collective_s: float = Field(600, description="for one collective operation of the ranks")
    save_s: float = Field(1800, description="for a checkpoint to stand on the disk of every node")
    stop_grace_s: float = Field(
        60, description="from SIGTERM to SIGKILL of the launcher, where saves do not take longer"
    )
    kill_s: float = Field(30, description="until processes that were sent SIGKILL have to be gone")
    drain_s: float = Field(900, description="for the uploads that are left when the launcher has ended")
    outputs_s: float = Field(
        900, description="for the run's outputs to reach the store, and as long again to come home"
    )
    peers_s: float = Field(120, description="for the other nodes' parts of a checkpoint to appear in the store")
    store_connect_s: float = Field(10, description="for a connection to the object store")
    store_read_s: float = Field(30, description="without a byte from the object store before a request is repeated")
    store_retry_s: float = Field(60, description="after which a failing request to the object store is not repeated")
    store_stall_s: float = Field(
        60, description="for the object store's transfers to move 4 MiB; slower ones are ended"
    )
    lease_s: float = Field(900, description="a node's lease while a run uses it")
    lease_renew_s: float = Field(20, description="between two renewals by the agent")
    lock_s: float = Field(
        90, description="after which a supervisor that did not renew its lock in a bucket has lost its run to who asks"
    )
    poll_s: float = Field(0.5, description="between two passes of the supervisor, and of the agent")
    look_s: float = Field(1, description="for all nodes to answer in one pass; a slower one is heard in a later pass")
    silence_s: float = Field(120, description="a node that cannot be reached is UNKNOWN; after this it counts as lost")

    def at_least(self, **seconds: float) -> Timeouts:
        """With these deadlines where they are longer, but for those that somebody has set."""
        longer = {name: s for name, s in seconds.items() if name not in self.model_fields_set}
        return self.model_copy(update={name: s for name, s in longer.items() if s > getattr(self, name)})

    def grace_s(self, save_s: float) -> float:
        """From SIGTERM to SIGKILL of a launcher whose last save takes so long: never less than `stop_grace_s`, and
        never more than any save may take."""
        return max(self.stop_grace_s, min(save_s, self.save_s))

    def scaled(self, factor: float) -> Timeouts:
        """All deadlines times `factor`, but for those that are a provider's own; for tests."""
        every = {name: getattr(self, name) for name in type(self).model_fields}
        return Timeouts(**{name: seconds * factor for name, seconds in every.items() if seconds})

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> Timeouts:
        """The deadlines, with those that the variable MGPU_TIMEOUTS changes: a JSON object, `{"silence_s": 300}`.

        Raises:
            pydantic.ValidationError: it is no such object, or names a deadline that does not exist.
        """
        return cls.model_validate_json(environment.get(VARIABLE) or "{}")
