"""A run's stack: found, brought up, read, given back. What is not mgpu's, or is in use, is left alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mgpu_train.timeouts import Timeouts

from mgpu import paths
from mgpu.errors import (
    InputError,
    StackError,
)
from mgpu.events import Emit
from mgpu.iac.engine import Stack
from mgpu.iac.outputs import StackOutput
from mgpu.providers import registry
from mgpu.run.record import Folder, Record, every, save
from mgpu.run.session import Session
from mgpu.run.teardown import give_back
from mgpu.spec.model import RunSpec


@dataclass(frozen=True)
class Context:
    """What a command gives every run: where events go, the deadlines, and how to ask on a terminal."""

    emit: Emit
    timeouts: Timeouts
    ask_to_stop: Callable[[], bool | None] | None = None


def project_of(run_file: Path) -> Path:
    """The folder with Pulumi.yaml: the run file's own, or the nearest above it.

    Raises:
        InputError: there is none.
    """
    for folder in (run_file.resolve().parent, *run_file.resolve().parents):
        if (folder / "Pulumi.yaml").exists():
            return folder
    raise InputError(
        f"{run_file}: no Pulumi.yaml in its folder or above",
        "mgpu rents machines through a Pulumi program that you own.",
        "Run `mgpu init` in your project's folder: it writes Pulumi.yaml and infra/.",
    )


def stack_of(record: Record, context: Context) -> Stack:
    """The stack of a run."""
    log_dir = Folder(record.run_id).pulumi if record.own_stack else None
    return open_stack(Path(record.project), record.stack, Path(record.run_file), log_dir, context)


def open_stack(project: Path, name: str, run_file: Path, log_dir: Path | None, context: Context) -> Stack:
    """A stack by name. `log_dir`: where a stack of mgpu's own keeps configuration and logs; None: the user's stack."""
    return Stack(
        project,
        name,
        run_file,
        log_dir=log_dir or paths.state_dir() / "stacks" / name,
        emit=context.emit,
        timeouts=context.timeouts,
        own_config=log_dir is not None,
    )


def bring_up(session: Session, stack: Stack) -> StackOutput:
    """Makes, or repairs, the stack's fleet, and remembers it.

    Raises:
        StackError, ProviderError: it could not be made.
        Interrupted: the end was asked for; what was begun is undone.
    """
    session.journal.append("up", stack=stack.name)  # the undo is known before the machines are asked for
    with session.undoing(stack.interrupt):
        stack.init()
        stack.up()
    fleet = stack.outputs()
    if fleet is None:
        raise StackError(
            f"stack {stack.name} has no output `mgpu`",
            "The Pulumi program in infra/ ran, but did not export it.",
            'Export it: pulumi.export("mgpu", fleet.output); docs/formats.md describes it.',
        )
    session.record.fleet = fleet.model_dump(mode="json")
    session.record.price_usd_per_hour = fleet.price_usd_per_hour
    session.record.hard_cap_at = fleet.hard_cap_at
    save(session.record)
    return fleet


def standing(stack: Stack, spec: RunSpec) -> StackOutput:
    """The fleet of a stack that is up.

    Raises:
        StackError: there is none.
        InputError: it is not what the run file asks for.
    """
    fleet = stack.outputs()
    if fleet is None:
        raise StackError(
            f"stack {stack.name} has no fleet",
            "It has no output `mgpu`: it was never brought up, or was destroyed.",
            "Run `. .mgpu/env && pulumi up` first, or use `mgpu launch`, which does both halves.",
        )
    if len(fleet.nodes) != spec.nodes or fleet.provider != spec.provider:
        raise InputError(
            f"stack {stack.name} has {len(fleet.nodes)} nodes of {fleet.provider}, "
            f"the run file wants {spec.nodes} of {spec.provider}",
            "The fleet was made from another run file, or before it was changed.",
            "Run `pulumi up` to bring the fleet in line with the run file.",
        )
    return fleet


def require_ours(stack: str, fleet: StackOutput) -> None:
    """Raises InputError for a fleet that a program not mgpu's made."""
    if not fleet.owner:
        raise InputError(f"stack {stack} is not made by mgpu", "Its output names no owner.", "Use `pulumi destroy`.")


def refuse_used(fleet: StackOutput, but: str = "") -> None:
    """Raises InputError when a run that is not over uses machines of this fleet; `but` is a run that may."""
    ids = {node.id for node in fleet.nodes}
    for record in every():
        theirs = {node.get("id") for node in (record.fleet or {}).get("nodes", ())}
        if not record.state.final and record.run_id != but and ids & theirs:
            raise InputError(
                f"fleet {fleet.fleet} is used by run {record.run_id}",
                f"That run is not over: {record.state}.",
                f"Follow it with `mgpu attach {record.run_id}`, or end it with `mgpu stop {record.run_id}`.",
            )


def give_back_fleet(stack: Stack, provider: str, fleet: StackOutput | None, context: Context, *, remove: bool) -> None:
    """Gives a stack's fleet back; `remove`: the empty stack goes too. Raises what `give_back` raises."""
    give_back(
        stack,
        registry.get(provider),
        fleet.owner if fleet else paths.owner(),
        context.timeouts,
        context.emit,
        remove=remove,
        fleet=fleet.fleet if fleet else None,
    )
    # earlier runs that kept this fleet: what their records say of it is not true any more
    names = (stack.fleet, fleet.fleet if fleet else stack.fleet)
    for record in every():
        if record.teardown == "kept" and (record.fleet or {}).get("fleet") in names:
            record.teardown = "confirmed"
            save(record)
