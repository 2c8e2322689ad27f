"""Prices and quotas as AWS publishes them: Pricing and Service Quotas, which moto lacks, and spot prices that vary."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from botocore.loaders import create_loader
from moto.core.responses import ActionResult
from moto.ec2.responses import EC2Response

from fakes.aws import market, patching
from fakes.aws.cloud import Cloud
from fakes.aws.protocol import Call
from fakes.aws.rules import Pool

STEP_S = 6 * 3600  # a spot price changes this often
HISTORY_S = 90 * 86400  # as far back as AWS remembers
ON_DEMAND_TERM, HOURLY = "JRTCKXETXF", "6YS6EN2CT7"

Data = dict[str, Any]
Handler = Callable[[Cloud, Call], Data]


class Refusal(Exception):
    """An error of these services: its code, and what is said."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


def install(cloud: Cloud) -> None:
    """From now on spot prices have a history that varies."""

    def describe_spot_price_history(self: Any) -> ActionResult:
        rows = list(_history(cloud, self.region, self.params))
        start, limit = int(self._get_param("NextToken") or 0), int(self._get_param("MaxResults") or 1000)
        more = str(start + limit) if len(rows) > start + limit else ""
        return ActionResult({"SpotPriceHistory": rows[start : start + limit], "NextToken": more})

    patching.replace(EC2Response, "describe_spot_price_history", describe_spot_price_history)


def _history(cloud: Cloud, region: str, asked: Data) -> Iterator[Data]:
    """Newest first in each zone; the price that held when the time asked for began comes with it."""
    filters = {each["Name"]: each["Values"] for each in asked.get("Filters") or []}
    kinds = asked.get("InstanceTypes") or filters.get("instance-type") or market.gpu_types()
    zones = [zone] if (zone := asked.get("AvailabilityZone")) else filters.get("availability-zone")
    end = _seconds(asked.get("EndTime"), time.time())
    start = max(_seconds(asked.get("StartTime"), end - HISTORY_S), end - HISTORY_S)
    for kind in kinds:
        for zone in market.zones(kind, region):
            if zones and zone not in zones:
                continue
            for step in range(int(end // STEP_S), int(start // STEP_S) - 1, -1):
                usd = cloud.rules.usd(Pool(kind, zone, "spot"), step * STEP_S)
                yield {
                    "InstanceType": kind,
                    "ProductDescription": "Linux/UNIX",
                    "SpotPrice": f"{usd:.6f}",
                    "AvailabilityZone": zone,
                    "Timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(step * STEP_S)),
                }


def _seconds(given: Any, otherwise: float) -> float:
    return given.timestamp() if given is not None else otherwise


def products(cloud: Cloud, call: Call) -> Data:
    """Pricing's GetProducts: machines by the hour, as a price list has them, misleading rows included."""
    if call.parameters.get("ServiceCode") != "AmazonEC2":
        raise Refusal("InvalidParameterException", "the fake AWS prices AmazonEC2 alone")
    wanted = {each["Field"]: each["Value"] for each in call.parameters.get("Filters") or []}
    rows = [row for row in _products(cloud, wanted) if _matches(row["product"]["attributes"], wanted)]
    start, limit = int(call.parameters.get("NextToken") or 0), int(call.parameters.get("MaxResults") or 100)
    answer: Data = {"FormatVersion": "aws_v1", "PriceList": [json.dumps(row) for row in rows[start : start + limit]]}
    return {**answer, "NextToken": str(start + limit)} if len(rows) > start + limit else answer


def _matches(attributes: Data, wanted: Data) -> bool:
    return all(attributes.get(field) == value for field, value in wanted.items())


def _products(cloud: Cloud, wanted: Data) -> Iterator[Data]:
    places = {wanted["regionCode"]: ""} if "regionCode" in wanted else locations()
    for region in places:
        for kind in [wanted["instanceType"]] if "instanceType" in wanted else market.gpu_types():
            if not (zones := market.zones(kind, region)):
                continue
            usd = cloud.rules.usd(Pool(kind, zones[0], "on-demand"))
            yield _product(kind, region, usd)
            yield _product(kind, region, 0.0, capacitystatus="AllocatedCapacityReservation")
            yield _product(kind, region, usd * 1.1, tenancy="Dedicated")
            yield _product(kind, region, usd * 1.6, operatingSystem="Windows")
            yield _product(kind, region, usd * 0.1, marketoption="CapacityBlock")


def _product(kind: str, region: str, usd: float, **differs: str) -> Data:
    attributes = {
        "servicecode": "AmazonEC2",
        "instanceType": kind,
        "regionCode": region,
        "location": locations().get(region, region),
        "locationType": "AWS Region",
        "operatingSystem": "Linux",
        "operation": "RunInstances",
        "tenancy": "Shared",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
        "licenseModel": "No License required",
        "marketoption": "OnDemand",
        "vcpu": str(market.vcpus(kind)),
        "gpu": str(market.gpus(kind)),
        **differs,
    }
    sku = hashlib.sha256(json.dumps(attributes).encode()).hexdigest()[:16].upper()
    price = {"unit": "Hrs", "beginRange": "0", "endRange": "Inf", "pricePerUnit": {"USD": f"{usd:.10f}"}}
    term = {"sku": sku, "offerTermCode": ON_DEMAND_TERM, "priceDimensions": {f"{sku}.{ON_DEMAND_TERM}.{HOURLY}": price}}
    return {
        "product": {"productFamily": "Compute Instance", "attributes": attributes, "sku": sku},
        "serviceCode": "AmazonEC2",
        "terms": {"OnDemand": {f"{sku}.{ON_DEMAND_TERM}": term}},
    }


@cache
def locations() -> dict[str, str]:
    """What a price list calls the regions."""
    partition = create_loader().load_data("endpoints")["partitions"][0]
    return {name: facts["description"].replace("Europe", "EU") for name, facts in partition["regions"].items()}


def list_quotas(cloud: Cloud, call: Call) -> Data:
    """Service Quotas' ListServiceQuotas."""
    rows = [_quota(cloud, call, code) for code in market.QUOTA_NAMES] if _is_ec2(call) else []
    start, limit = int(call.parameters.get("NextToken") or 0), int(call.parameters.get("MaxResults") or 100)
    answer: Data = {"Quotas": rows[start : start + limit]}
    return {**answer, "NextToken": str(start + limit)} if len(rows) > start + limit else answer


def get_quota(cloud: Cloud, call: Call) -> Data:
    """Service Quotas' GetServiceQuota."""
    code = call.parameters.get("QuotaCode", "")
    if not _is_ec2(call) or code not in market.QUOTA_NAMES:
        raise Refusal("NoSuchResourceException", f"the quota {code} does not exist")
    return {"Quota": _quota(cloud, call, code)}


def _is_ec2(call: Call) -> bool:
    return call.parameters.get("ServiceCode") == "ec2"


def _quota(cloud: Cloud, call: Call, code: str) -> Data:
    return {
        "ServiceCode": "ec2",
        "ServiceName": "Amazon Elastic Compute Cloud (Amazon EC2)",
        "QuotaArn": f"arn:aws:servicequotas:{call.region}:123456789012:ec2/{code}",
        "QuotaCode": code,
        "QuotaName": market.QUOTA_NAMES[code],
        "Value": cloud.rules.quota(code),
        "Unit": "None",
        "Adjustable": True,
        "GlobalQuota": False,
    }


HANDLERS: dict[tuple[str, str], Handler] = {
    ("pricing", "GetProducts"): products,
    ("servicequotas", "ListServiceQuotas"): list_quotas,
    ("servicequotas", "GetServiceQuota"): get_quota,
}
