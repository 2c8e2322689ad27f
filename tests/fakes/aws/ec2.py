"""moto's EC2 where it ends machines and gives addresses, with lookups that are not quadratic."""

from __future__ import annotations

from typing import Any

from moto.core.responses import ActionResult
from moto.ec2 import utils
from moto.ec2.exceptions import EC2ClientError, InvalidInstanceIdError
from moto.ec2.models import elastic_ip_addresses, elastic_network_interfaces
from moto.ec2.models.availability_zones_and_regions import RegionsAndZonesBackend
from moto.ec2.models.core import TaggedEC2Resource
from moto.ec2.models.elastic_block_store import EBSBackend
from moto.ec2.models.elastic_ip_addresses import ElasticAddressBackend
from moto.ec2.models.elastic_network_interfaces import Attachment
from moto.ec2.models.instances import Instance, InstanceBackend
from moto.ec2.models.subnets import Subnet
from moto.ec2.responses.instances import InstanceResponse

from fakes.aws import keys
from fakes.aws.cloud import Cloud
from fakes.aws.life import BY_USER
from fakes.aws.patching import existing, replace

# what is asked of all regions takes a client of boto3 for each, which is most of such a test's time
ENABLED_REGIONS = ("ap-south-1", "eu-west-1", "eu-west-3", "sa-east-1", "us-east-1", "us-east-2", "us-west-2")
SHUTTING_DOWN = {"Code": 32, "Name": "shutting-down"}


def install(cloud: Cloud) -> None:
    """From now on."""
    _install_addresses(cloud)
    _install_lookups(cloud)
    _install_ending(cloud)
    _install_disks()
    keys.install()


def _install_disks() -> None:
    def create_volume(self: Any, *given: Any, **asked: Any) -> Any:
        return create(self, *given, **{**asked, **getattr(asked.get("volume_type"), "speed", {})})

    create = replace(EBSBackend, "create_volume", create_volume)


def enable_few_regions() -> None:
    """The account has these enabled alone; the others answer, too, when they are asked."""
    enabled = [each for each in existing(RegionsAndZonesBackend, "regions") if each.name in ENABLED_REGIONS]
    replace(RegionsAndZonesBackend, "regions", enabled)


def _install_addresses(cloud: Cloud) -> None:
    replace(elastic_network_interfaces, "random_public_ip", cloud.public_address)
    replace(elastic_ip_addresses, "random_ip", cloud.public_address)
    associate = existing(ElasticAddressBackend, "associate_address")
    release = existing(ElasticAddressBackend, "release_address")

    def associate_address(self: Any, **asked: Any) -> Any:
        _require_started(asked.get("instance") or getattr(asked.get("eni"), "instance", None))
        address = associate(self, **asked)
        if machine := address.instance or (address.eni and address.eni.instance):
            address.instance = machine  # EC2 shows it, also where an interface was named
            cloud.machines.address(machine.id, address.public_ip)
        return address

    def release_address(self: Any, address: str | None = None, allocation_id: str | None = None) -> None:
        found = self.address_by_ip([address]) if address else self.address_by_allocation([allocation_id])
        if found[0].association_id:
            raise EC2ClientError("InvalidIPAddress.InUse", f"Address {found[0].public_ip} is in use.")
        release(self, address=address, allocation_id=allocation_id)

    replace(ElasticAddressBackend, "associate_address", associate_address)
    replace(ElasticAddressBackend, "release_address", release_address)
    started = existing(Attachment, "__init__")

    def begin(self: Any, eni: Any) -> None:
        started(self, eni)
        self.network_card_index = getattr(eni, "network_card", 0)

    replace(Attachment, "__init__", begin)
    pick = existing(Subnet, "get_available_subnet_ip")

    def pick_another(self: Any, instance: Any) -> str:
        """Default VPCs have the same range everywhere, but all machines of the fake are in one network."""
        taken = {life.instance.private_ip_address for life in cloud.lives.alive()} if cloud.machines.real else set()
        while (address := pick(self, instance)) in taken:
            pass
        return address

    replace(Subnet, "get_available_subnet_ip", pick_another)
    replace(Instance, "__del__", lambda self: None)  # it would give back the address of a mere copy's original


def _require_started(machine: Any) -> None:
    """EC2 gives no address to a machine before it runs."""
    if machine and machine._state.name == "pending":
        text = "The pending-instance-creation instance is not in a valid state for this operation"
        raise EC2ClientError("IncorrectInstanceState", text)


def _install_lookups(cloud: Cloud) -> None:
    def get_tags(self: Any) -> list[dict[str, str]]:
        kind = utils.EC2_PREFIX_TO_RESOURCE.get(utils.get_prefix(self.id), "") if self.id else ""
        tags = self.ec2_backend.tags.get(self.id, {})
        return [{"resource_id": self.id, "key": k, "value": v, "resource_type": kind} for k, v in tags.items()]

    scan = existing(InstanceBackend, "get_instance_by_id")

    def get_instance_by_id(self: Any, instance_id: str) -> Any | None:
        life = cloud.lives.by_id.get(instance_id)
        return life.instance if life and not life.forgotten else scan(self, instance_id)

    def get_instance(self: Any, instance_id: str) -> Any:
        if found := self.get_instance_by_id(instance_id):
            return found
        raise InvalidInstanceIdError(instance_id)

    replace(TaggedEC2Resource, "get_tags", get_tags)
    replace(InstanceBackend, "get_instance_by_id", get_instance_by_id)
    replace(InstanceBackend, "get_instance", get_instance)


def _install_ending(cloud: Cloud) -> None:
    def terminate(self: Any) -> Any:
        previous = self._state
        if life := cloud.lives.by_id.get(self.id):
            cloud.lives.end(life, BY_USER)
        return previous

    def terminate_instances(self: Any) -> ActionResult:
        ids = self._get_param("InstanceIds", [])
        self.error_on_dryrun()
        if cloud.rules.stubborn:  # it says yes and does nothing
            cloud.rules.stubborn -= 1
            found = [(each, each._state) for each in self.ec2_backend.get_multi_instances_by_id(ids)]
            return _ending((each.id, SHUTTING_DOWN, before) for each, before in found)
        ended = self.ec2_backend.terminate_instances(ids)
        return _ending((each.id, each._state, before) for each, before in ended)

    replace(Instance, "terminate", terminate)
    replace(InstanceResponse, "terminate_instances", terminate_instances)


def _ending(rows: Any) -> ActionResult:
    answer = [{"InstanceId": id_, "CurrentState": now, "PreviousState": before} for id_, now, before in rows]
    return ActionResult({"TerminatingInstances": answer})
