"""Writes docs/mgpu.schema.json and the generated parts of docs/formats.md and docs/json.md from the models. Run after
changing one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mgpu_train.agent.status.status import AgentStatus
from mgpu_train.checkpoint.log.manifest import Manifest, Sidecar
from mgpu_train.config import Job
from mgpu_train.data.token_index import Index
from mgpu_train.tasks import entry as tasks
from pydantic import BaseModel

from mgpu.cli import results
from mgpu.iac.outputs import StackOutput
from mgpu.plan.model import CheckpointRoom, Cost, Headroom, Obstacle, Offer, Refusal, Requirements, Reservation
from mgpu.providers.base import ReservationOffer
from mgpu.run.view import CheckView, InterruptionView, RunView
from mgpu.spec import schema

DOCS = Path(__file__).resolve().parent.parent / "docs"
# what results of commands are made of, by the heading that its table stands under
PARTS_OF_RESULTS: dict[type[BaseModel], str] = {
    RunView: "A run",
    InterruptionView: "An interruption",
    CheckView: "An expectation",
    results.Fleet: "A fleet",
    results.Checkpoint: "A checkpoint",
    Requirements: "Requirements",
    Offer: "An offer",
    Headroom: "Headroom",
    Obstacle: "An obstacle",
    Cost: "A cost",
    CheckpointRoom: "Checkpoints on a machine",
    Refusal: "A refusal",
    Reservation: "A reservation",
    ReservationOffer: "A reservation on sale",
    results.OnSale: "On sale",
    results.ScheduleView: "A schedule",
    results.Due: "A due time",
    results.LookedAfter: "A run that was looked after",
    results.QueuedRun: "A queued run",
    results.CostView: "What something has cost",
}


def parts() -> dict[str, dict[str, str]]:
    """The generated parts of each page, by the name in their marker."""
    job = [key for key in schema.keys(Job.model_json_schema()) if not key.name.startswith("train.")]
    stack = json.dumps(schema.without_titles(StackOutput.model_json_schema()), indent=2)
    made_of = (f"### {heading}\n\n{_table(each, {})}" for each, heading in PARTS_OF_RESULTS.items())
    return {
        "formats.md": {
            "run-file": schema.table(schema.keys()),
            "options-of-tasks": "\n".join(f"#### {name}\n\n{each}" for name, each in _options().items()),
            "stack-output-keys": schema.table(schema.keys(StackOutput.model_json_schema())),
            "stack-output-schema": f"```json\n{stack}\n```\n",
            "job": schema.table(job),
            "token-index": schema.table(schema.keys(Index.model_json_schema())),
            "manifest": schema.table(schema.keys(Manifest.model_json_schema())),
            "sidecar": schema.table(schema.keys(Sidecar.model_json_schema())),
            "status": schema.table(schema.keys(AgentStatus.model_json_schema())),
        },
        "json.md": {
            "results": "\n".join(map(_result, _subclasses(results.Result))),
            "parts-of-results": "\n".join(made_of),
        },
    }


def _options() -> dict[str, str]:
    """A table for each task of ours whose options do not stand in `train` itself."""
    ours = {name: entry for name, entry in tasks.OURS.items() if name != "lm"}
    return {name: schema.table(schema.keys(entry.options.model_json_schema())) for name, entry in ours.items()}


def _subclasses(model: type[BaseModel]) -> list[type[BaseModel]]:
    return [each for child in model.__subclasses__() for each in (child, *_subclasses(child))]


def _result(model: type[BaseModel]) -> str:
    """One command's result, without what it has of another one."""
    base = next(each for each in (results.Run, results.Pulled, results.Result) if each in model.__mro__[1:])
    of_base = {
        results.Run: "All keys of [a run](#a-run), and:",
        results.Pulled: "What a checkpoint that is pulled has, and:",
    }
    words = "All keys of [a run](#a-run)." if model is results.Run else of_base.get(base, "")
    table = "" if model is results.Run else _table(model, base.model_fields)
    heading = " ".join((model.__doc__ or "").split()).removesuffix(".")
    return "\n\n".join(part.rstrip("\n") for part in (f"### {heading}", words, table) if part) + "\n"


def _table(model: type[BaseModel], known: Any) -> str:
    schema_of = model.model_json_schema(mode="serialization")
    lines = ["| key | type | meaning |", "|---|---|---|"]
    for name, field in schema_of["properties"].items():
        if name not in known:
            lines.append(f"| `{name}` | {_type(field, schema_of)} | {field.get('description', '')} |")
    return "\n".join(lines) + "\n"


def _type(field: dict[str, Any], whole: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_type(each, whole) for each in field["anyOf"])
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        heading = {model.__name__: words for model, words in PARTS_OF_RESULTS.items()}[name]
        return f"[{heading[:1].lower()}{heading[1:]}](#{heading.lower().replace(' ', '-')})"
    if "enum" in field:
        return ", ".join(field["enum"])
    if field.get("type") == "array":
        return f"list of {_type(field['items'], whole)}"
    names = {"string": "text", "object": "object", "null": "null", "number": "number", "boolean": "true or false"}
    return str(field["const"]) if "const" in field else names.get(str(field["type"]), str(field["type"]))


def filled(name: str, page: str) -> str:
    """The page of this name with every generated part as it should be."""
    for part, text in parts()[name].items():
        begin, end = f"<!-- generated: {part} -->\n", "<!-- end -->"
        page, found = re.subn(
            f"(?<={re.escape(begin)}).*?(?={end})", lambda _, text=text: text, page, count=1, flags=re.DOTALL
        )
        if not found:
            raise SystemExit(f"docs/{name} has no marker `{begin.strip()}`")
    return page


def main() -> None:
    """Writes all of them."""
    for name in parts():
        (DOCS / name).write_text(filled(name, (DOCS / name).read_text(encoding="utf-8")), encoding="utf-8")
    (DOCS / "mgpu.schema.json").write_text(schema.text(), encoding="utf-8")


if __name__ == "__main__":
    main()
