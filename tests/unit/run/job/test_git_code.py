"""Code of a commit: what an address means, which commit it names, and the files as that commit has them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from mgpu.errors import InputError
from mgpu.run.job import git_code
from mgpu.run.job.git_code import GitCode


class Repository:
    """A repository on this disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.git("init", "--quiet", "--initial-branch=main", ".")

    def git(self, *words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", *who, *words], cwd=self.folder, check=True, capture_output=True, text=True
        ).stdout.strip()

    def commit(self, text: str) -> str:
        (self.folder / "part").mkdir(exist_ok=True)
        for name in ("train.py", "part/train.py"):
            (self.folder / name).write_text(f"print('{text} {name}')\n")
        self.git("add", ".")
        self.git("commit", "--quiet", "-m", text)
        return self.git("rev-parse", "HEAD")

    def code(self, ref: str, folder: str = ".") -> GitCode:
        return GitCode(f"file://{self.folder}", ref, folder)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    return Repository(tmp_path / "repository")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("git+https://github.com/you/llm@main", GitCode("https://github.com/you/llm", "main")),
        ("git+ssh://git@host.org/you/llm@feature/a", GitCode("ssh://git@host.org/you/llm", "feature/a")),
        ("git+file:///srv/llm.git@v1.2#subdirectory=a/b", GitCode("file:///srv/llm.git", "v1.2", "a/b")),
    ],
)
def test_an_address_is_read_as_pip_reads_it(text, code):
    assert GitCode.of(text) == code
    assert str(code) == text


@pytest.mark.parametrize(
    "text",
    [
        "https://github.com/you/llm@main",
        "git+https://github.com/you/llm",
        "git+ext::sh -c ls@main",
        "git+https://github.com/you/llm@--upload-pack=x",
        "git+https://github.com/you/llm@main#subdirectory=../other",
        "git+https://github.com/you/llm@main#subdirectory=/etc",
        "git+ssh://-oProxyCommand=x/y@main",
    ],
)
def test_what_names_no_code_is_refused(text):
    with pytest.raises(InputError, match="names no code"):
        GitCode.of(text)


def test_a_branch_a_tag_and_a_commit(repository):
    first = repository.commit("one")
    repository.git("tag", "-a", "v1", "-m", "v1")  # a tag with a text is an object of its own
    second = repository.commit("two")
    assert [repository.code(ref).commit() for ref in ("main", "v1", first)] == [second, first, first]
    for commit, text in ((first, "one"), (second, "two")):
        with repository.code("main", "part").at(commit) as folder:
            assert (folder / "train.py").read_text() == f"print('{text} part/train.py')\n"
    assert not folder.exists()


def test_a_server_that_gives_no_commit_by_its_name_gives_its_branches(repository, monkeypatch):
    first = repository.commit("one")
    repository.commit("two")
    real = git_code._git

    def by_branch_alone(words, *rest):
        if words[0] == "fetch" and first in words:
            raise InputError("not by its name")
        return real(words, *rest)

    monkeypatch.setattr(git_code, "_git", by_branch_alone)
    with repository.code("main").at(first) as folder:
        assert "one" in (folder / "train.py").read_text()


def test_what_cannot_be_fetched_says_what_git_said(repository, monkeypatch):
    commit = repository.commit("one")
    with pytest.raises(InputError, match="no branch or tag `other`"):
        repository.code("other").commit()
    with pytest.raises(InputError, match="cannot be asked") as refused:
        GitCode("file:///nowhere/at/all", "main").commit()
    assert "/nowhere/at/all" in refused.value.why
    with pytest.raises(InputError, match="has no folder gone"), repository.code("main", "gone").at(commit):
        pass
    with pytest.raises(InputError, match="could not be fetched"), repository.code("main").at("0" * 40):
        pass
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert repository.code("main").commit() == commit, "whatever a hook has set"
    monkeypatch.setattr(git_code, "_ASK_S", 0.0)
    with pytest.raises(InputError) as late:
        repository.code("main").commit()
    assert "did not end within" in late.value.why
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(InputError) as absent:
        repository.code("main").commit()
    assert "no `git`" in absent.value.why
