"""`mgpu policy`: the least permissions under which mgpu works."""

from __future__ import annotations

import click

from mgpu.console import Console
from mgpu.errors import InputError


@click.group()
def policy() -> None:
    """Print the least permissions that mgpu needs at a provider."""


@policy.command()
@click.option("--account", default="", help="Account, 12 digits (default: the one of the credentials).")
@click.option("--region", "regions", multiple=True, help="Rent in these regions alone; several times for several.")
@click.option("--bootstrap", is_flag=True, help="What `mgpu bootstrap aws` needs beyond that, for whoever runs it.")
@click.option("--ssm", is_flag=True, help="What `aws: {address: ssm}` needs, beyond that.")
@click.option("--reservations", is_flag=True, help="What `mgpu reservations buy` needs beyond that.")
@click.option("--passes", is_flag=True, help="What `mgpu schedule install --aws` needs beyond that.")
@click.option(
    "--permissions-boundary",
    default="",
    metavar="ARN",
    help="With --bootstrap or --passes: a policy of yours that every role has to be bounded by.",
)
@click.option("--profile", default="", help="Profile of ~/.aws.")
@click.option("--endpoint-url", default="", help="Address of all AWS services, for a VPC endpoint or a fake.")
def aws(
    account: str,
    regions: tuple[str, ...],
    bootstrap: bool,
    ssm: bool,
    reservations: bool,
    passes: bool,
    permissions_boundary: str,
    profile: str,
    endpoint_url: str,
) -> None:
    """Print the policy of who rents, watches and ends machines, as a JSON document for IAM.

    With --account nothing is asked of AWS. What ends or deletes something is limited to what carries mgpu's tags.
    """
    from mgpu.providers.aws.iam import operator_policies
    from mgpu.providers.aws.options import Options
    from mgpu.providers.aws.session import Account

    for region in regions:
        if not operator_policies.is_region(region):
            raise InputError(f"--region: {region!r} is no region", "", "Name it as AWS does: us-east-1.")
    if permissions_boundary and not (bootstrap or passes):
        why = "The roles that `mgpu launch` makes are bounded already, by the policy mgpu-run of base."
        raise InputError(
            "--permissions-boundary belongs to --bootstrap and --passes", why, "Add one of them, or leave it out."
        )
    flags = {"base": bootstrap, "sessions": ssm, "reservations": reservations, "passes": passes}
    asked = [name for name, given in flags.items() if given]
    if len(asked) > 1:
        why = "Each document fits into one managed policy, two do not."
        raise InputError(
            "--bootstrap, --ssm, --reservations and --passes exclude each other", why, "Print one after the other."
        )
    options = Options.of({"account": account, "profile": profile, "endpoint_url": endpoint_url})
    asked_of = Account(options)
    made = operator_policies.documents(account or asked_of.id(), regions, permissions_boundary, asked_of.home_region)
    Console().data(made[asked[0] if asked else "machines"])
