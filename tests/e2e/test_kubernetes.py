"""A whole run on a real Kubernetes: asked for, trained, a pod evicted, the gang made anew, and no pod left."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from fakes.kube.cluster import IMAGE, Json, Namespace
from fakes.registries import Asked, Said, scripted
from waiting import until

from mgpu.paths import state_dir
from mgpu.providers.kubernetes.findings import roles

RUN_FILE = """
name: e2e
provider: kubernetes
image: {{reference: "{image}"}}
nodes: 2
market: on-demand
max_price_usd_per_hour: 0.20
max_hours: 0.2
launcher: python
command: [train.py, "60", "0.1"]
checkpoint: {{to: "file://{store}", every_steps: 10, keep_last: 2}}
recovery: {{attempts: 3, wait_minutes: 1}}
kubernetes: {options}
"""


def record() -> dict:
    found = list((state_dir() / "runs").glob("*/record.json"))
    return json.loads(found[0].read_text()) if found else {}


@pytest.fixture
def image(kube: Namespace) -> Iterator[str]:
    """The tests' image in a registry that shows what it is; nodes have it."""
    config = json.dumps({"architecture": "amd64", "os": "linux", "config": {}}).encode()
    kind = "application/vnd.oci.image.manifest.v1+json"
    layer = {"mediaType": "application/vnd.oci.image.layer.v1.tar", "size": 1, "digest": f"sha256:{'0' * 64}"}
    about = {"mediaType": "application/vnd.oci.image.config.v1+json", "size": len(config), "digest": digest(config)}
    manifest = json.dumps({"schemaVersion": 2, "mediaType": kind, "config": about, "layers": [layer]}).encode()

    def answer(asked: Asked) -> Said:
        if "/blobs/" in asked.path:
            return Said(200, body=config)
        if "/manifests/" in asked.path:
            return Said(200, {"Content-Type": kind, "Docker-Content-Digest": digest(manifest)}, manifest)
        return Said(200)

    with scripted(answer) as registry:
        reference = f"{registry.address}/trainer@{digest(manifest)}"
        images = json.loads((kube.cluster.folder / "images.json").read_text())
        kube.cluster.images({**images, reference: images[IMAGE]})
        yield reference


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def claim(kube: Namespace, folder: Path) -> None:
    """A folder of this machine's, as a volume that pods may claim."""
    common: Json = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    name = f"{kube.name}-store"
    of = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": kube.name, "name": "store"}
    volume = {**common, "capacity": {"storage": "1Gi"}, "hostPath": {"path": str(folder)}, "claimRef": of}
    kube.api.post("/api/v1/persistentvolumes", {"metadata": {"name": name}, "spec": volume})
    wanted = {**common, "resources": {"requests": {"storage": "1Gi"}}, "volumeName": name}
    kube.api.post(kube.path("persistentvolumeclaims"), {"metadata": {"name": "store"}, "spec": wanted})
    until(lambda: kube.api.get(kube.path("persistentvolumeclaims", "store"))["status"]["phase"] == "Bound")


def test_a_run_loses_a_pod_and_its_gang_is_made_anew_and_nothing_is_left(
    project, kube: Namespace, image, tmp_path: Path
):
    kube.grant(yaml.safe_dump_all(roles(kube.name)))
    store = tmp_path / "store"
    store.mkdir()
    claim(kube, store)
    options = {"price_usd_per_hour": 0.05, "notice_s": 5, "volumes": {str(store): "store"}, "same_paths": True}
    (project.folder / "mgpu.yaml").write_text(RUN_FILE.format(store=store, image=image, options=json.dumps(options)))
    project.env |= {name: os.environ[name] for name in ("KUBECONFIG", "PATH")}
    launch = project.start("launch", "--yes", "--json")
    try:
        project.wait(lambda: launch.poll() is not None or record().get("checkpoint_step", -1) >= 10)
        assert launch.poll() is None, "".join(launch.communicate())
        before = [node["id"] for node in record()["fleet"]["nodes"]]
        victim = next(pod["metadata"]["name"] for pod in kube.pods() if "-1-" in pod["metadata"]["name"])
        kube.evict(victim)
        out, err = launch.communicate(timeout=600)
    finally:
        launch.kill()
    assert launch.returncode == 0, err
    run = json.loads(out)
    after = [node["id"] for node in run["fleet"]["nodes"]]
    assert not {*before} & {*after}, "a Job cannot be refilled: the whole gang is another one"
    assert (run["state"], run["attempt"], run["recoveries"], run["checkpoint_step"]) == ("succeeded", 2, 1, 60)
    log = project.mgpu("logs", run["run_id"], "--node", "1").stdout
    assert re.search(r"rank 1 of 2 from [1-9]", log), "it went on from a checkpoint"
    assert kube.pods() == [], "what stays for an hour is Jobs without pods"
