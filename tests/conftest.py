"""What all tests share: capabilities that this machine may lack, and folders of a test's own."""

from __future__ import annotations

import functools
import gc
import os
import re
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import draw
import figures
import forks
import pytest
import scheduling
import workers
from fakes import gateway, hosts
from fakes.aws import FOREIGN, FakeAws, world
from fakes.engine import engine, locked_registry, registry  # noqa: F401  fixtures, one of each for the session
from fakes.hosts import Rack
from fakes.kube.cluster import end_cluster, kube, kube_cluster  # noqa: F401  fixtures
from fakes.localstack import installed as localstack_installed
from fakes.localstack import localstack  # noqa: F401  a fixture, one for the session
from fakes.slurm import slurm, slurm_cluster  # noqa: F401  fixtures, one cluster for the session

# What tests import, and what they start, is compiled once, also where the environment forbids it, as many a CI image
# does: a single quick test takes half the time then, and reading all tests takes 7 s, not 30 s.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts background jobs
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as nohup starts anything; what tests start would not hear it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

Require = Callable[[str, bool, str], None]
DRAWING = pytest.StashKey[draw.Drawing]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    gc.disable()  # until all tests are read, which makes millions of objects and hardly any garbage: 2 of 10 s


def pytest_collection_finish() -> None:
    gc.freeze()  # what was read stays, and is not gone through again and again
    gc.enable()


@pytest.hookimpl(trylast=True)  # what the test itself has started ends before it
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or scheduling.shared(nextitem.nodeid) != scheduling.KUBERNETES:
        end_cluster(item.config)


@pytest.hookimpl(optionalhook=True)  # also where xdist is switched off
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    forks.share()
    workers.fork(specs)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> scheduling.LongestFirst:
    return scheduling.LongestFirst(config, log, figures.known(config))


@pytest.fixture(scope="session")
def require() -> Require:
    """`require("engine", present, "why it is absent")` skips the test, or fails it where MGPU_REQUIRE names it."""
    demanded = {name.strip() for name in os.environ.get("MGPU_REQUIRE", "").split(",")}

    def check(capability: str, present: bool, reason: str) -> None:
        if present:
            return
        if capability in demanded:
            pytest.fail(f"{capability} is in MGPU_REQUIRE, but: {reason}", pytrace=False)
        pytest.skip(f"{capability}: {reason}")

    return check


@pytest.fixture(scope="session")
def namespaces(require: Require) -> None:
    """Skips where no fake machines can run; root may make namespaces, an overlay and wires between them."""
    reason = world.missing()
    require("namespaces", reason is None, reason or "")
    require("sshd", Path("/usr/sbin/sshd").exists(), "OpenSSH's server is not installed")
    require("ssh", shutil.which("ssh") is not None, "OpenSSH's client is not installed")


@pytest.fixture(scope="session")
def aws_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeAws]:
    with FakeAws.start(tmp_path_factory.mktemp("aws")) as aws:
        yield aws


@pytest.fixture
def aws(aws_server: FakeAws, monkeypatch: pytest.MonkeyPatch) -> FakeAws:
    """As new, and what this test's environment means by AWS."""
    aws_server.reset()
    for name in FOREIGN:
        monkeypatch.delenv(name, raising=False)
    for name, value in aws_server.env.items():
        monkeypatch.setenv(name, value)
    return aws_server


@pytest.fixture(scope="session")
def hosts_up(namespaces: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rack]:
    with hosts.rack(tmp_path_factory.mktemp("hosts"), 3) as rack:
        yield rack


@pytest.fixture
def rack(hosts_up: Rack, xdg: Path) -> Rack:
    """Three hosts that answer, nobody's, and what ssh needs for them."""
    hosts_up.reset()
    return hosts_up


@pytest.fixture
def xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """State, configuration and data folders of this test alone, under the folder returned; the cache is shared."""
    for kind in ("STATE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"XDG_{kind}_HOME", str(tmp_path / "xdg" / kind.lower()))
    return tmp_path / "xdg"


class FailuresAtOnce:
    """Names each failure when it happens: the summary at the end of a long run may never come."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal:
            terminal.write_line(f"\nFAILED {report.nodeid} ({report.when})")


@functools.cache
def _has(server: object) -> bool:
    if server == "localstack":
        return localstack_installed() is not None
    return server != "versitygw" or gateway.program() is not None


def _absent(item: pytest.Item) -> bool:
    """A case of a server that this machine lacks."""
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return not all(_has(value) for value in parameters.values() if isinstance(value, str))


@pytest.fixture
def share(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> draw.Share:
    """Draws among the points that a test finds for itself; see draw.py."""
    return draw.Share(request.config.stash[DRAWING].draw, request.path, record_property)


@pytest.fixture(scope="module")
def wanted_stories(request: pytest.FixtureRequest) -> list[Any]:
    """The stories of the module that this session's tests judge: named by a mark, or by the parameter `story`."""
    items = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    marks = [name for item in items for mark in item.iter_markers("story") for name in mark.args]
    calls = [item.callspec for item in items if isinstance(item, pytest.Function) and hasattr(item, "callspec")]
    return list(dict.fromkeys(marks + [call.params["story"] for call in calls if "story" in call.params]))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "story(name): judges what is told beside others' stories; counts as slow")
    config.addinivalue_line("markers", "together(name): shares what is slow with others of its file; drawn as one")
    config.addinivalue_line("markers", "drawn(label, *sources): `make test` draws among the cases; see tests/draw.py")
    config.stash[DRAWING] = drawing = draw.of_session(config, _absent)
    config.pluginmanager.register(drawing)
    config.pluginmanager.register(figures.Meter())
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresAtOnce(config))
        config.pluginmanager.register(figures.Figures(config))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says what tests have counted, `record_property("counted", "...")`, also when they ran side by side; and what was
    not tested, by what it lacked."""
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            for name, value in report.user_properties if report.when == "call" else ():
                if name == "counted":
                    terminalreporter.write_line(f"{value}")
    skips = [report.longrepr for report in terminalreporter.getreports("skipped")]
    for line in skipped([skip[2] for skip in skips if isinstance(skip, tuple)]):
        terminalreporter.write_line(line)


def skipped(words: Sequence[str]) -> Iterator[str]:
    """A table of what was skipped: the capability of `require`, how many tests lacked it, and why it is absent."""
    rows = Counter(found.groups() for text in words if (found := re.match(r"(?s)Skipped: (?:(\w+): )?(.*)", text)))
    if not rows:
        return
    yield f"\nSkipped for what this machine lacks: {len(words)} tests. MGPU_REQUIRE=<name>,... makes failures of them."
    width = max(len(capability or "-") for capability, _ in rows)
    for (capability, reason), count in rows.most_common():
        yield f"  {capability or '-':<{width}}  {count:5d}  {' '.join(reason.split())}"
