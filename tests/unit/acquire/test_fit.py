"""What an image runs on, of the machines that a plan may take: named GPUs must all do, of others one is enough."""

from __future__ import annotations

from typing import Any

import pytest

from mgpu.acquire import fit
from mgpu.acquire.fit import Machines
from mgpu.errors import InputError
from mgpu.image import compat
from mgpu.plan.model import Offer, Plan, Requirements
from mgpu.providers.base import MachineDriver

NEW = MachineDriver(version="580.105.08", why="Image m-1 brings 580.105.08.", cure="`machine: m-2` is another.")
LABELS = {compat.TORCH: "2.11.0", compat.CUDA: "13.0"}  # no code for the V100


class Boots:
    """Of a provider what is asked here."""

    def machine_driver(self, _regions: object) -> MachineDriver | None:
        return NEW


PROVIDER: Any = Boots()


def plan(*gpus: str, named: bool) -> Plan:
    wanted = {"provider": "p", "nodes": 1, "max_price_usd_per_hour": 1, "max_hours": 1}
    sold = {"provider": "p", "instance_type": "m", "market": "spot", "price_usd_per_hour": 1, "fetched_at": 0}
    offers = tuple(Offer(gpu=gpu, region="r", **sold) for gpu in gpus)
    return Plan(requirements=Requirements(gpu=gpus if named else (), **wanted), offers=offers)


def fitted(whole: Plan) -> Plan:
    return fit.fitting(LABELS, whole, Machines.on_offer(PROVIDER, whole))


def test_of_gpus_that_nobody_named_those_that_cannot_run_it_are_put_aside():
    fitting = fitted(plan("V100-16GB", "H100-80GB", "V100-16GB", named=False))
    assert [offer.gpu for offer in fitting.offers] == ["H100-80GB"]
    assert [refused.offer.gpu for refused in fitting.refused] == ["V100-16GB", "V100-16GB"]
    assert all("no code for the V100" in refused.reason for refused in fitting.refused)


@pytest.mark.parametrize(
    ("gpus", "named"), [(("H100-80GB", "V100-16GB"), True), (("V100-16GB",), False)], ids=["named", "all"]
)
def test_a_gpu_that_was_named_and_the_last_one_are_refused(gpus, named):
    with pytest.raises(InputError, match="no code for the V100"):
        fitted(plan(*gpus, named=named))


def test_a_plan_that_fits_stays_as_it_is():
    whole = plan("H100-80GB", "A100-80GB", named=True)
    assert fitted(whole) == whole


def test_what_another_gpu_would_cure_says_nothing_of_the_driver():
    with pytest.raises(InputError, match="no code for the V100") as caught:
        fit.require(LABELS, Machines(("V100-16GB",), lambda: NEW))
    assert NEW.why not in caught.value.why
    assert NEW.cure not in caught.value.next_step
