"""What a builder and a push say, as events; and of a build that fails the step and its last words."""

from __future__ import annotations

import base64
import json
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mgpu.errors import ImageError
from mgpu.events import Emit, ImageStep, LayerPushed

LINES = 20  # of a failing step
_CLASSIC = re.compile(r"Step (\d+)/(\d+) : (.*)")
_BUILDKIT = re.compile(r"\[(?:\S+ )?(\d+)/(\d+)\] (.*)", re.DOTALL)
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-_]|[\x00-\x08\x0b-\x1f\x7f]")
_PUSHED = re.compile(r"\S+: digest: (sha256:[0-9a-f]{64}) size: \d+")
_REPORT_BYTES = 8 << 20  # of one layer, between two events

_SHORTEST = 4  # characters of a line of a secret: to hide every "1" of a build would hide the build


class Words:
    """The last lines of each step, without what is secret in them."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        lines = {line.strip() for each in secrets for line in each.splitlines()}  # a step's words come by lines
        longest_first = sorted((line for line in lines if len(line) >= _SHORTEST), key=len, reverse=True)
        self._secrets = re.compile("|".join(map(_in_any_form, longest_first)) or r"(?!)")
        self._lines: defaultdict[str, deque[str]] = defaultdict(lambda: deque(maxlen=LINES))
        self._open: defaultdict[str, str] = defaultdict(str)

    def add(self, step: str, text: str) -> None:
        """What a step has said, in pieces of any size."""
        *lines, self._open[step] = (self._open[step] + text).split("\n")
        self._lines[step] += [line.rstrip("\r").rpartition("\r")[2] for line in lines if line.strip()]

    def last(self, step: str) -> str:
        """Its last lines, LINES at most."""
        lines = [self.hide(line) for line in (*self._lines[step], self._open[step])]
        return "\n".join([line for line in lines if line.strip()][-LINES:])

    def hide(self, text: str) -> str:
        """`text` without any line of a secret, and without what a terminal would obey."""
        return self._secrets.sub("***", _ESCAPES.sub("", text))


def _in_any_form(secret: str) -> str:
    """A pattern of `secret` as it is, and as it is in a URL, all of it or only some letters quoted."""
    return re.sub(r"[^A-Za-z0-9_]", _quoted_or_not, secret)


def _quoted_or_not(letter: re.Match[str]) -> str:
    quoted = "".join(f"%{byte:02x}" for byte in letter[0].encode("utf-8", "surrogateescape"))
    return rf"(?:{re.escape(letter[0])}|(?i:{quoted}){'|[+]' if letter[0] == ' ' else ''})"


class Classic:
    """The stream of the engine's own builder."""

    def __init__(self, emit: Emit, words: Words) -> None:
        self.image = ""
        self._emit, self._words = emit, words
        self._step = ImageStep(0, 0, "reading the context")

    def take(self, said: Mapping[str, Any]) -> None:
        """One message.

        Raises:
            ImageError: it says that the build has failed.
        """
        if "error" in said or "errorDetail" in said:
            why = str(said.get("error") or said["errorDetail"].get("message", ""))
            raise failed(self._step, self._words.last(self._step.text), self._words.hide(why))
        self.image = said.get("aux", {}).get("ID", self.image)
        text = said.get("stream", "")
        if match := _CLASSIC.match(text):
            self._step = ImageStep(int(match[1]), int(match[2]), self._words.hide(match[3].strip()))
            self._emit(self._step)
        elif not text.startswith((" --->", "Removing intermediate container")):
            self._words.add(self._step.text, text)


class BuildKit:
    """The lines of `docker buildx build --progress=rawjson`, of which several steps run at once."""

    def __init__(self, emit: Emit, words: Words) -> None:
        self._emit, self._words = emit, words
        self._steps = dict[str, ImageStep]()
        self._failed: tuple[str, str] | None = None
        self._told = set[str]()

    def take(self, line: str) -> None:
        """One line; what is no JSON is the program's own."""
        try:
            said = json.loads(line)
        except ValueError:
            said = None
        if not isinstance(said, dict):
            self._words.add("", f"{line.rstrip()}\n")
            return
        for vertex in said.get("vertexes") or ():
            self._vertex(vertex)
        for log in said.get("logs") or ():
            self._words.add(log["vertex"], base64.b64decode(log["data"]).decode("utf-8", "replace"))

    def failure(self, status: int) -> ImageError:
        """Of a build that ended with this status."""
        if self._failed is None:
            return failed(None, self._words.last(""), f"docker buildx build ended with status {status}.")
        digest, why = self._failed
        return failed(self._steps[digest], self._words.last(digest), self._words.hide(why))

    def _vertex(self, vertex: Mapping[str, Any]) -> None:
        digest, name = vertex["digest"], self._words.hide(vertex.get("name", ""))
        match = _BUILDKIT.match(name)
        self._steps[digest] = ImageStep(int(match[1]), int(match[2]), match[3]) if match else ImageStep(0, 0, name)
        if match and vertex.get("started") and digest not in self._told:
            self._told.add(digest)
            self._emit(self._steps[digest])
        if vertex.get("error") and self._failed is None:
            self._failed = digest, vertex["error"]


def failed(step: ImageStep | None, last: str, why: str) -> ImageError:
    """A build that ended at a step."""
    at = f" at {step.text!r}" if step else ""
    number = f" (step {step.step} of {step.steps})" if step and step.steps else ""
    cure = "Mend the Dockerfile or what it needs; the lines above are the last ones of that step."
    if "no space left on device" in f"{last}{why}".lower():
        cure = "Free some: `docker system df`, `docker system prune`. Or move the engine's data-root."
    said = last if why in last.splitlines() else f"{last}\n{why}".strip()
    return ImageError(f"the image could not be built: it failed{at}{number}", said, cure)


@dataclass
class Push:
    """The stream of a push: how each layer fared, by the first 12 digits of its hash, and the digest of the whole."""

    emit: Emit
    digest: str = ""
    states: dict[str, str] = field(default_factory=dict)
    error: str = ""
    _bytes: dict[str, tuple[int, int]] = field(default_factory=dict)

    def take(self, said: Mapping[str, Any]) -> None:
        """One message."""
        if "error" in said or "errorDetail" in said:
            self.error = str(said.get("error") or said["errorDetail"].get("message", ""))
        self.digest = said.get("aux", {}).get("Digest", self.digest)
        layer, status = str(said.get("id", "")), str(said.get("status", ""))
        if match := _PUSHED.fullmatch(status):  # an engine with containerd's store says it in words alone
            self.digest = match[1]
        if status == "Pushing":
            self._pushing(layer, said.get("progressDetail") or {})
        elif status == "Pushed":
            self._ended(layer, "pushed")
        elif status.startswith(("Layer already exists", "Mounted from")):
            self._ended(layer, "there")

    def _pushing(self, layer: str, detail: Mapping[str, Any]) -> None:
        before = self._bytes.get(layer, (-_REPORT_BYTES, 0))[0]
        now = (int(detail.get("current", 0)), int(detail.get("total", 0)))
        if now[0] - before >= _REPORT_BYTES:
            self._bytes[layer] = now
            self.emit(LayerPushed(layer, "pushing", *now))

    def _ended(self, layer: str, state: str) -> None:
        self.states[layer] = state
        total = self._bytes.get(layer, (0, 0))[1]
        self.emit(LayerPushed(layer, state, total, total))
