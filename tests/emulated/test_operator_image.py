"""The image with mgpu itself, built by a real engine, and the pass of a CronJob in it: as little may be done there as
in the pod, the backend is a bucket of a real S3 server, and the run's machines are provider `local`'s, in there, too.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from fakes import gateway, trainer
from fakes.command import needs_secret
from fakes.engine import Engine
from mgpu_train.store import open_store

from mgpu.backend import location
from mgpu.iac.engine.install import find_engine
from mgpu.iac.engine.sources import FILES
from mgpu.image.build import shipped

BASE, IMAGE, PASS_S = "operator-base:1", "operator:1", 240


@pytest.fixture(scope="module")
def image(engine: Engine, require, tmp_path_factory: pytest.TempPathFactory) -> str:
    """On a base that has Pulumi's engine: nothing is fetched."""
    found, folder = find_engine(), tmp_path_factory.mktemp("image")
    require("engine", found is not None, "run `make setup` first")
    engine.docker("import", str(trainer.base(require)), trainer.BASE)
    (folder / "base").mkdir()
    for path in (found.pulumi, *(found.host_dir / name for name in FILES[1:])):
        shutil.copy(path, folder / "base")
    (folder / "base" / "Dockerfile").write_text(f"FROM {trainer.BASE}\nCOPY pulumi* /usr/local/bin/\n")
    assert trainer.build(engine, folder / "base", BASE, {}).returncode == 0
    with trainer.serving(trainer.wheels(require)) as index:
        context = trainer.context(shipped.operator_context(), folder / "context", index, {})
        done = trainer.build(engine, context, IMAGE, {"BASE": BASE})
    assert done.returncode == 0, done.stdout + done.stderr
    return IMAGE


@dataclass(frozen=True)
class Laptop:
    """Where the user is, whose backend is a bucket. `given`: what a pod has in its Secret."""

    folder: Path
    environ: Mapping[str, str]
    given: Mapping[str, str]

    def mgpu(self, *args: str) -> Any:
        command = [sys.executable, "-m", "mgpu", *args, "--json"]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environ, capture_output=True, text=True, timeout=PASS_S, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def laptop(require, tmp_path: Path) -> Iterator[Laptop]:
    versitygw = gateway.program()
    require("versitygw", versitygw is not None, "it is not built: scripts/setup-go-tools.sh versitygw")
    (tmp_path / "buckets").mkdir()
    (tmp_path / "bin").mkdir()  # with kubectl in it, which knows no cluster
    (tmp_path / "bin" / "kubectl").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin" / "kubectl").chmod(0o755)
    with gateway.serving(str(versitygw), tmp_path / "buckets") as env:
        bucket = gateway.make_bucket(env)
        # just now: what stands for S3 here has no machines
        open_store(f"s3://{bucket}/team/mgpu", env).put_if_absent("swept", b"")
        folder = tmp_path / "project"
        folder.mkdir()
        needs_secret(folder)
        ours = {f"XDG_{kind}_HOME": str(tmp_path / kind.lower()) for kind in ("STATE", "CONFIG", "CACHE", "DATA")}
        ours |= {
            location.VARIABLE: gateway.backend(env, bucket, "team"),
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        }
        keys = {name: value for name, value in env.items() if name.startswith(("AWS_ACCESS", "AWS_SECRET"))}
        yield Laptop(
            folder,
            {**os.environ, **keys, **ours, "TOKEN": "t0k"},
            {**keys, "MGPU_PASSPHRASE": "open sesame", "TOKEN": "t0k"},
        )


def pod_of(engine: Engine, manifest: str, given: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs the container of the manifest's job as the kubelet would, with these keys in the Secret."""
    job = list(yaml.safe_load_all(manifest))[-1]
    pod = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    (container,), who = pod["containers"], pod["securityContext"]
    environment = dict[str, str]()
    for each in container["env"]:
        key = each.get("valueFrom", {}).get("secretKeyRef", {})
        if "value" in each or key["key"] in given:
            environment[each["name"]] = each.get("value") or given[key["key"]]
        else:
            assert key["optional"], f"no pod begins: {key}"
    options = ["--rm", "--init", "--network=host", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges"]
    options += [f"--user={who['runAsUser']}:{who['runAsGroup']}", f"--workdir={container['workingDir']}"]
    options += [f"--tmpfs={each['mountPath']}:exec,mode=1777" for each in container["volumeMounts"]]
    options += [f"--env={name}={value}" for name, value in environment.items()]
    program, *rest = container["command"]
    run = ("run", *options, f"--entrypoint={program}", container["image"], *rest)
    return engine.docker(*run, check=False, timeout=PASS_S)


def test_a_pass_in_a_pod_begins_with_what_is_due(engine: Engine, image: str, laptop: Laptop):
    laptop.mgpu("schedule", "add", "mgpu.yaml", "--cron", "0 2 29 2 *", "--yes")
    (due,) = laptop.mgpu("schedule", "run-now", "it")["history"]
    manifest = laptop.mgpu("schedule", "install", "--kubernetes", "--image", image, "--dry-run")
    (text,) = manifest["files"].values()
    done = pod_of(engine, text, laptop.given)
    assert done.returncode == 0, done.stderr
    assert laptop.mgpu("status", due["run_id"])["state"] == "running", done.stderr
    assert not [each for each in ("open sesame", "t0k") if each in done.stdout + done.stderr]
