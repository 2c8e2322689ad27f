"""Machines and images that cannot: each is named, and what cannot be used does not stay."""

from __future__ import annotations

import shutil
import sys


def test_no_docker_is_named(new_machine, images, tmp_path):
    folder = tmp_path / "without"
    folder.mkdir()
    for name in ("sh", "env", "cat", "mkdir"):
        (folder / name).symlink_to(shutil.which(name))
    (folder / "python3").symlink_to(sys.executable)
    machine = new_machine(PATH=str(folder))
    error = machine.refused(images.first, "Docker does not answer")
    assert str(folder) in error.why
    assert machine.down() == 0


def test_an_engine_that_does_not_run_is_named(new_machine, images, tmp_path):
    machine = new_machine(DOCKER_HOST=f"unix://{tmp_path}/nobody")
    error = machine.refused(images.first, "Docker does not answer", times={"prepare_s": 3})
    assert "nobody" in error.why


def test_gpus_are_asked_for_before_the_pull(machine, images, engine):
    engine.docker("rmi", "--force", images.bare, check=False)
    machine.refused(images.bare, "Docker has no GPUs", gpus_per_node=1)
    assert machine.pulls == 0


def test_an_image_without_python_is_named(machine, images):
    machine.refused(images.bare, "needs Python 3.11 or newer")
    assert machine.ids() == [], "what cannot be used does not stay"


def test_an_image_without_torch_is_named(machine, images):
    machine.refused(images.first, "needs PyTorch", train={}, launcher="torchrun")
    assert machine.ids() == []
