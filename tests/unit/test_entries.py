"""Entry points: what a package brings is found by name, and what is wrong with one hinders no other."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from mgpu_train import entries

from mgpu.errors import InputError
from mgpu.providers import registry
from mgpu.spec.block import ProviderOptions
from mgpu.spec.provider import Capabilities, ProviderEntry, installed

GROUP = "mgpu.tests"


class Kind:
    """What an entry of these tests has to be."""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mgpu_tests_good.py").write_text(f"from {__name__} import Kind\nONE, TWO, OTHER = Kind(), Kind(), 1\n")
    (tmp_path / "mgpu_tests_bad.py").write_text("raise RuntimeError('half installed')\n")

    def installed(package: str, *lines: str) -> None:
        info = tmp_path / f"{package}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
        (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines]) + "\n")
        entries.points.cache_clear()

    yield installed
    entries.points.cache_clear()


def test_what_packages_bring_is_found_by_name(install):
    install("first", "one = mgpu_tests_good:ONE")
    install("second", "two = mgpu_tests_good:TWO")
    found = entries.read(GROUP, Kind)
    assert found.names == ("one", "two")
    assert found.complaint("tow") == ("`tow` is not one of one, two", "two")


@pytest.mark.parametrize(
    ("line", "name", "why"),
    [
        ("bad = mgpu_tests_bad:ONE", "bad", "mgpu_tests_bad:ONE cannot be imported (RuntimeError: half installed)"),
        ("bad = mgpu_tests_nowhere:ONE", "bad", "cannot be imported (ModuleNotFoundError"),
        ("bad = mgpu_tests_good:THREE", "bad", "cannot be imported (AttributeError"),
        ("bad = mgpu_tests_good:OTHER", "bad", "mgpu_tests_good:OTHER is no Kind"),
        ("Bad Name = mgpu_tests_good:ONE", "Bad Name", "a name is lower-case letters"),
        ("one = mgpu_tests_good:TWO", "one", "two packages bring one of this name"),
    ],
)
def test_one_that_cannot_be_used_is_named_and_hinders_no_other(install, line, name, why):
    install("first", "one = mgpu_tests_good:ONE", "two = mgpu_tests_good:TWO")
    install("second", line)
    found = entries.read(GROUP, Kind)
    assert "two" in found.names
    assert name not in found.names
    said, near = found.complaint(name)
    assert (why in said, near) == (True, None), said


def test_one_of_ours_is_not_taken_the_place_of(install, monkeypatch):
    monkeypatch.setattr(entries, "_OURS", ("first",))
    install("first", "one = mgpu_tests_good:ONE")
    install("second", "one = mgpu_tests_good:TWO")
    found = entries.read(GROUP, Kind)
    assert (found.names, found.broken) == (("one",), {})
    assert found.found["one"] is importlib.import_module("mgpu_tests_good").ONE


@pytest.mark.parametrize("provider", ["mgpu_tests_bad:ONE", "mgpu_tests_nowhere:ONE", "mgpu_tests_good:OTHER"])
def test_a_provider_that_does_not_work_is_told_with_what_brings_it(install, monkeypatch, provider):
    entry = ProviderEntry(provider, ProviderOptions, Capabilities())
    monkeypatch.setitem(installed().found, "yard", entry)
    with pytest.raises(InputError) as caught:
        registry.get("yard")
    assert provider in caught.value.what


def test_where_nothing_is_installed_that_is_what_is_said():
    assert entries.read("mgpu.nothing", Kind).complaint("local")[0].startswith("none is installed")


@pytest.mark.parametrize(
    "first",
    [
        "mgpu.spec.model",
        "mgpu.sinks.jsonl",
        "mgpu.providers.aws.options",
        "mgpu_train.launchers",
        "mgpu_train.tasks.entry",
        "mgpu_train.strategies.entry",
        "mgpu.providers.aws.provider",
        "mgpu.providers.local.provider",
        "mgpu.providers.base",
    ],
)
def test_our_own_are_found_whatever_is_imported_first_and_no_sdk_is(first):
    code = f"import sys, {first}\nfrom mgpu.spec.model import RunSpec\n"
    code += "from mgpu.spec import provider, sink\nfrom mgpu_train import launchers\n"
    code += "from mgpu_train.strategies import entry as strategy\nfrom mgpu_train.tasks import entry as task\n"
    code += "for each in (provider, sink, launchers, strategy, task): assert not each.installed().broken, each\n"
    code += "assert {'aws', 'local'} < set(RunSpec.model_fields)\n"
    code += "for each in (strategy, task): assert set(each.OURS) == set(each.installed().found)\n"
    code += "assert not {'torch', 'boto3', 'botocore', 'asyncssh', 'paramiko'} & set(sys.modules)\n"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
