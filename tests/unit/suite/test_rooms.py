"""The rooms of the source: no folder has more modules than one looks over."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[3]
MOST = 14  # modules; files that Python itself names are none
OF_EQUALS = {"mgpu/cli"}  # one module a command


def test_no_folder_has_more_modules_than_one_looks_over():
    sizes = {
        folder.relative_to(ROOT).as_posix(): len(
            [path for path in folder.glob("*.py") if not path.name.startswith("__")]
        )
        for top in ("mgpu", "train/mgpu_train", "infra")
        for folder in [ROOT / top, *(ROOT / top).rglob("*/")]
    }
    assert sizes.keys() >= OF_EQUALS
    assert {name: size for name, size in sizes.items() if size > MOST and name not in OF_EQUALS} == {}
