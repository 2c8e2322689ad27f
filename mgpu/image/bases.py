"""What a Dockerfile names: stages, arguments, and the images that it builds on with which ones they are today."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from mgpu.errors import ImageError, InputError
from mgpu.image.reference import Reference

_FROM = re.compile(r"FROM\s+(?:--\S+\s+)*(\S+)(?:\s+AS\s+(\S+))?\s*\Z", re.IGNORECASE)
_ARG = re.compile(r"ARG\s+(.+)", re.IGNORECASE)
_COPY = re.compile(r"(?:COPY|ADD)\s.*?--from=(\S+)", re.IGNORECASE)
_VALUE = re.compile(r"(\w+)(?:=(\"[^\"]*\"|'[^']*'|\S*))?")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::([-+])([^}]*))?\}|(\w+))")
# what a build is given without an ARG
_PREDEFINED = re.compile(r"(HTTP|HTTPS|FTP|NO|ALL)_PROXY|BUILDKIT_\w+|SOURCE_DATE_EPOCH", re.IGNORECASE)


@dataclass(frozen=True)
class Named:
    """What a Dockerfile names. `images`: of `FROM` and `COPY --from`, each once; its own stages and `scratch` are none.
    `stages`: in order, in lower case as builders compare them, "" for one without a name. `args`: of every ARG."""

    images: tuple[str, ...]
    stages: tuple[str, ...]
    args: frozenset[str]

    def require(self, target: str | None, path: str) -> None:
        """Raises InputError where there is nothing to build, or no stage `target`. `path`: how the file is called."""
        if not self.stages:
            raise InputError(f"{path} builds nothing", "It has no FROM.", "Begin it with the image to build on.")
        if target is None or target.lower() in self.stages or target in map(str, range(len(self.stages))):
            return
        names = list(filter(None, self.stages))
        near = get_close_matches(target.lower(), names, 1)
        why = f"Its stages with a name: {', '.join(names)}." if names else "None of its stages has a name (`AS`)."
        cure = f"Did you mean `{near[0]}`?" if near else "Mend image.target, or leave it out for the last stage."
        raise InputError(f"image.target: {path} has no stage `{target}`", why, cure)

    def unused(self, args: Mapping[str, str]) -> list[str]:
        """What is said of arguments that no ARG takes: a builder leaves them out."""
        return [self._unused(name) for name in args if name not in self.args and not _PREDEFINED.fullmatch(name)]

    def _unused(self, name: str) -> str:
        near = get_close_matches(name.upper(), self.args, 1)
        meant = f"; did you mean `{near[0]}`?" if near else ""
        return f"image.args: the Dockerfile has no ARG {name}, the value is not used{meant}"


def read(recipe: bytes, args: Mapping[str, str]) -> Named:
    """What a Dockerfile names; `args` are values of the ARGs before the first FROM."""
    values, found, stages, known = dict[str, str](), dict[str, None](), list[str](), set[str]()
    for line in _instructions(recipe.decode("utf-8", "replace")):
        if match := _FROM.match(line):
            image = _filled(match[1], values)
            if not _own(image, stages):
                found[image] = None
            stages.append((match[2] or "").lower())
        elif match := _ARG.match(line):
            for name, default in _VALUE.findall(match[1]):
                known.add(name)
                if not stages:
                    values[name] = args.get(name, _filled(default.strip("\"'"), values))
        elif (match := _COPY.match(line)) and not _own(match[1], stages) and not match[1].isdigit():
            found[match[1]] = None
    return Named(tuple(found), tuple(stages), frozenset(known))


def _own(image: str, stages: list[str]) -> bool:
    return image.lower() in ("scratch", "", *stages)


def resolve(
    names: tuple[str, ...], engine: Callable[[str], str | None], registry: Callable[[str], str | None]
) -> dict[str, str]:
    """The digest or id of each: as the name says itself, else as the engine has it, which builds with that; else as
    its registry has it.

    Raises:
        ImageError: nobody has it, and why not.
        InputError: a name that is none.
    """
    return {name: Reference.parse(name).digest or _asked(name, engine, registry) for name in names}


def _asked(name: str, engine: Callable[[str], str | None], registry: Callable[[str], str | None]) -> str:
    """Where the engine is not there, what is in the registry is built on all the same, elsewhere."""
    said, errors = list[str](), list[ImageError]()
    for who, ask in (("the Docker engine", engine), (Reference.parse(name).registry, registry)):
        try:
            if digest := ask(name):
                return digest
            said.append(f"{who} does not have it")
        except ImageError as error:
            said.append(error.what)
            errors.append(error)
    why = "\n".join(f"{each.what}: {each.why}" for each in errors)
    cure = " ".join(each.next_step for each in errors)
    cure = cure or "Mend FROM or the ARG that names it; a private one needs `docker login`."
    raise ImageError(f"no base image {name}: {said[0]}, and {said[1]}", why, cure)


def _instructions(text: str) -> list[str]:
    """Lines without comments, continued ones as one."""
    lines = [line.strip() for line in text.splitlines() if not line.lstrip().startswith("#")]
    return [line for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines() if line]


def _filled(text: str, values: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        known = values.get(match[1] or match[4], "")
        if match[2] == "-":
            return known or match[3]
        return (match[3] if known else "") if match[2] == "+" else known

    return _VARIABLE.sub(value, text)
