"""A run file -> `RunSpec`. Every mistake in it is reported at once, each with its line, its field and what is right.

    text --document--> data and lines --pydantic, wording--> each key alone --rules--> the keys together --> the files

A key with a mistake does not hide the mistakes of the next step: it is set aside, and only what would be concluded from
it is not said.
"""

from __future__ import annotations

import ast
import json
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Set
from copy import deepcopy
from dataclasses import replace
from difflib import get_close_matches
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import yaml
from mgpu_train.tasks import entry as tasks
from pydantic import ValidationError

from mgpu.errors import InputError, Problem, SpecError
from mgpu.spec import command
from mgpu.spec.block import ProviderOptions, as_list
from mgpu.spec.model import RunSpec, candidates, is_shell
from mgpu.spec.provider import entry, installed
from mgpu.spec.rules import Mistake, mistakes
from mgpu.spec.text.change import Change
from mgpu.spec.text.document import MAX_BYTES, MAX_DEPTH, STRING, Document, Where, is_text, read
from mgpu.spec.text.wording import where, word
from mgpu.words import count

# for required keys that are missing or wrong, so that the rules can read the others
_STAND_INS = {"name": "x", "provider": "local", "max_price_usd_per_hour": 1, "max_hours": 1}
_PROGRAMS = (".py", ".pyc", ".pyz", ".zip")  # whatever they hold, Python says it best
_MAX_RUNS = 256  # of a sweep
_ROUNDS = MAX_DEPTH + 1  # one for each block around a key, and the last, in which all is well
_PROGRAM_BYTES = 1 << 20  # that are looked at


class _Dumper(yaml.SafeDumper):
    """Puts texts in quotes that `read` would refuse, or take for something else: PyYAML does not know all of them."""


_Dumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar(STRING, text, style=None if is_text(text) else '"')
)


def load(path: Path, changes: Iterable[Change] = ()) -> RunSpec:
    """Reads and checks a run file, and that the files which it names exist.

    Args:
        path: the run file; what its paths are relative to is its folder.
        changes: what is otherwise than the file says, in their order.

    Raises:
        InputError: there is no such file, or it cannot be read, or it is a sweep.
        SpecError: the file or a change has mistakes; it holds all of them.
    """
    runs = sweep(path, changes)
    if len(runs) > 1:
        keys = " ".join(f"--set {shlex.quote(f'{key}={value}')}" for key, value in runs[0][0].items())
        what, why = f"{path} is a sweep of {len(runs)} runs", "Its `matrix` makes one of each combination."
        raise InputError(what, why, f"`mgpu submit` queues them all; one of them is `{keys}`.")
    return runs[0][1]


def first(path: Path, changes: Iterable[Change] = ()) -> RunSpec:
    """As `load`, but of a sweep the first run: for commands that begin none, and ask who its machines are of."""
    return sweep(path, changes)[0][1]


def whole(path: Path, changes: Iterable[Change] = ()) -> RunSpec:
    """As `load`, but a `matrix` is left in it as it stands."""
    document = _read(path)
    _change(document, changes)
    return _checked(document, path.parent)


def sweep(path: Path, changes: Iterable[Change] = ()) -> list[tuple[dict[str, str], RunSpec]]:
    """The runs of a run file, each with the values that make it differ: one, or those that its `matrix` asks for. What
    `changes` give is no axis of it. Arguments and errors as of `load`."""
    document, changes = _read(path), [*changes]
    _change(document, changes)
    named = _named_by(document)
    axes = _axes(document, {change.at for change in changes})
    if not axes:
        return [({}, _checked(document, path.parent))]
    runs, wrong = list[tuple[dict[str, str], RunSpec]](), dict[str, Problem]()
    for values in product(*axes):
        each = deepcopy(document)
        _change(each, values, named)
        try:
            spec = _checked(each, path.parent)
        except SpecError:
            wrong |= {str(problem): problem for problem in each.problems}
        else:
            runs.append(({".".join(map(str, value.at)): value.value for value in values}, spec))
    if wrong:
        raise Document(str(path), problems=list(wrong.values())).error()
    return runs


def _named_by(document: Document) -> set[str]:
    """The providers that runs of a `matrix` over them may have machines of."""
    matrix = document.data.get("matrix") if isinstance(document.data, dict) else None
    named = matrix.get("provider") if isinstance(matrix, dict) else None
    return {*candidates(map(str, named))} if isinstance(named, list) else set()


def _change(document: Document, changes: Iterable[Change], others: Set[str] = frozenset()) -> None:
    """Makes the changes. Where one of them names another provider, the file's blocks of those that it leaves out say
    nothing of this run; one that a change is in is still a mistake, unless it says something of `others`, which other
    runs of the file name."""
    made = set[Where]()
    for change in changes:
        change.make(document)
        made.add(change.at)
    named = as_list(document.data.get("provider")) if isinstance(document.data, dict) else None
    if ("provider",) not in made or not isinstance(named, tuple):
        return
    earlier = {at[0] for at, mark in document.marks.items() if at and mark.origin}
    changed = {at[0] for at in made} | (earlier - others)
    for name in ({*installed().names} & {*document.data}) - {*candidates(map(str, named)), *changed}:
        document.forget((name,))
        del document.data[name]


def _axes(document: Document, given: set[Where]) -> list[list[Change]]:
    """The changes that a matrix asks for, by key; it is taken out of the document. What is no matrix stays there."""
    block = document.data.get("matrix") if isinstance(document.data, dict) else None
    whole = isinstance(block, dict) and all(isinstance(values, list) and values for values in block.values())
    if not whole or not block or any(isinstance(value, dict | list) for values in block.values() for value in values):
        return []
    axes = list[list[Change]]()
    for key, values in block.items():
        axis = list[Change]()
        for number, value in enumerate(values):
            if ("matrix", key, number) in document.bad:
                continue
            line, plain, origin = document.mark(("matrix", key, number))
            said = json.dumps(value, ensure_ascii=False) if plain is None else plain
            try:
                change = Change.of("--set", f"{key}={said}")
                axis.append(replace(change, option=origin, line=line))
            except ValueError as error:
                document.problem(("matrix", key), str(error))
                break
        if axis and axis[0].at not in given:
            axes.append(axis)
    if prod(map(len, axes)) > _MAX_RUNS:
        document.problem(("matrix",), f"it makes {prod(map(len, axes))} runs; {_MAX_RUNS} at most")
        axes = [axis[:1] for axis in axes]  # what is wrong besides shows in one of them
    del document.data["matrix"]
    return axes


def loads(text: str, path: str) -> RunSpec:
    """Checks the text of a run file; `path` is only how messages call it, and no file is looked for.

    Raises:
        SpecError: the text has mistakes; it holds all of them.
    """
    return _checked(read(text, path), None)


def accepted(text: str, path: str) -> RunSpec:
    """What a run's kept file says. It was checked when the run was submitted: rules may have become stricter since, and
    a run that has machines is gone on with all the same. `path` as of `loads`.

    Raises:
        SpecError: it cannot be read, or names what is not installed here.
    """
    return _checked(read(text, path), None, anew=False)


def blocks(changes: Iterable[Change]) -> dict[str, ProviderOptions]:
    """The blocks of providers that `--set NAME.KEY=VALUE` makes by itself, without a run file; checked as if one had
    them.

    Raises:
        InputError: there is no such provider, or keys and values mean nothing to it: all of them.
    """
    document, found = Document("--set", {}), dict[str, ProviderOptions]()
    for change in changes:
        change.make(document)
    for name, block in document.data.items():
        try:
            found[name] = entry(name).options.model_validate_json(json.dumps(block), strict=True)
        except ValidationError as error:
            for each in error.errors(include_url=False):
                at = (name, *each["loc"])
                if at not in document.bad:
                    document.problem(at, *word({**each, "loc": at}, document))
    if document.problems:
        why = "\n".join(map(str, document.problems))
        cure = f"`mgpu spec {next(iter(document.data))}` prints the keys with their defaults."
        raise InputError(f"--set: {count(len(document.problems), 'mistake')}", why, cure)
    return found


def require_files(spec: RunSpec, base: Path, path: str) -> None:
    """Raises SpecError: files that the run file names are not in `base`, the folder that stands for its own. `path` is
    how messages call it."""
    document = Document(path)
    for mistake in _files(spec, base):
        document.problem(mistake.at, mistake.message, mistake.nearest)
    if document.problems:
        raise document.error()


def text_of(spec: RunSpec, path: Path) -> str:
    """A run file that says `spec`: the one at `path`, or where that says something else a text of its own."""
    try:
        text = path.read_text(encoding="utf-8")
        if loads(text, str(path)) == spec:
            return text
    except (InputError, OSError, UnicodeDecodeError):
        pass  # it was changed since
    said = spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
    text = yaml.dump(said, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return f"# {path.name}, as it was changed for this run\n{text}"


def _read(path: Path) -> Document:
    try:
        if not path.is_file():
            raise FileNotFoundError("it is not a file" if path.exists() else "there is no such file")
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except OSError as error:
        why = error.strerror or str(error)
        next_step = "Name a run file, or write one with `mgpu init`."
        raise InputError(f"{path}: the run file cannot be read", f"{why[:1].upper()}{why[1:]}.", next_step) from error
    try:
        return read(raw.decode(), str(path))
    except UnicodeDecodeError as error:
        document = Document(str(path))
        document.problem((), "not UTF-8 text", line=raw.count(b"\n", 0, error.start) + 1)
        raise document.error() from error


def _checked(document: Document, base: Path | None, *, anew: bool = True) -> RunSpec:
    spec, set_aside = _validated(document)
    if spec is not None:
        found = [*mistakes(spec), *_options(spec, document)]
        found = found if anew else [mistake for mistake in found if mistake.absent]
        told = {mistake.at for mistake in found}  # what cannot be a file's name is not looked for
        found += [mistake for mistake in (_files(spec, base) if base else ()) if mistake.at not in told]
        for mistake in found:
            reads = (mistake.at, *mistake.reads)
            if not any(read[: len(aside)] == aside for read in reads for aside in set_aside):
                document.problem(mistake.at, mistake.message, mistake.nearest)
    if spec is None or document.problems:
        raise document.error()
    blocks = {name: block for name in spec.candidates if (block := spec.of(name).options) is not None}
    return spec.model_copy(update={name: block.in_folder(base) for name, block in blocks.items()}) if base else spec


def _validated(document: Document) -> tuple[RunSpec | None, set[Where]]:
    """Each key alone. Returns the spec, of stand-ins where a key is wrong, and which keys these are."""
    if not isinstance(document.data, dict):
        if not document.problems:
            document.problem((), "a run file is a block of keys, `name: ...` and so on")
        return None, set()
    set_aside, dropped, stand_ins = set(document.bad), set[Where](), dict[str, Any]()
    told = {above for at in document.bad for above in _and_above(at)}  # and all that may follow from it
    for _ in range(_ROUNDS):  # what keys of a block say together is looked at once each of them is right
        try:
            return _validate({**stand_ins, **document.data}), set_aside
        except ValidationError as error:
            errors: list[Any] = error.errors(include_url=False)
        stand_ins, earlier = _STAND_INS, set(dropped)
        for each in errors:
            at = where(each)
            unknown = each["type"] == "extra_forbidden"
            if unknown or at not in told:
                document.problem(at, *word(each, document))
            aside = _droppable(at)
            if aside in earlier:  # and its block cannot be without it
                aside = aside[:-1]
            if not unknown:
                told |= {*_and_above(at)}
            if not unknown or aside != at:  # with its whole list
                set_aside.add(aside)
            dropped.add(aside)
            _drop(document.data, aside)
    return None, set_aside


def _and_above(at: Where) -> Iterator[Where]:
    return (at[:length] for length in range(len(at) + 1))


def _validate(data: dict[str, Any]) -> RunSpec:
    line = data.get("command")
    if isinstance(line, str) and is_shell(data.get("launcher")):
        data = {**data, "command": ["-c", line]}
    # JSON mode is strict about types (`yes` is no 1, "2" is no 2) and still takes lists for tuples
    return RunSpec.model_validate_json(json.dumps(data), strict=True)


def _options(spec: RunSpec, document: Document) -> Iterator[Mistake]:
    """Those of a task that is installed here; a node asks a class of the user's for its own."""
    entry = tasks.installed().found.get(spec.train.task) if spec.train else None
    if entry is None or spec.train is None:
        return
    try:
        entry.options.model_validate_json(json.dumps(spec.train.options), strict=True)
    except ValidationError as error:
        for each in error.errors(include_url=False):
            at: Any = ("train", "options", *each["loc"])
            message, nearest = word({**each, "loc": at}, document, entry.options)
            yield Mistake(at, message, (("train", "task"),), nearest)


def _droppable(at: Where) -> Where:
    """The part of a path up to the first list: items are not dropped one by one, because that would renumber them."""
    first = next((index for index, part in enumerate(at) if isinstance(part, int)), len(at))
    return at[:first]


def _drop(data: dict[str, Any], at: Where) -> None:
    """Takes away what stands there; `at` is all of texts."""
    *above, last = at
    for part in above:
        data = data.get(part, {})  # type: ignore[arg-type]
        if not isinstance(data, dict):
            return
    data.pop(last, None)  # type: ignore[arg-type]


def _files(spec: RunSpec, base: Path) -> Iterator[Mistake]:
    yield from _code_files(spec, base)
    yield from _data_folders(spec)
    yield from _image_files(spec, base)


def _code_files(spec: RunSpec, base: Path) -> Iterator[Mistake]:
    """The folder and files of the user's code that nodes need."""
    if not spec.own_code:
        return
    workdir = base / (spec.code.workdir if spec.code else ".")
    if not _seen(workdir.is_dir):
        yield Mistake(("code", "workdir"), f"there is no folder {workdir}")
        return
    requirements = spec.code.requirements if spec.code else None
    if requirements and not _seen((workdir / requirements).is_file):
        yield _absent(("code", "requirements"), workdir, requirements, ("code", "workdir"))
    elif requirements and not (workdir / requirements).resolve().is_relative_to(workdir.resolve()):
        yield Mistake(("code", "requirements"), f"is a link out of {workdir}", (("code", "workdir"),))
    if spec.command is not None:
        yield from _program(spec, spec.command, workdir)
    elif spec.train is not None and ":" in spec.train.task:
        yield from _class(spec.train.task, workdir)


def _program(spec: RunSpec, words: tuple[str, ...], workdir: Path) -> Iterator[Mistake]:
    """The file that Python, or a shell, is given on the nodes, where it can be seen from here."""
    name = words[0]
    in_image = spec.image is not None and (
        name.startswith("/") or (spec.code is not None and spec.code.mode == "image")
    )
    elsewhere = name.startswith("/") and not spec.on_this_machine  # a machine image of the user's may have it
    if in_image or elsewhere or command.wrong(words, spec.launcher, shell=spec.shell):
        return
    at, path, reads = ("command", 0), workdir / name, (("code", "workdir"),)
    if name.startswith("-"):
        if name == "-m" and len(words) > 1 and (gone := _no_module(workdir, words[1])):
            yield Mistake(("command", 1), gone, reads)
    elif not name.startswith("/") and os.path.normpath(name).startswith(".."):
        yield Mistake(at, f"{name} is not below {workdir}, which is what is sent (`code.workdir`)", reads)
    elif _seen(path.is_symlink) and not path.exists():
        yield Mistake(at, f"{path} is a link to nothing", reads)
    elif not _seen(path.exists):
        if not spec.data and not (spec.setup and not _seen(path.parent.is_dir)):  # from which it may come, too
            yield _no_program(words, workdir, *reads, ("data",), ("setup",))
    elif spec.shell:
        if not path.is_file():
            yield Mistake(at, f"{path} is not a file: name a script", reads)
    elif path.is_dir():
        if not (path / "__main__.py").is_file():
            yield Mistake(at, f"{path} is a folder without a __main__.py: name a Python file", reads)
    elif (why := _no_python(path)) is not None:
        yield Mistake(at, f"{path} {why}: the launcher gives it to Python", reads)


def _no_program(words: tuple[str, ...], workdir: Path, *reads: Where) -> Mistake:
    """With the line to write, where a file that is there comes later: behind `uv run`, or in the same word."""
    words = (*(words[0].split() or words[:1]), *words[1:])
    later = next((n for n, each in enumerate(words) if each.endswith(".py") and _seen((workdir / each).is_file)), None)
    if later is None:
        return _absent(("command", 0), workdir, words[0], *reads)
    gone = " ".join(words[: later or None])
    return Mistake(
        ("command", 0), f"there is no file {gone} in {workdir}: write `{command.line(words[later:])}`", reads
    )


def _no_module(workdir: Path, name: str) -> str | None:
    """That a module is none, where its package is a folder of the code; others may be installed on the nodes."""
    path = workdir.joinpath(*name.split("."))
    if not _seen((workdir / name.partition(".")[0]).is_dir) or _seen(path.with_suffix(".py").is_file):
        return None
    return None if _seen((path / "__main__.py").is_file) else f"there is no module {name} in {workdir}"


def _class(task: str, workdir: Path) -> Iterator[Mistake]:
    """The user's own task, where its file can be seen from here; it may be in an installed package, too."""
    module, _, name = task.partition(":")
    path = workdir.joinpath(*module.split(".")).with_suffix(".py")
    if _seen(path.is_file) and name not in path.read_text(encoding="utf-8", errors="replace"):
        yield Mistake(("train", "task"), f"there is no {name} in {path}", (("code", "workdir"),))


def _no_python(path: Path) -> str | None:
    """Why a file cannot be a Python program, where its beginning or its name says so."""
    try:
        with path.open("rb") as file:
            begin = file.read(_PROGRAM_BYTES)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    interpreter = begin.partition(b"\n")[0].decode(errors="replace") if begin.startswith(b"#!") else ""
    if interpreter and "python" not in interpreter:
        cure = " (`launcher: bash` runs it)" if interpreter.endswith("sh") else ""
        return f"is a script for another program ({interpreter}){cure}"
    if path.suffix == ".ipynb":
        return "is a notebook (`jupyter nbconvert --to script` makes a program of it)"
    if path.suffix in _PROGRAMS or len(begin) == _PROGRAM_BYTES:  # the nodes' Python may know more than this one
        return None
    try:
        ast.parse(begin)
    except (SyntaxError, ValueError):
        return "is no Python program"
    return None


def _data_folders(spec: RunSpec) -> Iterator[Mistake]:
    """Those that the nodes of this machine would read."""
    for index, item in enumerate(spec.data if spec.on_this_machine else ()):
        folder = Path(item.source.removeprefix("file://"))
        if item.source.startswith("file:///") and not _seen(folder.is_dir):
            yield Mistake(("data", index, "from"), f"there is no folder {folder}")


def _image_files(spec: RunSpec, base: Path) -> Iterator[Mistake]:
    """What an image is built from."""
    image = spec.image
    if image is None or not image.builds:
        return
    if image.ca_file is not None and not _seen((base / image.ca_file).is_file):
        yield Mistake(("image", "ca_file"), f"there is no file {base / image.ca_file}")
    if image.context is None:
        return
    context = base / image.context
    if not _seen(context.is_dir):
        yield Mistake(("image", "context"), f"there is no folder {context}")
    elif not _seen((context / image.dockerfile).is_file):
        yield _absent(("image", "dockerfile"), context, image.dockerfile, ("image", "context"))


def _seen(look: Callable[[], bool]) -> bool:
    """What `look` says of a file; False where it can be none: a name of 300 characters, such as a whole command's."""
    try:
        return look()
    except OSError:
        return False


def _absent(at: Where, workdir: Path, name: str, *reads: Where) -> Mistake:
    beside = [path.name for path in workdir.iterdir()]
    near = get_close_matches(name, beside, 1)
    return Mistake(at, f"there is no file {name} in {workdir}", reads, near[0] if near else None)
