"""What a Dockerfile names: stages, arguments, what it copies, and the images that it builds on with which ones they are
today."""

from __future__ import annotations

import platform as machine
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import NamedTuple

from e2b_dockerfile_utils import DockerfileInstruction, DockerfileSyntaxError, ShellLex, parse_dockerfile_ast

from mgpu.errors import ImageError, InputError
from mgpu.image.registry import failures
from mgpu.image.registry.reference import Reference

_BOM = "\ufeff"
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_MOUNTED = re.compile(r"--mount=(?:.*,)?from=([^,]+)")
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
# what a build is given without an ARG
_PREDEFINED = re.compile(r"(HTTP|HTTPS|FTP|NO|ALL)_PROXY|BUILDKIT_\w+|SOURCE_DATE_EPOCH", re.IGNORECASE)


class Use(NamedTuple):
    """Where a Dockerfile names an image: as which word of which instruction; `platform`: for which machines (empty:
    those that are built for)."""

    image: str
    word: str
    at: DockerfileInstruction
    platform: str = ""


class Copied(NamedTuple):
    """What a COPY or ADD of a stage takes out of the context, or out of the stage `origin`, and where it puts that,
    from the root (None: only its base image says where); which line it is, and its text."""

    stage: int
    origin: int | None
    line: int
    text: str
    sources: tuple[str, ...]
    into: str | None


@dataclass(frozen=True)
class Named:
    """What a Dockerfile names. `images`: of `FROM`, `COPY --from` and `RUN --mount`, each once, and `uses`, each place
    where they are; its own stages and `scratch` are none. `stages`: in order, in lower case as builders compare them,
    "" for one without a name; `parents`: the number of the stage that each one begins with, None for an image. `args`:
    every ARG, with the value that it has last, "" for none. `copied`: what is taken out of the context, and from stage
    to stage."""

    images: tuple[str, ...]
    stages: tuple[str, ...]
    args: Mapping[str, str]
    parents: tuple[int | None, ...] = ()
    uses: tuple[Use, ...] = ()
    copied: tuple[Copied, ...] = ()

    def require(self, target: str | None, path: str) -> None:
        """Raises InputError where there is nothing to build, or no stage `target`. `path`: how the file is called."""
        if not self.stages:
            raise InputError(f"{path} builds nothing", "It has no FROM.", "Begin it with the image to build on.")
        if self._target(target) is not None:
            return
        names = list(filter(None, self.stages))
        near = get_close_matches((target or "").lower(), names, 1)
        why = f"Its stages with a name: {', '.join(names)}." if names else "None of its stages has a name (`AS`)."
        cure = f"Did you mean `{near[0]}`?" if near else "Mend image.target, or leave it out for the last stage."
        raise InputError(f"image.target: {path} has no stage `{target}`", why, cure)

    def kept(self, target: str | None) -> set[int]:
        """The stages whose layers are the image's: the target's, and those that it begins with."""
        number, found = self._target(target), set[int]()
        while number is not None:
            found.add(number)
            number = self.parents[number]
        return found

    def unused(self, args: Mapping[str, str]) -> list[str]:
        """What is said of arguments that no ARG takes: a builder leaves them out."""
        return [self._unused(name) for name in args if name not in self.args and not _PREDEFINED.fullmatch(name)]

    def _target(self, target: str | None) -> int | None:
        return len(self.stages) - 1 if target is None else _number(target, self.stages)

    def _unused(self, name: str) -> str:
        near = get_close_matches(name.upper(), self.args, 1)
        meant = f"; did you mean `{near[0]}`?" if near else ""
        return f"image.args: the Dockerfile has no ARG {name}, the value is not used{meant}"


def read(
    recipe: bytes,
    args: Mapping[str, str],
    platform: str = "linux/amd64",
    triggers: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Named:
    """What a Dockerfile names; `args` are values of its ARGs, `platform` is what is built for. `triggers`: the
    instructions that images have for whoever begins with them (`ONBUILD`), as far as these are known.

    Raises:
        ImageError: builders would not take it for a Dockerfile.
    """
    try:
        parsed = parse_dockerfile_ast(_decoded(recipe))
    except DockerfileSyntaxError as error:
        raise failures.unreadable(error.line, str(error).partition(": ")[2]) from error
    except RecursionError as error:
        raise failures.unreadable(0, "it is nested too deep") from error
    given = {name: args.get(name, value) for name, value in _of_platforms(platform).items()}
    reader = _Reader(args, given, parsed.escape_token, triggers)
    for each in parsed.instructions:
        reader.take(each)
    stages = tuple(reader.stages)
    borrowed = (use for each in parsed.instructions for use in _borrowed(each) if not _own(use.image, stages))
    uses = sorted([*reader.uses, *borrowed], key=lambda use: use.at.start_line)
    images = tuple(dict.fromkeys(use.image for use in uses))
    return Named(images, stages, reader.known, tuple(reader.parents), tuple(uses), tuple(reader.copied))


class BaseImage(NamedTuple):
    """Which image a name means today. `digest`: as its registry says it; else the engine's, which has it alone, or
    before its registry (`pinned` is False), by whatever name it has there. `unsure`: this engine gives digests to what
    it has built itself, too."""

    digest: str
    pinned: bool
    unsure: bool = False


def resolve(
    names: tuple[str, ...],
    engine: Callable[[str], BaseImage | None],
    registry: Callable[[str], str | None],
    glance: Callable[[str], str | None],
    tell: Callable[[str], object],
) -> dict[str, BaseImage]:
    """What each name means: by its own digest; else the engine's own image of that name; else as the registry has it.

    `engine`: what it has, `pinned` where that came from a registry, which is asked by `glance` then: the engine's copy
    counts only where that does not answer, or where it is `unsure`, and the registry does not have it, be it that it
    never had; `tell` is told of both. `registry` is asked for what the engine lacks.

    Raises:
        ImageError: nobody has it, and why not.
        InputError: a name that is none.
    """
    return {name: _resolved(name, engine, registry, glance, tell) for name in names}


def pinned(recipe: bytes, named: Named, found: Mapping[str, BaseImage]) -> bytes:
    """The Dockerfile with images by their digest: nothing else is built on. The engine's own keep their names.

    It has as many lines as before; an instruction that names an image stands on the last one of its own.
    """
    changed = dict[int, tuple[DockerfileInstruction, str]]()
    for use in named.uses:
        name, base = Reference.parse(use.image), found[use.image]
        if base.pinned and not name.digest:
            text = changed[use.at.start_line][1] if use.at.start_line in changed else use.at.original
            changed[use.at.start_line] = use.at, _renamed(text, use.word, name.at(base.digest))
    text = _decoded(recipe)
    lines = text.removeprefix(_BOM).split("\n")
    for at, instead in changed.values():
        below = sum(each.content.count("\n") + 1 for each in at.heredocs)
        first, last = at.start_line - 1, at.end_line - below - 1
        end = "\r" if lines[last].endswith("\r") else ""
        lines[first : last + 1] = [*[end] * (last - first), instead + end]
    return (_BOM * text.startswith(_BOM) + "\n".join(lines)).encode("utf-8", "surrogateescape")


def _renamed(text: str, word: str, name: str) -> str:
    """An instruction, in which the first image of that word is another one."""
    return re.sub(rf"(\s|from=[\"']?){re.escape(word)}(?=[\s,\"']|\Z)", lambda match: match[1] + name, text, count=1)


def _resolved(
    name: str,
    engine: Callable[[str], BaseImage | None],
    registry: Callable[[str], str | None],
    glance: Callable[[str], str | None],
    tell: Callable[[str], object],
) -> BaseImage:
    reference = Reference.parse(name)
    if reference.digest:
        return BaseImage(reference.digest, pinned=True)
    here, errors = None, list[ImageError]()
    said = "the Docker engine does not have it"
    try:
        here = engine(name)
    except ImageError as error:
        errors.append(error)
        said = error.what
    if here is not None and not here.pinned:
        return here
    try:
        if digest := (registry if here is None else glance)(name):
            if here is not None and here.unsure and digest != here.digest and _only_here(reference, here, glance):
                tell(
                    f"base image {name}: the Docker engine's is built on, which {reference.registry} does not have: "
                    f"what has that name there is another one; `docker pull {name}` takes that"
                )
                return BaseImage(here.digest, pinned=False)
            return BaseImage(digest, pinned=True)
        silent = f"{reference.registry} does not have it"
    except ImageError as error:
        errors.append(error)
        silent = error.what
    if here is not None:
        tell(f"base image {name}: {silent}; the Docker engine's copy of it is built on")
        return BaseImage(here.digest, pinned=False)
    why = "\n".join(f"{each.what}: {each.why}" for each in errors)
    cure = " ".join(each.next_step for each in errors)
    cure = cure or "Mend FROM or the ARG that names it; a private one needs `docker login`."
    raise ImageError(f"no base image {name}: {said}, and {silent}", why, cure)


def _only_here(name: Reference, here: BaseImage, glance: Callable[[str], str | None]) -> bool:
    try:
        return glance(name.at(here.digest)) is None
    except ImageError:  # what is known is what the name means there
        return False


@dataclass
class _Reader:
    """Goes through a Dockerfile. `outer`: values for every FROM; `escape`: what takes a character's meaning away;
    `triggers`: see `read`; `inner`: values in each stage, which begins with its parent's; `folders`: where each one
    works, "" as long as its base image alone says so."""

    args: Mapping[str, str]
    outer: dict[str, str]
    escape: str
    triggers: Mapping[str, Sequence[str]]
    inner: list[dict[str, str]] = field(default_factory=list)
    known: dict[str, str] = field(default_factory=dict)
    stages: list[str] = field(default_factory=list)
    parents: list[int | None] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    copied: list[Copied] = field(default_factory=list)

    def take(self, each: DockerfileInstruction) -> None:
        if each.name == "FROM" and each.args:
            self._from(each)
        elif each.name == "ARG":
            self._arg(each)
        elif each.name == "ENV" and self.stages:
            for name, value in zip(each.args[::3], each.args[1::3], strict=True):
                self.inner[-1][name] = self._filled(value, self.inner[-1], unknown="*")
        elif each.name == "WORKDIR" and self.stages:
            self.folders[-1] = self._place(each.args)
        elif each.name in ("COPY", "ADD") and self.stages:
            self._copy(each)
        elif each.name == "ONBUILD" and self.stages:  # carried out in each stage of this file that begins with this one
            for later in _added(each.original.partition(" ")[2], each.start_line, each.original):
                if later.name in ("COPY", "ADD"):
                    self._copy(later)

    def _from(self, each: DockerfileInstruction) -> None:
        word, *rest = each.args
        image = self._filled(word, self.outer)
        parent = self.stages.index(image.lower()) if image and image.lower() in self.stages else None
        if parent is None and not _own(image, ()):
            given = next((flag.partition("=")[2] for flag in each.flags if flag.startswith("--platform=")), "")
            self.uses.append(Use(image, word, each, self._filled(given, self.outer) if given else ""))
        self.inner.append({} if parent is None else {**self.inner[parent]})
        self.folders.append(self.folders[parent] if parent is not None else "/" if image.lower() == "scratch" else "")
        self.parents.append(parent)
        self.stages.append(rest[1].lower() if len(rest) > 1 and rest[0].upper() == "AS" else "")
        for text in self.triggers.get(image, ()) if parent is None else ():
            for later in _added(text, each.start_line, f"ONBUILD {text}` of `{image}"):
                self.take(later)

    def _arg(self, each: DockerfileInstruction) -> None:
        values = self.inner[-1] if self.inner else self.outer
        for word in each.args:
            name, has_default, default = word.partition("=")
            unknown = "*" if self.inner else ""  # the base image may have what no line of this file sets
            value = self._filled(default, values, unknown) if has_default else self.outer.get(name)
            value = self.args.get(name, value)
            self.known[name] = value or ""
            if value is not None:
                values[name] = value

    def _copy(self, each: DockerfileInstruction) -> None:
        named = [flag.removeprefix("--from=") for flag in each.flags if flag.startswith("--from=")]
        origin = next((_number(stage, self.stages) for stage in named), None)
        if not each.args or (origin is None and named):
            return  # out of an image
        sources = tuple(self._filled(word, self.inner[-1], unknown="*") for word in each.args[:-1])
        into = self._place(each.args[-1:]) or None
        self.copied.append(Copied(len(self.stages) - 1, origin, each.start_line, each.original, sources, into))

    def _place(self, words: Sequence[str]) -> str:
        """A folder from the root, as a stage names it; "" where that takes what its base image says."""
        into = posixpath.join(self.folders[-1], *(self._filled(word, self.inner[-1], unknown="*") for word in words))
        return into if into.startswith("/") and "*" not in into else ""

    def _filled(self, word: str, values: Mapping[str, str], unknown: str = "") -> str:
        """A word without quotes, with the values of its variables; `unknown` for one that has none."""
        if unknown:
            word = _VARIABLE.sub(lambda match: match[0] if (match[1] or match[2]) in values else unknown, word)
        try:
            return ShellLex(self.escape, env=values, skip_unset_env=False).process_word(word)
        except ValueError:  # the builder will say so, where it comes to that
            return unknown


def _added(text: str, line: int, shown: str) -> list[DockerfileInstruction]:
    """What a trigger does, on the line at which it comes into the Dockerfile."""
    return [replace(each, start_line=line, original=shown) for each in parse_dockerfile_ast(text).instructions]


def _number(stage: str, stages: Sequence[str]) -> int | None:
    """Which stage has that name or number."""
    if stage and stage.lower() in stages:
        return stages.index(stage.lower())
    return next((number for number in range(len(stages)) if stage == str(number)), None)


def _borrowed(each: DockerfileInstruction) -> Iterator[Use]:
    """What a COPY or a mount takes out of another image, or stage."""
    for flag in each.flags:
        if each.name in ("COPY", "ADD") and flag.startswith("--from="):
            yield Use(flag.removeprefix("--from="), flag.removeprefix("--from="), each)
        elif each.name == "RUN" and (match := _MOUNTED.match(flag)):
            yield Use(match[1], match[1], each)


def _own(image: str, stages: tuple[str, ...]) -> bool:
    return image.lower() in ("scratch", "", *stages) or (bool(stages) and image.isdigit())


def _of_platforms(platform: str) -> dict[str, str]:
    """What every FROM may use without an ARG, of the machine that is built for and the one that builds."""
    here = f"linux/{_MACHINES.get(machine.machine(), machine.machine())}"
    return {
        f"{whose}{part}": value
        for whose, name in (("TARGET", platform), ("BUILD", here))
        for part, value in (
            ("PLATFORM", name), ("OS", name.partition("/")[0]), ("ARCH", name.partition("/")[2]), ("VARIANT", ""),
        )
    }  # fmt: skip


def _decoded(recipe: bytes) -> str:
    return recipe.decode("utf-8", "surrogateescape")
