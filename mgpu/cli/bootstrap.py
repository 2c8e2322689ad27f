"""`mgpu bootstrap`: what machines at a provider stand on, made once for each account and region."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from mgpu.cli.common import parameters, wiring
from mgpu.console import Console
from mgpu.errors import InputError

if TYPE_CHECKING:
    from mgpu.iac.aws.bootstrap import Base, Wanted
    from mgpu.iac.engine.event_log import Change
    from mgpu.providers.aws.session import Account

_FREE = "none of it costs anything by itself: S3 and ECR bill what will be stored in them"
_KINDS = {
    "Bucket": "checkpoints: closed to the public, TLS only, versioned; stays when the rest goes",
    "Repository": "images: scanned on push, tags that never move",
    "NodeRole": "what nodes may do: images of that repository; and the most that a run may be given in buckets",
    "ReaperRole": "lets EventBridge Scheduler end machines of mgpu's at their hard cap",
    "SecurityGroup": "SSH from the addresses named, if any, everything between nodes, everything out",
}
_SHOWN = ("checkpoints", "repository", "instance_profile", "reaper_role", "security_group", "vpc")
_REGIONAL = ("vpc", "bucket", "repository", "security_group")


@click.group()
def bootstrap() -> None:
    """Make what machines at a provider stand on: once for each account and region."""


@bootstrap.command()
@click.option("--region", "regions", multiple=True, help="Region; several times for several (default: AWS_REGION).")
@click.option("--allow-ssh", "ssh", multiple=True, metavar="CIDR", help="Who may log in (default: this machine).")
@click.option("--force-public-ssh", "allow_world", is_flag=True, help="Let `--allow-ssh` be the whole world.")
@click.option("--ssm", is_flag=True, help="For `aws: {address: ssm}`: nobody is let in but whom `--allow-ssh` names.")
@click.option("--vpc", default="", help="Network of the security group (default: the default VPC).")
@click.option(
    "--data-bucket",
    "data_buckets",
    multiple=True,
    metavar="NAME",
    help="A bucket of yours that runs may use, too, for data or checkpoints; several times for several.",
)
@click.option("--bucket", default="", help="A bucket of yours instead.")
@click.option("--repository", default="", help="A repository of yours instead.")
@click.option("--instance-profile", default="", help="An instance profile of yours instead.")
@click.option("--reaper-role", default="", help="A role of yours instead, its ARN.")
@click.option("--security-group", default="", help="A security group of yours instead, its id.")
@click.option(
    "--permissions-boundary", default="", metavar="ARN", help="A policy of yours that bounds the roles that are made."
)
@click.option(
    "--tags", multiple=True, metavar="KEY=VALUE", help="A tag of all that is made; may be given several times."
)
@click.option("--account", default="", help="Refuse credentials of another account than this, 12 digits.")
@click.option("--profile", default="", help="Profile of ~/.aws.")
@click.option("--endpoint-url", default="", help="Address of all AWS services, for a VPC endpoint or a fake.")
@click.option("--destroy", is_flag=True, help="Take it all down again; the bucket stays.")
@click.option("--delete-bucket", is_flag=True, help="With --destroy: the bucket too, if it is empty.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask; what changes is still shown.")
@parameters.json_option
def aws(
    regions: tuple[str, ...],
    account: str,
    profile: str,
    endpoint_url: str,
    destroy: bool,
    delete_bucket: bool,
    yes: bool,
    as_json: bool,
    **wanted: Any,
) -> None:
    """Make bucket, repository, roles and security group at AWS, or bring them in line. Costs nothing until used.

    What is there already, made by mgpu from whatever machine, is taken over. Anything of yours that you name is
    checked and used as it is.
    """
    from mgpu.iac.aws import bootstrap

    console = Console(as_json=as_json)
    _require_sense(regions, destroy, delete_bucket, wanted)
    _require_tags(wanted["tags"])
    found = bootstrap.account_of(account, profile, endpoint_url)
    places = tuple(dict.fromkeys(regions)) or (found.home_region,)
    bootstrap.require_regions(found, places)
    if destroy:
        _take_down(console, found, places, delete_bucket, yes)
    else:
        _bring_up(console, found, places, bootstrap.Wanted(**wanted), yes)


def _require_sense(regions: tuple[str, ...], destroy: bool, delete_bucket: bool, wanted: dict[str, Any]) -> None:
    if delete_bucket and not destroy:
        raise InputError("--delete-bucket belongs to --destroy", "", "Add `--destroy`, or leave it out.")
    given = [f"--{key.replace('_', '-')}" for key in _REGIONAL if wanted[key]]
    if given and len(set(regions)) > 1:
        raise InputError(f"{given[0]} is in one region, and {len(set(regions))} were named", "", "Do one at a time.")
    if wanted["security_group"] and wanted["ssh"]:
        why = "mgpu changes no security group of yours."
        raise InputError("--allow-ssh and --security-group exclude each other", why, "Leave one of them out.")


def _require_tags(given: tuple[str, ...]) -> None:
    """By the rules of `aws.tags` of a run file."""
    from mgpu.providers.aws.options import Options

    cure = "Write `--tags KEY=VALUE`, several times for several tags."
    for each in given:
        if "=" not in each:
            raise InputError(f"--tags {each}: a tag has a key and a value", "", cure)
    try:
        Options.of({"tags": json.dumps(dict(each.split("=", 1) for each in given))} if given else {})
    except InputError as error:
        raise InputError(f"--tags: {error.what.removeprefix('aws.tags: ')}", error.why, cure) from error


def _bring_up(console: Console, account: Account, regions: tuple[str, ...], wanted: Wanted, yes: bool) -> None:
    from mgpu.cli.common import own_address
    from mgpu.iac.aws import bootstrap

    if wanted.ssm and not (wanted.ssh or wanted.security_group):
        console.say("nobody is let in: machines are reached through Session Manager; `--allow-ssh` names others")
    elif not wanted.ssh and not wanted.security_group:
        with console.waiting("asking from which address this machine reaches the internet"):
            wanted = replace(wanted, ssh=(own_address.own_address(),))
        console.say(f"SSH is let in from {wanted.ssh[0]}, this machine's address; `--allow-ssh` names others")
    context = wiring.context(console)
    bases = [bootstrap.Base(account, region, context, wanted) for region in regions]  # all mistakes before any change
    with console.waiting(f"looking at what is there in {', '.join(regions)}"):
        plans = [(each, each.preview()) for each in bases]
    _show(console, account, plans)
    if any(changes for _, changes in plans) and not _agreed(yes, console, "make it so?"):
        for each in bases:
            each.forget()
        raise _not_agreed("Nothing was made or changed.")
    results = [{**each.up(), "changes": [_line(change) for change in changes]} for each, changes in plans]
    console.done()
    _report(console, results, wanted)


def _take_down(console: Console, account: Account, regions: tuple[str, ...], and_bucket: bool, yes: bool) -> None:
    from mgpu.iac.aws import bootstrap

    context = wiring.context(console)
    bases = [bootstrap.Base(account, region, context) for region in regions]
    for each in bases:
        each.require_removable(and_bucket=and_bucket)
    bucket = "with the bucket, which is empty" if and_bucket else "the bucket stays as it is"
    console.say(
        f"takes down the base of account {account.id()} in {', '.join(regions)}: the repository with its images, "
        f"the security group, and the roles where no other region's base uses them; {bucket}"
    )
    if not _agreed(yes, console, "take it down?"):
        raise _not_agreed("Nothing was deleted.")
    for each in bases:
        each.down(and_bucket=and_bucket)
    console.done()
    if console.as_json:
        from mgpu.cli.results import Bases

        console.result(
            Bases(regions=[{"account": account.id(), "region": each, "destroyed": True} for each in regions])
        )
    else:
        console.prose(
            f"taken down, confirmed by AWS: {', '.join(regions)}; {bucket if not and_bucket else 'all of it'}"
        )


def _show(console: Console, account: Account, plans: list[tuple[Base, tuple[Change, ...]]]) -> None:
    """What would change, before it does. On stderr: the result has the same place on stdout."""
    for base, changes in plans:
        console.say(f"account {account.id()}, {base.region}:" + ("" if changes else " nothing to change"), "bold")
        for change in changes:
            kind = change.type.rpartition(":")[2]
            console.say(f"  {change.op} {kind}: {'; '.join(change.properties) or _KINDS.get(kind, change.name)}")
    if any(change.op == "create" for _, changes in plans for change in changes):
        console.say(_FREE)


def _line(change: Change) -> str:
    return " ".join([change.op, change.type.rpartition(":")[2], *change.properties])


def _agreed(yes: bool, console: Console, question: str) -> bool:
    return yes or console.confirm(question)


def _not_agreed(nothing: str) -> InputError:
    if sys.stdin.isatty():
        return InputError("not agreed", nothing)
    return InputError(
        "this command changes your account and nobody can be asked",
        f"Standard input is not a terminal. {nothing}",
        "Add `--yes` to agree to what is shown above.",
    )


def _backend(base: dict[str, Any]) -> str:
    from mgpu.providers.aws.iam.policies import BACKEND

    return f"s3://{base['bucket']}/{BACKEND}?region={base['region']}"


def _report(console: Console, results: list[dict[str, Any]], wanted: Wanted) -> None:
    if console.as_json:
        from mgpu.cli.results import Bases

        console.result(Bases(regions=results))
        return
    for result in results:
        rows = [(name.replace("_", " "), result.get(name, "")) for name in _SHOWN]
        console.table((f"base of {result['account']}", result["region"]), rows)
    theirs = {
        "instance_profile": wanted.instance_profile,
        "reaper_role": wanted.reaper_role,
        "security_group_id": wanted.security_group,
    }
    named = ", ".join(f"{key}: {value}" for key, value in theirs.items() if value)
    if named:  # everything else is found by its name
        console.say(f"run files that are to use what you gave need  aws: {{{named}}}", "yellow")
    if wanted.repository and results:
        uri = results[0].get("repository", wanted.repository)
        console.say(f"run files whose image mgpu builds need  image: {{repository: {uri}}}", "yellow")
    if wanted.tags and any(sorted(each.get("tags", ())) != sorted(wanted.tags) for each in results):
        console.say(
            "the tags were not set: your `infra/base` does not pass `tags` on (`mgpu init` writes one that does)",
            "yellow",
        )
    if wanted.ssm and not all(each.get("ssm", wanted.instance_profile) for each in results):
        console.say(
            "machines cannot be reached through Session Manager: your `infra/base` does not pass `ssm` on (`mgpu init` "
            "writes one that does)",
            "yellow",
        )
    elif wanted.ssm:
        console.say(
            "run files need  aws: {address: ssm, subnet_ids: [...]}  with subnets behind a NAT gateway", "yellow"
        )
    if wanted.vpc:
        console.say(f"run files need  aws: {{subnet_ids: [...]}}  with subnets of {wanted.vpc}", "yellow")
    shared = [
        f"mgpu init --backend '{_backend(each)}'    runs that any machine can go on with"
        for each in results[:1]
        if each.get("bucket")
    ]
    console.next(
        *shared,
        "mgpu plan    what a run file with `provider: aws` would rent",
        "mgpu bootstrap aws --destroy    undo it",
    )
