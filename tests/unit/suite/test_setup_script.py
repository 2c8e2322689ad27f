"""The scripts of set-up on machines made of fakes: what they find, what they leave alone, what they say when they
cannot, and that nothing half made counts as done."""

from __future__ import annotations

import fcntl
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import until

ROOT = Path(__file__).parents[3]
TOOLS = (
    *(
        "sh",
        "env",
        "true",
        "dirname",
        "cksum",
        "cat",
        "sed",
        "sort",
        "head",
        "tail",
        "cut",
        "grep",
        "find",
        "stat",
        "id",
    ),
    *(
        "mkdir",
        "mktemp",
        "touch",
        "rm",
        "rmdir",
        "mv",
        "cp",
        "ln",
        "chmod",
        "flock",
        "sleep",
        "sha256sum",
        "tar",
        "gzip",
    ),
    *("dpkg", "umount", "mount", "tr"),
)

RECIPES = ("scripts/*.sh", "scripts/uv.txt", "tests/fakes/kube/program/*")

# A uv that makes the environment it is asked for, out of a Python that writes down how it was called.
# Its words are those of the file `says`, where there is one; with `slow` there, it takes long.
UV = """#!/bin/sh
echo "uv $*" >>calls
echo "$* ${{UV_SYSTEM_CERTS:-}}" >>certificates
if [ "$1" != --version ]; then cat says >&2 2>/dev/null; fi
for last; do :; done
case $1 in
    --version) echo "uv {version}" ;;
    venv) mkdir -p "$last/bin"; printf '#!/bin/sh\\necho "venv-python $*" >>calls\\n' >"$last/bin/python"
          chmod +x "$last/bin/python"; touch "$last/pyvenv.cfg" ;;
    pip) : "${{VIRTUAL_ENV:=.}}"; touch "$VIRTUAL_ENV/half"
        if [ -e slow ]; then sleep 60; fi; touch "$VIRTUAL_ENV/whole"; exit {sync} ;;
    sync) exit {sync} ;;
esac
"""
# A Python that is new enough; its pip "installs" uv, or fails.
PYTHON = """#!/bin/sh
case "$*" in
    *version_info*) exit 0 ;;
    "-m pip --version") exit 0 ;;
    "-m pip config list") cat pip.config 2>/dev/null ;;
    "-m pip install"*) echo "pip $*" >>calls; echo "${{PIP_CERT:-}}" >pip.cert; cat says >&2 2>/dev/null
        for last; do :; done; mkdir -p "$last/bin"; cp uv.fake "$last/bin/uv"; exit {pip} ;;
    "-m pip download"*) while [ "$1" != --dest ]; do shift; done; mkdir -p "$2"; touch "$2/one.whl"
        cat says >&2 2>/dev/null; test {pip} = 0 && echo wheel >"$2/two.whl" ;;
esac
"""


class Machine:
    """A checkout and a PATH with nothing on it but a few standard tools."""

    def __init__(self, folder: Path) -> None:
        self.checkout, self.bin, self.cache = folder / "checkout", folder / "bin", folder / "cache"
        scripts = [str(path.relative_to(ROOT)) for pattern in RECIPES for path in ROOT.glob(pattern)]
        others = ("uv.lock", "pyproject.toml", "train/pyproject.toml", "images/trainer/requirements.lock")
        for name in (*scripts, *others):
            (self.checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.checkout / name)
        self.bin.mkdir()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(str(shutil.which(tool)))
        self.program(self.checkout / "uv.fake", UV.format(version="0.13.8", sync=0))

    def program(self, path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def has_python(self, pip: int = 0) -> Machine:
        self.program(self.bin / "python3", PYTHON.format(pip=pip))
        return self

    def has_uv(self, version: str = "0.13.8", sync: int = 0) -> Machine:
        self.program(self.bin / "uv", UV.format(version=version, sync=sync))
        return self

    def has_go(self, build: int) -> Machine:
        """A Go that writes what it "builds", the exit code of that, and what `says` holds."""
        writes = 'for last; do test "$before" = -o && echo built >"$last" && chmod +x "$last"; before=$last; done'
        words = f"cat {self.checkout}/says >&2 2>/dev/null"
        case = f"case $1 in build) before=; {writes}; {words}; exit {build} ;; esac"
        self.program(self.bin / "go", f"#!/bin/sh\n{case}\n")
        return self

    def says(self, words: str) -> Machine:
        """What uv and pip say on standard error."""
        (self.checkout / "says").write_text(f"{words}\n")
        return self

    def set_up(self, name: str = "setup.sh", *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(**self.command(name, *args, **env), capture_output=True, text=True, check=False)

    def command(self, name: str, *args: str, **env: str) -> dict[str, Any]:
        given = {"PATH": str(self.bin), "HOME": "/nonexistent", "XDG_CACHE_HOME": str(self.cache), **env}
        return {"args": [str(self.bin / "sh"), f"scripts/{name}", *args], "cwd": self.checkout, "env": given}

    def kept(self, name: str) -> bool:
        """Whether the script takes what it has made for whole."""
        return self.set_up(name, "--kept").returncode == 0

    def calls(self) -> list[str]:
        """What was called since the last time this was asked."""
        log = self.checkout / "calls"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_second_set_up_asks_uv_nothing(machine):
    assert machine.has_python().has_uv().set_up().returncode == 0
    assert "uv sync --quiet --frozen" in machine.calls()
    again = machine.set_up()
    assert (again.returncode, again.stderr) == (0, "")
    assert machine.calls() == ["venv-python -m mgpu.iac.engine.install --project ."]


@pytest.mark.parametrize("name", ["uv.lock", "pyproject.toml", "train/pyproject.toml"])
def test_a_changed_lock_or_project_file_is_synced_into_the_same_venv(machine, name):
    machine.has_python().has_uv().set_up()
    machine.calls()
    with (machine.checkout / name).open("a") as file:
        file.write("# changed\n")
    assert "bringing .venv" in machine.set_up().stderr
    calls = machine.calls()
    assert "uv sync --quiet --frozen" in calls
    assert not any(call.startswith("uv venv") for call in calls)


def test_what_set_up_starts_has_the_home_of_the_user_where_nothing_names_one(machine):
    machine.has_python().program(machine.bin / "uv", '#!/bin/sh\necho uv 0.13.8\necho "$HOME" >home\n')
    command = machine.command("uv.sh", "pip")
    del command["env"]["HOME"]
    done = subprocess.run(**command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (machine.checkout / "home").read_text().strip() == pwd.getpwuid(os.getuid()).pw_dir


def test_the_size_is_said_before_the_download(machine):
    assert "5.5 GB" in machine.has_python().has_uv(sync=1).set_up().stderr


@pytest.mark.parametrize("version", [None, "0.4.9"])
def test_uv_is_installed_outside_the_checkout_where_it_is_missing_or_too_old(machine, version):
    machine.has_python()
    if version:
        machine.has_uv(version)
    assert machine.set_up().returncode == 0
    calls = machine.calls()
    pip = next(call for call in calls if call.startswith("pip"))
    assert "--require-hashes" in pip
    assert list(machine.cache.glob("mgpu/uv/*/bin/uv")), "uv lies in the cache"
    (machine.checkout / ".venv" / ".mgpu-stamp").unlink()
    assert machine.set_up().returncode == 0
    assert not any(call.startswith("pip") for call in machine.calls()), "and is found there the next time"


def test_no_python_is_one_error_with_the_cure(machine):
    done = machine.set_up()
    assert done.returncode != 0
    assert len(done.stderr.splitlines()) == 3
    assert "Install one" in done.stderr


def test_a_uv_that_cannot_be_installed_is_an_error_with_the_cure(machine):
    done = machine.has_python(pip=1).set_up()
    assert done.returncode != 0
    assert "install uv by hand" in done.stderr
    assert not list(machine.cache.glob("mgpu/uv/**/bin/uv")), "half an installation is not taken for one"


def test_packages_that_cannot_be_installed_are_an_error_and_tried_again(machine):
    done = machine.has_python().has_uv(sync=2).set_up()
    assert done.returncode != 0
    assert "could not be installed" in done.stderr
    machine.calls()
    machine.has_uv().set_up()
    assert "uv sync --quiet --frozen" in machine.calls()


@pytest.mark.parametrize("name", ["uv.lock", "pyproject.toml"])
def test_what_a_failed_set_up_has_changed_does_not_count_with_the_lock_of_before(machine, name):
    machine.has_python().has_uv().set_up()
    before = (machine.checkout / name).read_text()
    (machine.checkout / name).write_text(f"{before}# changed\n")
    assert machine.has_uv(sync=1).set_up().returncode != 0
    (machine.checkout / name).write_text(before)
    machine.calls()
    assert machine.has_uv().set_up().returncode == 0
    assert "uv sync --quiet --frozen" in machine.calls()


@pytest.mark.parametrize("lacks", ["bin/python", "pyvenv.cfg"])
def test_an_environment_that_was_made_by_half_is_made_anew(machine, lacks):
    machine.has_python().has_uv().set_up()
    (machine.checkout / ".venv" / ".mgpu-stamp").unlink()
    (machine.checkout / ".venv" / lacks).unlink()
    machine.calls()
    assert machine.set_up().returncode == 0
    assert any(call.startswith("uv venv --quiet --clear") for call in machine.calls())


def test_of_two_set_ups_of_a_checkout_at_once_the_second_waits_and_has_nothing_to_do(machine):
    """`make demo` and `make test` in two terminals: the second would clear away what the first is installing."""
    machine.has_python().has_uv().set_up()
    machine.calls()
    stamp, folder = machine.checkout / ".venv" / ".mgpu-stamp", machine.checkout / ".mgpu"
    done = stamp.read_text()
    stamp.write_text(done.splitlines()[0] + "\n")  # as the first one has it while it installs
    with (folder / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with subprocess.Popen(**machine.command("setup.sh"), stderr=subprocess.PIPE, text=True) as second:
            assert "waiting for another set-up" in second.stderr.readline()
            stamp.write_text(done)
            fcntl.flock(held, fcntl.LOCK_UN)
            assert second.wait(60) == 0
    assert machine.calls() == ["venv-python -m mgpu.iac.engine.install --project ."]


@pytest.mark.parametrize("code", [65, 71, 127])  # util-linux' for what is not supported and ENOLCK; there is no flock
def test_a_checkout_where_no_file_can_be_locked_is_set_up_without_a_lock(machine, code):
    """Lustre has no flock where it was not mounted with it, and many a cluster has its home folders there."""
    (machine.bin / "flock").unlink()
    if code != 127:
        machine.program(machine.bin / "flock", f"#!/bin/sh\necho flock: 9: Function not implemented >&2\nexit {code}\n")
    done = machine.has_python().has_uv().set_up()
    assert done.returncode == 0
    assert "no second set-up" in done.stderr
    assert "waiting" not in done.stderr
    assert "uv sync --quiet --frozen" in machine.calls()


@pytest.mark.parametrize("by", [shutil.move, shutil.copytree])
def test_a_checkout_that_was_moved_or_copied_gets_an_environment_of_its_own(machine, by):
    """Its programs begin with the path of the folder that they were made in, its .pth file names that one's code."""
    machine.has_python().has_uv().set_up()
    machine.calls()
    elsewhere = machine.checkout.with_name("another checkout")
    by(machine.checkout, elsewhere)
    machine.checkout = elsewhere
    assert machine.set_up().returncode == 0
    assert any(call.startswith("uv venv --quiet --clear") for call in machine.calls())
    assert machine.set_up().stderr == ""


# ---- certificates


def test_uv_and_pip_trust_what_this_machine_trusts(machine, tmp_path):
    store = tmp_path / "certificates.pem"
    store.write_text("one")
    assert machine.has_python().set_up(SSL_CERT_FILE=str(store)).returncode == 0
    assert (machine.checkout / "pip.cert").read_text() == f"{store}\n"
    lines = (machine.checkout / "certificates").read_text().splitlines()
    assert {"sync --quiet --frozen 1"} <= set(lines)
    assert all(line.endswith(" 1") for line in lines)


def test_certificates_that_the_user_has_chosen_stay(machine, tmp_path):
    store = tmp_path / "certificates.pem"
    store.write_text("one")
    (machine.checkout / "pip.config").write_text("global.cert='/etc/company.pem'\n")
    assert machine.has_python().set_up(SSL_CERT_FILE=str(store), UV_SYSTEM_CERTS="0").returncode == 0
    assert (machine.checkout / "pip.cert").read_text() == "\n"
    assert "sync --quiet --frozen 0" in (machine.checkout / "certificates").read_text()


# ---- what is said of the cause


FULL = "error: Failed to copy\n  cause: No space left on device (os error 28)"
SIGNED_ANEW = "error: Failed to fetch\n  cause: invalid peer certificate: UnknownIssuer"
NO_NAME = "  cause: dns error\n  cause: failed to lookup address information: Temporary failure in name resolution"
SILENT = "  cause: something else"


@pytest.mark.parametrize(
    "script", ["setup.sh", "setup-localstack.sh", "fetch-image-wheels.sh", "setup-go-tools.sh", "setup-kube.sh"]
)
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (FULL, r"A disk is full, .*Free now: \d+ MiB in /\S+, \d+ MiB in /"),
        (SIGNED_ANEW, "certificate is signed by nobody whom this machine trusts"),
        (NO_NAME, "name of a server could not be resolved"),
        ("connection refused (os error 111)", "server could not be reached"),
        (SILENT, "The lines above say why"),
    ],
    ids=["full", "signed anew", "no name", "refused", "silent"],
)
def test_the_cause_is_told_where_it_shows_and_nothing_is_guessed(machine, script, words, told):
    machine.has_python().has_uv().set_up()
    machine.has_python(pip=1).has_uv(sync=1).has_go(1).says(words)
    (machine.checkout / ".venv" / ".mgpu-stamp").unlink()
    shutil.copy(machine.bin / "python3", machine.checkout / ".venv" / "bin" / "python")
    done = machine.set_up(script, *(["s5cmd"] if "go" in script else []))
    assert done.returncode != 0
    assert words in done.stderr, "the program's own words are there"
    assert re.search(told, done.stderr), done.stderr
    others = {"A disk is full", "signed by nobody", "could not be resolved", "could not be reached"}
    assert sum(other in done.stderr for other in others) == (words != SILENT)


# ---- nothing half made counts


MADE = ["setup-localstack.sh", "fetch-image-wheels.sh"]


@pytest.fixture
def made(machine) -> Callable[[str], Path]:
    """`made(script)`: the folder that it has made on a machine where all goes well."""

    def make(script: str) -> Path:
        machine.has_python().has_uv().set_up()
        shutil.copy(machine.bin / "python3", machine.checkout / ".venv" / "bin" / "python")
        done = machine.set_up(script)
        assert done.returncode == 0, done.stderr
        return Path(done.stdout.strip())

    return make


@pytest.mark.parametrize("script", MADE)
def test_what_failed_in_the_middle_is_not_kept_and_leaves_nothing(machine, made, script):
    folder = made(script)
    assert machine.kept(script)
    shutil.rmtree(folder)
    machine.has_python(pip=1).has_uv(sync=1)
    shutil.copy(machine.bin / "python3", machine.checkout / ".venv" / "bin" / "python")
    assert machine.set_up(script).returncode != 0
    assert not machine.kept(script)
    assert [path.name for path in folder.parent.iterdir()] == [".lock"]


@pytest.mark.parametrize("script", MADE)
@pytest.mark.parametrize("damage", ["lost", "cut off", "empty seal"])
def test_what_was_made_and_is_not_whole_any_more_is_made_anew(machine, made, script, damage):
    folder = made(script)
    name = "pyvenv.cfg" if "localstack" in script else "two.whl"
    if damage == "lost":
        (folder / name).unlink()
    elif damage == "cut off":
        (folder / name).write_text("wh")
    else:
        (folder / ".complete").write_text("")  # as older versions of the script have left it, half made or whole
    assert not machine.kept(script)
    assert machine.set_up(script).returncode == 0
    assert machine.kept(script)


@pytest.mark.parametrize("script", MADE)
def test_bytecode_that_comes_with_use_breaks_no_seal(machine, made, script):
    folder = made(script)
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "module.pyc").touch()
    assert machine.kept(script)


def test_a_set_up_that_is_killed_leaves_nothing_that_counts_and_the_next_one_clears_it_away(machine, made):
    folder = made("setup-localstack.sh")
    shutil.rmtree(folder)
    (machine.checkout / "slow").touch()
    process = subprocess.Popen(**machine.command("setup-localstack.sh"), start_new_session=True)
    try:
        until(lambda: list(folder.parent.glob("**/half")))
        waiting = subprocess.Popen(**machine.command("setup-localstack.sh"), stderr=subprocess.PIPE, text=True)
        assert waiting.stderr
        assert "waiting for another set-up" in waiting.stderr.readline()
        (machine.checkout / "slow").unlink()
        assert not machine.kept("setup-localstack.sh")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    waiting.communicate(timeout=30)
    assert waiting.returncode == 0
    assert machine.kept("setup-localstack.sh")
    assert sorted(path.name for path in folder.parent.iterdir()) == [".lock", folder.name]


@pytest.mark.parametrize(
    ("script", "name", "folder"), [("setup-go-tools.sh", "s5cmd", "go-tools"), ("setup-kube.sh", "kube", "kube")]
)
def test_a_go_program_counts_only_when_it_was_built_to_its_end(machine, script, name, folder):
    asked = (script, *(["s5cmd"] if name == "s5cmd" else []))
    machine.has_go(1)
    assert machine.set_up(*asked).returncode != 0
    tools = machine.cache / "mgpu" / folder
    assert [path.name for path in tools.iterdir()] == [".lock"]
    machine.has_go(0)
    done = machine.set_up(*asked)
    (program,) = done.stdout.splitlines()
    assert program.startswith(str(tools / f"{name}-v"))
    assert sorted(path.name for path in tools.iterdir()) == [".lock", Path(program).name]
    machine.has_go(1)
    assert machine.set_up(*asked).stdout == done.stdout


def test_a_kubernetes_of_another_recipe_is_another_program(machine):
    machine.has_go(0)
    built = machine.set_up("setup-kube.sh").stdout
    with (machine.checkout / "tests/fakes/kube/program/streams.go").open("a") as file:
        file.write("// changed\n")
    assert not machine.kept("setup-kube.sh")
    assert machine.set_up("setup-kube.sh").stdout not in ("", built)


# ---- the base image

DEBOOTSTRAP = """#!/bin/sh
for last; do root=$before; before=$last; done
mkdir -p "$root/proc" "$root/etc" "$root/tmp"
mount --bind {outside} "$root/proc"
echo "$root" >{outside}/root
{then}
umount "$root/proc"
"""


@pytest.fixture
def bare(machine, require, tmp_path) -> Callable[..., tuple[Path, Path]]:
    """`bare(then)`: a debootstrap that mounts a folder with a file in it, and then does that. Returns that folder, and
    the one for what is temporary."""
    root = os.geteuid() == 0
    require("mounts", root, "only root can mount")
    outside, temporary = tmp_path / "outside", tmp_path / "temporary"
    outside.mkdir()
    temporary.mkdir()
    (outside / "precious").touch()
    tried = ["unshare", "--mount", "mount", "--bind", outside, temporary]
    allowed = subprocess.run(tried, check=False, capture_output=True).returncode == 0
    require("mounts", allowed, "root may not mount here")
    keyring = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
    require("trainer", keyring.exists(), f"there is no {keyring}")
    require("trainer", shutil.which("dpkg") is not None, "this is no Debian")

    def make(then: str) -> tuple[Path, Path]:
        machine.program(machine.bin / "debootstrap", DEBOOTSTRAP.format(outside=outside, then=then))
        return outside, temporary

    yield make
    for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
        if (point := line.split()[1]).startswith(f"{tmp_path}/"):
            subprocess.run(["umount", point], check=True)


def mounted(under: Path) -> list[str]:
    """What is mounted there."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return [line.split()[1] for line in lines if line.split()[1].startswith(f"{under}/")]


@pytest.mark.parametrize("private", [True, False], ids=["mounts of its own", "this machine's mounts"])
def test_a_debootstrap_that_fails_leaves_no_mount_and_nothing_in_the_cache(machine, bare, private):
    outside, temporary = bare("echo 'E: No space left on device'; exit 1")
    if private:
        (machine.bin / "unshare").symlink_to(str(shutil.which("unshare")))
    done = machine.set_up("make-base-image.sh", TMPDIR=str(temporary))
    assert done.returncode != 0
    assert "A disk is full" in done.stderr
    assert Path((outside / "root").read_text()).is_relative_to(temporary), "it was made elsewhere than in the cache"
    assert mounted(temporary) == []
    assert list(temporary.iterdir()) == []
    assert (outside / "precious").exists(), "what was mounted is not removed with it"
    assert [path.name for path in (machine.cache / "mgpu" / "base-image").iterdir()] == [".lock"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_a_base_image_that_is_ended_in_the_middle_leaves_no_mount(machine, bare, number):
    outside, temporary = bare("exec sleep 60")  # started by fork, dash would lose a SIGINT that comes at that moment
    if number == signal.SIGKILL:  # nothing can be done then: the mounts go with the processes that see them
        (machine.bin / "unshare").symlink_to(str(shutil.which("unshare")))
    command = machine.command("make-base-image.sh", TMPDIR=str(temporary))
    process = subprocess.Popen(**command, start_new_session=True)
    until((outside / "root").exists)
    os.killpg(process.pid, number)
    assert process.wait(30) != 0
    assert mounted(temporary) == []
    assert (outside / "precious").exists()
    assert number == signal.SIGKILL or list(temporary.iterdir()) == []
    assert not machine.kept("make-base-image.sh")


def test_a_base_image_is_kept_while_it_is_what_was_made(machine, bare):
    _, temporary = bare("touch $root/etc/hostname $root/etc/kept")
    done = machine.set_up("make-base-image.sh", TMPDIR=str(temporary))
    assert done.returncode == 0, done.stderr
    base = Path(done.stdout.strip())
    packed = subprocess.run(["tar", "-tzf", base], capture_output=True, text=True, check=True).stdout.split()
    assert "./etc/kept" in packed
    assert "./proc/precious" not in packed
    assert machine.kept("make-base-image.sh")
    assert list(temporary.iterdir()) == []
    with base.open("r+b") as file:
        file.truncate(20)
    assert not machine.kept("make-base-image.sh")


# ---- one way to find uv


def test_a_bench_finds_the_uv_of_set_up_on_a_machine_that_has_no_other(machine):
    machine.has_python().set_up()
    command = "from bench.tools import UV; import subprocess; subprocess.run([*UV, '--version'], check=True)"
    env = {"PATH": str(machine.bin), "HOME": "/nonexistent", "XDG_CACHE_HOME": str(machine.cache)}
    env["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=machine.checkout, env=env, capture_output=True, check=True
    )
    assert done.stdout == b"uv 0.13.8\n"


def test_a_peer_of_the_benches_that_was_installed_by_half_is_installed_anew(machine):
    machine.has_python().has_uv(sync=1)  # its own words are shown, and nothing stays
    assert peer_of(machine.says("cause: the index has gone")) == ("None\n", True)
    machine.has_uv()
    shown, installed = peer_of(machine)
    program = Path(shown.strip())
    assert (program.name, installed) == ("dstack", True)
    assert peer_of(machine) == (shown, False)
    (program.parents[1] / ".complete").write_text("")
    assert peer_of(machine) == (shown, True)


def peer_of(machine: Machine) -> tuple[str, bool]:
    """What a bench has for a peer, and whether it has installed it for that."""
    command = "from bench.tools import peer; print(peer('dstack'))"
    env = {"PATH": str(machine.bin), "HOME": "/nonexistent", "XDG_CACHE_HOME": str(machine.cache)}
    run = [sys.executable, "-c", command]
    env["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(run, cwd=machine.checkout, env=env, capture_output=True, text=True, check=True)
    assert ("index has gone" in done.stderr) == (done.stdout == "None\n")
    return done.stdout, "installing" in done.stderr
