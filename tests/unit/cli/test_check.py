"""`mgpu check` as a user types it: which provider is looked at, for which run file, and what comes of a red line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from mgpu.cli import check, cli
from mgpu.errors import InvalidRequest
from mgpu.iac.engine import install
from mgpu.providers import registry
from mgpu.providers.base import Finding
from mgpu.providers.local.provider import LocalProvider

OK = Finding(subject="credentials", status="ok", detail="somebody's")
WARNING = Finding(subject="clock", status="warning", detail="70 s ahead", cure="Set it.")
FAILED = Finding(subject="permissions", status="failed", detail="2 are missing", cure="Attach it.", document={"A": [1]})
RUN_FILE = """
name: demo
provider: {provider}
max_price_usd_per_hour: 1
max_hours: 1
command: [train.py]
checkpoint: none
"""


class Provider:
    """Says what it is told to, and notes what it was asked."""

    def __init__(self, lines):
        self.lines, self.asked = lines, []

    def get(self, name, options=None):
        self.asked.append((name, dict(options or {})))
        return self

    def findings(self, requirements, here):
        self.asked[-1] += (requirements,)
        return tuple(self.lines)


@pytest.fixture
def provider(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    made = Provider([OK])
    monkeypatch.setattr(registry, "get", made.get)
    monkeypatch.setattr(check, "_engine", lambda: Finding(subject="Pulumi engine", status="ok", detail="3"))
    return made


def run(*arguments):
    return CliRunner().invoke(cli, ["check", *arguments], standalone_mode=False)


def write(name="mgpu.yaml", provider="aws", more=""):
    Path("train.py").touch()
    Path(name).write_text(RUN_FILE.format(provider=provider) + more)


@pytest.mark.parametrize(("line", "code"), [(OK, 0), (WARNING, 0), (FAILED, 3)])
def test_only_a_red_line_is_a_failure(provider, line, code):
    provider.lines = [OK, line]
    assert run("aws").return_value == code
    assert run("aws", "--json").return_value == code


def test_every_line_is_shown_with_its_cure_and_what_to_paste(provider):
    provider.lines = [OK, WARNING, FAILED]
    shown = run("aws").stdout
    for line in provider.lines:
        assert line.subject in shown
        assert line.detail in shown
        assert line.cure in shown
    assert "FAILED" in shown
    assert json.loads(shown[shown.index("{") :]) == FAILED.document


def test_json_has_all_of_it(provider):
    provider.lines = [OK, FAILED]
    told = json.loads(run("aws", "--json").stdout)["checks"]
    assert [each["subject"] for each in told] == ["credentials", "permissions", "Pulumi engine"]
    assert told[1] == FAILED.model_dump(mode="json")
    assert told[0] == {"subject": "credentials", "status": "ok", "detail": "somebody's"}


def test_by_default_this_folders_run_file_says_what_is_looked_at(provider):
    write(more="regions: [eu-west-1]\naws: {profile: work}\n")
    run()
    ((name, options, requirements),) = provider.asked
    assert (name, options["profile"], requirements.regions) == ("aws", "work", ("eu-west-1",))


def test_a_sweep_is_looked_at_by_all_that_its_runs_ask_for(provider):
    write(more="matrix: {nodes: [2, 4], env.SEED: [1, 2]}\n")
    done = run("--json")
    assert done.return_value == 0
    assert [needed.nodes for _, _, needed in provider.asked] == [2, 4], "what is the same is asked once"
    told = [each["subject"] for each in json.loads(done.stdout)["checks"]]
    assert told == ["credentials", "Pulumi engine"], "and told once"


def test_one_run_of_a_sweep_that_lacks_something_is_a_failure(provider):
    write(more="matrix: {nodes: [2, 4]}\n")
    provider.findings = lambda needed, here: (OK, FAILED) if needed.nodes == 4 else (OK,)
    assert run().return_value == 3


def test_a_sweep_over_providers_is_looked_at_at_each(provider):
    write(more="matrix: {provider: [aws, local]}\n")
    run()
    assert [name for name, _, _ in provider.asked] == ["aws", "local"]
    provider.asked.clear()
    run("local", "mgpu.yaml")
    assert [name for name, _, _ in provider.asked] == ["local"], "although its first run is for another"


def test_a_provider_alone_is_looked_at_without_a_run_file(provider):
    run("aws")
    write(provider="local")
    run("aws")
    assert provider.asked == [("aws", {}, None)] * 2, "this folder's run file is for another provider"


def test_a_run_file_of_another_provider_is_refused_when_it_was_named(provider):
    write("other.yaml", "local")
    assert run("aws", "other.yaml").exception.exit_code == 2
    assert provider.asked == []


def test_without_a_provider_or_run_file_nothing_is_guessed(provider):
    assert run().exception.exit_code == 2


def test_a_profile_beats_the_run_files_and_is_aws_s_alone(provider):
    write(more="aws: {profile: work, network: plain}\n")
    run("--profile", "home")
    ((_, options, requirements),) = provider.asked
    assert options == requirements.provider_options
    assert (options["profile"], options["network"]) == ("home", "plain")
    assert run("local", "--profile", "home").exception.exit_code == 2


def test_an_engine_that_is_not_there_is_a_red_line_with_its_cure(monkeypatch):
    monkeypatch.setattr(install, "find_engine", lambda: None)
    line = check._engine()
    assert line.status == "failed"
    assert "mgpu init" in line.cure


def test_an_engine_that_is_there_says_where_from(monkeypatch, tmp_path):
    there = install.PulumiEngine(tmp_path / "pulumi", tmp_path, "3.1.4", "cache")
    monkeypatch.setattr(install, "find_engine", lambda: there)
    line = check._engine()
    assert (line.status, line.detail) == ("ok", "version 3.1.4, cache")


def test_local_looks_at_this_machine(monkeypatch, tmp_path):
    local = LocalProvider(root=tmp_path)
    monkeypatch.setattr(local, "check", lambda: None)
    (line,) = local.findings(None, lambda: "")
    assert line.status == "ok"

    def refuse():
        raise InvalidRequest("it has no torch", "the import fails", "Install it.")

    monkeypatch.setattr(local, "check", refuse)
    (line,) = local.findings(None, lambda: "")
    assert (line.status, line.detail, line.cure) == ("failed", "it has no torch: the import fails", "Install it.")
