"""Passes in containers of a real engine; the backend is a bucket of a real S3 server.

In the image with mgpu itself that of a CronJob: as little may be done there as in the pod, and the run's machines are
provider `local`'s, in there, too. On a bare Debian the jobs of GitHub's and GitLab's: the steps of the files as they
stand there, which install the wheels of this checkout from an index.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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

BASE, IMAGE, PASS_S = "operator-base:1", "operator:1", 600


@pytest.fixture(scope="module")
def base(engine: Engine, require, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Debian with Python, as `python`, too, and with Pulumi's engine, so that nothing is fetched."""
    found, folder = find_engine(), tmp_path_factory.mktemp("base")
    require("engine", found is not None, "run `make setup` first")
    engine.docker("import", str(trainer.base(require)), trainer.BASE)
    for path in (found.pulumi, *(found.host_dir / name for name in FILES[1:])):
        shutil.copy(path, folder)
    lines = (f"FROM {trainer.BASE}", "COPY pulumi* /usr/local/bin/", "RUN ln -s /usr/bin/python3 /usr/local/bin/python")
    (folder / "Dockerfile").write_text("\n".join(lines))
    assert trainer.build(engine, folder, BASE, {}).returncode == 0
    return BASE


@pytest.fixture(scope="module")
def image(engine: Engine, base: str, require, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The image with mgpu itself."""
    folder = tmp_path_factory.mktemp("image")
    with trainer.serving(trainer.wheels(require)) as index:
        context = trainer.context(shipped.operator_context(), folder / "context", index, {})
        done = trainer.build(engine, context, IMAGE, {"BASE": base})
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


# --- the jobs of a CI


@pytest.fixture(scope="module")
def index(require, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An index with the wheels of this checkout, and all that they need."""
    folder, root = tmp_path_factory.mktemp("wheels"), Path(__file__).parents[2]
    for source in (root, root / "train"):
        build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
        done = subprocess.run(build, cwd=source, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    for path in trainer.wheels(require).glob("*.whl"):
        (folder / path.name).symlink_to(path)
    with trainer.serving(folder) as serves:
        yield serves.url


class Hook:
    """A service that writes down what it is told."""

    def __init__(self) -> None:
        hook, self.told = self, list[dict[str, Any]]()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                hook.told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()


@pytest.fixture
def hook() -> Iterator[Hook]:
    made = Hook()
    yield made
    made.server.shutdown()
    made.server.server_close()


def filled_in(values: Mapping[str, str], secrets: Mapping[str, str]) -> dict[str, str]:
    """What GitHub makes of an environment; a secret that is not there is empty."""
    return {
        name: re.sub(r"\$\{\{ secrets\.(\w+) \}\}", lambda found: secrets.get(found[1], ""), value)
        for name, value in values.items()
    }


def steps_of_github(text: str, secrets: Mapping[str, str]) -> str:
    """A job as the runner does it: each step is a file, run by `bash -e`, with the job's environment and its own."""
    (job,) = yaml.safe_load(text)["jobs"].values()
    lines = ["set -e"]
    for number, step in enumerate(job["steps"]):
        if "uses" in step:  # the container has Python
            assert step["uses"].startswith("actions/setup-python@")
            continue
        given = filled_in({**job["env"], **step.get("env", {})}, secrets)
        variables = " ".join(shlex.quote(f"{name}={value}") for name, value in given.items())
        lines += [f"cat > /{number}.sh <<'END'", step["run"], "END", f"env {variables} bash -e /{number}.sh"]
    return "\n".join(lines)


def script_of_gitlab(text: str, secrets: Mapping[str, str]) -> str:
    """A job as the runner does it: one script, with the job's variables and the project's."""
    (job,) = yaml.safe_load(text).values()
    variables = [f"export {name}={shlex.quote(value)}" for name, value in {**secrets, **job["variables"]}.items()]
    return "\n".join(["set -eo pipefail", *variables, *job["script"]])


@pytest.mark.parametrize(("way", "script"), [("github", steps_of_github), ("gitlab", script_of_gitlab)])
def test_the_job_of_a_ci_does_a_pass_from_an_empty_machine(
    engine: Engine, base: str, index: str, laptop: Laptop, hook: Hook, way: str, script
):
    """What somebody is to be told lies in the backend: the laptop has not got the webhook's address, the CI has."""
    needs_secret(laptop.folder, "sinks: {webhook: {url: HOOK_URL}}\n")
    run = laptop.mgpu("submit", "mgpu.yaml", "--yes")["run_id"]
    (text,) = laptop.mgpu("schedule", "install", f"--{way}", "--dry-run")["files"].values()
    laptop.mgpu("queue", "rm", run)
    secrets = {**laptop.given, "HOOK_URL": hook.url}
    options = ["--rm", "--interactive", "--network=host", "--env=HOME=/home/ci", f"--env=PIP_FIND_LINKS={index}"]
    options += ["--env=PIP_NO_INDEX=1", "--env=PIP_BREAK_SYSTEM_PACKAGES=1", "--env=PIP_NO_COMPILE=1"]
    done = engine.docker("run", *options, base, "bash", "-s", input=script(text, secrets), check=False, timeout=PASS_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(told["event"], told["run_id"]) for told in hook.told] == [("ended", run)], done.stderr
    assert laptop.mgpu("reconcile")["told"] == []
    assert not [each for each in ("open sesame", "t0k") if each in done.stdout + done.stderr]
