"""The provider contract on EC2. Everything is known from AWS alone: tags, launch templates, and what EC2 shows.

A fleet's machines are made by `launch`, described by `machines`, ended by `ending`; `offers` needs no network.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mgpu.errors import AuthError, NoOffer, PermissionDenied, ProviderError, Transient
from mgpu.paths import expanded
from mgpu.plan.model import Cost, Offer, Requirements, Reservation, Saves
from mgpu.providers.aws.options import ENTRY, Options, region_of
from mgpu.providers.aws.session import Account
from mgpu.providers.base import (
    GOING,
    Finding,
    FleetRequest,
    FleetState,
    Handle,
    Intent,
    Listing,
    MachineDriver,
    Offers,
    Provider,
    Refreshed,
    ReservationOffer,
    ReservationOffers,
    ReservationRequest,
    Reservations,
)

# any of these means that the user has AWS set up
_VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_PROFILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_VENDOR = Path("/sys/class/dmi/id/sys_vendor")  # who has made this machine
_FILES = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}


class AwsProvider(Provider):
    """Rents machines with GPUs from EC2, on both markets, in every region of one account."""

    name = Options.block
    capabilities = ENTRY.capabilities

    def __init__(self, options: Mapping[str, str] | None = None) -> None:
        """Raises InputError: an option that means nothing."""
        self._given = dict(options or {})
        self._options = Options.of(self._given)
        self._account = Account(self._options)

    def configured(self) -> bool:
        """Whether there is anything that looks like credentials: a variable, a file of AWS's tools, or, on a machine of
        EC2's, its role."""
        if self._options.profile or any(os.environ.get(name) for name in _VARIABLES):
            return True
        paths = (expanded(os.environ.get(name) or default) for name, default in _FILES.items())
        return any(path.is_file() and path.stat().st_size > 0 for path in paths) or _has_role()

    def check(self) -> None:
        """Tests the credentials, whose they are, and that machines may be listed.

        Raises:
            AuthError: the credentials are missing, wrong or expired.
            InputError: they are of another account than `aws.account`; nothing here carries `address: ssm`.
            PermissionDenied: `ec2:DescribeInstances` is missing.
        """
        from botocore.exceptions import ClientError

        from mgpu.providers.aws.failures import calling, code_of
        from mgpu.providers.aws.instances import session_manager

        if self._options.address == "ssm":
            session_manager.require_program()
        self._account.id()
        region = self._account.home_region
        with calling("trying whether machines may be listed", region):
            try:
                self._account.client("ec2", region).describe_instances(DryRun=True)
            except ClientError as error:
                if code_of(error) != "DryRunOperation":  # the answer of one who may
                    raise

    def findings(self, requirements: Requirements | None, here: Callable[[], str]) -> tuple[Finding, ...]:
        """Credentials, clock, permissions, and in each region base, network, SSH and quotas."""
        from mgpu.providers.aws.check import findings

        return findings(self._account, self._of(requirements) if requirements else self._options, requirements, here)

    def offers(self, requirements: Requirements) -> Offers:
        """What is known to be on sale, from the snapshot or the newest refresh; of a run file that names a reservation,
        that one as EC2 shows it. Raises InputError, NoOffer; with a reservation ProviderError."""
        options = self._of(requirements)
        if options.reservation:
            from mgpu.providers.aws.reservations.offers import offers as reserved

            return reserved(self._account, options, requirements)
        from mgpu.providers.aws.catalog.offers import offers

        return offers(requirements, options, region_of=self._region_of)

    def other_costs(self, requirements: Requirements, offer: Offer, saves: Saves | None) -> tuple[Cost, ...]:
        """Disks, public addresses, traffic between regions, and S3. Raises InputError."""
        from mgpu.providers.aws.catalog.other_costs import ImageDisks, other_costs
        from mgpu.providers.aws.catalog.store_regions import elsewhere
        from mgpu.providers.aws.instances import machine_image

        options = self._of(requirements)
        image = machine_image.glance(self._account, options, offer.region) if self.configured() else None
        disks = ImageDisks(image.root_gib, tuple(ebs for _, ebs in image.others)) if image else None
        return tuple(other_costs(requirements, offer, options, saves, self._region_of, disks, elsewhere()))

    def boot_s(self, requirements: Requirements) -> float:
        """By the slowest type that is on offer. Raises InputError."""
        from mgpu.providers.aws.catalog.machine_types import boot_s

        try:
            sold = self.offers(requirements).offers
        except NoOffer:
            return 0
        except ProviderError:  # of a reservation nothing is known now
            return self.capabilities.boot_s
        # of a reservation that is full, too: the fleet's own machines may be in it
        waited_for = (each for each in sold if each.reservation or not each.obstacle)
        return max((boot_s(each.instance_type) for each in waited_for), default=0)

    def refresh_offers(self) -> Refreshed:
        """Asks all regions for types, prices and quotas. Raises AuthError, InputError, ProviderError."""
        from mgpu.providers.aws.catalog.refresh import refresh

        return refresh(self._account)

    def find_reservations(self, wanted: ReservationRequest) -> ReservationOffers:
        """Capacity Blocks on sale. Raises InputError, ProviderError."""
        from mgpu.providers.aws.reservations import blocks

        return blocks.find(self._account, wanted)

    def buy_reservation(self, offer: ReservationOffer, owner: str, token: str) -> Reservation:
        """Buys a Capacity Block. Raises what `mgpu.providers.aws.reservations.blocks.buy` raises."""
        from mgpu.providers.aws.reservations import blocks

        return blocks.buy(self._account, offer, owner, token)

    def bought_reservation(self, offer: ReservationOffer, token: str, at: float) -> Reservation | None:
        """The Capacity Block that a purchase by this token has made. Raises ProviderError."""
        from mgpu.providers.aws.reservations import blocks

        return blocks.bought(self._account, offer, token, at)

    def list_reservations(self, regions: Sequence[str]) -> Reservations:
        """On-Demand Capacity Reservations and Capacity Blocks that are not over. Raises ProviderError."""
        from mgpu.providers.aws.reservations import lookup

        return lookup.every(self._account, regions)

    def create(self, request: FleetRequest, offer: Offer, token: str) -> Handle:
        """Makes the whole gang, or nothing. Raises what `mgpu.providers.aws.instances.launch.launch` raises."""
        return self._launch(request, offer, token, tuple(range(request.requirements.nodes)))

    def recall(self, request: FleetRequest, intent: Intent, ranks: tuple[int, ...]) -> Handle | None:
        """What CreateFleet says of the intent's token. Raises ProviderError: nothing that could be relied on."""
        from mgpu.providers.aws.instances.fleet_request import Order
        from mgpu.providers.aws.instances.launch import recall

        order = Order(request, intent.offer, intent.token, ranks, self._of(request.requirements))
        made = recall(self._account, order)
        return self._ours(made) if made else None

    def find(self, intent: Intent) -> Handle | None:
        """The machines that carry the intent's token. Raises ProviderError."""
        from mgpu.providers.aws.instances import machines

        found = machines.find(self._account, intent)
        return self._ours(found) if found else None

    def describe(self, handle: Handle) -> FleetState:
        """The machines as EC2 shows them. Raises Transient: one that is too new to be shown; ProviderError."""
        from mgpu.providers.aws.instances import machines

        return machines.describe(self._account, self._options, handle)

    def describe_all(self, handles: Sequence[Handle]) -> tuple[FleetState, ...]:
        """`describe` for many handles, in a few calls for each region. Raises what `describe` raises."""
        from mgpu.providers.aws.instances import machines

        return machines.describe_all(self._account, self._options, handles)

    def rekeyed(self, handle: Handle, node: str, host_key: str, *, used: bool) -> None:
        """Writes the new host key into the machine's tags. Raises ProviderError."""
        from mgpu.providers.aws.instances import machines

        machines.rekeyed(self._account, handle, node, host_key, used=used)

    def repair(
        self, handle: Handle, missing: tuple[int, ...], request: FleetRequest, offer: Offer, token: str
    ) -> Handle:
        """Replaces the machines of these ranks. Raises what `create` raises, and `Transient` until EC2 shows that the
        lost ones are on their way out."""
        from mgpu.providers.aws.instances import machines

        intent = Intent(
            fleet=request.fleet, generation=request.generation, owner=request.owner, token=token, offer=offer
        )
        fresh = machines.find(self._account, intent)
        ours = set(fresh.ids) if fresh else set[str]()
        self._confirm_going(handle, tuple(handle.ids[rank] for rank in missing if handle.ids[rank] not in ours))
        made = self._launch(request, offer, token, missing)
        ids = tuple(made.ids[rank] if rank in missing else name for rank, name in enumerate(handle.ids))
        changed = {"ids": ids, "generation": request.generation, "token": token, "made_at": made.made_at}
        return handle.model_copy(update=changed)

    def store_environment(self, environ: Mapping[str, str]) -> Mapping[str, str] | None:
        """`aws.profile` opens S3 as it opens EC2, whatever keys are set; a store elsewhere than at AWS has keys of its
        own."""
        if not self._options.profile or environ.get("AWS_ENDPOINT_URL_S3"):
            return None
        kept = {name: value for name, value in environ.items() if name not in _KEYS}
        return {**kept, "AWS_PROFILE": self._options.profile}

    def require_store(self, urls: Sequence[str]) -> None:
        """Whether a role for a run can open all of these. Raises InputError, ProviderError."""
        from mgpu.providers.aws.iam import run_role

        run_role.require(self._account, self._options, urls)

    def grant_store(self, run_id: str, reads: Sequence[str], writes: Sequence[str]) -> Mapping[str, str]:
        """The run's own role, made or brought in line. Raises InputError, ProviderError."""
        from mgpu.providers.aws.iam import run_role

        return run_role.grant(self._account, self._options, run_id, reads, writes)

    def revoke_store(self, run_id: str) -> None:
        """Takes the run's role away. Raises ProviderError."""
        from mgpu.providers.aws.iam import run_role

        run_role.revoke(self._account, self._options, run_id)

    def image_repository(self, regions: Sequence[str]) -> str:
        """The one of base in the first of these regions, else at home. Raises AuthError, InputError."""
        from mgpu.providers.aws.bootstrap.repository import Repository, RepositoryManager
        from mgpu.providers.aws.bootstrap.resource import Site

        manager = RepositoryManager(Site(self._account, regions[0] if regions else self._account.home_region))
        return manager.expected(manager.complete(Repository()))["uri"]

    def pulled_by_role(self, registry: str) -> Mapping[str, str]:
        """In all regions: a token of the operator's could push for twelve hours. Which repository the role may pull
        from, `base` says."""
        region = region_of(registry)
        return {"region": region, "endpoint": self._options.endpoint_url or ""} if region else {}

    def registry_login(self, registry: str) -> tuple[str, str, float]:
        """ECR's token, which lives for 12 hours, with the credentials of `aws.profile`. Raises ProviderError,
        InputError."""
        from mgpu.providers.aws.failures import calling

        region = region_of(registry)
        with calling("asking for a login of ECR", region):
            token = self._account.client("ecr", region).get_authorization_token()["authorizationData"][0]
        username, _, password = base64.b64decode(token["authorizationToken"]).decode().partition(":")
        return username, password, token["expiresAt"].timestamp()

    def machine_driver(self, regions: Sequence[str]) -> MachineDriver | None:
        """Of the machine image in the first of these regions that has one: AWS publishes a build in all of them at
        once. Raises ProviderError: AWS refused in all of them, or did not answer."""
        from mgpu.providers.aws.instances import machine_image

        denied: ProviderError | None = None
        for region in regions:
            try:
                return machine_image.find(self._account, self._options, region).driver
            except NoOffer:
                continue
            except (AuthError, PermissionDenied) as error:  # the region's own, perhaps
                denied = denied or error
        if denied:
            raise denied
        return None

    def driver_of(self, handle: Handle) -> MachineDriver | None:
        """Of the machine image that they were made from, where all have the same. Raises ProviderError."""
        from mgpu.providers.aws.instances import listing, machine_image

        machines = listing.by_id(self._account, handle.region, handle.ids).values()
        made_from = {machine["ImageId"] for machine in machines if "ImageId" in machine}
        return machine_image.driver(self._account, handle.region, *made_from) if len(made_from) == 1 else None

    def list_owned(self, owner: str) -> tuple[Handle, ...]:
        """What carries this owner's tag, in all regions but those that the account's organization closes. Raises
        ProviderError: not all of them have answered."""
        return self.list_reached(owner).handles

    def list_reached(self, owner: str) -> Listing:
        """The same, and which regions are closed."""
        from mgpu.providers.aws.instances import teardown

        found = teardown.list_owned(self._account, owner)
        return found.model_copy(update={"handles": tuple(map(self._ours, found.handles))})

    def destroy(self, handle: Handle, nodes: tuple[str, ...] | None = None) -> bool:
        """Ends machines and what only they used. Raises ProviderError: EC2 refused, or did not answer."""
        from mgpu.providers.aws.instances import teardown

        return teardown.destroy(self._account, handle, nodes)

    def _region_of(self, url: str) -> str:
        from mgpu.providers.aws.catalog.store_regions import region_of

        return region_of(self._account, url)

    def _of(self, requirements: Requirements) -> Options:
        return Options.of({**self._given, **requirements.provider_options})

    def _launch(self, request: FleetRequest, offer: Offer, token: str, ranks: tuple[int, ...]) -> Handle:
        from mgpu.providers.aws.instances.fleet_request import Order
        from mgpu.providers.aws.instances.launch import launch

        return self._ours(launch(self._account, Order(request, offer, token, ranks, self._of(request.requirements))))

    def _ours(self, handle: Handle) -> Handle:
        return handle.model_copy(update={"account": self._account.id()})

    def _confirm_going(self, handle: Handle, lost: tuple[str, ...]) -> None:
        """Asks EC2 to end these machines, and returns once it shows that they are ending."""
        lost = tuple(filter(None, lost))
        if not lost or self.destroy(handle, lost):
            return
        state = self.describe(handle.model_copy(update={"ids": lost}))
        running = [node.id for node in state.nodes if node.phase not in GOING]
        if running:
            names = ", ".join(running)
            raise Transient("a lost machine is not ending yet", f"EC2 shows as running: {names}", "Call again.")
        self._forget(handle, lost)

    def _forget(self, handle: Handle, lost: tuple[str, ...]) -> None:
        """Takes away what machines on their way out still have: once they are replaced nobody asks about them again,
        and an account has few addresses."""
        from mgpu.providers.aws.instances import listing, reaper, teardown

        for some in listing.in_batches(list(lost)):
            used_by = [{"Name": "instance-id", "Values": some}]
            if not teardown.release(self._account, handle.region, used_by):
                raise Transient("the address of a lost machine is still in use", ", ".join(some), "Call again.")
        reaper.disarm(self._account, handle.region, lost)


def _has_role() -> bool:
    """Whether this is a machine of EC2's that AWS's own tools find credentials on: those of its role."""
    try:
        if _VENDOR.read_text(encoding="utf-8").strip() != "Amazon EC2":
            return False
    except OSError:
        return False
    from botocore.exceptions import BotoCoreError
    from botocore.session import Session

    try:
        return Session().get_credentials() is not None
    except BotoCoreError:  # there are some, and whoever asks for machines is told what is wrong with them
        return True
