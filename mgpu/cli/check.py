"""`mgpu check`: all that renting needs at a provider, looked at, with a cure for each red line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from mgpu.cli.common import agreement, parameters, wiring
from mgpu.console import Console
from mgpu.errors import InputError, MgpuError, ProviderError

if TYPE_CHECKING:
    from mgpu.plan.model import Requirements
    from mgpu.providers.base import Finding, Provider

_MARKS = {"ok": "ok", "warning": "warning", "failed": "FAILED"}


@click.command()
@click.argument("provider", required=False)
@click.argument("run_file", required=False, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--profile", help="Profile of provider aws, as `aws: {profile: ...}` of a run file.")
@click.option("--on-node", metavar="RUN", help="Ask the machines of this run instead: driver, GPUs, Docker, image.")
@parameters.json_option
def check(provider: str | None, run_file: Path | None, profile: str | None, on_node: str | None, as_json: bool) -> int:
    """Test what PROVIDER needs, for RUN_FILE if there is one; by default ./mgpu.yaml and its providers. Of a sweep, for
    all its runs.

    Rents and changes nothing. Exit code 3 where something is missing that a run cannot do without.
    """
    from mgpu.providers import registry
    from mgpu.spec.provider import entry

    console = Console(as_json=as_json)
    if on_node is not None:
        if provider or profile:
            raise InputError("--on-node goes with nothing else", "The run says whose machines they are.")
        return _on_node(console, on_node)
    found: list[Finding] = []
    sellers = _needed(provider, run_file)
    for name, asked in sellers.items():
        lines: dict[str, Finding] = {}  # of several runs what is the same of all is one line
        for needed in asked or [None]:
            options = dict(needed.provider_options) if needed else {}
            if profile and (len(sellers) == 1 or "profile" in entry(name).options.model_fields):
                options = agreement.with_profile(name, options, profile, "Leave it out.")
                needed = needed.model_copy(update={"provider_options": options}) if needed else None
            with console.waiting(f"asking {name}"):
                told = _findings(registry.get(name, options), needed)
            lines |= {each.model_dump_json(): each for each in told}
        found += lines.values()
    return _told(console, (*found, _engine()))


def _findings(provider: Provider, needed: Requirements | None) -> tuple[Finding, ...]:
    from mgpu.cli.common.own_address import own_address
    from mgpu.providers import base

    if isinstance(provider, base.Findings):
        return provider.findings(needed, own_address)
    try:
        provider.check()
    except MgpuError as error:
        return (base.Finding.of(provider.name, error),)
    return (base.Finding(subject=provider.name, status="ok", detail="it answers, and the credentials are good"),)


def _on_node(console: Console, run: str) -> int:
    from mgpu.run.fleet import key
    from mgpu.run.nodes import node_check
    from mgpu.run.record.record import load

    record = load(run)
    key.bring(record, wiring.context(console))
    with console.waiting(f"asking the nodes of {record.run_id}"):
        found = node_check.findings(record, wiring.timeouts())
    return _told(console, found)


def _told(console: Console, found: tuple[Finding, ...]) -> int:
    if console.as_json:
        from mgpu.cli import results

        checks = [each.model_dump(mode="json", exclude_defaults=True) for each in found]
        console.result(results.Checks(checks=checks))
    else:
        _show(console, found)
    return ProviderError.exit_code if any(each.status == "failed" for each in found) else 0


def _needed(provider: str | None, run_file: Path | None) -> dict[str, list[Requirements]]:
    """The providers to look at, and what the runs of the run file ask of each, the same once; nothing: there is no run
    file, or it does not name that one."""
    from mgpu.plan import rank
    from mgpu.run.job import on_sale
    from mgpu.spec.load import sweep

    path = run_file or Path(wiring.RUN_FILE)
    if run_file is None and provider and not path.exists():
        return {provider: []}
    runs = [spec for _, spec in sweep(path)]
    if provider is None:
        wanted = [(name, spec) for spec in runs for name in on_sale.sellers(spec)]
    else:
        wanted = [(provider, spec) for spec in runs if provider in spec.candidates]
        if not wanted and run_file is None:
            return {provider: []}  # this folder's run file is for another provider
        if not wanted:
            agreement.require_for(runs[0], provider, path, "check")
    found: dict[str, list[Requirements]] = {}
    for name, spec in wanted:
        needed = rank.requirements(spec.of(name))
        if needed not in found.setdefault(name, []):
            found[name].append(needed)
    return found


def _engine() -> Finding:
    from mgpu.iac.engine.install import find_engine
    from mgpu.providers.base import Finding

    try:
        engine = find_engine()
    except MgpuError as error:
        return Finding.of("Pulumi engine", error)
    if engine is None:
        cure = "`mgpu init` in a folder of its own fetches it; in a checkout `make setup`."
        return Finding(subject="Pulumi engine", status="failed", detail="there is none yet", cure=cure)
    return Finding(subject="Pulumi engine", status="ok", detail=f"version {engine.version}, {engine.origin}")


def _show(console: Console, found: tuple[Finding, ...]) -> None:
    console.table(("check", "", "what was found"), [(each.subject, _MARKS[each.status], each.detail) for each in found])
    for each in found:
        if each.cure:
            console.prose(f"\n{each.subject}: {each.cure}")
        if each.document:
            console.data(each.document)
