"""Whether an image fits a machine: the table's rows against their neighbours, and the makers' own examples."""

from __future__ import annotations

from itertools import pairwise

import pytest

from mgpu.image import compat
from mgpu.image.compat import check, machine_code, runs_on, version
from mgpu.image.compat_table import ARCHITECTURES, FAMILIES, TOOLKITS, WHEELS
from mgpu.providers.aws.catalog import snapshot as snapshots
from mgpu.spec.gpus import GPUS

BUILDS = [(torch, cuda) for torch, builds in WHEELS.items() for cuda in builds]


def name(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def labels(torch: str = "2.15.0+cu132", cuda: str = "13.2", package: str = "", python: str = "3.12") -> dict[str, str]:
    return {compat.TORCH: torch, compat.CUDA: cuda, compat.CUDA_COMPAT: package, compat.PYTHON: python}


def words(found: list[compat.Mismatch]) -> str:
    return "\n".join(map(str, found))


def test_a_newer_cuda_comes_with_a_newer_driver():
    assert list(TOOLKITS) == sorted(TOOLKITS)
    for (_, older), (_, newer) in pairwise(TOOLKITS.items()):
        assert older.driver < newer.driver


def test_no_release_of_cuda_is_missing():
    last = {11: [8], 12: [*range(7), 8, 9], 13: list(range(5))}  # NVIDIA made no 12.7
    assert list(TOOLKITS) == [(major, minor) for major, minors in last.items() for minor in minors]


def test_a_family_begins_with_the_driver_of_its_first_release_or_before():
    assert list(FAMILIES) == sorted({major for major, _ in TOOLKITS})
    for (major, _), toolkit in TOOLKITS.items():
        assert FAMILIES[major] <= toolkit.driver
    assert list(FAMILIES.values()) == sorted(FAMILIES.values())


@pytest.mark.parametrize("cuda", TOOLKITS, ids=name)
def test_a_compatibility_package_is_for_older_drivers_and_of_none_that_runs_it_anyhow(cuda):
    for branch in TOOLKITS[cuda].compat_on:
        assert branch < FAMILIES[cuda[0]][0] < TOOLKITS[cuda].driver[0] + 1


def test_no_release_of_pytorch_is_missing():
    assert list(WHEELS) == [(2, minor) for minor in range(4, 16)]


@pytest.mark.parametrize(("torch", "cuda"), BUILDS, ids=lambda one: name(one))
def test_wheels_hold_code_that_their_cuda_can_make(torch, cuda):
    codes = WHEELS[torch][cuda]
    assert cuda in TOOLKITS
    assert list(codes) == sorted(set(codes))
    assert set(codes) <= set(machine_code(None, cuda))


def test_a_later_pytorch_is_built_with_no_older_cuda_than_the_one_before():
    for (_, older), (_, newer) in pairwise(WHEELS.items()):
        assert min(older) <= min(newer)
        assert max(older) <= max(newer)


@pytest.mark.parametrize("torch", WHEELS, ids=name)
def test_each_release_runs_on_every_architecture_from_turing_to_hopper(torch):
    wanted = [capability for capability in ARCHITECTURES if (7, 5) <= capability <= (9, 0)]
    for codes in WHEELS[torch].values():
        assert all(runs_on(codes, capability) for capability in wanted)


def test_architectures_came_in_order_and_none_is_before_volta():
    assert list(ARCHITECTURES) == sorted(ARCHITECTURES)
    assert min(ARCHITECTURES) == (7, 0)
    data_center = [ARCHITECTURES[capability].since for capability in ARCHITECTURES if capability < (12, 0)]
    assert data_center == sorted(data_center)


@pytest.mark.parametrize("gpu", sorted({one.gpu for one in snapshots._read(snapshots.SHIPPED).machines.values()}))
def test_every_gpu_that_aws_rents_is_known(gpu):
    assert GPUS[gpu].capability in ARCHITECTURES


@pytest.mark.parametrize("gpu", GPUS)
def test_every_gpu_has_a_build_that_runs_on_it(gpu):
    codes = [codes for builds in WHEELS.values() for codes in builds.values()]
    assert any(runs_on(each, GPUS[gpu].capability) for each in codes)


# NVIDIA's own: minor-version-compatibility.html, table 1, and forward-compatibility.html
@pytest.mark.parametrize(
    ("cuda", "driver", "runs"),
    [
        ("13.2", "595.45.04", True),  # made with it
        ("13.2", "580.65.06", True),  # minor version compatibility: 13.x on 580 or newer
        ("13.2", "580", True),  # a branch, not a driver
        ("13.2", "580.40", False),
        ("13.0", "575.57.08", False),
        ("12.8", "525.60.13", True),  # 12.x on 525 or newer
        ("12.8", "525.60.12", False),
        ("12.1", "595.71.05", True),  # drivers run every older CUDA
        ("11.8", "450.80.02", True),  # 11.x on 450 or newer
        ("11.8", "450.51.06", False),
        ("11.8", "418.226.00", False),
        ("14.0", "580.65.06", True),  # not known: no problem that is known
    ],
)
def test_a_driver_runs_its_own_major_release_of_cuda_and_older_ones(cuda, driver, runs):
    found = check(labels("", cuda), driver, None)
    assert (found == []) == runs, words(found)
    if not runs:
        assert driver in found[0].what
        assert f"CUDA {cuda} runs on" in found[0].why


@pytest.mark.parametrize(
    ("package", "driver", "gpu", "runs"),
    [
        ("13.0", "570.211.01", "T4", True),
        ("13.0", "535.274.02", "H100-80GB", True),
        ("13.0", "570.211.01", "8.0", True),
        ("", "570.211.01", "T4", False),
        ("13.0", "560.35.03", "T4", False),  # a branch that the package is not made for
        ("13.0", "470.256.02", "T4", False),
        ("13.0", "570.211.01", "RTX-4090", False),  # no data centre's GPU
        ("13.0", "570.211.01", "8.9", False),  # might be one, might be none
        ("13.0", "570.211.01", None, False),
        ("12.8", "470.256.02", "T4", False),  # that package brings no CUDA 13
        ("99.0", "570.211.01", "T4", False),
    ],
)
def test_the_compatibility_package_helps_where_nvidia_says_so(package, driver, gpu, runs):
    assert (check(labels(package=package), driver, gpu) == []) == runs


def test_the_error_names_the_newest_cuda_that_the_driver_runs():
    assert "is CUDA 12." in check(labels(), "570.26", None)[0].why
    assert "no CUDA that PyTorch is built with" in check(labels(), "418.226.00", None)[0].why


@pytest.mark.parametrize(
    ("torch", "cuda", "gpu", "runs"),
    [
        ("2.15.0+cu132", "13.2", "V100-32GB", False),  # CUDA 13 builds for no Volta
        ("2.14.0+cu126", "12.6", "V100-32GB", True),
        ("2.10.0+cu128", "12.8", "V100-32GB", True),
        ("2.11.0+cu128", "12.8", "V100-32GB", False),
        ("2.7.1+cu128", "12.8", "V100-32GB", False),
        ("2.8.0+cu126", "12.6", "B200", False),  # CUDA 12.6 is older than Blackwell
        ("2.8.0+cu128", "12.8", "B200", True),
        ("2.8.0+cu128", "12.8", "B300", True),  # code for 10.0 runs on 10.3
        ("2.6.0+cu124", "12.4", "RTX-PRO-6000", False),
        ("2.6.0+cu118", "11.8", "L40S", True),  # code for 8.6 runs on 8.9
        ("2.99.0", "12.6", "B200", False),  # a build of one's own: what its CUDA can make
        ("2.99.0", "12.8", "B300", True),
        ("", "13.2", "V100-32GB", False),
        ("2.15.0+cu132", "13.2", "some other GPU", True),
        ("2.15.0+cu132", "13.2", "6.1", False),
        ("", "", "V100-32GB", True),  # an image that says nothing of itself
    ],
)
def test_pytorch_runs_where_it_has_code_for_the_gpu(torch, cuda, gpu, runs):
    found = check(labels(torch, cuda), None, gpu)
    assert (found == []) == runs, words(found)


def test_the_error_names_the_newest_build_for_the_gpu():
    assert "PyTorch 2.14 for CUDA 12.6" in check(labels(), None, "V100-32GB")[0].next_step
    assert check(labels(), None, "6.1")[0].next_step == "Take another GPU."


@pytest.mark.parametrize(("code", "runs"), [((8, 6), True), ((8, 9), True), ((8, 0), True), ((9, 0), False)])
def test_machine_code_runs_on_later_capabilities_of_its_own_major_number(code, runs):
    assert runs_on([code], (8, 9)) == runs
    assert not runs_on([(8, 9)], (8, 6))


def test_a_driver_that_dropped_the_gpu_is_told():
    older = labels("2.14.0+cu126", "12.6")
    assert check(older, "580.105.08", "V100-32GB") == []
    assert "does not know the V100-32GB" in check(older, "595.71.05", "V100-32GB")[0].what


def test_an_image_without_cuda_is_for_machines_without_gpus():
    plain = labels("2.15.0+cpu", "cpu")
    assert check(plain, None, None) == []
    assert "cannot use the T4" in check(plain, "580.105.08", "T4")[0].what


@pytest.mark.parametrize(("python", "runs"), [("3.10", False), ("3.9.2", False), ("3.11", True), ("3.12.3", True)])
def test_the_agent_needs_a_python_of_today(python, runs):
    assert (check(labels(python=python), None, None) == []) == runs


def test_all_problems_are_told_at_once():
    assert len(check(labels(python="3.9"), "575.57.08", "V100-32GB")) == 3


@pytest.mark.parametrize("bad", [{compat.CUDA: "new"}, {compat.TORCH: "x"}, {compat.PYTHON: "three"}], ids=str)
def test_a_label_that_is_no_version_is_told(bad):
    found = check(labels() | bad, "580.65.06", "T4")
    assert next(iter(bad)) in words(found)


def test_an_image_of_somebody_else_has_no_problem_that_is_known():
    assert check({"maintainer": "somebody"}, "450.80.02", "B200") == []


def test_a_version_may_have_a_suffix():
    assert version("2.15.0a0+git1234") == (2, 15, 0)
    with pytest.raises(ValueError, match="no version"):
        version("main")
