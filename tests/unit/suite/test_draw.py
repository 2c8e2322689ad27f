"""The draw of tests/draw.py: who is in it, and that eight in a row leave out nobody."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import draw
import pytest

POINTS = [f"before call {number}" for number in range(131)]
HERE = draw.ROOT / "tests"


# --- who is drawn -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 10, 31, 131])
def test_at_least_a_quarter_is_drawn_and_seldom_much_more(size):
    shares = [len(draw.chosen(POINTS[:size], number)) for number in range(80)]
    assert min(shares) >= size / 4
    assert sum(shares) / len(shares) <= size / 4 + 1.5


@pytest.mark.parametrize("first", [0, 5, 470, 10**6])
@pytest.mark.parametrize("size", [1, 4, 131])
def test_eight_commits_in_a_row_draw_every_point(first, size):
    drawn = [draw.chosen(POINTS[:size], number) for number in range(first, first + 8)]
    assert set().union(*drawn) == set(POINTS[:size])


def test_of_dear_points_fewer_are_drawn_and_as_many_commits_in_a_row_draw_every_one():
    drawn = [draw.chosen(POINTS, number, 32) for number in range(7, 39)]
    assert set().union(*drawn) == set(POINTS)
    assert {draw.chosen(POINTS, number, 32) == {*draw.Draw(number).of(POINTS, share=32)} for number in (0, 7)} == {True}
    assert len(POINTS) / 32 <= sum(map(len, drawn)) / 32 <= len(POINTS) / 32 + 3


def test_eight_commits_in_a_row_draw_every_point_that_stays_while_others_come_and_go():
    drawn = set[str]()
    for number in range(8):
        others = [f"a point of others {number} {each}" for each in range(random.Random(number).randrange(300))]
        drawn |= draw.chosen([*others, *POINTS], number)
    assert drawn >= set(POINTS)


def test_which_points_are_drawn_together_changes_from_round_to_round():
    rounds = [draw.chosen(POINTS, number) for number in (3, 11, 19)]
    assert len({frozenset(each) for each in rounds}) == 3


def test_the_order_of_the_points_changes_nothing_and_is_kept():
    mixed = random.Random(1).sample(POINTS, len(POINTS))
    first, second = draw.Draw(7).of(POINTS), draw.Draw(7).of(mixed)
    assert sorted(first) == sorted(second)
    assert first == [point for point in POINTS if point in first]
    assert second == [point for point in mixed if point in first]


def test_without_a_number_every_point_is_drawn():
    assert draw.Draw(None).of(POINTS) == POINTS


# --- new and changed --------------------------------------------------------------------------------------------------


def test_new_points_are_always_drawn_beside_the_share_of_all():
    new = POINTS[100:]
    for number in range(16):
        drawn = draw.Draw(number).of(POINTS, new=new)
        assert set(drawn) == draw.chosen(POINTS, number) | set(new)


@pytest.mark.parametrize(("source", "every"), [("a/b.py", True), ("a", True), ("a/b", False), ("c.py", False)])
def test_what_was_changed_is_drawn_whole_and_nothing_else(source, every):
    drawn = draw.Draw(7, changed=("a/b.py", "mgpu/cli.py")).of(POINTS, [source])
    assert (drawn == POINTS) == every


def sharing(number: int | None, said: str = "") -> tuple[draw.Share, list[tuple[str, object]]]:
    told = list[tuple[str, object]]()
    file = draw.ROOT / "test_it.py"
    return draw.Share(draw.Draw(number, said), file, lambda name, value: told.append((name, value))), told


def test_a_point_that_is_not_known_or_has_got_a_new_part_is_new(tmp_path):
    known = tmp_path / "points.txt"
    known.write_text("\n".join([*POINTS[1:], "a part", ""]))
    parts = {point: [point] for point in POINTS} | {POINTS[1]: [POINTS[1], "a part"], POINTS[2]: [POINTS[2], "another"]}
    for number in range(8):
        share, told = sharing(number)
        drawn = share.of("points", parts, known=known)
        assert set(drawn) == draw.chosen(POINTS, number) | {POINTS[0], POINTS[2]}
        assert told == [(draw.TOLD, ["points", len(drawn), len(POINTS), 2])]


def test_only_a_run_of_every_point_that_was_asked_for_writes_what_is_known(monkeypatch, tmp_path):
    monkeypatch.setattr(draw, "ROOT", tmp_path)
    known = tmp_path / "points.txt"
    every = draw.by(draw.ALL).said
    for number, said in ((7, ""), (None, "")):
        share, _ = sharing(number, said)
        share.of("points", POINTS, known=known)
        share.know()
        assert not known.exists()
    sharing(None, every)[0].know()
    assert not known.exists(), "a test that was told which points to take draws among none"
    for times in (1, 0):
        share, told = sharing(None, every)
        share.of("points", {"b": ["b", "c"], "a": ["a"]}, known=known)
        share.know()
        assert known.read_text() == "a\nb\nc\n"
        assert [name for name, _ in told].count("counted") == times, "said when it was another one"


# --- the number -------------------------------------------------------------------------------------------------------


class Repository:
    """A checkout with a history."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "tests").mkdir(parents=True)
        (root / "tests" / "test_a.py").write_text("1")
        self.git("init", "-q", "-b", "main")

    def git(self, *arguments: str) -> str:
        who = {f"GIT_{role}_{what}": "me@here" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        outside = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        done = subprocess.run(
            ["git", *arguments], cwd=self.root, env=outside | who, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    def commit(self, name: str, text: str = "") -> str:
        (self.root / name).write_text(text)
        self.git("add", "--all")
        self.git("commit", "-q", "-m", name)
        return self.git("rev-parse", "HEAD")

    def draw(self, wanted: str = "commit", since: str = "") -> draw.Draw:
        return draw.by(wanted, since, self.root)


@pytest.fixture
def repository(tmp_path, monkeypatch) -> Repository:
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    return Repository(tmp_path / "checkout")


def test_the_number_goes_up_by_one_with_each_commit_of_the_main_line(repository):
    assert [repository.commit(f"f{number}") and repository.draw().number for number in range(3)] == [1, 2, 3]
    repository.git("checkout", "-q", "-b", "side")
    repository.commit("s1"), repository.commit("s2")
    repository.git("checkout", "-q", "main")
    repository.git("merge", "-q", "--no-ff", "-m", "merge", "side")
    assert repository.draw().number == 4
    assert repository.draw().changed == ("s1", "s2"), "all that the merge has brought"


def test_changed_is_what_the_commit_or_the_working_tree_changed(repository):
    first = repository.commit("a")
    repository.commit("b"), repository.commit("c")
    before = repository.draw()
    assert before.changed == ("c",)
    (repository.root / "a").write_text("dirty")
    (repository.root / "new").write_text("")
    assert repository.draw() == draw.Draw(before.number, before.said, ("a", "c", "new")), "of the same number"
    assert repository.draw(since=first).changed == ("a", "b", "c", "new")
    with pytest.raises(pytest.UsageError, match="MGPU_DRAW_SINCE='nothing'"):
        repository.draw(since="nothing")


def test_a_number_draws_again_what_its_commit_drew(repository):
    repository.commit("a"), repository.commit("b")
    first = repository.draw()
    repository.commit("c")
    again = repository.draw(str(first.number))
    assert again.of(POINTS) == first.of(POINTS) != repository.draw().of(POINTS)


def test_where_the_history_is_cut_off_the_commit_is_the_number_and_it_says_so(repository, tmp_path):
    repository.commit("a")
    commit = repository.commit("b")
    repository.git("clone", "-q", "--depth", "1", repository.root.as_uri(), str(tmp_path / "shallow"))
    found = draw.by("commit", root=tmp_path / "shallow")
    assert found.number == int(commit[:6], 16)
    assert "its history is cut off; what was changed is not known" in found.said


def test_without_git_the_sources_are_the_number_and_it_says_so(repository, monkeypatch):
    repository.commit("tests/test_b.py", "2")
    (repository.root / ".git").rename(repository.root / "not-git")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(repository.root.parent))
    first = repository.draw()
    assert "git knows no commit here; what was changed is not known" in first.said
    assert repository.draw() == first
    (repository.root / "tests" / "test_b.py").write_text("3")
    assert repository.draw().number != first.number


@pytest.mark.parametrize("wanted", ["every", "-1", "1.5"])
def test_what_names_no_draw_is_refused(wanted):
    with pytest.raises(pytest.UsageError, match=f"MGPU_DRAW='{wanted}'"):
        draw.by(wanted)


# --- in pytest --------------------------------------------------------------------------------------------------------

CONFTEST = """
import draw, pytest

def pytest_configure(config):
    config.addinivalue_line("markers", "drawn(label, *sources)")
    config.addinivalue_line("markers", "together(name)")
    config.pluginmanager.register(draw.of_session(config, lambda item: "[absent" in item.nodeid))
"""
TESTS = """
import pytest

@pytest.mark.drawn("cells of a matrix")
@pytest.mark.parametrize("fault", ["lost", "late"])
@pytest.mark.parametrize("store", ["folder", "server", "other", "absent"])
def test_matrix(store, fault): ...

@pytest.mark.drawn("cells of a matrix")
@pytest.mark.parametrize("number", range(40))
def test_numbers(number): ...

@pytest.mark.parametrize("number", range(5))
def test_that_has_each_something_of_its_own_to_say(number): ...
"""
PAIRS = 20
PAIR = """
@pytest.mark.drawn("pairs")
@pytest.mark.parametrize("side", ["left", "right"])
def test_pair_{}(side): ...
"""


SLOW = """
import pytest

@pytest.mark.parametrize("number", range(16))
def test_slow(number): ...

@pytest.mark.drawn("own points")
@pytest.mark.parametrize("number", range(8))
def test_own(number): ...

@pytest.mark.parametrize("number", range(8))
def test_quick(number): ...
"""

SHARED = """
import pytest

@pytest.fixture(scope="module")
def made(): ...

@pytest.mark.parametrize("number", range(6))
def test_share(made, number): ...

@pytest.mark.parametrize("number", [0])
def test_quick(number): ...
"""

TOGETHER = """
import pytest

STAGES = [pytest.param(stage, marks=pytest.mark.together(f"stage {stage}")) for stage in range(3)]

@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("stage", STAGES)
def test_stage(stage, number): ...
"""


@pytest.fixture
def tests(tmp_path) -> Path:
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {HERE}\n")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS + "".join(map(PAIR.format, range(PAIRS))))
    return tmp_path


def lines(tests: Path, *options: str, **env: str) -> list[str]:
    """What pytest prints."""
    known = {name: value for name, value in os.environ.items() if not name.startswith(("MGPU_DRAW", "PYTEST_"))}
    files = (
        [] if any(not option.startswith("-") and (tests / option).exists() for option in options) else ["test_it.py"]
    )
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *files, *options]
    done = subprocess.run(command, cwd=tests, env=known | env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def passed(printed: list[str], test: str) -> set[str]:
    """The cases, also as xdist prints them."""
    return {word for line in printed if " PASSED " in f" {line} " for word in line.split() if f"::{test}[" in word}


def test_cases_are_drawn_of_each_test_that_is_marked_and_how_many_is_said(tests):
    printed = lines(tests, MGPU_DRAW="470")
    cells, numbers = passed(printed, "test_matrix"), passed(printed, "test_numbers")
    present = {case for case in cells if "absent" not in case}
    assert len(cells - present) == 2, "what this machine skips stands for nothing that it could do"
    assert (2 <= len(present) < 6, 10 <= len(numbers) < 40) == (True, True)
    assert all(passed(printed, f"test_pair_{number}") for number in range(PAIRS)), "no test is left out as a whole"
    assert len(passed(printed, "test_that_has_each_something_of_its_own_to_say")) == 5
    assert f"cells of a matrix: {len(present) + len(numbers)} of 46 drawn" in printed
    assert any(line.startswith("the draw: number 470, given by MGPU_DRAW") for line in printed)
    some = lines(tests, "-k", "numbers", MGPU_DRAW="470")
    assert passed(some, "test_numbers") == numbers, "what -k chooses is of the same draw"
    assert f"cells of a matrix: {len(numbers)} of 40 drawn" in some, "of what was run"


def test_all_workers_draw_the_same_and_it_is_summed_up(tests):
    alone, many = lines(tests, MGPU_DRAW="470"), lines(tests, "--numprocesses", "2", MGPU_DRAW="470")
    for test in ("test_matrix", "test_numbers"):
        assert passed(alone, test) == passed(many, test)
    (said,) = (line for line in alone if " drawn" in line and "cells" in line)
    assert said in many


def test_whoever_names_a_test_has_all_its_cases_and_nothing_is_said(tests):
    printed = lines(tests)
    assert (len(passed(printed, "test_matrix")), len(passed(printed, "test_numbers"))) == (8, 40)
    assert not any("drawn" in line for line in printed)


def test_all_is_all(tests):
    printed = lines(tests, MGPU_DRAW="all")
    assert (len(passed(printed, "test_matrix")), len(passed(printed, "test_numbers"))) == (8, 40)
    assert "cells of a matrix: 46 of 46 drawn" in printed


# --- slow tests -------------------------------------------------------------------------------------------------------


@pytest.fixture
def slow(tests) -> Path:
    """Two folders with slow tests, of which a list in the first one tells."""
    names = []
    for folder in ("one", "two"):
        (tests / folder).mkdir()
        (tests / folder / f"test_{folder}.py").write_text(SLOW)
        names += [f"{folder}/test_{folder}.py::test_slow[{number}]" for number in range(16)]
        names += [f"{folder}/test_{folder}.py::test_own[{number}]" for number in range(8)]
    (tests / "slow.txt").write_text("".join(f"{name}\n" for name in names))
    listed = "".join(f"draw.{name.upper()} = draw.Path({str(tests / f'{name}.txt')!r})\n" for name in ("slow", "sole"))
    (tests / "conftest.py").write_text(CONFTEST.replace("import draw, pytest\n", f"import draw, pytest\n{listed}"))
    (tests / "test_it.py").unlink()
    return tests


def test_of_slow_tests_an_eighth_is_run_and_eight_draws_run_all(slow):
    met = set[str]()
    for number in range(470, 478):
        printed = lines(slow, "one", "two", MGPU_DRAW=str(number))
        drawn = passed(printed, "test_slow")
        assert 32 / 8 <= len(drawn) < 12
        for folder in ("one", "two"):
            assert len([name for name in passed(printed, "test_own") if name.startswith(folder)]) < 8, "by its own draw"
        assert f"slow tests: {len(drawn)} of 32 drawn" in printed
        assert len(passed(printed, "test_quick")) == 16
        met |= drawn
    assert len(met) == 32
    assert len(passed(lines(slow, "one"), "test_slow")) == 16, "who names a folder means all of it"


def test_no_draw_leaves_out_all_that_stands_for_the_same_code(slow):
    serves = "draw.SERVES = {'one/': ('no/such/folder',)}\n"
    (slow / "conftest.py").write_text((slow / "conftest.py").read_text() + serves)
    shares = [passed(lines(slow, "one", "two", MGPU_DRAW=str(number)), "test_slow") for number in range(470, 478)]
    for folder in ("one", "two"):
        assert all(len([name for name in share if name.startswith(folder)]) >= 16 / 8 for share in shares)
    assert len(set().union(*shares)) == 32


def test_what_a_change_touches_is_run_beside_its_share(slow):
    listed = (slow / "conftest.py").read_text()
    (slow / "conftest.py").write_text(f"{listed}draw.is_touched = lambda _draw, test: test.startswith('one/')\n")
    drawn = passed(lines(slow, "one", "two", MGPU_DRAW="470"), "test_slow")
    assert len([name for name in drawn if name.startswith("one/")]) == 16
    assert len([name for name in drawn if name.startswith("two/")]) < 12


def test_tests_that_share_what_is_slow_are_drawn_together(slow):
    (slow / "one" / "test_shared.py").write_text(SHARED)
    with (slow / "slow.txt").open("a", encoding="utf-8") as names:
        names.writelines(f"one/test_shared.py::{each}\n" for each in ("made", *(f"test_share[{n}]" for n in range(6))))
    due = draw.ROUND + draw._hash("one/test_shared.py::made") % draw.ROUND
    for number, drawn in ((due, {6}), (due + 1, {0, 6})):
        printed = lines(slow, "one", MGPU_DRAW=str(number))
        assert len(passed(printed, "test_share")) in drawn
        assert len(passed(printed, "test_quick")) == 9, "the one beside them needs nothing slow"


def test_tests_that_are_marked_as_sharing_what_is_slow_are_drawn_together(slow):
    (slow / "one" / "test_marked.py").write_text(TOGETHER)
    due = draw.ROUND + draw._hash("one/test_marked.py::stage 0") % draw.ROUND
    for number, first in ((due, {4}), (due + 1, {0, 4})):
        drawn = passed(lines(slow, "one/test_marked.py", MGPU_DRAW=str(number)), "test_stage")
        stages = [sum(f"[{stage}-" in name for name in drawn) for stage in range(3)]
        assert stages[0] in first, "though no list names them"
        assert {*stages} == {0, 4}, "each for itself"


def test_what_alone_passes_lines_is_run_always_and_not_drawn_among(slow):
    always = "one/test_one.py::test_slow[3]"
    (slow / "sole.txt").write_text(f"{always}\n")
    for number in (470, 471):
        printed = lines(slow, "one", "two", MGPU_DRAW=str(number))
        drawn = passed(printed, "test_slow")
        assert always in drawn
        assert f"slow tests: {len(drawn) - 1} of 31 drawn" in printed


def test_own_draws_are_no_smaller_because_they_are_slow(slow):
    some = passed(lines(slow, "one", MGPU_DRAW="470"), "test_own")
    (slow / "slow.txt").unlink()
    assert passed(lines(slow, "one", MGPU_DRAW="470"), "test_own") == some


@pytest.mark.parametrize(
    ("changed", "test", "touched"),
    [
        ("tests/e2e/test_a.py", "tests/e2e/test_a.py::test_it[1]", True),
        ("tests/e2e/test_b.py", "tests/e2e/test_a.py::test_it", False),
        ("mgpu/iac/engine/stack.py", "tests/infra/test_a.py::test_it", True),
        ("mgpu/run/lifecycle/launch.py", "tests/infra/test_a.py::test_it", False),
        ("train/mgpu_train/agent/phases/watch.py", "tests/train/test_agent_ends.py::test_it", True),
        ("train/mgpu_train/store/s3.py", "tests/train/test_agent_ends.py::test_it", False),
        ("train/mgpu_train/agent/host/container.py", "tests/remote/container/test_a.py::test_it", True),
        ("mgpu/remote/node.py", "tests/remote/container/test_a.py::test_it", False),
    ],
)
def test_a_slow_test_is_run_when_its_file_or_what_it_stands_for_was_changed(changed, test, touched):
    assert draw.is_touched(draw.Draw(7, changed=(changed,)), test) == touched


def test_what_slow_tests_stand_for_is_there():
    paths = {path for paths in draw.SERVES.values() for path in paths}
    assert [path for path in paths if not (draw.ROOT / path).exists()] == []
    assert [path for path in draw.SERVES if not list(draw.ROOT.glob(f"{path}*"))] == []


def test_the_list_keeps_what_is_neither_slow_nor_quick(monkeypatch, tmp_path):
    monkeypatch.setattr(draw, "ROOT", tmp_path)
    monkeypatch.setattr(draw, "SLOW", tmp_path / "slow.txt")
    between = (draw.SLOW_S + draw.QUICK_S) / 2
    assert "to be committed" in draw.list_slow({"a": draw.SLOW_S, "b": between, "c": 60.0})
    assert draw.slow_tests() == {"a", "c"}
    assert draw.list_slow({"a": between, "b": between, "c": 60.0}) == "", "a machine that is a little faster or slower"
    assert draw.list_slow({"a": draw.QUICK_S / 2, "b": between})
    assert draw.slow_tests() == set()


def test_of_slow_tests_those_are_run_always_that_pass_most_in_their_time_until_no_other_is_worth_it(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(draw, "ROOT", tmp_path)
    monkeypatch.setattr(draw, "SLOW", tmp_path / "slow.txt")
    monkeypatch.setattr(draw, "SOLE", tmp_path / "sole.txt")
    draw.SLOW.write_text("all\ndear\nfew\nhalf\nsame\nseen\n")
    passed = {"": {100}, "quick": set(range(50)), "seen": set(range(50)), "half": set(range(50, 75))}
    passed |= {"all": set(range(40, 90)), "same": set(range(40, 90)), "dear": {200}, "few": {0, -1, -2, -3}}
    seconds = {"half": 1.0, "all": 1.0, "same": 2.0, "seen": 1.0, "dear": 1.0, "few": 3 / draw.WORTH}
    assert "2 tests: it is to be committed" in draw.list_sole(passed, seconds)
    assert draw.sole_tests() == {"all", "few"}
    assert draw.list_sole(passed, seconds) == ""
