"""Writes docs/mgpu.schema.json and the generated parts of docs/formats.md from the models. Run after changing one."""

from __future__ import annotations

import json
import re
from pathlib import Path

from mgpu_train.agent.status import AgentStatus
from mgpu_train.checkpoint.manifest import Manifest, Sidecar
from mgpu_train.config import Job

from mgpu.iac.outputs import StackOutput
from mgpu.spec import schema

DOCS = Path(__file__).resolve().parent.parent / "docs"


def parts() -> dict[str, str]:
    """The generated parts of docs/formats.md, by the name in their marker."""
    job = [key for key in schema.keys(Job.model_json_schema()) if not key.name.startswith("train.")]
    stack = json.dumps(schema.without_titles(StackOutput.model_json_schema()), indent=2)
    return {
        "run-file": schema.table(schema.keys()),
        "stack-output-keys": schema.table(schema.keys(StackOutput.model_json_schema())),
        "stack-output-schema": f"```json\n{stack}\n```\n",
        "job": schema.table(job),
        "manifest": schema.table(schema.keys(Manifest.model_json_schema())),
        "sidecar": schema.table(schema.keys(Sidecar.model_json_schema())),
        "status": schema.table(schema.keys(AgentStatus.model_json_schema())),
    }


def filled(page: str) -> str:
    """The page with every generated part as it should be."""
    for name, text in parts().items():
        begin, end = f"<!-- generated: {name} -->\n", "<!-- end -->"
        page, found = re.subn(
            f"(?<={re.escape(begin)}).*?(?={end})", lambda _, text=text: text, page, count=1, flags=re.DOTALL
        )
        if not found:
            raise SystemExit(f"docs/formats.md has no marker `{begin.strip()}`")
    return page


def main() -> None:
    """Writes both files."""
    page = DOCS / "formats.md"
    page.write_text(filled(page.read_text()))
    (DOCS / "mgpu.schema.json").write_text(schema.text())


if __name__ == "__main__":
    main()
