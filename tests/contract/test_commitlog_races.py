"""F30, F31: one winner a number, and nothing of a zombie, in every store that is here."""

from __future__ import annotations

import pytest
from fakes import lograces


@pytest.mark.parametrize("scenario", lograces.SCENARIOS, ids=lambda each: each.__name__)
def test_twenty_threads_on_one_log(site, scenario, monkeypatch):
    lograces.small_index(monkeypatch)
    scenario(site.store)
