"""A command arrives as it is, whichever shell the user of a node logs in with."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import strange_shell

from mgpu.remote.targets import login_line

SHELLS = [
    ("sh", "-c"),
    ("bash", "-c"),
    ("zsh", "-f", "-c"),
    ("csh", "-f", "-c"),
    ("tcsh", "-f", "-c"),
    ("fish", "--no-config", "-c"),
    (*strange_shell.PROGRAM, "-c"),
]
ARGUMENTS = [
    *("", "-n", "it's", 'a "b" $HOME `x` $(y)', "a\\b \\\\ \\n \\047", "wow! !! !x", "two\nlines\n\n", "tab\there"),
    *("%s %d", "*?[a]{b,c}", "~", "#x", "a=b", "^x", "<>|&;()", "数据 →", "x\n" * 9000),
]


@pytest.mark.parametrize(
    "shell", [each for each in SHELLS if shutil.which(each[0])], ids=lambda each: Path(each[0]).name
)
def test_arguments_arrive_as_they_are(shell):
    program = [sys.executable, "-S", "-c", "import sys; sys.stdout.buffer.write('\\0'.join(sys.argv[1:]).encode())"]
    done = subprocess.run([*shell, login_line([*program, *ARGUMENTS])], capture_output=True, check=False)
    assert (done.stderr, done.stdout.decode().split("\0")) == (b"", ARGUMENTS)


@pytest.mark.parametrize("line", ["printf 'a\nb'", "echo 'oh!'", "( cd x; echo y )", "code=1", "exit $?"])
def test_the_stand_in_refuses_what_csh_and_fish_refuse(line):
    done = subprocess.run([*strange_shell.PROGRAM, "-c", line], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (1, b"")


def test_what_all_shells_read_the_same_stays_readable():
    assert login_line(["python3", "-I", "/a b/agent.py", "$x"]) == "python3 -I '/a b/agent.py' '$x'"
