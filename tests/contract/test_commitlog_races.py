"""F30, F31: one winner a number, and nothing of a zombie, in every store that is here and bears twenty at once.

LocalStack 4.6.0 does not: of 27 such races one ended with an answer that stopped between its header and its body.
"""

from __future__ import annotations

import pytest
from fakes import lograces


@pytest.mark.drawn("stores x what is asked of them", "tests/contract/conftest.py", "train/mgpu_train/store")
@pytest.mark.parametrize("site", ["file", "moto", "versitygw"], indirect=True)
@pytest.mark.parametrize("scenario", lograces.SCENARIOS, ids=lambda each: each.__name__)
def test_twenty_threads_on_one_log(site, scenario, monkeypatch):
    lograces.small_index(monkeypatch)
    scenario(site.store)
