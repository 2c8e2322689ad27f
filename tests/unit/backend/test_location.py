"""Which backend a command has, by Pulumi's own key."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from mgpu import paths
from mgpu.backend import location
from mgpu.errors import InputError, StackError


@pytest.fixture(autouse=True)
def home(xdg: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's machine whose present folder is a project's, two below its Pulumi.yaml."""
    here = tmp_path / "project" / "a" / "b"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.delenv(location.VARIABLE, raising=False)
    yield here
    location.choose(None)


def project(text: str, folder: Path | None = None) -> None:
    ((folder or Path.cwd().parents[1]) / "Pulumi.yaml").write_text(f"name: x\nruntime: python\n{text}")


def test_without_any_it_is_a_folder_of_this_machines():
    project("main: infra/\n")
    found = location.current()
    assert (found.root, found.folder) == (paths.state_dir(), paths.state_dir() / "pulumi")
    assert found.url == (paths.state_dir() / "pulumi").as_uri()
    assert found.shared is None


@pytest.mark.parametrize(
    "text", ["backend:\n  url: file:///team/state\n", "backend: {url: 'file:///team/state'}", '"backend": {"url": "file:///team/state"}']
)  # fmt: skip
def test_the_nearest_project_names_it(text: str):
    project(text)
    found = location.current()
    assert (found.root, found.folder) == (Path("/team/state/mgpu"), Path("/team/state"))


def test_the_variable_comes_first_and_the_run_files_folder_before_the_present_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    other = tmp_path / "other"
    other.mkdir()
    project("backend: {url: file:///mine}")
    project("backend: {url: file:///theirs}", other)
    assert location.current().url == "file:///mine"
    location.choose(other)
    assert location.current().url == "file:///theirs"
    monkeypatch.setenv(location.VARIABLE, "file://~/state")
    assert location.current().folder == Path.home() / "state"


def test_another_users_home_is_no_folder_that_it_can_be_in(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(location.VARIABLE, "file://~no-such-user/state")
    with pytest.raises(InputError, match="cannot be used"):
        location.current()


@pytest.mark.parametrize("named", [True, False])
def test_a_folder_is_called_as_its_user_likes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool):
    folder = tmp_path / "my 100% state"
    if named:
        monkeypatch.setenv(location.VARIABLE, folder.as_uri())
    else:
        monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    location.current().state.put(".pulumi/x", b"1")
    assert location.current().folder in (folder, folder / "mgpu" / "pulumi")
    assert (location.current().folder / ".pulumi" / "x").exists()


def test_each_bucket_and_prefix_has_a_folder_of_its_own_here_whatever_its_settings(monkeypatch: pytest.MonkeyPatch):
    def at(url: str) -> location.Backend:
        monkeypatch.setenv(location.VARIABLE, url)
        return location.current()

    one = at("s3://team/mgpu")
    assert (one.folder, one.address) == (None, "s3://team/mgpu")
    assert one.root.parent == paths.state_dir() / "backends"
    assert at("s3://team/mgpu/?region=eu-west-1").root == one.root
    assert at("s3://team/other").root != one.root


def test_a_buckets_settings_reach_its_store(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    url = "s3://team/a/?region=eu-west-1&endpoint=http://127.0.0.1:9&s3ForcePathStyle=true"
    monkeypatch.setenv(location.VARIABLE, url)
    found = location.current()
    assert (found.state.url, found.shared.url) == ("s3://team/a", "s3://team/a/mgpu")
    monkeypatch.setenv("MGPU_TIMEOUTS", "{}")
    with pytest.raises(StackError, match="could not be listed") as error, found.asking("listed"):
        list(found.state.list(""))
    assert "127.0.0.1:9" in error.value.why


def test_the_environments_deadlines_are_those_of_its_store_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(location.VARIABLE, "s3://team/a")
    given = list[Any]()
    monkeypatch.setattr("mgpu_train.store.open_store", lambda *_, timeouts: given.append(timeouts))
    for seconds in (7, 8):
        monkeypatch.setenv("MGPU_TIMEOUTS", f'{{"store_retry_s": {seconds}}}')
        location.current().state  # noqa: B018  it is opened
    assert [each.store_retry_s for each in given] == [7, 8]
    monkeypatch.setenv("MGPU_TIMEOUTS", "seven")
    with pytest.raises(InputError, match="MGPU_TIMEOUTS in the environment cannot be used"):
        location.current().state  # noqa: B018


@pytest.mark.parametrize("url", ["https://api.pulumi.com", "gs://bucket", "azblob://x", "file://relative", "s3://"])
def test_one_that_cannot_keep_records_is_named_with_where_it_stands(url: str, monkeypatch: pytest.MonkeyPatch):
    project(f"backend: {{url: '{url}'}}")
    with pytest.raises(InputError) as error:
        location.current()
    assert url in error.value.what
    assert str(Path.cwd().parents[1] / "Pulumi.yaml") in error.value.why
    monkeypatch.setenv(location.VARIABLE, url)
    with pytest.raises(InputError) as error:
        location.current()
    assert location.VARIABLE in error.value.why


def test_what_is_no_yaml_is_left_to_pulumi():
    project("backend: [")
    assert location.current().root == paths.state_dir()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said of a bucket's silence, which is at once none any more."""
    lines = list[str]()
    monkeypatch.setattr(location, "_SILENCE_S", 0.0)
    monkeypatch.setattr(location, "_said_at", float("-inf"))
    monkeypatch.setattr(location, "_tell", None)
    location.tell_of_waits(lines.append)
    return lines


def no_timer_is_left() -> bool:
    """Once those that are about to end have."""
    timers = [each for each in threading.enumerate() if isinstance(each, threading.Timer)]
    for each in timers:
        each.join(10)
    return not any(each.is_alive() for each in timers)


def asks(backend: location.Backend, what: str = "asked for its runs") -> None:
    with backend.asking(what):
        assert no_timer_is_left()


BUCKET = location.Backend("s3://team/x?region=y", Path("/nowhere"), None)


def test_a_machine_without_a_thread_left_asks_in_silence(told: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(threading.Timer, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    asks(BUCKET)
    assert told == []


def test_what_is_waited_for_is_said_once_a_minute(told: list[str], monkeypatch: pytest.MonkeyPatch):
    asks(BUCKET)
    asks(BUCKET, "written")
    no_longer = "no request waits longer than 160 s for an answer"
    said = f"the backend s3://team/x is still being asked for its runs; {no_longer}"
    assert told == [said]
    monkeypatch.setattr(location, "_SAID_EVERY_S", 0.0)
    asks(BUCKET, "written")
    assert told[1:] == [said.replace("asked for its runs", "written")]


def test_no_wait_is_said_of_a_folder_of_what_works_beside_the_command_and_of_what_is_quick(
    told: list[str], monkeypatch: pytest.MonkeyPatch
):
    asks(location.current())
    beside = threading.Thread(target=asks, args=(BUCKET,))
    beside.start()
    beside.join(10)
    monkeypatch.setattr(location, "_SILENCE_S", 3600.0)
    with BUCKET.asking("read"):
        pass
    assert no_timer_is_left()
    assert told == []
