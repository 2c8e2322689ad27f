"""An environment with packages of other people beside mgpu: what each folder here holds, installed as pip would."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from fakes.cloud import KEY, Cloud, serving
from fakes.cloud.machines import Processes

from mgpu.iac.engine import install

HERE = Path(__file__).parent
MAIN = Path(sysconfig.get_path("purelib"))


@dataclass(frozen=True)
class Beside:
    """The environment, and a folder to work in."""

    programs: Path
    folder: Path

    def mgpu(self, *words: str, code: int = 0) -> str:
        """What `mgpu` prints; its exit code is this one."""
        return self.ended(self.start(*words), code)

    def start(self, *words: str) -> subprocess.Popen[str]:
        """`mgpu`, which goes on meanwhile."""
        pipe = subprocess.PIPE
        command = [self.programs / "mgpu", *words]
        return subprocess.Popen(
            command, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
        )  # fmt: skip

    def ended(self, process: subprocess.Popen[str], code: int = 0) -> str:
        """What it has printed by its end."""
        with process:
            try:
                out, err = process.communicate(timeout=600)
            finally:
                process.kill()
        assert process.returncode == code, out + err
        return out + (err if code else "")


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment that has all that this one has, and the packages here."""
    home = tmp_path_factory.mktemp("beside")
    venv.create(home, symlinks=True)
    site = next(home.glob("lib/python*/site-packages"))
    packages = [file.parent for file in HERE.glob("*/pyproject.toml")]
    paths = "\n".join(map(str, packages))
    (site / "beside.pth").write_text(f"import site; site.addsitedir({str(MAIN)!r})\n{paths}\n")
    for package in packages:
        _install(package, site)
    for name in ("mgpu", "pulumi-resource-mgpu"):
        _, _, text = Path(sys.executable).with_name(name).read_text().partition("\n")
        script = home / "bin" / name
        script.write_text(f"#!{home}/bin/python\n{text}")
        script.chmod(0o755)
    return home / "bin"


def _install(package: Path, site: Path) -> None:
    """What an installer writes of a package, besides its code."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    """Yard, with machines that are processes, and a key of an account there."""
    monkeypatch.setenv("OUR_YARD_KEY", KEY)
    with serving(Processes(tmp_path / "yard")) as cloud:
        yield cloud


@pytest.fixture
def beside(programs: Path, tmp_path: Path, xdg: Path, require, monkeypatch) -> Beside:
    """The environment in a folder made by `mgpu init`, with a state of its own."""
    require("engine", install.find_engine() is not None, "no Pulumi engine; `make setup` installs one")
    for name in ("PULUMI_STACK", "PULUMI_BACKEND_URL", "PULUMI_CONFIG_PASSPHRASE_FILE", "PULUMI_CONFIG_PASSPHRASE"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "mine"
    folder.mkdir()
    return Beside(programs, folder)
