"""A machine's GPUs as its driver shows them: a library with the three calls of CUDA's driver that are asked, and files.

`FAKE_GPUS` names a file: the code that `cuInit` returns, and how many GPUs there are. It is read at each call.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

_SOURCE = """
#include <stdio.h>
#include <stdlib.h>
static int field(int which) {
    int said[2] = {999, 0};
    FILE *file = fopen(getenv("FAKE_GPUS"), "r");
    if (file) { if (fscanf(file, "%d %d", said, said + 1) != 2) said[0] = 999; fclose(file); }
    return said[which];
}
int cuInit(unsigned flags) { return field(0); }
int cuDeviceGetCount(int *count) { *count = getenv("CUDA_VISIBLE_DEVICES") ? 1 : field(1); return 0; }
int cuGetErrorString(int code, const char **text) { if (code != 802) return 1; *text = "not ready"; return 0; }
"""


class Driver:
    """A driver in a folder: `says` changes what it tells; `env` is for whoever is to see it."""

    def __init__(self, folder: Path, require: Callable[[str, bool, str], None]) -> None:
        """Skips where there is no C compiler."""
        compiler = shutil.which("cc")
        require("cc", compiler is not None, "no C compiler is installed")
        self._file, library = folder / "gpus", folder / "lib" / "libcuda.so.1"
        library.parent.mkdir(parents=True)
        (folder / "fake.c").write_text(_SOURCE)
        subprocess.run([str(compiler), "-shared", "-fPIC", "-o", library, folder / "fake.c"], check=True)
        path = os.pathsep.join(filter(None, (str(library.parent), os.environ.get("LD_LIBRARY_PATH", ""))))
        self.env = {"LD_LIBRARY_PATH": path, "FAKE_GPUS": str(self._file)}
        self.says(0, 0)

    def says(self, code: int, count: int) -> None:
        """`cuInit` returns the code; there are so many GPUs."""
        self._file.write_text(f"{code} {count}\n")
