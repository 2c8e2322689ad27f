from __future__ import annotations

import errno
import os
import re

import pytest

from mgpu import errors
from mgpu.errors import MgpuError, Problem, SpecError, of_this_machine

CLASSES = {name: each for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, MgpuError)}


def tree() -> list[tuple[int, str, int | None]]:
    """Depth, name and exit code (None: the parent's) of every line of the tree in the module's docstring."""
    line = re.compile(r"^ {4}([│ ├└─]*)(\w+) +(\d+)?", re.MULTILINE)
    return [(len(m[1]) // 4, m[2], int(m[3]) if m[3] else None) for m in line.finditer(errors.__doc__ or "")]


def test_the_docstring_draws_every_class_once():
    assert sorted(name for _, name, _ in tree()) == sorted(CLASSES)


def test_the_docstring_draws_parents_and_exit_codes():
    above: list[type] = []
    for depth, name, code in tree():
        above[depth:] = [CLASSES[name]]
        if depth:
            assert CLASSES[name].__bases__ == (above[depth - 1],)
        expected = code if code is not None else above[depth - 1].exit_code
        assert CLASSES[name].exit_code == expected, name


def test_an_error_is_what_why_and_next_step():
    error = MgpuError("what", "why", "next")
    assert str(error) == "what\nwhy\nnext"
    assert error.args == ("what",)


def test_empty_parts_leave_no_empty_lines():
    assert str(MgpuError("what", next_step="next")) == "what\nnext"


def test_a_provider_error_says_what_it_blocks():
    error = errors.RateLimited("slow down", scope="region", retry_after=3.5)
    assert (error.scope, error.retry_after) == ("region", 3.5)
    assert (errors.Transient("x").scope, errors.Transient("x").retry_after) == ("provider", None)


def test_a_spec_error_holds_all_problems():
    problems = (Problem("f.yaml", 3, "nodes", "bad"), Problem("f.yaml", 9, "gpus", "unknown key", "gpu"))
    error = SpecError("f.yaml", problems)
    assert error.what == "f.yaml: 2 problems in the run file"
    assert error.why.splitlines() == ["f.yaml:3: nodes: bad", "f.yaml:9: gpus: unknown key (did you mean `gpu`?)"]
    assert error.problems == problems


def test_one_problem_is_not_problems():
    assert SpecError("f", (Problem("f", 1, "a", "b"),)).what == "f: 1 problem in the run file"


def test_a_failed_command_keeps_its_status():
    error = errors.CommandFailed("ls failed", status=2, stderr="no such file")
    assert (error.status, error.stderr, error.exit_code) == (2, "no such file", 5)


def test_teardown_incomplete_has_a_code_of_its_own():
    with pytest.raises(MgpuError) as caught:
        raise errors.TeardownIncomplete("left")
    others = {each.exit_code for each in CLASSES.values() if each is not errors.TeardownIncomplete}
    assert caught.value.exit_code == 7
    assert 7 not in others


def system(number: int) -> OSError:
    return OSError(number, os.strerror(number), "/x")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (system(errno.ENOSPC), "/x: No space left on device"),
        (system(errno.EACCES), "/x: Permission denied"),
        (system(errno.EMFILE), "not enough open files"),
        (system(errno.ENOMEM), "not enough memory"),
        (system(errno.EAGAIN), "not enough processes"),  # of fork
        (MemoryError(), "not enough memory"),
        (RuntimeError("can't start new thread"), "not enough threads"),
    ],
    ids=repr,
)
def test_what_this_machine_lacks_is_no_bug(error, words):
    told = of_this_machine(error)
    assert told is not None
    assert words in told.what
    assert (told.exit_code, len(told.why) > 1, bool(told.next_step)) == (2, True, True)


@pytest.mark.parametrize(
    "error",
    [
        *(ValueError("x"), RuntimeError("generator ignored GeneratorExit"), RecursionError("too deep")),
        *(FileNotFoundError(2, "No such file or directory", "/x"), OSError("of somebody's own")),
        BlockingIOError(errno.EAGAIN, "write could not complete without blocking"),
    ],
    ids=repr,
)
def test_all_else_is_one(error):
    assert of_this_machine(error) is None
