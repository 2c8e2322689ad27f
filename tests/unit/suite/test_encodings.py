"""Text on disk and text of programs is UTF-8, whatever locale somebody has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
NO_TEXT = ("tarfile.open", "os.open")
SOURCES = ("mgpu", "train/mgpu_train", "infra", "scripts", "demo.py", "demo_aws.py", "demo_nightly.py")
# what may read or write text, and the place of its argument `encoding`, or of `mode` where that comes first
ENCODING_AT, MODE_AT = {"read_text": 0, "write_text": 1}, {"open": 0, "fdopen": 1, "NamedTemporaryFile": 0}
WORDS = re.compile(rf"\b({'|'.join((*ENCODING_AT, *MODE_AT))})\(|\b(text|universal_newlines)=True")
SETTLED = re.compile(r"\bencoding=|\"[rwax]\+?b\"|\bos\.open\(")


def suspect(text: str) -> bool:
    """Whether it is worth a look: to parse all files takes a second."""
    lines = (line for line in text.splitlines() if WORDS.search(line))
    return any(len(WORDS.findall(line)) > len(SETTLED.findall(line)) for line in lines)


def by_locale(text: str) -> Iterator[int]:
    """The lines with a call whose encoding is the locale's."""
    for call in ast.walk(ast.parse(text)):
        if isinstance(call, ast.Call) and reads_text(call):
            yield call.lineno


def reads_text(call: ast.Call) -> bool:
    """As text, without an encoding."""
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if "encoding" in given or ast.unparse(call.func) in NO_TEXT:
        return False
    if name in ENCODING_AT:
        return len(call.args) <= ENCODING_AT[name]
    if name in MODE_AT:
        at = 1 if isinstance(call.func, ast.Name) and name == "open" else MODE_AT[name]
        default = "'w+b'" if name == "NamedTemporaryFile" else "'r'"
        mode = given.get("mode", ast.unparse(call.args[at]) if len(call.args) > at else default)
        return re.fullmatch(r"'[rwax][+t]?'", mode) is not None
    return "True" in (given.get("text"), given.get("universal_newlines"))


def test_no_file_and_no_program_is_read_by_the_locale():
    files = [path for top in SOURCES for path in ([ROOT / top] if top.endswith(".py") else (ROOT / top).rglob("*.py"))]
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    found = {
        f"{path.relative_to(ROOT)}:{line}" for path, text in texts.items() if suspect(text) for line in by_locale(text)
    }
    assert len(files) > 500
    assert not found


def test_what_it_looks_for_is_found():
    wrong = [
        "path.read_text()",
        "path.write_text(other.read_text(), encoding='utf-8')",
        "path.write_text(text, errors='replace')",
        "path.open()",
        "path.open('a')",
        "open(path)",
        "open(path, mode='r')",
        "os.fdopen(handle, 'w')",
        "tempfile.NamedTemporaryFile('w')",
        "subprocess.run(words, text=True)",
    ]
    right = [
        "path.read_text(encoding='utf-8')",
        "path.open('rb')",
        "open(path, 'wb')",
        "os.open(path, os.O_RDONLY)",
        "tarfile.open(fileobj=stream)",
        "tempfile.NamedTemporaryFile()",
        "subprocess.run(words, encoding='utf-8')",
    ]
    assert all(map(suspect, wrong))
    assert sorted(by_locale("\n".join(wrong))) == [*range(1, len(wrong) + 1)]
    assert not list(by_locale("\n".join(right)))
