"""`image:` of the run file: what is accepted, and that every mistake in it is found, in words that help."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest
import yaml

from mgpu.errors import InputError, SpecError
from mgpu.run.job.request import build_secrets
from mgpu.spec.image import ImageSpec
from mgpu.spec.load import load, loads
from mgpu.spec.schema import schema

DIGEST = "sha256:" + "0123456789abcdef" * 4
OWN = """\
name: own
provider: {provider}
max_price_usd_per_hour: 1
max_hours: 1
checkpoint: none
command: [train.py]
"""


def text(image: str, *, provider: str = "aws", more: str = "") -> str:
    return OWN.format(provider=provider) + more + f"image: {image}\n"


def parsed(image: str, **of: str) -> ImageSpec:
    spec = loads(text(image, **of), "f.yaml")
    assert spec.image is not None
    return spec.image


def found(run_file: str) -> list[tuple[str, str]]:
    with pytest.raises(SpecError) as caught:
        loads(run_file, "f.yaml")
    return [(each.field, each.message) for each in caught.value.problems]


def test_an_empty_block_builds_the_image_that_mgpu_ships():
    image = parsed("{}")
    assert image.builds
    assert (image.context, image.dockerfile, image.platform, image.target) == (None, "Dockerfile", "linux/amd64", None)
    assert loads(OWN.format(provider="local"), "f").image is None


def test_every_key_of_a_build_is_read():
    image = parsed(
        "{repository: 'r.example:5000/team/train', context: docker, dockerfile: gpu/Dockerfile, args: {CUDA: 12.10},"
        " target: run, platform: linux/arm64, ca_file: /etc/ca.pem, secrets: [PIP_TOKEN]}",
        provider="local",
    )
    assert image == ImageSpec(
        repository="r.example:5000/team/train",
        context="docker",
        dockerfile="gpu/Dockerfile",
        args={"CUDA": "12.10"},
        target="run",
        platform="linux/arm64",
        ca_file="/etc/ca.pem",
        secrets=("PIP_TOKEN",),
    )  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "reference",
    [
        "pytorch/pytorch:2.9",
        "ubuntu:22.04",
        "localhost:5000/a:b",
        "[::1]:5000/a:b",
        f"r.example/team/train@{DIGEST}",
        f"r.example/team/train:v1@{DIGEST}",
        "123456789012.dkr.ecr.us-east-1.amazonaws.com/mgpu-base:mgpu-0f",
        "R.Example/a__b/c--d:X_1.2-3",
    ],
)
def test_an_image_that_exists_is_named_by_tag_or_digest(reference):
    assert parsed(f"{{reference: '{reference}'}}").reference == reference


@pytest.mark.parametrize(
    "reference",
    [
        "pytorch/PyTorch:2.9",
        "https://r.example/a:b",
        "a:b:c:d",
        "a@sha256:12",
        f"a@{DIGEST}0",
        "a:-b",
        "-a:b",
        "a b:c",
        "",
        "a/:b",
        ":b",
        "user:pw@r.example/a:b",
    ],
)
def test_what_is_no_reference_is_refused_without_being_repeated(reference):
    [(field, message)] = found(text(f"{{reference: '{reference}'}}"))
    assert field == "image.reference"
    assert message == "must be repository:tag or repository@sha256:..., the repository in lower case"


@pytest.mark.parametrize("repository", ["a/b:tag", f"a/b@{DIGEST}", "a/B", "http://a/b", "a//b", "a/b/"])
def test_a_repository_has_no_tag(repository):
    [(field, message)] = found(text(f"{{repository: '{repository}'}}"))
    assert (field, message) == ("image.repository", "must be registry/name in lower case, without tag or digest")


@pytest.mark.parametrize(
    ("image", "field", "message"),
    [
        ("{referense: a/b}", "image.referense", "unknown key"),
        ("{platform: linux/arm}", "image.platform", "`linux/arm` is not one of: linux/amd64, linux/arm64"),
        ("{args: {A-B: x}}", "image.args.A-B", "name of an environment variable"),
        ("{args: {A: on}}", "image.args.A", 'YAML reads `on` as yes or no: write it in quotes, "on"'),
        ("{args: [A]}", "image.args", "a block of keys is needed"),
        ("{secrets: [A=b]}", "image.secrets[0]", "name of an environment variable"),
        ("{secrets: [A, A]}", "image.secrets", "`A` is given 2 times"),
        ("{secrets: [B, A], args: {A: x}}", "image.secrets[1]", "in `image.args` too"),
        ("{target: ''}", "image.target", "at least 1 character"),
        ("{context: /src}", "image.context", "is relative"),
        ("{context: ~/src}", "image.context", "is relative"),
        ("{context: -x}", "image.context", "begins with `-`"),
        ("{context: ' x'}", "image.context", "one name"),
        ("{dockerfile: D}", "image.dockerfile", "`context` of your own"),
        ("{context: x, dockerfile: ../D}", "image.dockerfile", "inside `image.context`"),
        ("{context: x, dockerfile: /D}", "image.dockerfile", "inside `image.context`"),
        ("{context: x, dockerfile: -D}", "image.dockerfile", "begins with `-`"),
        ("{ca_file: ~/ca.pem}", "image.ca_file", "no `~`"),
        ("{ca_file: -x}", "image.ca_file", "begins with `-`"),
        ("7", "image", "a block of keys is needed, not `7`"),
    ],
)
def test_a_mistake_in_the_block(image, field, message):
    [(at, said)] = found(text(image))
    assert at == field
    assert message in said


BUILD = {
    "repository": "a/b",
    "context": "x",
    "dockerfile": "D",
    "args": "{A: b}",
    "target": "x",
    "ca_file": "/x",
    "secrets": "[A]",
}


def test_the_keys_for_building_are_all_but_two():
    assert {*BUILD, "reference", "platform"} == set(ImageSpec.model_fields)


def test_an_image_that_exists_may_be_for_other_machines():
    assert parsed("{reference: 'a:b', platform: linux/arm64}", provider="local").platform == "linux/arm64"


@pytest.mark.parametrize("image", ["{platform: linux/arm64}", "{reference: 'a:b', platform: linux/arm64}"])
def test_an_image_for_machines_that_a_provider_does_not_have_is_refused_before_any_is_rented(image):
    assert found(text(image)) == [("image.platform", "machines of aws are linux/amd64")]


@pytest.mark.parametrize("key", BUILD)
def test_a_reference_goes_with_no_key_for_building(key):
    [(field, message)] = found(text(f"{{reference: 'a:b', {key}: {BUILD[key]}}}"))
    assert field == f"image.{key}"
    assert message == "is for building, and `reference` names an image that exists"


def test_code_in_the_image_needs_an_image_that_is_built():
    code = "code: {mode: image}\n"
    assert parsed("{context: mine}", more=code).builds
    for image in ("", "image: {}\n", "image: {reference: 'a:b'}\n"):
        [(field, message)] = found(OWN.format(provider="aws") + code + image)
        assert field == "code.mode"
        assert "needs `image.context`" in message
        assert ("in place of `image.reference`" in message) is ("reference" in image)


@pytest.mark.parametrize("provider", ["local", "aws"])
@pytest.mark.parametrize("more", ["", "code: {mode: image}\n"])
def test_a_reference_without_a_tag_is_one_mistake(provider, more):
    run_file = text("{reference: '127.0.0.1:5000/team/x'}", provider=provider, more=more)
    assert found(run_file) == [("image.reference", "has no tag: write 127.0.0.1:5000/team/x:TAG")]


def test_a_reference_that_is_wrong_hides_nothing_of_the_rest():
    run_file = text("{reference: x, dockerfile: D, secrets: [A, A]}", provider="local")
    assert [field for field, _ in found(run_file)] == ["image.reference", "image.secrets"]


def test_provider_local_has_no_registry_of_its_own():
    [(field, message)] = found(text("{}", provider="local"))
    assert field == "image.repository"
    assert "is needed with provider local" in message
    assert parsed("{repository: 'localhost:5000/a'}", provider="local").builds
    assert not parsed("{reference: 'a:b'}", provider="local").builds


def test_all_mistakes_are_told_at_once_each_in_its_line():
    run_file = OWN.format(provider="aws") + (
        "image:\n  context: /x\n  platform: vax\n  args: {A: x}\n  secrets: [A]\n  lock: x\n"
    )
    with pytest.raises(SpecError) as caught:
        loads(run_file, "f.yaml")
    assert [(each.line, each.field) for each in caught.value.problems] == [
        (8, "image.context"),
        (9, "image.platform"),
        (11, "image.secrets[0]"),
        (12, "image.lock"),
    ]


def test_an_argument_that_may_be_a_secret_is_not_repeated():
    for image in ("{args: {TOKEN: [hunter2]}}", "{secrets: [TOKEN=hunter2]}", "{secrets: {TOKEN: hunter2}}"):
        assert all("hunter2" not in message for _, message in found(text(image)))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "docker" / "gpu").mkdir(parents=True)
    (tmp_path / "docker" / "gpu" / "Dockerfile").touch()
    (tmp_path / "ca.pem").touch()
    (tmp_path / "train.py").touch()
    return tmp_path


def loaded(project: Path, image: str) -> list[tuple[str, str | None]]:
    (project / "mgpu.yaml").write_text(text(image))
    try:
        load(project / "mgpu.yaml")
    except SpecError as error:
        return [(each.field, each.nearest) for each in error.problems]
    return []


def test_what_an_image_is_built_from_has_to_be_there(project, monkeypatch):
    monkeypatch.chdir("/")  # beside the run file, not in the current folder
    assert loaded(project, "{context: docker, dockerfile: gpu/Dockerfile, ca_file: ca.pem}") == []
    assert loaded(project, f"{{ca_file: {project / 'ca.pem'}}}") == []
    assert loaded(project, "{context: dokcer}") == [("image.context", None)]
    assert loaded(project, "{context: docker}") == [("image.dockerfile", None)]
    assert loaded(project, "{context: docker/gpu, dockerfile: Dokcerfile}") == [("image.dockerfile", "Dockerfile")]
    assert loaded(project, "{context: docker/gpu, dockerfile: ../x}") == [("image.dockerfile", None)]
    assert loaded(project, "{ca_file: ca.crt, context: none}") == [("image.ca_file", None), ("image.context", None)]
    assert loaded(project, "{reference: 'a:b'}") == []


def test_secrets_of_the_build_are_all_missed_at_once_and_sent_nowhere_else():
    spec = loads(text("{secrets: [ONE, TWO]}"), "f")
    with pytest.raises(InputError, match=r"image\.secrets: ONE, TWO not set") as caught:
        build_secrets(spec, {"THREE": "3"})
    assert "`image.secrets:`" in caught.value.next_step
    assert build_secrets(spec, {"ONE": "1", "TWO": "2", "THREE": "3"}) == {"ONE": "1", "TWO": "2"}
    assert spec.secrets == ()
    assert build_secrets(loads(OWN.format(provider="aws"), "f"), {}) == {}


@pytest.mark.parametrize(
    ("image", "good"),
    [
        ({}, True),
        ({"args": {"A": 1.5, "B": "x"}}, True),
        ({"reference": "a:b"}, True),
        ({"reference": "a"}, False),
        ({"args": {"A-B": "x"}}, False),
        ({"platform": "vax"}, False),
        ({"x": 1}, False),
    ],
)
def test_an_editor_and_the_loader_agree(image, good):
    data = yaml.safe_load(OWN.format(provider="aws")) | {"image": image}
    assert jsonschema.Draft202012Validator(schema()).is_valid(data) is good
    if good:
        loads(yaml.safe_dump(data), "f")
    else:
        assert found(yaml.safe_dump(data))
