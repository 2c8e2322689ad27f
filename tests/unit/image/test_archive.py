"""What is for the build alone: who gets it, and which Dockerfiles would take it into their image."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from mgpu.errors import InputError
from mgpu.image.build import archive, bases, context, docker_engine
from mgpu.image.build.hashes import Hashes
from mgpu.image.build.recipe import Recipe

THROWN = "FROM a AS packages\nCOPY .buil[d] /build/\nRUN x\n"
PACKAGES = f"{THROWN}FROM a\n"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("COPY .build /b", True),
        ("COPY x .buil[d] /b/", True),
        ("copy --chown=1:1 ./.build/secrets/T /b", True),
        ('ADD [".build", "/b"]', True),
        ("COPY \\\n  .buil[d] \\\n  /b", True),
        ("# COPY .build /b", False),
        ("COPY . /b", False),
        ("COPY x /b/.build", False),
        ("COPY app.build/x /x", False),
        ("COPY x/.build /x", False),
        ("COPY --from=0 .build /x", False),
        ("RUN echo mypkg.build", False),
        ("RUN <<E\nCOPY .build /b\nE", False),
    ],
)
def test_only_a_copy_asks(line, expected):
    assert archive.asks(bases.read(f"FROM a\n{line}\n".encode(), {})) is expected


def refused(recipe: str, target: str | None = None, secrets: tuple[str, ...] = ("TOKEN",)) -> str:
    try:
        archive.require_thrown_away(bases.read(recipe.encode(), {}), target, "Dockerfile", secrets)
    except InputError as error:
        return f"{error.what} | {error.why} | {error.next_step}"
    return ""


@pytest.mark.parametrize(
    "source",
    [
        ".", "./", "/", "./.", "x/..", "app .", "*", "./*", ".*", ".b*", ".buil?", ".bui[a-l]d", "[^x]build", "?build",
        ".build", "./.build/", "\\.build", ".buil[d]", ".build/*", "*/secrets", ".build/secrets/TOKEN", "*/*/TOKEN",
        "*/ca.pem", "$X", "${X}/*",
    ],
)  # fmt: skip
@pytest.mark.parametrize("word", ["COPY", "ADD --chown=1:1"])
def test_a_copy_that_takes_it_along_into_the_image_is_refused(source, word):
    said = refused(f"{PACKAGES}RUN y\n{word} {source} /app")
    assert said.startswith("image.secrets would end in the image: Dockerfile, line 6 | ")
    assert f"{word} {source} /app" in said
    assert "COPY app /app" in said
    assert "--mount=type=secret" in said


@pytest.mark.parametrize(
    "line",
    [
        "COPY app /app",
        "COPY app/. app/* /app/",
        "COPY *.py [a-z]* /app/",
        "COPY ..build .builds .[a-b] /app",
        "COPY --from=packages / /app",
        "COPY */secrets/OTHER /app",
        "COPY a[ /app",
        "COPY <<E /app\nCOPY . /\nE",
        "RUN cp . /app",
        "ARG APP=app\nCOPY ${APP} $APP/x /app/",
        "ENV APP app\nCOPY $APP /app/",
    ],
)
def test_other_copies_are_not(line):
    assert not refused(f"{PACKAGES}{line}\n")


def test_a_variable_that_means_the_whole_context_is_seen():
    assert refused(f"{PACKAGES}ARG APP=.\nCOPY ${{APP}} /app")
    assert refused(f"{PACKAGES}ENV A=b APP=.\nCOPY ${{APP}} /app")


def test_a_list_in_json_and_continued_lines_are_read():
    assert "line 5" in refused(f'{PACKAGES}COPY ["app", ".", "/app"]')
    assert "line 5" in refused(f"{PACKAGES}COPY \\\n  . \\\n  /app")


CHAIN = """\
FROM a AS packages
COPY .buil[d] /build/
FROM a AS one
COPY . /app
FROM One AS two
RUN x
FROM packages AS three
FROM a AS four
COPY --from=one /app/x /x
"""


@pytest.mark.parametrize(
    ("target", "line"),
    [("one", "line 4"), ("two", "line 4"), ("2", "line 4"), ("packages", "line 2"), ("three", "line 2")],
)
def test_what_the_target_begins_with_is_in_the_image(target, line):
    assert line in refused(CHAIN, target)


def test_an_onbuild_of_a_stage_that_another_one_begins_with_is_in_the_image():
    later = "FROM scratch AS sec\nCOPY .build /s\nFROM alpine AS x\nONBUILD COPY . /app\nFROM x\nRUN true\n"
    assert "line 4" in refused(later)


@pytest.mark.parametrize("target", ["four", None])
def test_a_stage_that_is_thrown_away_may_take_all(target):
    assert not refused(CHAIN, target)


BY_WAY = """\
FROM a AS packages
COPY .buil[d] /build/
FROM a AS code
WORKDIR /srv
ARG TO=app
COPY . ./$TO
FROM code AS more
FROM a
"""


@pytest.mark.parametrize(
    "line",
    [
        "COPY --from=code /srv/app /app",
        "COPY --from=CODE / /",
        "COPY --from=1 /srv /x",
        "COPY --from=more srv/app/. /app",
        "COPY --from=code /srv/app/* /app/",
        "COPY --from=code /srv/app/.build/secrets /x",
    ],
)
def test_what_a_stage_has_taken_along_is_not_carried_into_the_image(line):
    said = refused(f"{BY_WAY}{line}\n")
    assert "line 9" in said
    assert line in said


@pytest.mark.parametrize(
    "line",
    [
        "COPY --from=code /srv/app/out /app",
        "COPY --from=code /srv/app2 /srv/ap /app",
        "COPY --from=packages / /",
        "COPY --from=packages /opt /opt",
        "COPY --from=r.io/code /srv/app /app",
    ],
)
def test_other_things_of_such_a_stage_are(line):
    assert not refused(f"{BY_WAY}{line}\n")


def test_a_stage_between_two_carries_on():
    assert "line 11" in refused(f"{BY_WAY}COPY --from=code /srv/app /o\nFROM a\nCOPY --from=3 /o /x")
    assert not refused(f"{BY_WAY}COPY --from=code /srv/app /o\nFROM a\nCOPY --from=3 /p /x")


@pytest.mark.parametrize(
    "code",
    [
        "FROM a AS code\nCOPY . .",
        "FROM a AS code\nWORKDIR app\nCOPY . ./x",
        "FROM a AS code\nWORKDIR $HOME/app\nCOPY . .",
        "FROM a AS code\nWORKDIR /srv\nCOPY . $APP",
        "FROM a AS code\nENV APP=$HOME/app\nCOPY . $APP",
        "FROM a AS code\nARG APP=/srv/$NAME\nWORKDIR $APP\nCOPY . .",
        "FROM a AS first\nFROM first AS code\nCOPY . .",
        "FROM a AS first\nCOPY . .\nFROM a AS code\nCOPY --from=first /workspace /o",
    ],
)
def test_a_folder_that_only_a_base_image_names_may_be_any(code):
    said = refused(f"{THROWN}{code}\nFROM a\nCOPY --from=code /workspace /workspace\n")
    assert "`COPY --from=code /workspace /workspace` may take `.build` along" in said
    assert "by WORKDIR" in said


@pytest.mark.parametrize(
    "code",
    [
        "FROM scratch AS code\nCOPY . .",
        "FROM a AS code\nWORKDIR /srv\nCOPY . app",
        "FROM a AS code\nARG NAME=x\nENV APP=/srv/$NAME\nCOPY . $APP",
    ],
)
def test_a_folder_that_the_dockerfile_names_is_known(code):
    whole = f"{THROWN}{code}\nFROM a\nCOPY --from=code /workspace /workspace\n"
    assert not refused(whole)


def test_without_a_way_for_them_nothing_is_in_the_context():
    assert not refused("FROM a\nCOPY . /app")


@pytest.mark.parametrize("given", [{"secrets": {"T": "x"}}, {"ca_file": Path("ca.pem")}])
def test_nothing_that_would_keep_them_can_be_built(given):
    def made(line: str, **more: object) -> Recipe:
        return Recipe(context.BuildContext(Path("x"), "D", f"{PACKAGES}{line}".encode(), ()), **more)

    with pytest.raises(InputError, match="would end in the image: D, line 5"):
        made("COPY . /app", **given)
    with pytest.raises(InputError, match="would end in the image: D, line 5"):
        made("COPY $A /app\nFROM a", target="1", **given)
    made("COPY app /app", **given)
    made("ARG A\nCOPY $A /app", args={"A": "app"}, **given)
    made("COPY . /app")


@pytest.mark.parametrize(
    ("default", "given", "copies", "there"),
    [(".build", "app", "COPY . /app", []), ("app", ".build", "COPY app /app", [".build/secrets/TOKEN"])],
)
def test_an_argument_says_whether_they_are_in_the_context(tmp_path: Path, default, given, copies, there):
    (tmp_path / "Dockerfile").write_text(f"FROM a AS packages\nARG X={default}\nCOPY $X /b\nFROM a\n{copies}\n")
    recipe = Recipe(context.scan(tmp_path, "Dockerfile", Hashes()), args={"X": given}, secrets={"TOKEN": "canary"})
    with docker_engine._packed(recipe) as packed, tarfile.open(fileobj=packed) as tar:
        assert [name for name in tar.getnames() if name.startswith(".build")] == there


def test_certificates_alone_are_named():
    assert refused(f"{PACKAGES}COPY . /app", secrets=()).startswith("image.ca_file would end in the image")
    assert not refused(f"{PACKAGES}COPY .build/secrets/TOKEN /app", secrets=())


@pytest.mark.parametrize("path", ["docker/Dockerfile", "linked/Dockerfile"])
def test_the_dockerfile_of_the_archive_is_the_one_that_was_pinned(tmp_path: Path, path: str):
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker/Dockerfile").write_text("FROM a\n")
    (tmp_path / "x").write_text("x")
    (tmp_path / "linked").symlink_to("docker")
    found = context.scan(tmp_path, path, Hashes())
    assert found.dockerfile == "docker/Dockerfile"
    pinned = context.BuildContext(found.root, found.dockerfile, b"FROM b@sha256:1\n", found.entries)
    for each, text in ((found, b"FROM a\n"), (pinned, b"FROM b@sha256:1\n")):
        packed = io.BytesIO()
        archive.write(each, packed, b"", {})
        packed.seek(0)
        with tarfile.open(fileobj=packed) as tar:
            members = {member.name: member for member in tar.getmembers()}
            assert sorted(tar.getnames()) == ["docker", "docker/Dockerfile", "linked", "x"]
            assert tar.extractfile("docker/Dockerfile").read() == text
            assert members["docker/Dockerfile"].mode == 0o644
