"""`pulumi up`, then `mgpu run`: twice on one fleet that is kept; and on a fleet that a program not ours exports."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from mgpu import paths
from mgpu.iac.outputs import NodeOutput, StackOutput
from mgpu.plan.model import Requirements
from mgpu.providers import registry
from mgpu.providers.base import FleetRequest


def pulumi(project, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", "-c", '. .mgpu/env && exec pulumi "$@"', "sh", *args, "--non-interactive"],
        cwd=project.folder,
        env=project.env,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_a_kept_fleet_serves_run_after_run_until_it_is_given_back(project):
    project.write(["train.py", "10", "0.01"], nodes=2, more="teardown: keep\n")
    up = pulumi(project, "up", "--yes")
    assert up.returncode == 0, up.stdout + up.stderr
    assert project.billed() == 2

    first = project.mgpu("run", "--stack", "dev", "--json")
    assert first.returncode == 0, first.stderr
    second = project.mgpu("run", "--stack", "dev")
    assert second.returncode == 0, second.stderr
    assert "kept under their lease until" in second.stdout
    assert "mgpu down --stack dev" in second.stderr
    again = project.mgpu("status", "--json")
    runs = [json.loads(done.stdout) for done in (first, again)]
    assert runs[0]["run_id"] != runs[1]["run_id"]
    assert [run["teardown"] for run in runs] == ["kept", "kept"]
    assert runs[0]["fleet"]["nodes"] == runs[1]["fleet"]["nodes"], "it is the same fleet"
    assert project.billed() == 2

    files = project.mgpu("exec", runs[1]["run_id"], "--", "test -f train.py && echo here; echo there >&2")
    assert (files.returncode, sorted(files.stdout.splitlines())) == (0, ["[0] here", "[1] here"]), files.stderr
    assert sorted(files.stderr.splitlines()) == ["[0] there", "[1] there"]
    exact = project.mgpu("exec", "--stack", "dev", "--node", "1", "--", "printf", "%s|", "a b", "$HOME", "")
    assert (exact.returncode, exact.stdout) == (0, "a b|$HOME||"), exact.stderr
    assert project.mgpu("exec", "--stack", "dev", "--", "exit 3").returncode == 3

    down = project.mgpu("down", "--stack", "dev")
    assert down.returncode == 0, down.stderr
    assert project.billed() == 0


def test_run_gives_the_fleet_back_by_default(project):
    project.write(["train.py", "10", "0.01"])
    assert pulumi(project, "up", "--yes").returncode == 0
    done = project.mgpu("run", "--stack", "dev")
    assert done.returncode == 0, done.stderr
    assert project.billed() == 0


def test_run_without_a_fleet_says_what_to_do(project):
    project.write(["train.py", "10", "0.01"])
    done = project.mgpu("run", "--stack", "dev")
    assert done.returncode == 4
    assert "pulumi up" in done.stderr


def test_any_program_that_exports_the_output_can_be_run_on(project, tmp_path):
    """The machines are made by hand here; the Pulumi program only exports where they are."""
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    provider = registry.get("local")
    wanted = Requirements(provider="local", nodes=1, market="spot", max_price_usd_per_hour=1, max_hours=0.1)
    offer = provider.offers(wanted).offers[0]
    request = FleetRequest(
        fleet="theirs",
        generation=1,
        owner=paths.owner(),
        requirements=wanted,
        ssh_public_key=key.with_suffix(".pub").read_text().strip(),
        lease_s=300,
        hard_cap_s=360,
    )
    handle = provider.create(request, offer, "ab" * 16)
    try:
        project.wait(lambda: provider.describe(handle).ready)
        (node,) = provider.describe(handle).nodes
        output = StackOutput(
            version=1,
            fleet="theirs",
            provider="local",
            private_key_file=str(key),
            nodes=(
                NodeOutput(
                    rank=0, id=node.id, address=node.address, port=node.port, user=node.user, host_key=node.host_key
                ),
            ),
        )
        program = f"import json, pulumi\npulumi.export('mgpu', json.loads({output.model_dump_json()!r}))\n"
        Path(project.folder, "infra", "__main__.py").write_text(program)
        project.write(["train.py", "10", "0.01"])
        assert pulumi(project, "up", "--yes").returncode == 0
        done = project.mgpu("run", "--stack", "dev", "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["teardown"] == "not ours"
        assert provider.describe(handle).ready, "machines that mgpu did not make are left as they are"
    finally:
        project.wait(lambda: provider.destroy(handle))
