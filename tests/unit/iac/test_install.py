"""Set-up: where the engine comes from, what is refused, and what `.mgpu/env` says. No network, no real engine."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import stat
import subprocess
import sys
import tarfile
import threading
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from mgpu.backend import location
from mgpu.errors import StackError
from mgpu.iac import environment
from mgpu.iac.engine import install, sources
from mgpu.iac.engine.install import find_engine, install_engine
from mgpu.iac.engine.sources import FILES, VERSION, Outside, SourceUnavailable

ROOT = Path(__file__).parents[3]
SUMS = f"pulumi-{VERSION}-checksums.txt"


class FakeOutside(Outside):
    """No network and no programs, but for what a test puts in."""

    def __init__(self, pulumi: Path | None = None, says: str = f"v{VERSION}", go: Path | None = None) -> None:
        self.programs = {"pulumi": pulumi, "go": go}
        self.says = says
        self.pages: dict[str, bytes] = {}
        self.opened: list[str] = []
        self.ran: list[list[str]] = []
        self.on_run: Callable[[list[str], Path | None], str | None] = lambda argv, cwd: None
        self.env: dict[str, str] = {}

    def which(self, name: str) -> Path | None:
        return self.programs[name]

    def run(
        self,
        argv: Sequence[str | Path],
        timeout_s: float,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> str:
        words = [str(word) for word in argv]
        self.ran.append(words)
        self.env = dict(env or {})
        if words[1:] == ["version"]:
            return f"{self.says}\n"
        return self.on_run(words, cwd) or ""

    def open(self, url: str, timeout_s: float) -> tuple[io.BytesIO, int]:
        name = url.rpartition("/")[2]
        self.opened.append(name)
        if name not in self.pages:
            raise OSError("no route to host")
        return io.BytesIO(self.pages[name]), len(self.pages[name])


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of the test's own; an ambient passphrase must not decide anything."""
    for variable in ("XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / variable.lower()))
    monkeypatch.setattr(sources.platform, "system", lambda: "Linux")
    monkeypatch.setattr(sources.platform, "machine", lambda: "x86_64")
    return tmp_path


def fill(folder: Path, names: Sequence[str] = FILES) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text(f"old {name}")
        (folder / name).chmod(0o755)
    return folder


def cached() -> Path:
    return install.cache_dir() / VERSION


def archive_of(names: Sequence[str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name in names:
            member = tarfile.TarInfo(f"pulumi/{name}")
            member.size = len(name)
            tar.addfile(member, io.BytesIO(name.encode()))
    return buffer.getvalue()


ARCHIVE = f"pulumi-v{VERSION}-linux-x64.tar.gz"


def with_release(outside: FakeOutside, archive: bytes, digest: str | None = None) -> FakeOutside:
    digest = digest or hashlib.sha256(archive).hexdigest()
    outside.pages = {ARCHIVE: archive, SUMS: f"{'0' * 64}  other.tar.gz\n{digest}  {ARCHIVE}\n".encode()}
    return outside


def with_go(outside: FakeOutside, tmp_path: Path) -> FakeOutside:
    """A Go that "builds" by writing the output file and knows one module folder."""
    module = fill(tmp_path / "gomod" / "python" / "cmd", FILES[2:]).parents[1]

    def go(argv: list[str], cwd: Path | None) -> str | None:
        if argv[1] == "build":
            output = Path(argv[argv.index("-o") + 1])
            output.write_text(argv[-1])
            output.chmod(0o755)
        return str(module) if argv[1] == "list" else None

    outside.programs["go"] = Path("/opt/go/bin/go")
    outside.on_run = go
    return outside


def quiet(line: str) -> None:
    """A report that nobody reads."""


# ---- finding


def test_nothing_here_is_found_as_nothing():
    assert find_engine(FakeOutside()) is None


def test_an_engine_on_path_wins_over_the_cache(tmp_path):
    fill(cached())
    there = fill(tmp_path / "bin")
    engine = find_engine(FakeOutside(there / "pulumi", "v3.300.1"))
    assert engine == install.PulumiEngine(there / "pulumi", there, "3.300.1", "PATH")


@pytest.mark.parametrize("says", ["v3.258.9", "v2.999.0", "v4.0.0", "dev", ""])
def test_an_engine_on_path_of_another_age_is_passed_over(tmp_path, says):
    fill(cached())
    engine = find_engine(FakeOutside(fill(tmp_path / "bin") / "pulumi", says))
    assert engine is not None
    assert engine.origin == "cache"


def test_an_engine_on_path_without_its_python_host_is_passed_over(tmp_path):
    there = fill(tmp_path / "bin", ["pulumi"])
    assert find_engine(FakeOutside(there / "pulumi")) is None


def test_a_link_on_path_leads_to_the_host_beside_the_real_file(tmp_path):
    real = fill(tmp_path / "opt")
    link = tmp_path / "bin" / "pulumi"
    link.parent.mkdir()
    link.symlink_to(real / "pulumi")
    engine = find_engine(FakeOutside(link))
    assert engine is not None
    assert engine.path == (link.parent, real)


def test_a_pulumi_that_cannot_be_run_is_passed_over(tmp_path):
    broken = tmp_path / "pulumi"
    broken.touch(0o755)
    outside = Outside()
    outside.which = lambda name: broken  # type: ignore[method-assign]
    assert find_engine(outside) is None


def test_the_cache_is_found_without_running_anything():
    fill(cached())
    outside = FakeOutside()
    engine = find_engine(outside)
    assert engine == install.PulumiEngine(cached() / "pulumi", cached(), VERSION, "cache")
    assert outside.ran == []


@pytest.mark.parametrize("missing", FILES)
def test_a_cache_that_lacks_a_file_is_no_engine(missing):
    fill(cached(), [name for name in FILES if name != missing])
    assert find_engine(FakeOutside()) is None


def test_the_engine_is_the_version_of_the_sdk_that_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"pulumi=={VERSION}" in project["dependencies"]


# ---- installing


def test_a_release_is_installed_with_the_three_files_only(tmp_path):
    outside = with_release(FakeOutside(), archive_of([*FILES, "pulumi-language-go"]))
    said: list[str] = []
    engine = install_engine(said.append, outside)
    assert engine == install.PulumiEngine(cached() / "pulumi", cached(), VERSION, "release")
    assert {path.name: path.read_text() for path in cached().iterdir()} == {name: name for name in FILES}
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o755 for path in cached().iterdir())
    assert "MB" in said[1], "the size is said before the download"
    assert find_engine(FakeOutside()) is not None


def test_a_wrong_checksum_is_refused(tmp_path):
    outside = with_release(FakeOutside(), archive_of(FILES), digest="f" * 64)
    with pytest.raises(StackError, match="could not be installed") as caught:
        install_engine(quiet, outside)
    assert "SHA-256" in caught.value.why
    assert not cached().exists()


def test_an_archive_that_the_official_list_does_not_name_is_refused():
    outside = with_release(FakeOutside(), archive_of(FILES))
    outside.pages[SUMS] = b""
    with pytest.raises(StackError, match="could not be installed") as caught:
        install_engine(quiet, outside)
    assert "does not name" in caught.value.why
    assert outside.opened == [SUMS], "nothing is downloaded that cannot be checked"


@pytest.mark.parametrize(
    "archive",
    [archive_of(FILES[:2]), b"not an archive", archive_of(FILES)[:40]],
    ids=["without the engine", "no archive", "cut off"],  # gzip's own bytes have the time in them
)
def test_an_archive_without_an_engine_in_it_is_refused(archive):
    with pytest.raises(StackError, match="could not be installed"):
        install_engine(quiet, with_release(FakeOutside(), archive))
    assert not cached().exists()


def test_an_engine_of_another_version_than_asked_is_not_published():
    outside = with_release(FakeOutside(says="v3.1.0"), archive_of(FILES))
    with pytest.raises(StackError, match="could not be installed") as caught:
        install_engine(quiet, outside)
    assert "3.1.0" in caught.value.why
    assert not cached().exists()


def test_an_unknown_machine_is_told_that_there_is_no_release(monkeypatch):
    monkeypatch.setattr(sources.platform, "machine", lambda: "s390x")
    with pytest.raises(StackError, match="could not be installed") as caught:
        install_engine(quiet, FakeOutside())
    assert "s390x" in caught.value.why


def test_without_the_release_it_is_built_from_the_go_modules(tmp_path):
    outside = with_go(FakeOutside(), tmp_path)
    said: list[str] = []
    requirements: dict[str, str] = {}
    go = outside.on_run

    def spy(argv: list[str], cwd: Path | None) -> str | None:
        if argv[1:3] == ["mod", "tidy"]:
            assert cwd is not None
            requirements[cwd.name] = (cwd / "go.mod").read_text()
        return go(argv, cwd)

    outside.on_run = spy
    engine = install_engine(said.append, outside)
    assert (engine.origin, engine.host_dir) == ("modules", cached())
    assert sorted(path.name for path in cached().iterdir()) == sorted(FILES)
    assert os.access(cached() / FILES[2], os.X_OK)
    assert f"github.com/pulumi/pulumi/pkg/v3 v{VERSION}" in requirements["module-pulumi"]
    assert "github.com/pulumi/pulumi/sdk/v3 v3.79.0" in requirements["module-pulumi-language-python"]
    assert any("about 4 minutes" in line for line in said), "how long it takes is said before"
    version_variable = "github.com/pulumi/pulumi/sdk/v3/go/common/version.Version"
    assert any(f"-X {version_variable}=v{VERSION}" in word for argv in outside.ran for word in argv)


def test_the_build_needs_no_c_compiler_and_ignores_the_users_go_flags(tmp_path, monkeypatch):
    monkeypatch.setenv("GOFLAGS", "-mod=vendor")
    outside = with_go(FakeOutside(), tmp_path)
    sources.from_modules(fill(tmp_path / "scratch" / "engine", []), quiet, outside)
    assert (outside.env["CGO_ENABLED"], outside.env["GOFLAGS"], outside.env["GOWORK"]) == ("0", "", "off")


def test_go_has_a_home_where_nothing_names_one(tmp_path, monkeypatch):
    """It has no place for modules then, and builds nothing."""
    home = str(Path.home())
    monkeypatch.setattr(Path, "home", lambda: Path(home))
    outside = with_go(FakeOutside(), tmp_path)
    for given, has in (("/other", "/other"), (None, home)):
        monkeypatch.setenv("HOME", given) if given else monkeypatch.delenv("HOME")
        sources.from_modules(fill(tmp_path / str(given).strip("/") / "engine", []), quiet, outside)
        assert outside.env["HOME"] == has


def test_neither_network_nor_go_is_one_error_with_the_cure():
    with pytest.raises(StackError) as caught:
        install_engine(quiet, FakeOutside())
    error = caught.value
    assert error.exit_code == 4
    assert "no route to host" in error.why
    assert "no Go on PATH" in error.why
    assert "https://www.pulumi.com/docs/install/" in error.next_step
    assert len(str(error).splitlines()) == 3


def test_a_failed_build_leaves_neither_engine_nor_scratch(tmp_path):
    outside = with_go(FakeOutside(), tmp_path)
    build = outside.on_run

    def half(argv: list[str], cwd: Path | None) -> str | None:
        if argv[-1].endswith("pulumi-language-python"):
            raise SourceUnavailable("`go build` failed: no space left")
        return build(argv, cwd)

    outside.on_run = half
    with pytest.raises(StackError, match="could not be installed"):
        install_engine(quiet, outside)
    assert [path.name for path in install.cache_dir().iterdir()] == [".lock"]


@pytest.mark.parametrize("source", ["release", "staged", "modules"])
def test_a_full_disk_is_called_that_at_once_and_no_other_source_is_tried(tmp_path, monkeypatch, source):
    outside = with_go(FakeOutside(), tmp_path)
    build = outside.on_run
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def refuse(*args: object, **kwargs: object) -> None:
        raise full

    def fail(argv: list[str], cwd: Path | None) -> str | None:
        if argv[1] != "build":
            return build(argv, cwd)
        words = "compile: write $WORK/_pkg_.a: no space left on device\nnote: module requires Go 1.25"
        return Outside().run([sys.executable, "-c", f"import sys; sys.exit({words!r})"], 20)

    outside.on_run = fail
    if source == "release":
        with_release(outside, archive_of(FILES))
        monkeypatch.setattr(sources, "_download", refuse)
    elif source == "staged":
        with_release(outside, archive_of(FILES))
        monkeypatch.setattr(install, "_publish", refuse)
    with pytest.raises(StackError, match="there is no room") as caught:
        install_engine(quiet, outside)
    assert re.search(r"(?i)no space left on device.* Free now: \d+ MB in ", caught.value.why)
    assert "Make room" in caught.value.next_step
    assert [argv for argv in outside.ran if "go" in Path(argv[0]).name] == [] or source == "modules"
    assert [path.name for path in install.cache_dir().iterdir()] == [".lock"]


def test_a_build_without_something_to_run_is_not_published(tmp_path):
    outside = with_go(FakeOutside(), tmp_path)
    outside.on_run = lambda argv, cwd: str(tmp_path / "gomod") if argv[1] == "list" else None
    with pytest.raises(StackError, match="could not be installed") as caught:
        install_engine(quiet, outside)
    assert "no complete engine" in caught.value.why
    assert not cached().exists()


def test_what_a_killed_set_up_left_is_cleared_and_a_broken_engine_replaced():
    half_made = fill(install.cache_dir() / ".making-old")
    fill(cached(), FILES[:1])
    install_engine(quiet, with_release(FakeOutside(), archive_of(FILES)))
    assert not half_made.exists()
    assert (cached() / "pulumi").read_text() == "pulumi"
    assert sorted(path.name for path in cached().iterdir()) == sorted(FILES)


def test_two_set_ups_at_once_install_once():
    building, waiting = threading.Event(), threading.Event()
    outside = with_release(FakeOutside(), archive_of(FILES))
    plain_open = outside.open

    def slow_open(url: str, timeout_s: float) -> tuple[io.BytesIO, int]:
        building.set()
        assert waiting.wait(20), "the second set-up never reached the lock"
        return plain_open(url, timeout_s)

    outside.open = slow_open  # type: ignore[method-assign]
    first = threading.Thread(target=install_engine, args=(quiet, outside))
    first.start()
    assert building.wait(20)
    second = install_engine(lambda line: waiting.set(), FakeOutside())
    first.join(20)
    assert second.origin == "cache"
    assert outside.opened == [SUMS, ARCHIVE]


# ---- programs


def test_a_program_that_fails_is_quoted_by_its_last_line():
    code = "import sys; sys.exit('first\\nand the cause')"
    with pytest.raises(SourceUnavailable, match="failed: and the cause"):
        Outside().run([sys.executable, "-c", code], 20)


def test_a_program_that_hangs_is_ended_at_its_deadline():
    with pytest.raises(SourceUnavailable, match="timed out"):
        Outside().run([sys.executable, "-c", "import time; time.sleep(60)"], 0.2)


# ---- .mgpu/env


def sourced(env_file: Path, ambient: Mapping[str, str], times: int = 1) -> dict[str, str]:
    script = f"{'. ' + str(env_file.name) + '; '}" * times + "env -0"
    command = ["/bin/sh", "-eu", "-c", script.replace(". env", ". ./env")]
    output = subprocess.run(command, cwd=env_file.parent, env=ambient, capture_output=True, text=True, check=True)
    return dict(item.split("=", 1) for item in output.stdout.split("\0") if item)


def test_the_shell_reads_every_value_as_it_was_written(tmp_path, monkeypatch):
    odd = tmp_path / 'it\'s $HOME; `x` "y" 100%'
    for variable in ("XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(variable, str(odd))
    variables = environment.engine_env([odd / "engine"], venv=odd / "venv")
    seen = sourced(environment.write_env(tmp_path, variables), {"PATH": "/usr/bin:/bin"})
    assert seen["PATH"] == f"{odd}/venv/bin:{odd}/engine:/usr/bin:/bin"
    assert {name: seen[name] for name in variables if name != "PATH"} == {
        name: value for name, value in variables.items() if name != "PATH"
    }


def test_the_environment_of_the_program_comes_before_the_engine_and_the_users_path(tmp_path):
    variables = environment.engine_env([Path("/e"), Path("/h")], venv=Path("/v"))
    env_file = environment.write_env(tmp_path, variables)
    assert sourced(env_file, {"PATH": "/bin:/usr/bin"}, times=2)["PATH"].startswith("/v/bin:/e:/h:/v/bin")


def test_an_ambient_passphrase_does_not_win_over_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv(environment.AMBIENT_PASSPHRASE, "")
    variables = environment.engine_env([Path("/e")])
    seen = sourced(environment.write_env(tmp_path, variables), {**os.environ})
    assert environment.AMBIENT_PASSPHRASE not in seen
    assert environment.AMBIENT_PASSPHRASE not in environment.process_env(variables)


def test_a_backend_path_with_signs_of_a_url_survives(monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/a b%20c")
    assert environment.engine_env([])["PULUMI_BACKEND_URL"] == "file:///a%20b%2520c/mgpu/pulumi"


def test_a_child_process_gets_the_users_path_last(monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin")
    env = environment.process_env(environment.engine_env([Path("/e")], venv=Path("/v")))
    assert env["PATH"] == "/v/bin:/e:/usr/bin"


def test_what_the_operators_shell_says_of_aws_reaches_the_plugin_as_it_is(monkeypatch):
    said = {"AWS_PROFILE": "work", "AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_SESSION_TOKEN": "t"}
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    ours = environment.engine_env([Path("/e")])
    assert not any(name.startswith("AWS_") for name in ours)
    assert said.items() <= environment.process_env(ours).items()


def test_a_second_write_of_the_same_env_touches_nothing(tmp_path):
    variables = environment.engine_env([Path("/e")])
    before = environment.write_env(tmp_path, variables).stat()
    after = environment.write_env(tmp_path, variables).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    other = environment.write_env(tmp_path, environment.engine_env([Path("/another-engine")])).read_text()
    assert other.count("/another-engine") == 1


# ---- passphrase and backend


def test_the_passphrase_is_random_private_and_kept():
    path = environment.make_passphrase()
    first = path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(first.strip()) >= 32
    assert environment.make_passphrase().read_text() == first
    path.unlink()
    assert environment.make_passphrase().read_text() != first
    assert [item.name for item in path.parent.iterdir()] == ["passphrase"]


@pytest.mark.parametrize("content", ["", "\n", "  \n"])
def test_an_empty_passphrase_is_refused_and_left_as_it_is(content):
    path = environment.passphrase_file()
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(StackError, match="is empty"):
        environment.make_passphrase()
    assert path.read_text() == content


def test_a_passphrase_of_the_users_own_may_be_in_any_encoding():
    path = environment.passphrase_file()
    path.parent.mkdir(parents=True)
    path.write_bytes("für mich\n".encode("latin-1"))
    assert environment.make_passphrase() == path


def test_a_passphrase_that_others_could_read_is_closed():
    path = environment.make_passphrase()
    path.chmod(0o644)
    environment.make_passphrase()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_backend_is_for_this_user_only():
    environment.make_backend_dir()
    folder = location.current().folder
    folder.chmod(0o755)
    environment.make_backend_dir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


# ---- all of it


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "Pulumi.yaml").write_text("name: demo.x\nruntime: python\n")
    fill(cached())
    return folder


def stack_file(name: str) -> Path:
    return location.current().folder / ".pulumi" / "stacks" / "demo.x" / name


def touch(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def test_set_up_makes_everything_and_a_second_one_starts_no_program(project):
    outside = FakeOutside()
    outside.on_run = lambda argv, cwd: touch(stack_file("dev.json"))
    install.set_up(project, quiet, outside)
    assert outside.ran == [[str(cached() / "pulumi"), "stack", "init", "dev", "--non-interactive"]]
    assert outside.env["PULUMI_BACKEND_URL"] == location.current().folder.as_uri()
    assert (project / ".mgpu" / "env").exists()
    install.set_up(project, quiet, outside)
    assert len(outside.ran) == 1


def test_the_backup_of_a_removed_stack_is_no_stack(project):
    touch(stack_file("dev.json.bak"))
    outside = FakeOutside()
    install.set_up(project, quiet, outside)
    assert len(outside.ran) == 1


def test_a_folder_without_a_program_gets_no_stack(project):
    (project / "Pulumi.yaml").unlink()
    outside = FakeOutside()
    install.set_up(project, quiet, outside)
    assert outside.ran == []


def test_a_stack_that_another_set_up_made_meanwhile_is_no_error(project):
    def lose(argv: list[str], cwd: Path | None) -> str:
        touch(stack_file("dev.json"))
        raise SourceUnavailable("stack 'dev' already exists")

    outside = FakeOutside()
    outside.on_run = lose
    assert install.set_up(project, quiet, outside).pulumi


def test_a_stack_that_cannot_be_made_is_an_error_with_the_engines_words(project):
    def refuse(argv: list[str], cwd: Path | None) -> str:
        raise SourceUnavailable("`pulumi stack` failed: incorrect passphrase")

    outside = FakeOutside()
    outside.on_run = refuse
    with pytest.raises(StackError, match="could not be made") as caught:
        install.set_up(project, quiet, outside)
    assert "incorrect passphrase" in caught.value.why


def test_the_program_ends_with_the_errors_code_and_no_traceback(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(install, "Outside", FakeOutside)
    assert install.main(["--project", str(tmp_path)]) == 4
    assert "Traceback" not in capsys.readouterr().err


def test_a_cache_that_cannot_be_written_is_told_without_a_traceback(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(install, "Outside", FakeOutside)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert install.main(["--project", str(tmp_path)]) == 4
    assert str(tmp_path / "file") in capsys.readouterr().err
