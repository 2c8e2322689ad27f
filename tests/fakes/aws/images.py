"""The deep-learning machine images of every region, and the SSM parameters that name the newest of each kind."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from datetime import datetime
from typing import Any

from moto.core.utils import utcnow
from moto.ec2.models import EC2Backend
from moto.ec2.models.amis import Ami
from moto.ec2.responses.amis import AmisResponse
from moto.ssm.models import Parameter, ParameterDict

from fakes.aws.patching import existing, replace

TREE = "/aws/service/deeplearning/ami"
AMAZON = "898082745236"  # who owns them
# kind in the parameter's name -> the image's name, before its date
KINDS = {
    "base-oss-nvidia-driver-gpu-ubuntu-22.04": "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 22.04)",
    "base-oss-nvidia-driver-gpu-ubuntu-24.04": "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04)",
    "oss-nvidia-driver-gpu-pytorch-2.6-ubuntu-22.04": (
        "Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.6.0 (Ubuntu 22.04)"
    ),
    "oss-nvidia-driver-gpu-pytorch-2.7-ubuntu-22.04": (
        "Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.7 (Ubuntu 22.04)"
    ),
    "oss-nvidia-driver-gpu-pytorch-2.8-ubuntu-24.04": (
        "Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.8 (Ubuntu 24.04)"
    ),
}
deprecated: set[str] = set()  # ids; shown to those alone who ask for such, and machines are made of them all the same
DATES = ("20250920", "20260103")  # of the images of each kind: with drivers of branches 570 and 580


def install() -> None:
    """From now on every region has them."""
    begin = existing(EC2Backend, "__init__")
    loads = existing(ParameterDict, "_check_loading_status")

    def begin_with_images(self: Any, region_name: str, account_id: str) -> None:
        begin(self, region_name, account_id)
        for kind, name in KINDS.items():
            for date in DATES:
                _register(self, kind, f"{name} {date}", date)

    def load(self: Any, key: str) -> None:
        loads(self, key)
        if str(key or "").startswith(TREE) and not getattr(self, "images_loaded", False):
            self.images_loaded = True
            for kind in KINDS:
                _name(self, kind)

    def describe_images(self: Any) -> Any:
        hidden = () if self._get_bool_param("IncludeDeprecated") else deprecated & self.ec2_backend.amis.keys()
        aside = {name: self.ec2_backend.amis.pop(name) for name in hidden}
        try:
            return describe(self)
        finally:
            self.ec2_backend.amis.update(aside)

    describe = replace(AmisResponse, "describe_images", describe_images)
    replace(EC2Backend, "__init__", begin_with_images)
    replace(ParameterDict, "_check_loading_status", load)


def image_id(region: str, kind: str, date: str) -> str:
    """The same each time."""
    return f"ami-{hashlib.sha256(f'{region} {kind} {date}'.encode()).hexdigest()[:17]}"


def _register(backend: Any, kind: str, name: str, date: str) -> None:
    known = image_id(backend.region_name, kind, date)
    backend.amis[known] = Ami(
        backend,
        known,
        name=name,
        description=name,
        owner_id=AMAZON,
        owner_alias="amazon",
        public=True,
        virtualization_type="hvm",
        architecture="x86_64",
        creation_date=datetime.strptime(date, "%Y%m%d"),
        hypervisor="xen",
        root_device_type="ebs",
        region_name=f"{backend.region_name}a",
    )


def _name(parameters: Any, kind: str) -> None:
    name = f"{TREE}/x86_64/{kind}/latest/ami-id"
    value = Parameter(
        account_id=parameters.account_id,
        name=name,
        value=image_id(parameters.region_name, kind, DATES[-1]),
        parameter_type="String",
        description=None,
        allowed_pattern=None,
        keyid=None,
        last_modified_date=utcnow(),
        version=len(DATES),
        data_type="aws:ec2:image",
    )
    defaultdict.__getitem__(parameters, name).append(value)
