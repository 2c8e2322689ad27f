"""`mgpu image`: what a run file's `image:` means: built, pushed, and what is in it."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from mgpu import paths
from mgpu.cli.common import parameters, wiring
from mgpu.console import Console
from mgpu.errors import ImageError, InputError, MgpuError
from mgpu.spec.image import Platform
from mgpu.words import amount

if TYPE_CHECKING:
    from mgpu.image.publish import Site
    from mgpu.image.registry.registry import ImageManifest
    from mgpu.spec.image import ImageSpec
    from mgpu.spec.model import RunSpec

_LOCAL = "mgpu/image"  # what is built for this machine's engine alone
_OURS = "dev.mgpu."


@click.group()
def image() -> None:
    """Build, push or inspect the container image that a run file's `image:` describes.

    Its tag is a hash of all that it is made of: what is in the registry already is neither built nor pushed.
    """


@image.command()
@parameters.run_file_argument
@parameters.json_option
def build(run_file: Path, as_json: bool) -> None:
    """Build what the `image:` of RUN_FILE says, with this machine's Docker engine. Pushes nothing.

    No registry is asked but those of the base images. Of a sweep the images of all its runs are built.
    """
    from mgpu.image import cancellable
    from mgpu.run.job.images import cancelling

    console, all_of_them = Console(as_json=as_json), list[dict[str, Any]]()
    for spec, site in _of_all_runs(run_file, repository=_LOCAL):
        with cancelling() as cancelled:
            built = cancellable.build(spec, site, console.emit, cancelled)
        console.done()
        name = built.wanted.name
        result = {"name": str(name), "tag": name.tag, "id": built.id, "inputs_hash": built.wanted.inputs_hash}
        all_of_them.append(result)
        if not as_json:
            rows = [(key.replace("_", " "), value) for key, value in result.items() if key != "name"]
            console.table(("image", str(name)), rows)
    if as_json:
        from mgpu.cli import results

        one = len(all_of_them) == 1
        console.result(results.Built(**all_of_them[0]) if one else results.BuiltAll(images=all_of_them))
        return
    console.next(f"mgpu image push {run_file}    what nodes can run")


@image.command()
@parameters.run_file_argument
@parameters.json_option
def push(run_file: Path, as_json: bool) -> None:
    """Make sure that the image of RUN_FILE is in its registry, and print it by its digest.

    What is there is neither built nor pushed, and needs no Docker engine. Of a sweep those of all its runs are.
    """
    _push(Console(as_json=as_json), _of_all_runs(run_file))


@image.command()
@click.argument("repository")
@click.option(
    "--platform", type=click.Choice(get_args(Platform)), default=get_args(Platform)[0], show_default=True,
    help="What it runs on.",
)  # fmt: skip
@click.option("--ca-file", type=click.Path(path_type=Path, dir_okay=False), help="As `image.ca_file` of a run file.")
@click.option("--secret", "secrets", multiple=True, metavar="NAME", help="As `image.secrets`; PIP_INDEX_URL, say.")
@parameters.json_option
def operator(repository: str, platform: str, ca_file: Path | None, secrets: tuple[str, ...], as_json: bool) -> None:
    """Make sure that an image with mgpu itself, as it is installed here, is in REPOSITORY, and print it by its digest.

    It is what `mgpu schedule install --kubernetes` and `--aws` take. What is there is neither built nor pushed.
    """
    from pydantic import ValidationError

    from mgpu.image.build import shipped
    from mgpu.image.publish import Site
    from mgpu.spec.image import ImageSpec
    from mgpu.spec.values import refusal

    given = {"repository": repository, "platform": platform, "ca_file": ca_file and str(ca_file), "secrets": secrets}
    with wiring.writing(paths.cache_dir()):
        context = shipped.operator_context()
    try:
        spec = ImageSpec.model_validate({**given, "context": str(context)})
    except ValidationError as error:
        wrong = error.errors()[0]
        what, why = f"{wrong['loc'][0]} {wrong['input']}", f"It {refusal(wrong, str(wrong['input']))}."
        raise InputError(what, why, "Mend that: `mgpu image operator --help`.") from error
    _push(Console(as_json=as_json), [(spec, Site(Path.cwd(), None, os.environ))])


def _push(console: Console, images: list[tuple[ImageSpec, Site]]) -> None:
    from mgpu.image import cancellable
    from mgpu.run.job.images import cancelling, told

    there = list[dict[str, Any]]()
    for spec, site in images:
        with cancelling() as cancelled:
            published = cancellable.ensure(spec, site, console.emit, cancelled)
        console.done()
        there.append(asdict(published))
        if not console.as_json:
            console.say(told(published))
            console.text(published.reference)
    if console.as_json:
        from mgpu.cli import results

        console.result(results.Pushed(**there[0]) if len(there) == 1 else results.PushedAll(images=there))


@image.command()
@click.argument("reference", default="")
@click.option(
    "--file", "-f", "run_file", type=click.Path(path_type=Path, dir_okay=False), default=Path(wiring.RUN_FILE),
    show_default=True, help="The run file whose image is meant where no REFERENCE is given.",
)  # fmt: skip
@click.option(
    "--platform", type=click.Choice(get_args(Platform)), default=get_args(Platform)[0], show_default=True,
    help="Which one of REFERENCE's.",
)  # fmt: skip
@parameters.json_option
def inspect(reference: str, run_file: Path, platform: str, as_json: bool) -> int:
    """Show the digest, labels and layers of an image, and which drivers and GPUs it runs on.

    REFERENCE is repository:tag or repository@sha256:...; without one it is the image of the run file. The registry is
    asked; the Docker engine only for what no registry has. Of a sweep the images of all its runs are shown.
    """
    console, failures = Console(as_json=as_json), list[MgpuError]()
    with console.waiting("asking the registry"):
        shown = [_named(reference, platform)] if reference else _of_run_file(run_file, failures)
    if as_json:
        from mgpu.cli import results

        told = [each.to_json() for each in failures]
        alone = len(shown) == 1 and not told
        console.result(results.Inspected(**shown[0]) if alone else results.InspectedAll(images=shown, failures=told))
    else:
        for index, each in enumerate(shown):
            if index:
                console.text("")
            _show(console, each)
    return max((wiring.exit_with(console, error) for error in failures), default=0)


def _show(console: Console, shown: dict[str, Any]) -> None:
    console.table(("image", shown["reference"]), _rows(shown))
    console.text("")
    sizes = shown["pushed"]  # an engine does not tell them
    rows = [(each["digest"], *([amount(each["bytes"])] if sizes else [])) for each in shown["layers"]]
    console.table(("layer", *(["size"] if sizes else [])), rows)


def _of_all_runs(run_file: Path, repository: str | None = None) -> list[tuple[ImageSpec, Site]]:
    """The images of all runs of a run file, and where they go; those that are the same, and go to the same place,
    once. `repository`: unless the run file says."""
    from mgpu.spec.load import sweep

    found: list[tuple[ImageSpec, Site]] = []
    asked: list[object] = []
    for _, spec in sweep(run_file):
        if (whose := (spec.image, spec.providers, spec.options, spec.regions)) in asked:  # many providers ask a service
            continue
        asked.append(whose)
        image, site = _of_run(run_file, spec, repository)
        if not any((image, site.repository) == (other, there.repository) for other, there in found):
            found.append((image, site))
    return found


def _of_run(run_file: Path, spec: RunSpec, repository: str | None = None) -> tuple[ImageSpec, Site]:
    from mgpu.image import place
    from mgpu.run.job.stack_output import provider_for

    if spec.image is None:
        cure = "Add one: `image: {}` is the trainer's, `image: {reference: ...}` one that exists."
        raise InputError(f"{run_file} has no `image:`", "Its nodes run without a container.", cure)
    image = spec.image
    if image.builds and image.repository is None and repository:
        image = image.model_copy(update={"repository": repository})
    return image, place.site(image, run_file.resolve().parent, provider_for(spec), spec.regions, os.environ)


def _of_run_file(run_file: Path, failures: list[MgpuError]) -> list[dict[str, Any]]:
    """Those that can be looked at; of several, `failures` gets why another one cannot. Raises MgpuError: the only one
    cannot."""
    found, images = list[dict[str, Any]](), _of_all_runs(run_file)
    for spec, site in images:
        try:
            found.append(_of_spec(run_file, spec, site))
        except MgpuError as error:
            if len(images) == 1:
                raise
            failures.append(error)
    return found


def _of_spec(run_file: Path, spec: ImageSpec, site: Site) -> dict[str, Any]:
    from mgpu.image import publish
    from mgpu.image.registry import registry
    from mgpu.image.registry.reference import Reference

    found = publish.find(spec, site)
    if found is None:
        name = publish.wanted(spec, site).name
        for each in (str(name), f"{_LOCAL}:{name.tag}"):  # where `build` knows no repository
            if here := _here(each, pushed=False):
                return here
        cure = f"Run `mgpu image push {run_file}`: it builds and pushes it."
        cure = cure if spec.builds else "Mend image.reference, or push the image first."
        raise ImageError(f"no image {name}", f"{name.registry} does not have it.", cure)
    login = site.login(Reference.parse(found.reference).registry)
    manifest = registry.manifest(found.reference, login, spec.platform, ca_file=site.ca_file(spec))
    if manifest is None:
        raise ImageError(f"no image {found.reference}", "Its registry had it a moment ago.", "Try again.")
    return _shown(found.reference, manifest)


def _named(reference: str, platform: str) -> dict[str, Any]:
    from mgpu.image.registry import auth, registry
    from mgpu.image.registry.reference import Reference

    name, pushed = Reference.parse(reference), False
    refused = ImageError(f"no image {name} for {platform}", f"{name.registry} does not have it.", "Check the name.")
    try:
        digest = registry.find(str(name), auth.of(name.registry))
        manifest = digest and registry.manifest(name.at(digest), auth.of(name.registry), platform)
        if digest and manifest:
            return _shown(name.at(digest), manifest)
    except ImageError as error:
        refused, pushed = error, None
    if here := _here(reference, pushed):
        return here
    raise refused


def _here(reference: str, pushed: bool | None) -> dict[str, Any] | None:
    """What this machine's engine has under that name; None also where there is no engine. `pushed`: as far as its
    registry tells."""
    from mgpu.image.build.docker_engine import DockerEngine

    try:
        found = DockerEngine().inspect(reference)
    except ImageError:
        return None
    if found is None:
        return None
    layers = [{"digest": each, "bytes": None} for each in found.layers]
    return _as_data(reference, pushed, found.id, found.platform, None, found.labels, layers)


def _shown(reference: str, manifest: ImageManifest) -> dict[str, Any]:
    layers = [{"digest": digest, "bytes": size} for digest, size in manifest.layers]
    return _as_data(reference, True, manifest.digest, manifest.platform, manifest.bytes, manifest.labels, layers)


def _as_data(
    reference: str, pushed: bool | None, digest: str, platform: str, size: int | None, labels: Any, layers: Any
) -> dict[str, Any]:
    from mgpu.image import compat

    fit = compat.fit(labels)
    return {
        "reference": reference, "pushed": pushed, "digest": digest, "platform": platform, "bytes": size,
        "labels": dict(labels), "runs_on": asdict(fit) if fit else None, "layers": layers,
    }  # fmt: skip


def _rows(shown: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [(key, shown[key]) for key in ("digest", "platform")]
    where = "this machine's engine" + ("; not pushed yet" if shown["pushed"] is False else "")
    rows += [("size", amount(shown["bytes"]))] if shown["pushed"] else [("where", where)]
    rows += [(key.removeprefix(_OURS), value) for key, value in sorted(shown["labels"].items())]
    return rows + (_fit_rows(shown["runs_on"]) if shown["runs_on"] else [_no_fit(shown["labels"])])


def _no_fit(labels: dict[str, str]) -> tuple[str, str]:
    from mgpu.image import compat

    if labels.get(compat.CUDA) == "cpu":
        return "NVIDIA driver", "none is needed: its PyTorch has no CUDA"
    return "NVIDIA driver", f"not known: no label {compat.CUDA} says which CUDA it has"


def _fit_rows(fit: dict[str, Any]) -> list[tuple[str, str]]:
    older = ", ".join(map(str, fit["compat_branches"]))
    also = f"; on data centres' GPUs also of branches {older}" if older else ""
    return [
        ("NVIDIA driver", f"{fit['driver'] or 'not known'} or newer{also}"),
        ("GPU architectures", ", ".join(fit["architectures"]) or "not known"),
        ("GPUs", ", ".join(fit["gpus"]) or "none that is known"),
    ]
