"""What builders and pushes say, as events and errors."""

from __future__ import annotations

import base64
import json
from urllib.parse import quote, quote_plus

import pytest

from mgpu.errors import ImageError
from mgpu.events import Event, ImageStep, LayerPushed
from mgpu.image.build.progress import LINES, BuildKit, Classic, Push, Words

RUN = "RUN pip install x"


def classic(*said: dict, secrets: tuple[str, ...] = ()) -> tuple[Classic, list[Event]]:
    told = list[Event]()
    stream = Classic(told.append, Words(secrets))
    for each in said:
        stream.take(each)
    return stream, told


def test_each_step_of_the_engines_builder_is_an_event():
    stream, told = classic(
        {"stream": "Step 1/2 : FROM base\n"},
        {"stream": " ---> 123\n"},
        {"stream": f"Step 2/2 : {RUN}\n"},
        {"aux": {"ID": "sha256:abc"}},
        {"stream": "Successfully built abc\n"},
    )
    assert told == [ImageStep(1, 2, "FROM base"), ImageStep(2, 2, RUN)]
    assert stream.image == "sha256:abc"


def test_a_failing_step_is_shown_with_its_last_lines():
    lines = [{"stream": "Step 1/2 : RUN before\n"}, {"stream": "of another step\n"}, {"stream": f"Step 2/2 : {RUN}\n"}]
    lines += [{"stream": f"line {number}\nha"} for number in range(30)]
    with pytest.raises(ImageError) as caught:
        classic(*lines, {"errorDetail": {"message": "it returned 1"}, "error": "it returned 1"})
    assert caught.value.what == f"the image could not be built: it failed at {RUN!r} (step 2 of 2)"
    shown = caught.value.why.splitlines()
    assert shown[-1] == "it returned 1"
    assert shown[-3:-1] == ["haline 29", "ha"]
    assert len(shown) == LINES + 1
    assert "of another step" not in caught.value.why


@pytest.mark.parametrize("where", ["no space left on device", "write /x: No space left on device"])
def test_no_space_has_a_cure_of_its_own(where):
    with pytest.raises(ImageError) as caught:
        classic({"stream": f"Step 1/1 : {RUN}\n"}, {"error": where})
    assert "docker system prune" in caught.value.next_step


def test_what_a_terminal_would_obey_is_not_shown():
    with pytest.raises(ImageError) as caught:
        classic(
            {"stream": "Step 1/1 : RUN x\n"}, {"stream": "\x1b[91mred\x1b[0m\x1b]52;c;x\x07\r\n"}, {"error": "e\x07"}
        )
    assert not {*caught.value.why} & {*map(chr, range(32))} - {"\n"}
    assert "red" in caught.value.why


def test_a_bar_that_is_drawn_again_is_one_line():
    with pytest.raises(ImageError) as caught:
        classic({"stream": "Step 1/1 : RUN x\n"}, {"stream": "10%\r50%\r100%\n"}, {"error": "e"})
    assert caught.value.why == "100%\ne"


def test_secrets_are_not_repeated():
    with pytest.raises(ImageError) as caught:
        classic(
            {"stream": "Step 1/1 : RUN x\n"},
            {"stream": "token=cana"},
            {"stream": "ry-1 and canary-1-long\n"},
            {"error": "canary-1"},
            secrets=("canary-1", "canary-1-long", ""),
        )
    assert caught.value.why == "token=*** and ***\n***"


KEY = "-----BEGIN KEY-----\ncanary+1/==\n  canary 2\n}\n-----END KEY-----\n"


@pytest.mark.parametrize(
    "shown",
    [
        "canary+1/==",
        KEY,
        KEY.replace("\n", "\r\n"),
        repr(KEY),
        quote(KEY),
        quote_plus(KEY),
        quote(KEY, safe=""),
        "canary%2b1%2f==",
        "https://me:canary%202@host/",
    ],
)
def test_no_line_of_a_secret_is_repeated_however_it_is_quoted(shown):
    said = ({"stream": "Step 1/1 : RUN x\n"}, {"stream": f"said: {shown}\n"}, {"error": f"exit 1: {shown}"})
    with pytest.raises(ImageError) as caught:
        classic(*said, secrets=(KEY,))
    assert "canary" not in caught.value.why
    assert "said: " in caught.value.why


def test_a_setting_among_the_secrets_hides_no_other_digit():
    said = ({"stream": "Step 11/14 : RUN x\n"}, {"stream": "line 1 of 10\n"}, {"error": "no-proxy"})
    with pytest.raises(ImageError) as caught:
        classic(*said, secrets=("1", "no"))
    assert caught.value.why == "line 1 of 10\nno-proxy"


def buildkit(*said: dict | str, secrets: tuple[str, ...] = ()) -> tuple[BuildKit, list[Event]]:
    told = list[Event]()
    stream = BuildKit(told.append, Words(secrets))
    for each in said:
        stream.take(each if isinstance(each, str) else json.dumps(each))
    return stream, told


def vertex(digest: str, name: str, **more: object) -> dict:
    return {"vertexes": [{"digest": digest, "name": name, **more}]}


def log(digest: str, text: str) -> dict:
    return {"logs": [{"vertex": digest, "stream": 1, "data": base64.b64encode(text.encode()).decode()}]}


def test_each_step_of_buildkit_is_one_event_when_it_starts():
    _, told = buildkit(
        vertex("a", "[internal] load build definition", started="t"),
        vertex("b", f"[packages 2/3] {RUN}"),
        vertex("b", f"[packages 2/3] {RUN}", started="t"),
        vertex("b", f"[packages 2/3] {RUN}", started="t", completed="u"),
        vertex("c", "[1/2] FROM base", started="t", cached=True),
    )
    assert told == [ImageStep(2, 3, RUN), ImageStep(1, 2, "FROM base")]


def test_of_buildkits_steps_the_one_that_failed_is_shown():
    stream, _ = buildkit(
        vertex("a", "[1/2] RUN a", started="t"),
        vertex("b", "[2/2] RUN b", started="t"),
        log("b", "canary says\nboom\n"),
        log("a", "of the other\n"),
        vertex("b", "[2/2] RUN b", started="t", error="exit code: 2"),
        vertex("a", "[1/2] RUN a", started="t", error="canceled"),
        "ERROR: failed to solve\n",
        secrets=("canary",),
    )
    error = stream.failure(1)
    assert error.what == "the image could not be built: it failed at 'RUN b' (step 2 of 2)"
    assert error.why == "*** says\nboom\nexit code: 2"


def test_a_buildx_that_fails_by_itself_is_quoted():
    stream, _ = buildkit("ERROR: no builder\n")
    assert stream.failure(1).why == "ERROR: no builder\ndocker buildx build ended with status 1."


def test_a_push_tells_of_each_layer():
    told = list[Event]()
    stream = Push(told.append)
    for current in (1 << 20, 2 << 20, 10 << 20):
        stream.take({"id": "aa", "status": "Pushing", "progressDetail": {"current": current, "total": 11 << 20}})
    stream.take({"id": "aa", "status": "Pushed"})
    stream.take({"id": "bb", "status": "Layer already exists"})
    stream.take({"id": "cc", "status": "Mounted from other"})
    stream.take({"aux": {"Tag": "1", "Digest": "sha256:1", "Size": 3}})
    assert told == [
        LayerPushed("aa", "pushing", 1 << 20, 11 << 20),
        LayerPushed("aa", "pushing", 10 << 20, 11 << 20),
        LayerPushed("aa", "pushed", 11 << 20, 11 << 20),
        LayerPushed("bb", "there", 0, 0),
        LayerPushed("cc", "there", 0, 0),
    ]
    assert (stream.digest, stream.states) == ("sha256:1", {"aa": "pushed", "bb": "there", "cc": "there"})


def test_an_engine_with_containerds_store_says_the_digest_in_words():
    stream = Push(lambda _: None)
    digest = "sha256:" + "d" * 64
    stream.take({"status": "The push refers to repository [r.example/x]"})
    stream.take({"id": "aa", "status": "Pushed"})
    assert stream.digest == ""
    stream.take({"status": f"mgpu-1: digest: {digest} size: 1234"})
    assert stream.digest == digest
