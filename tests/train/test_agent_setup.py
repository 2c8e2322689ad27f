"""`setup:`: shell lines before the program, once for a machine; what fails in them is the program's fault, and told."""

from __future__ import annotations

import pytest

PROGRAM = "import pathlib\nprint('made', pathlib.Path('made').read_text().split())\n"


@pytest.fixture
def ready(node):
    """A node, and how it runs once."""

    def run(setup, attempt=1, **more):
        node.program(PROGRAM)
        node.job(setup=setup, checkpoint=None, attempt=attempt, writer=f"w-{attempt}", **more)
        node.start({"env": {"TOKEN": "a-long-secret-value"}})
        return node.ended()

    return node, run


def test_the_lines_are_one_script_in_the_folder_of_the_code(ready):
    node, run = ready
    status = run(["mkdir -p sub", "cd sub", "NAME=x", 'echo "$NAME $MODE" > ../made'], env={"MODE": "fast"})
    assert status["phase"] == "done"
    assert "made ['x', 'fast']" in node.log
    assert "setup: 4 lines\n" in node.log


@pytest.mark.parametrize(("block", "said"), [("touch made\n", "1 line"), ("cd .\n\ntouch made\n", "3 lines")])
def test_lines_of_a_block_are_counted_as_they_are_written(ready, block, said):
    node, run = ready
    assert run([block])["phase"] == "done"
    assert f"setup: {said}\n" in node.log


def test_python_and_pip_are_the_programs(ready):
    node, run = ready
    assert run(["python -c 'import mgpu_train, sys; print(sys.executable)' > made"])["phase"] == "done"
    assert "/python" in node.log


def test_a_line_that_fails_ends_the_attempt_before_the_program_and_is_told(ready):
    node, run = ready
    status = run(["echo first", "echo no such package >&2; exit 3", "touch made"])
    assert (status["phase"], status["fault"]) == ("failed", "user")
    assert status["reason"] == "setup: exit code 3: no such package"
    assert "launching" not in status["phase_seconds"]
    assert not (node.run / "work" / "made").exists()


def test_it_is_done_once_for_a_machine_and_again_when_it_has_changed_or_failed(ready):
    node, run = ready
    fails_once = "echo a >> made; grep -c a made | grep 2"
    assert run([fails_once])["phase"] == "failed"
    for attempt, line in enumerate([fails_once, "echo b >> made", "echo b >> made", "echo c >> made"], 2):
        assert run([line], attempt)["phase"] == "done"
    assert "made ['a', 'a', 'b', 'c']" in node.log


def test_a_stop_ends_a_set_up_that_hangs_with_all_that_it_started(ready):
    node, _ = ready
    node.program(PROGRAM)
    node.job(setup=["echo begun", "sleep 600 & sleep 600"], checkpoint=None)
    node.start()
    node.until(lambda: "begun" in node.log)
    node.stop("--now")
    assert node.ended()["fault"] == "stopped", "and `ended` looks for processes"


def test_its_deadline_is_that_of_preparing(ready):
    _, run = ready
    status = run(["sleep 600"], timeouts={"prepare_s": 1})
    assert status["reason"] == "preparing took more than 1 s (prepare_s)"
