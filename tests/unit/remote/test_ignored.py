"""What of a folder is not sent: whose word is the last, where a repository begins, and what git would say."""

from __future__ import annotations

import os
import subprocess

import pytest

from mgpu.errors import InputError
from mgpu.remote.snapshot import scan


@pytest.fixture
def folder(tmp_path):
    return write(
        tmp_path / "mine", **{"train.py": "", "data/a": "", "data/b": "", "sub/x.log": "", "sub/deep/y.log": ""}
    )


def write(folder, **files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def sent(folder, **options):
    """What is sent of it, without what says so."""
    return {path for path in scan(folder, **options).entries if not path.endswith("ignore")}


ALL = {"train.py", "data/a", "data/b", "sub/x.log", "sub/deep/y.log"}
NEVER = {
    ".git/config": "",
    ".venv/lib/a.py": "",
    ".mgpu/env": "",
    "sub/__pycache__/x.pyc": "",
    "mgpu-runs/r/step-1": "",
}


@pytest.mark.parametrize(
    ("files", "gone"),
    [
        ({".gitignore": "data/"}, {"data/a", "data/b"}),
        ({".gitignore": "*.log\n!x.log"}, {"sub/deep/y.log"}),
        ({"sub/.gitignore": "*.log"}, {"sub/x.log", "sub/deep/y.log"}),
        ({"sub/.gitignore": "/*.log"}, {"sub/x.log"}),
        ({".gitignore": "*.log", "sub/deep/.gitignore": "!y.log"}, {"sub/x.log"}),
        ({".gitignore": "sub/", "sub/deep/.gitignore": "!y.log"}, {"sub/x.log", "sub/deep/y.log"}),
        ({".gitignore": "data/", ".mgpuignore": "!data/"}, set()),
        ({".gitignore": "data/*", ".mgpuignore": "!data/a"}, {"data/b"}),
        ({".mgpuignore": "data/b"}, {"data/b"}),
        ({".gitignore": "!data/b", ".mgpuignore": "data/b"}, {"data/b"}),
        ({".gitignore": "\ufeffdata/"}, {"data/a", "data/b"}),
        ({".gitignore": "!\n///\ndata/b"}, {"data/b"}),
        ({".gitignore": "*\n!*/\n!*.py\n!a"}, {"data/b", "sub/x.log", "sub/deep/y.log"}),
        ({".mgpuignore": "*\n!*/\n!*.py"}, ALL - {"train.py"}),
        ({".gitignore": "/*\n!/sub/\n/sub/*\n!/sub/deep/"}, ALL - {"sub/deep/y.log"}),
        ({".gitignore": "!*/\n*"}, ALL),
        ({".gitignore": "sub/**/"}, {"sub/deep/y.log"}),
        ({".gitignore": "data/*\n!data/**/"}, {"data/a", "data/b"}),
        ({".gitignore": "*.log\n!sub/**/"}, {"sub/x.log", "sub/deep/y.log"}),
    ],
)
def test_whose_word_is_the_last(folder, files, gone):
    write(folder, **files)
    assert sent(folder) == ALL - gone
    assert sent(folder, ignore_files=False) == ALL


def test_it_is_as_git_itself_says(folder):
    """Compared with git: a file that it would add is sent, and no other."""
    rules = "*.log\n!/sub/x.log\ndata/*\n!data/b\n\\#odd\n[ab].txt\n**/deep/z*\nname \nspace\\ \n"
    rules += "run_[[:digit:]_]\n[![:alpha:].]*.csv\n[:digit:].md\n\\[[:digit:]]\n"
    write(folder, **dict.fromkeys(("run_1", "run__", "run_a", "1.csv", "a.csv", "d.md", "1.md", "[1]", "[d]"), ""))
    write(
        folder,
        **{".gitignore": rules, "sub/.gitignore": "q\n", "#odd": "", "a.txt": "", "c.txt": "", "sub/deep/zz": ""},
    )
    write(folder, **{"name": "", "space ": "", "sub/q": "", "q": "", "sub/deep/b.txt": ""})
    assert set(scan(folder).entries) == added(folder)


@pytest.mark.parametrize(
    "rules",
    [
        *("?", "??", "?.u", "[é].u", "[!a].u", "[ö-ü].u", "é?", "a/?", "*é", "[[:alpha:]].u", "\\é", "?.u\n!é.u"),
        *("a\\/b", "a\\\\\\/b", "a\\/", "\\/a", "!\\/a", "a\\//", "a\\/*", "a*\\/b", "*\n!a\\/\n!a\\/b"),
        *("***/q", "a/***/q", "!***/q", "*/q\n!***/q", "a/****", "[b]***/q", "a/**q"),
        *(
            "a[!x]b",
            "a[^x]b",
            "a[!0-9]*",
            "a[!]]b",
            "a[!-x]b",
            "a[![:digit:]]b",
            "[!]",
            "a[!é]b",
            "*\n!*/\n!a[!a]*",
            "[!a]*/\n!q",
            "*\n![!a]*/\n!q",
        ),
    ],
)
def test_letters_slashes_and_asterisks_are_gits(folder, rules):
    """A `?` is for one byte, and é has two: git would add a file of that name."""
    names = [
        "a-b",
        "a]b",
        "axb",
        "a1b",
        "a_",
        "a~b/a b/c",
        "é",
        "éa",
        "é.u",
        "ä.u",
        "a.u",
        "ab.u",
        "日",
        "a/é",
        "a/b",
        "a/d",
        "a/c/q",
        "a/xq",
        "q",
        "ac/q",
        "bc/q",
    ]
    write(folder, **dict.fromkeys([*names, "a\\/b", "bc/d/q"], ""), **{".gitignore": rules})
    assert set(scan(folder).entries) == added(folder)


@pytest.mark.parametrize(
    "name",
    ["alnum", "alpha", "blank", "cntrl", "digit", "graph", "lower", "print", "punct", "space", "upper", "xdigit"],
)
def test_a_class_of_characters_is_gits(folder, name):
    signs = sorted({chr(code) for code in range(32, 127)} - set("/\\"))  # a node's names have no others
    write(folder, **{f"c{sign}_": "" for sign in signs})
    write(folder, **{".gitignore": f"c[[:{name}:]]_\nx[![:{name}:]Aa]\n", "xA": "", "x.": "", "x1": "", "xb": ""})
    assert set(scan(folder).entries) == added(folder)


def test_a_range_that_runs_backwards_is_passed_over(folder):
    write(folder, **{".gitignore": "[z-a]*\n[a-[:digit:]]\ndata/\n"})
    assert set(scan(folder).entries) == added(folder)
    write(folder, **{".mgpuignore": "[z-a]*\n"})
    with pytest.raises(InputError, match="not a pattern"):
        scan(folder)


def added(folder):
    """What git would add."""
    subprocess.run(["git", "init", "-q", "."], cwd=folder, check=True)
    command = ["git", "-c", "core.excludesFile=", "ls-files", "-z", "--others", "--exclude-standard"]
    said = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout
    return set(said.split("\0")) - {""}


@pytest.mark.parametrize("name", [".gitignore", ".mgpuignore"])
@pytest.mark.parametrize("rules", ["*\n!*/\n!*", "!*", "!.*", "!.git", "!**/"])
def test_what_nobody_sends_is_no_folder_of_the_owners(folder, name, rules):
    write(folder, **NEVER, **{name: rules})
    assert sent(folder) == ALL


def test_only_its_own_file_takes_back_what_nobody_sends_by_its_name(folder):
    write(folder, **NEVER, **{".gitignore": "!mgpu-runs/\n!__pycache__/\n!*.pyc\n"})
    assert sent(folder) == ALL
    write(folder, **{".mgpuignore": "!mgpu-runs/\n!__pycache__/\n"})
    assert sent(folder) == ALL | {"mgpu-runs/r/step-1", "sub/__pycache__/x.pyc"}


def test_the_rules_of_the_repository_around_it_count(tmp_path, folder):
    write(tmp_path, **{".gitignore": "/mine/data/\n*.log\n", ".git/info/exclude": "train.py\n"})
    assert sent(folder) == set()
    write(folder, **{".mgpuignore": "!train.py\n!data/\n"})
    assert sent(folder) == {"train.py", "data/a", "data/b"}


def test_beyond_the_repository_nobody_is_asked(tmp_path, folder):
    write(tmp_path, **{".gitignore": "*.log\n"})
    (folder / ".git").mkdir()
    assert sent(folder) == ALL


def test_without_a_repository_folders_above_are_not_asked(tmp_path, folder):
    write(tmp_path, **{".gitignore": "*.log\n"})
    assert sent(folder) == ALL


def test_a_repository_that_names_what_it_wants_has_folders(tmp_path, folder):
    (tmp_path / ".git").mkdir()
    write(tmp_path, **{".gitignore": "*\n!*/\n!*.py\n"})
    assert sent(folder) == {"train.py"}


def test_a_folder_that_is_left_out_as_a_whole_was_chosen_all_the_same(tmp_path, folder):
    (tmp_path / ".git").mkdir()
    write(tmp_path, **{".gitignore": "mine/\n*.log\n"})
    assert sent(folder) == ALL


def test_what_nobody_sends_is_not_told_and_a_folder_is_told_by_its_name(folder):
    write(folder, **{".gitignore": "data/\n*.log\n", "__pycache__/x.pyc": "", ".venv/bin/python": ""})
    assert scan(folder).left_out == ["data/", "sub/deep/y.log", "sub/x.log"]
    write(folder, **{".gitignore": ".venv/\n"})
    assert scan(folder).left_out == [".venv/"], "its owner does not send it, either: a program in there is named"


@pytest.mark.parametrize("name", [".gitignore", ".mgpuignore"])
def test_one_that_cannot_be_read_is_named(folder, name):
    (folder / name).write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=name.replace(".", r"\.")):
        scan(folder)


@pytest.mark.parametrize("name", [".gitignore", ".mgpuignore"])
def test_one_that_is_not_utf_8_is_read_as_git_reads_it(folder, name):
    (folder / ".git").mkdir()
    (folder / name).write_bytes("# größe\ndata/\n*.lög\n".encode("latin-1"))
    (folder / os.fsdecode(b"x.l\xf6g")).touch()
    assert sent(folder) == ALL - {"data/a", "data/b"}


def test_a_folder_of_that_name_holds_no_rules(folder):
    write(folder, **{".gitignore/x": "", "sub/.gitignore/x": ""})
    assert sent(folder) == ALL | {".gitignore/x", "sub/.gitignore/x"}


@pytest.mark.parametrize("sign", ["\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\r"])
def test_a_line_ends_where_git_ends_it(folder, sign):
    """Words that were copied from a page hold all kinds of signs."""
    write(folder, **{".gitignore": f"# weights go to{sign}data/\n*.log\r\n"})
    assert sent(folder) == ALL - {"sub/x.log", "sub/deep/y.log"}


def test_of_its_own_file_every_line_is_a_pattern(folder):
    write(folder, **{".mgpuignore": "*.log\ngrö[!a]\\\n"})
    with pytest.raises(InputError, match="line 2: not a pattern") as raised:
        scan(folder)
    assert raised.value.why == "`grö[!a]\\`"
