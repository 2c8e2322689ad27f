"""Images with one class each: arrays in memory, or files that are decoded when they are asked for."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from mgpu_train.errors import TrainError

_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp"}
_HELD_OUT = 10  # where there is no validation set, one image in so many


class Images(Protocol):
    """One split. Images are uint8 of shape (channels, height, width), the same for all."""

    @property
    def classes(self) -> int:
        """How many there may be."""
        ...

    @property
    def fingerprint(self) -> str:
        """Two nodes with the same one see the same images."""
        ...

    def __len__(self) -> int:
        """How many there are."""
        ...

    def read(self, number: int) -> np.ndarray:
        """One of them."""
        ...

    def label(self, number: int) -> int:
        """Its class."""
        ...


@dataclass(frozen=True)
class Arrays:
    """In memory: (count, channels, height, width) and (count,)."""

    images: np.ndarray
    labels: np.ndarray
    classes: int

    @property
    def fingerprint(self) -> str:
        """Of all pixels and labels."""
        return f"{zlib.crc32(self.labels.tobytes(), zlib.crc32(self.images.tobytes())):08x}"

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, number: int) -> np.ndarray:
        """A view of it."""
        return self.images[number]

    def label(self, number: int) -> int:
        """As the files say."""
        return int(self.labels[number])


@dataclass(frozen=True)
class Files:
    """Decoded by Pillow, and resized: the shorter side to `size`, then its middle."""

    root: Path
    paths: tuple[str, ...]
    labels: tuple[int, ...]
    classes: int
    size: int

    @property
    def fingerprint(self) -> str:
        """Of all names and sizes."""
        found = [(path, (self.root / path).stat().st_size) for path in self.paths]
        return f"{zlib.crc32(repr(found).encode()):08x}"

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, number: int) -> np.ndarray:
        """Raises TrainError: it cannot be."""
        from PIL import Image, ImageOps, UnidentifiedImageError

        path = self.root / self.paths[number]
        try:
            with Image.open(path) as image:
                return np.asarray(ImageOps.fit(image.convert("RGB"), (self.size, self.size))).transpose(2, 0, 1)
        except (OSError, UnidentifiedImageError) as error:
            raise TrainError(f"cannot read the image {path}: {error}") from error

    def label(self, number: int) -> int:
        """Its folder's."""
        return self.labels[number]


def open_splits(folder: str | None, size: int | None) -> tuple[Images, Images]:
    """Training and validation images of a folder, by what lies in it.

    Raises TrainError: it holds nothing that is known, or what reads it is not installed.
    """
    if folder is None:
        return _digits()
    root = Path(folder)
    if not root.is_dir():
        raise TrainError(f"`train.options.data` names {root}, which is no folder on this node")
    if (root / "data_batch_1.bin").exists():
        return _cifar(root, [f"data_batch_{each}.bin" for each in range(1, 6)], "test_batch.bin", 1, 10)
    if (root / "train.bin").exists() and (root / "test.bin").exists():
        return _cifar(root, ["train.bin"], "test.bin", 2, 100)
    if training := _idx_files(root, "train"):
        validation = _idx_files(root, "t10k")
        return (_idx(*training), _idx(*validation)) if validation else _parted(_idx(*training), _HELD_OUT)
    return _folders(root, size)


def _digits() -> tuple[Images, Images]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise TrainError(
            "the digits come with scikit-learn, which is not installed here: `pip install scikit-learn`, or name a "
            "folder of images in `train.options.data`"
        ) from error
    data, labels = load_digits(return_X_y=True)
    images = np.rint(data.reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.uint8)
    return _parted(Arrays(images, labels, 10), 5)


def _parted(arrays: Arrays, one_in: int) -> tuple[Images, Images]:
    held_out = np.arange(len(arrays)) % one_in == 0
    training, validation = (
        Arrays(arrays.images[part], arrays.labels[part], arrays.classes) for part in (~held_out, held_out)
    )
    return training, validation


def _cifar(root: Path, training: Sequence[str], validation: str, labels: int, classes: int) -> tuple[Images, Images]:
    """Rows of `labels` bytes, of which the last one counts, and 3 x 32 x 32 pixels."""

    def read(names: Sequence[str]) -> Arrays:
        row = labels + 3072
        data = b"".join(_bytes(root / name) for name in names)
        if not data or len(data) % row:
            raise TrainError(f"{root / names[0]} is no binary file of CIFAR: not a multiple of {row} bytes")
        rows = np.frombuffer(data, np.uint8).reshape(-1, row)
        return Arrays(rows[:, labels:].reshape(-1, 3, 32, 32), rows[:, labels - 1].astype(np.int64), classes)

    return read(training), read([validation])


def _idx_files(root: Path, part: str) -> tuple[Path, Path] | None:
    for end in ("", ".gz"):
        pair = tuple(root / f"{part}-{kind}{end}" for kind in ("images-idx3-ubyte", "labels-idx1-ubyte"))
        if all(path.exists() for path in pair):
            return pair  # type: ignore[return-value]
    return None


def _idx(images: Path, labels: Path) -> Arrays:
    """The format of MNIST: a magic number, the sizes of dimensions, bytes."""

    def read(path: Path, dimensions: int) -> np.ndarray:
        data = gzip.decompress(_bytes(path)) if path.suffix == ".gz" else _bytes(path)
        shape = np.frombuffer(data, ">u4", dimensions, 4) if len(data) >= 4 * (dimensions + 1) else np.zeros(0)
        if data[:4] != bytes((0, 0, 8, dimensions)) or shape.prod() != len(data) - 4 * (dimensions + 1):
            raise TrainError(f"{path} is no IDX file of {dimensions} dimensions of bytes")
        return np.frombuffer(data, np.uint8, offset=4 * (dimensions + 1)).reshape(*shape.astype(int))

    numbers = read(labels, 1).astype(np.int64)
    return Arrays(read(images, 3)[:, None], numbers, int(numbers.max(initial=-1)) + 1)


def _folders(root: Path, size: int | None) -> tuple[Images, Images]:
    parted = (root / "train").is_dir() and (root / "val").is_dir()
    top = root / "train" if parted else root
    names = sorted(path.name for path in top.iterdir() if path.is_dir() and not path.name.startswith("."))
    found = _listed(top, names)
    if not found:
        raise TrainError(
            f"{root} holds no images that are known: class folders of {', '.join(sorted(_SUFFIXES))}, the binary files "
            "of CIFAR, or IDX files"
        )
    if size is None:
        raise TrainError(
            "`train.options.size` is needed with class folders: the pixels of a side that images are cut to"
        )
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise TrainError(
            "image files are decoded by Pillow, which is not installed here: `pip install pillow`"
        ) from error

    def made(where: Path, some: list[tuple[str, int]]) -> Files:
        return Files(where, tuple(path for path, _ in some), tuple(label for _, label in some), len(names), size)

    if parted:
        return made(top, found), made(root / "val", _listed(root / "val", names))
    held_out = {path for path, _ in found if zlib.crc32(path.encode()) % _HELD_OUT == 0}
    training, validation = ([each for each in found if (each[0] in held_out) is out] for out in (False, True))
    return made(top, training), made(top, validation)


def _listed(root: Path, names: list[str]) -> list[tuple[str, int]]:
    return [
        (path.relative_to(root).as_posix(), label)
        for label, name in enumerate(names)
        for path in sorted((root / name).rglob("*"))
        if path.suffix.lower() in _SUFFIXES
    ]


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TrainError(f"cannot read {path}: {error.strerror}") from error
