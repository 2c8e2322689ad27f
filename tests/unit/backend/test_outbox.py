"""What waits in the backend is delivered by whoever passes next, once, wherever its bearer dies."""

from __future__ import annotations

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from mgpu_train.store import Ambiguous, Unavailable, open_store
from mgpu_train.store.file import FileStore

from mgpu.backend import location, outbox
from mgpu.backend.outbox import CLAIM_S, NotKept, Outbox
from mgpu.errors import StackError

WHOSE = "runs/night-1125-abcde"


class Dead(BaseException):
    """The process is killed here."""


@pytest.fixture
def box(xdg: Path) -> Outbox:
    """An outbox in which three messages wait, kept in another order than that of their times."""
    made = Outbox(WHOSE, "webhook")
    now = time.time()
    for number in (3, 1, 2):
        made.keep(f"m{number}", now + number, {"id": f"m{number}"})
    return made


def keys(prefix: str = "unsettled/") -> list[str]:
    return [found.key for found in location.current().ours.list(prefix)]


def older(seconds: float) -> None:
    """What waits was written so much longer ago."""
    for key in keys():
        path = location.current().root / key
        at = path.stat().st_mtime - seconds
        os.utime(path, (at, at))


def test_what_waits_is_told_in_its_order_and_marked(box: Outbox):
    told = list[str]()
    assert outbox.waiting() == [WHOSE]
    assert box.deliver(lambda message: told.append(message["id"])) is True
    assert told == ["m1", "m2", "m3"]
    assert (keys(), outbox.waiting()) == ([], [])
    assert keys(f"{WHOSE}/told/") == [f"{WHOSE}/told/webhook/m{number}" for number in (1, 2, 3)]
    box.keep("m2", 2.0, {"id": "m2"})
    box.deliver(lambda message: told.append(message["id"]))
    assert told == ["m1", "m2", "m3"], "an event that is said again is told once"


def test_what_a_newer_mgpu_has_written_beside_a_message_is_carried_through(box: Outbox):
    first = location.current().root / keys()[0]
    first.write_text(json.dumps(json.loads(first.read_text()) | {"of_tomorrow": [1]}))

    def fails(_: dict[str, Any]) -> None:
        assert json.loads(first.read_text())["of_tomorrow"] == [1], "claimed"
        raise OSError("away")

    with pytest.raises(OSError, match="away"):
        box.deliver(fails)
    assert json.loads(first.read_text())["of_tomorrow"] == [1], "and let go"


def test_what_this_machine_told_while_the_bucket_was_away_is_marked_there_and_not_told(
    xdg: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    bucket = open_store(f"file://{tmp_path}/bucket", {})
    monkeypatch.setattr(location.Backend, "ours", property(lambda _: bucket))
    box, told = Outbox(WHOSE, "webhook"), list[str]()
    for ident in ("m1", "m2"):
        box.note(ident)
    box.keep("m1", 1.0, {"id": "m1"})
    assert keys() == []
    with monkeypatch.context() as another_machine:
        another_machine.setenv("XDG_STATE_HOME", str(xdg / "another"))
        box.keep("m2", 2.0, {"id": "m2"})
    assert box.deliver(lambda message: told.append(message["id"])) is True
    assert (told, keys()) == ([], [])
    assert keys(f"{WHOSE}/told/") == [f"{WHOSE}/told/webhook/m{number}" for number in (1, 2)]


def test_twenty_at_once_tell_each_once_and_in_order(box: Outbox):
    told, gate = list[str](), threading.Barrier(20, timeout=60)

    def tell(message: dict[str, Any]) -> None:
        told.append(message["id"])
        time.sleep(0)  # to the others, with the claim held

    def one(_: int) -> None:
        gate.wait()
        Outbox(WHOSE, "webhook").deliver(tell)

    with ThreadPoolExecutor(20) as pool:
        list(pool.map(one, range(20)))
    box.deliver(tell)  # what the last of them left to another one that was at it
    assert told == ["m1", "m2", "m3"]
    assert keys() == []


def test_what_cannot_be_told_holds_up_what_is_newer_and_is_left_to_the_next_at_once(box: Outbox):
    def refuses(message: dict[str, Any]) -> None:
        raise OSError(f"{message['id']}: no answer")

    with pytest.raises(OSError, match="m1: no answer"):
        box.deliver(refuses)
    told = list[str]()
    assert Outbox(WHOSE, "webhook").deliver(lambda message: told.append(message["id"])) is True
    assert told == ["m1", "m2", "m3"]


def test_who_dies_between_claim_and_delivery_is_followed_once_the_claim_is_over(box: Outbox, monkeypatch):
    told = list[str]()

    def killed(_: dict[str, Any]) -> None:
        monkeypatch.setattr(outbox, "_let_go", lambda *_: None)  # nothing more comes of a process that was killed
        raise Dead

    with pytest.raises(Dead):
        box.deliver(killed)
    next_one = Outbox(WHOSE, "webhook")
    assert next_one.deliver(lambda message: told.append(message["id"])) is False
    older(CLAIM_S - 5)
    assert next_one.deliver(lambda message: told.append(message["id"])) is False
    assert told == [], "it may still be at it"
    older(10)
    assert next_one.deliver(lambda message: told.append(message["id"])) is True
    assert told == ["m1", "m2", "m3"]


@pytest.mark.parametrize(
    ("dies_in", "after", "again"),
    [
        ("put", False, ["m1"]),  # delivered, and not marked: the one case in which it comes twice
        ("put", True, []),
        ("delete", False, []),
        ("delete", True, []),
    ],
)
def test_who_dies_after_the_delivery(box: Outbox, monkeypatch, dies_in: str, after: bool, again: list[str]):
    told = list[str]()
    with monkeypatch.context() as patch:
        real = getattr(FileStore, dies_in)

        def killed(*args: Any) -> None:
            if after:
                real(*args)
            raise Dead

        patch.setattr(FileStore, dies_in, killed)
        with pytest.raises(Dead):
            box.deliver(lambda message: told.append(message["id"]))
    assert told == ["m1"]
    older(CLAIM_S + 1)
    Outbox(WHOSE, "webhook").deliver(lambda message: told.append(message["id"]))
    assert told == ["m1", *again, "m2", "m3"]
    assert keys() == []


@pytest.mark.parametrize("lost", ["put_if_absent", "replace"])
@pytest.mark.parametrize("done", [True, False])
def test_an_answer_that_is_lost_neither_loses_nor_doubles_a_message(xdg: Path, monkeypatch, lost: str, done: bool):
    real, asked, told = getattr(FileStore, lost), list[str](), list[str]()

    def lossy(store: FileStore, key: str, *args: Any) -> bool:
        asked.append(key)
        if asked.count(key) > 1:
            return real(store, key, *args)
        if done:
            real(store, key, *args)
        raise Ambiguous("the answer was lost")

    monkeypatch.setattr(FileStore, lost, lossy)
    made = Outbox(WHOSE, "webhook")
    made.keep("m1", 1.0, {"id": "m1"})
    while outbox.waiting():
        made.deliver(lambda message: told.append(message["id"]))
    assert told == ["m1"]
    assert asked


def test_who_could_not_mark_what_it_has_told_marks_it_later_and_does_not_tell_it_again(box: Outbox, monkeypatch):
    told = list[str]()
    with monkeypatch.context() as patch:
        patch.setattr(FileStore, "put", lambda *_: (_ for _ in ()).throw(Unavailable("no answer")))
        with pytest.raises(StackError):
            box.deliver(lambda message: told.append(message["id"]))
    older(CLAIM_S + 1)
    box.deliver(lambda message: told.append(message["id"]))
    assert (told, keys()) == (["m1", "m2", "m3"], [])


def test_a_backend_that_is_away_says_so(xdg: Path, monkeypatch):
    def away(*_: Any) -> None:
        raise Unavailable("no answer")

    made = Outbox(WHOSE, "webhook")
    for name in ("stat", "list"):
        monkeypatch.setattr(FileStore, name, away)
    with pytest.raises(NotKept, match="no answer"):
        made.keep("m1", 1.0, {})
    with pytest.raises(StackError):
        made.deliver(lambda _: None)


def test_what_is_removed_takes_its_messages_along(box: Outbox):
    Outbox("runs/night-1125-abcdef", "webhook").keep("x", 1.0, {})
    outbox.remove(location.current().ours, WHOSE)
    assert outbox.waiting() == ["runs/night-1125-abcdef"]


def test_what_nobody_can_deliver_is_given_up_at_last_and_what_is_newer_waits_on(xdg: Path):
    box, tried = Outbox(WHOSE, "webhook"), list[str]()
    for number, days in (("old", 15), ("older", 16), ("new", 13)):
        box.keep(number, time.time() - days * 86400, {"id": number})

    def away(message: dict[str, Any]) -> None:
        tried.append(message["id"])
        raise OSError("no answer")

    said = list[str]()
    for _ in range(4):
        with pytest.raises(Exception, match="no answer") as refused:
            box.deliver(away)
        said.append(str(refused.value))
    assert tried == ["older", "old", "new", "new"], "each is tried before it is given up"
    assert said[:3] == ["OSError: no answer; 1 message given up after 14 days"] * 2 + ["no answer"]
    assert [key.rpartition("-")[2] for key in keys()] == ["new.json"]


def test_an_end_of_the_process_gives_nothing_up(xdg: Path):
    box = Outbox(WHOSE, "webhook")
    box.keep("old", time.time() - 15 * 86400, {})
    with pytest.raises(Dead):
        box.deliver(lambda _: (_ for _ in ()).throw(Dead()))
    assert len(keys()) == 1


def test_who_cannot_even_try_gives_up_what_is_too_old(box: Outbox):
    box.keep("old", time.time() - 15 * 86400, {})
    assert box.give_up_late() == "1 message given up after 14 days"
    assert (len(keys()), box.give_up_late()) == (3, "")
