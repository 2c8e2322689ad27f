"""Where a test enumerates points that are equal in kind, `make test` draws a share of them by the commit.

Points are the moments at which a process is killed, seeds, cells of a matrix such as stores x faults. A plain `pytest`
has them all, for somebody who names a test means it; `make test` sets MGPU_DRAW=commit, `make test-all` MGPU_DRAW=all.

Every draw is that of a *number*; MGPU_DRAW=NUMBER draws it again. Of the points of one enumeration it has

- the eighth that is due: a point is due when the hash of its name and the number are equal modulo 8. So eight numbers
  in a row draw every point, whatever other points come and go meanwhile;
- others until they are a quarter, in the order of a hash of name and number: not always the same points go together;
- all that are new or were changed, which includes every point whose name a list of known ones lacks.

Slow tests are points, too, although each says something different: a third of all tests takes nearly all of the time.
`slow.txt` names them, and fixtures that take longer than all tests of a file that share them: those tests are a single
point, for one of them takes as long as all. So are tests of a file that `together(name)` marks, which share what the
first of them makes. A change of a test's file draws it, and a change of what SERVES names draws
all that serves it. Else an eighth of each folder is drawn, and an eighth of all whole stories, which stand for no
folder of the code alone. A test that the list lacks is run; `make test-all` writes the list anew. Run always are those
of ALWAYS and of `sole.txt`: they alone pass lines and branches of which something would be missed most days. `make
coverage` writes it.

The number is the commit's place in the history, counted along first parents: it goes up by one from commit to commit,
which no hash does. Where the history is cut off the commit's hash is taken, without git the hash of the sources; such
draws are as large, but nothing is due in turn. Changed is what differs from the first parent of the commit, in it or in
the working tree; MGPU_DRAW_SINCE=COMMIT names another one, for several commits that are tested once.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROUND = 8  # draws in a row that have every point
SHARE = 4  # a fourth of the points, at least
SOURCES = ("mgpu", "train", "infra", "tests")
ALL = "all"
SLOW, SOLE = ROOT / "tests" / "slow.txt", ROOT / "tests" / "sole.txt"
SLOW_S, QUICK_S = 0.25, 0.15  # a test gets onto the list at the first, and off it at the second
WORTH = 1.5  # lines and branches that a slow test has to pass alone, for each of its seconds, to be run always
# Whose slow tests stand for which code, by the folder, or the beginning of the file's name. The longest holds.
SERVES = {
    "tests/contract/": ("mgpu/providers", "mgpu/testing", "train/mgpu_train/store"),
    "tests/contract/test_kube.py": ("tests/fakes/kube", "scripts/setup-kube.sh"),
    "tests/contract/test_kubernetes.py": ("mgpu/providers/kubernetes",),
    "tests/contract/test_hosts.py": ("mgpu/providers/hosts",),
    "tests/e2e/test_hosts.py": ("mgpu/providers/hosts",),
    "tests/e2e/test_kubernetes.py": ("mgpu/providers/kubernetes",),
    "tests/e2e/test_aws.py": ("mgpu/providers/aws", "mgpu/iac/aws"),
    "tests/e2e/test_callers.py": ("mgpu/schedule/callers.py",),
    "tests/e2e/test_demo_aws.py": ("demo_aws.py",),
    "tests/e2e/test_demo_nightly.py": ("demo_nightly.py", "examples/nightly"),
    "tests/e2e/test_slurm.py": ("mgpu/providers/slurm",),
    "tests/e2e/test_thirty_nights.py": ("mgpu/schedule",),
    "tests/e2e/test_image": ("mgpu/image", "images"),
    "tests/emulated/": ("mgpu/providers/aws", "mgpu/iac/aws", "tests/fakes/aws"),
    "tests/emulated/test_operator_image.py": (
        "images/operator",
        "mgpu/schedule/kubernetes.py",
        "mgpu/schedule/callers.py",
    ),
    "tests/examples/": ("examples",),
    "tests/newcomers/": ("train/mgpu_train/agent/phases/outputs.py",),
    "tests/failure/test_operator_gone.py": ("mgpu/providers/lease.sh",),
    "tests/infra/": ("mgpu/iac", "infra"),
    "tests/infra/test_aws_passes.py": ("mgpu/iac", "infra", "mgpu/providers/aws", "mgpu/schedule/fargate.py"),
    "tests/remote/": ("mgpu/remote",),
    "tests/unit/image/": ("mgpu/image",),
    "tests/unit/cli/test_image.py": ("mgpu/image", "mgpu/cli/image.py"),
    "tests/remote/container/": ("mgpu/run/nodes/container_setup.py", "train/mgpu_train/agent/host/container.py"),
    "tests/train/": ("train/mgpu_train",),
    "tests/train/test_agent": ("train/mgpu_train/agent",),
}
ALWAYS = ("tests/e2e/test_demo.py",)  # slow as it is: the README's first command
TOLD = "drawn"  # the property of a report that says how many of how many


def _hash(text: str | bytes) -> int:
    data = text.encode() if isinstance(text, str) else text
    return int.from_bytes(hashlib.sha256(data).digest()[:8])


def chosen(points: Collection[str], number: int, share: int = SHARE) -> set[str]:
    """The draw of this number: of each point it matters only how it is named and who else there is. `share`: one in so
    many; of a share that is smaller than the eighth it takes as many numbers in a row until every point was due."""
    rounds = max(ROUND, share)
    due = {point for point in points if _hash(point) % rounds == number % rounds}
    others = sorted(set(points) - due, key=lambda point: _hash(f"{number} {point}"))
    return due | set(others[: max(0, -(-len(set(points)) // share) - len(due))])


@dataclass(frozen=True)
class Draw:
    """What is drawn in this session; all processes of it have the same."""

    number: int | None  # None: every point
    said: str = ""  # why it is this number; of plain runs nothing is said
    changed: tuple[str, ...] = ()  # files of the checkout

    def of(
        self, points: Iterable[str], sources: Iterable[str] = (), new: Collection[str] = (), share: int = SHARE
    ) -> list[str]:
        """Those of the points that are drawn, in their order. A change of a source, a file or a folder, draws all."""
        points = list(points)
        if self.number is None or self.has_changed(*sources):
            return points
        taken = chosen(points, self.number, share) | set(new)
        return [point for point in points if point in taken]

    def has_changed(self, *sources: str) -> bool:
        """Whether one of these files differs, or something in one of these folders."""
        return any(file == source or file.startswith(f"{source}/") for file in self.changed for source in sources)


def by(wanted: str, since: str = "", root: Path = ROOT) -> Draw:
    """The draw that MGPU_DRAW asks for."""
    if wanted in ("", ALL):
        return Draw(None, "every point" if wanted else "")
    changed, unknown = _changed(root, since)
    if wanted.isdecimal():
        return Draw(int(wanted), f"given by MGPU_DRAW{unknown}", changed)
    if wanted != "commit":
        raise pytest.UsageError(f"MGPU_DRAW={wanted!r} is neither `commit`, nor `all`, nor the number of a draw")
    number, why = _number(root)
    return Draw(number, why + unknown, changed)


def _number(root: Path) -> tuple[int, str]:
    try:
        commit = _git(root, "rev-parse", "HEAD").strip()
        if _git(root, "rev-parse", "--is-shallow-repository").strip() == "false":
            count = _git(root, "rev-list", "--count", "--first-parent", "HEAD").strip()
            return int(count), f"the place of commit {commit[:8]}"
        return int(commit[:6], 16), f"the hash of commit {commit[:8]}, for its history is cut off"
    except (OSError, subprocess.CalledProcessError):
        return _hash_of_sources(root) % 10**6, "the hash of the sources, for git knows no commit here"


def _hash_of_sources(root: Path) -> int:
    files = sorted(path for folder in SOURCES for path in (root / folder).rglob("*.py"))
    return _hash("".join(f"{path.relative_to(root)} {_hash(path.read_bytes())}\n" for path in files))


def _changed(root: Path, since: str) -> tuple[tuple[str, ...], str]:
    """The files, and what is to be said where they are not known."""
    try:
        found = _git(root, "diff", "--name-only", "--no-renames", "--relative", "-z", since or "HEAD^", "--")
        found += _git(root, "ls-files", "--others", "--exclude-standard", "-z")
    except (OSError, subprocess.CalledProcessError):
        if since:
            raise pytest.UsageError(f"MGPU_DRAW_SINCE={since!r} is no commit that git knows here") from None
        return (), "; what was changed is not known"
    return tuple(sorted(set(found.split("\0")) - {""})), ""


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True)
    return done.stdout


class Share:
    """Draws among points that only the test itself knows, and says how many."""

    def __init__(self, draw: Draw, file: Path, tell: Callable[[str, object], None]) -> None:
        self._draw, self._file, self._tell = draw, file, tell
        self._met: dict[Path, set[str]] = {}

    def of(
        self,
        label: str,
        points: Mapping[str, Collection[str]] | Collection[str],
        *,
        known: Path | None = None,
        sources: Iterable[Path] = (),
        share: int = SHARE,
    ) -> list[str]:
        """Those that are drawn. `known` lists names; a point that it lacks, or a name of which it lacks, is new. A
        change of the test's file or of another source draws all. `share`: one in so many, where a point is dear."""
        parts = points if isinstance(points, Mapping) else {point: (point,) for point in points}
        old = set(known.read_text().splitlines() if known and known.exists() else ())
        if known:
            self._met[known] = set(itertools.chain.from_iterable(parts.values()))
        new = [point for point, names in parts.items() if known and not old.issuperset(names)]
        files = [source.resolve().relative_to(ROOT).as_posix() for source in (self._file, *sources)]
        drawn = self._draw.of(parts, files, new, share)
        self._tell(TOLD, [label, len(drawn), len(parts), len(new)])
        return drawn

    def know(self) -> None:
        """Lists the points, which have all been tried and are good; only `make test-all` writes into the checkout."""
        for known, names in self._met.items():
            text = "".join(f"{name}\n" for name in sorted(names))
            if self._draw == by(ALL) and (not known.exists() or known.read_text() != text):
                known.write_text(text)
                self._tell("counted", f"{known.relative_to(ROOT)} was written anew: it is to be committed")


class Drawing:
    """The part of pytest: leaves out cases of tests that are marked `drawn(label, *sources)`, and sums up."""

    def __init__(self, draw: Draw, absent: Callable[[pytest.Item], bool]) -> None:
        """`absent`: a case that this machine has to skip. It stands for no other, so it is not drawn among."""
        self.draw, self._absent = draw, absent
        self.left_out: list[pytest.Item] = []

    @pytest.hookimpl(tryfirst=True)  # before -k and -m: what they choose is of the same draw
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        tests: dict[str, list[pytest.Item]] = {}
        for item in items:
            if item.get_closest_marker("drawn") and not self._absent(item):
                tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
        for cases in tests.values():
            self._among(cases)
        self._among_slow(items)
        if self.left_out:
            config.hook.pytest_deselected(items=self.left_out)
            gone = set(self.left_out)
            items[:] = [item for item in items if item not in gone]

    def _among(self, cases: list[pytest.Item]) -> None:
        """Of each test, so that none is without a case."""
        label, *sources = next(cases[0].iter_markers("drawn")).args
        drawn = set(self.draw.of([case.nodeid for case in cases], [cases[0].nodeid.partition("::")[0], *sources]))
        self.left_out += [case for case in cases if case.nodeid not in drawn]
        if len(cases) > 1:
            first = next(case for case in cases if case.nodeid in drawn)
            first.user_properties.append((TOLD, [label, len(drawn), len(cases), 0]))

    def _among_slow(self, items: list[pytest.Item]) -> None:
        """Without the tests that draw among points of their own."""
        known, always = slow_tests(), sole_tests()
        points = {item: _point(item, known) for item in items}
        folders: dict[str, list[pytest.Item]] = {}
        for item in items:
            own = item.get_closest_marker("drawn") or "share" in getattr(item, "fixturenames", ())
            slow = points[item] in known or item.get_closest_marker("story") or item.get_closest_marker("together")
            runs = item.nodeid in always or item.nodeid.startswith(ALWAYS)
            if slow and not own and not runs and not self._absent(item):
                folder = item.nodeid.partition("::")[0].rpartition("/")[0]
                folders.setdefault(folder if serves(f"{folder}/") else "", []).append(item)
        for tests in folders.values():
            names, number = {points[test] for test in tests}, self.draw.number
            taken = chosen(names, number, ROUND) if number is not None else names
            drawn = [test for test in tests if points[test] in taken or is_touched(self.draw, test.nodeid)]
            gone = set(tests) - set(drawn)
            self.left_out += [test for test in tests if test in gone]
            drawn[0].user_properties.append((TOLD, ["slow tests", len(drawn), len(tests), 0]))

    @pytest.hookimpl(optionalhook=True)  # also where xdist is switched off
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["draw"] = [self.draw.number, self.draw.said, list(self.draw.changed)]

    def pytest_report_header(self) -> str | None:
        return f"draw: {self}" if self.draw.said else None

    def __str__(self) -> str:
        if self.draw.number is None:
            return "every point"
        number = self.draw.number
        return f"number {number}, {self.draw.said}; MGPU_DRAW={number} replays it, `make test-all` runs every point"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        told = list(self._told(terminalreporter)) if self.draw.said else []
        if not told:
            return
        for label in dict.fromkeys(label for label, *_ in told):
            drawn, of, new = (sum(row[column] for row in told if row[0] == label) for column in (1, 2, 3))
            terminalreporter.write_line(f"{label}: {drawn} of {of} drawn" + (f", {new} of them new" if new else ""))
        terminalreporter.write_line(f"the draw: {self}")

    def _told(self, terminalreporter: pytest.TerminalReporter) -> Iterable[list[Any]]:
        tests: dict[
            str, list[list[Any]]
        ] = {}  # the reports of a test, of its beginning, call and end, repeat each other
        for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
            if not isinstance(report, pytest.TestReport):  # a case that was deselected is told there as itself
                continue
            rows = [value for name, value in report.user_properties if name == TOLD]
            if rows:
                tests[report.nodeid] = rows
        return itertools.chain.from_iterable(tests.values())


def shared(test: str, name: str) -> str:
    """What `slow.txt` calls a fixture that is made once for all tests of a file; also the point of `together(name)`."""
    return f"{test.partition('::')[0]}::{name}"


def _point(item: pytest.Item, known: Collection[str]) -> str:
    """What is drawn as one: tests that share what is slow, or the test."""
    if mark := item.get_closest_marker("together"):
        return shared(item.nodeid, mark.args[0])
    fixtures = (shared(item.nodeid, name) for name in getattr(item, "fixturenames", ()))
    return next((name for name in fixtures if name in known), item.nodeid)


def slow_tests() -> set[str]:
    """The names of the slow tests, and of slow fixtures that tests of a file share."""
    return set(SLOW.read_text().splitlines()) if SLOW.exists() else set()


def sole_tests() -> set[str]:
    """The names of the slow tests that are run always."""
    return set(SOLE.read_text().splitlines()) if SOLE.exists() else set()


def is_touched(draw: Draw, test: str) -> bool:
    """Whether the test's file was changed, or the code that it stands for."""
    return draw.has_changed(test.partition("::")[0], *serves(test))


def serves(test: str) -> tuple[str, ...]:
    """The code that a test, or a folder of tests, stands for; none: for all of it."""
    return SERVES.get(max((each for each in SERVES if test.startswith(each)), key=len, default=""), ())


def list_slow(seconds: Mapping[str, float]) -> str:
    """Writes the names of slow tests anew, by what each took now; what to say of it. A test that was not run is gone
    from the list, so only a run of all tests may call this."""
    old = slow_tests()
    new = {test for test, took in seconds.items() if took >= (QUICK_S if test in old else SLOW_S)}
    if new == old:
        return ""
    SLOW.write_text("".join(f"{test}\n" for test in sorted(new)))
    return f"{SLOW.relative_to(ROOT)} was written anew: it is to be committed"


def list_sole(passed: Mapping[str, Collection[object]], seconds: Mapping[str, float]) -> str:
    """Writes anew which slow tests are run always, by what each test has passed; what to say of it.

    A set cover, greedily: of what no quick test passes, the one comes next that passes most of the rest in its time.
    """
    slow = slow_tests()
    left = set().union(*passed.values()).difference(*(passed[test] for test in passed.keys() - slow))
    alone = {test: left.intersection(passed[test]) for test in sorted(passed.keys() & slow)}
    chosen = list[str]()

    def worth(test: str) -> float:
        return len(alone[test] & left) / max(seconds.get(test, SLOW_S), SLOW_S)

    while alone and worth(best := max(alone, key=worth)) >= WORTH:
        chosen.append(best)
        left -= alone.pop(best)
    if set(chosen) == sole_tests():
        return ""
    SOLE.write_text("".join(f"{test}\n" for test in sorted(chosen)))
    return f"{SOLE.relative_to(ROOT)} was written anew, {len(chosen)} tests: it is to be committed"


def of_session(config: pytest.Config, absent: Callable[[pytest.Item], bool]) -> Drawing:
    """What this session draws; a worker of xdist draws what its session does."""
    worker = getattr(config, "workerinput", None)
    if worker is None:
        return Drawing(by(os.environ.get("MGPU_DRAW", ""), os.environ.get("MGPU_DRAW_SINCE", "")), absent)
    number, said, changed = worker["draw"]
    return Drawing(Draw(number, said, tuple(changed)), absent)
