"""Images with one class each: arrays in memory, or files that are decoded when they are asked for."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from mgpu_train import pickles
from mgpu_train.data import image_records
from mgpu_train.errors import TrainError

_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp"}
_HELD_OUT = 10  # where there is no validation set, one image in so many
_SUMMED = 1 << 30  # bytes of pixels that a fingerprint is made of, at least


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
    """In memory, or mapped into it: (count, channels, height, width) and (count,)."""

    images: np.ndarray
    labels: np.ndarray
    classes: int

    @property
    def fingerprint(self) -> str:
        """Of all labels, and of all pixels, or where they are more than a GiB of images at equal distances."""
        some = self.images[:: 1 + self.images.nbytes // _SUMMED]
        value = zlib.crc32(repr(self.images.shape).encode() + self.labels.tobytes())
        for image in some:
            value = zlib.crc32(image.tobytes(), value)
        return f"{value:08x}"

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
        path = self.root / self.paths[number]
        return _decoded(path, str(path), self.size)

    def label(self, number: int) -> int:
        """Its folder's."""
        return self.labels[number]


def _decoded(source: Path | BinaryIO, name: str, size: int) -> np.ndarray:
    """In color, of 8 bits: the upper ones of 16. Raises TrainError: it is no image, or none of so few bits."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(source) as image:
            if image.mode in ("I", "F"):
                raise TrainError(f"the image {name} has pixels of 32 bits (mode {image.mode}): make them bytes")
            if image.mode.startswith("I;16"):  # Pillow would make all that is above 255 white
                whole = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
            else:
                whole = image.convert("RGB")
            return np.asarray(ImageOps.fit(whole, (size, size))).transpose(2, 0, 1)
    except (OSError, UnidentifiedImageError) as error:
        raise TrainError(f"cannot read the image {name}: {error}") from error


def open_splits(folder: str | None, size: int | None) -> tuple[Images, Images]:
    """Training and validation images of a folder, by what lies in it.

    Raises TrainError: it holds nothing that is known, or what reads it is not installed.
    """
    training, validation = _found(Path(folder), size) if folder is not None else _digits()
    shapes = [each.read(0).shape for each in (training, validation) if len(each)]
    if len({shape[0] for shape in shapes}) > 1 or validation.classes > training.classes:
        raise TrainError(
            f"{folder}: what is validated on has {validation.classes} classes and the shape {shapes[-1]}, and what is "
            f"learned from {training.classes} and {shapes[0]}: both need the same channels, and no class may be new"
        )
    return training, validation


def _found(root: Path, size: int | None) -> tuple[Images, Images]:
    if not root.is_dir():
        raise TrainError(f"`train.options.data` names {root}, which is no folder on this node")
    for read, end in ((_cifar_rows, ".bin"), (_cifar_pickles, "")):
        if (root / f"data_batch_1{end}").is_file():
            training = [root / f"data_batch_{each}{end}" for each in range(1, 6)]
            return read(training, 10), read([root / f"test_batch{end}"], 10)
        if (root / f"train{end}").is_file() and (root / f"test{end}").is_file():
            return read([root / f"train{end}"], 100), read([root / f"test{end}"], 100)
    if (root / "images.npy").exists() or (root / "train-images.npy").exists():
        return _numpy(root)
    if training := _idx_files(root, "train"):
        validation = _idx_files(root, "t10k")
        return (_idx(*training), _idx(*validation)) if validation else _parted(_idx(*training), _HELD_OUT)
    if names := image_records.named(root):
        return image_records.open_records(root, names, partial(_decoded, size=_needed(size, "TFRecord files")))
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


def _cifar_rows(paths: Sequence[Path], classes: int) -> Arrays:
    """The binary version: rows of one label, or a coarse and a fine one, and of 3 x 32 x 32 pixels."""
    labels = 1 if classes == 10 else 2
    row = labels + 3072
    data = b"".join(map(_bytes, paths))
    if not data or len(data) % row:
        raise TrainError(f"{paths[0]} is no binary file of CIFAR-{classes}: not a multiple of {row} bytes")
    rows = np.frombuffer(data, np.uint8).reshape(-1, row)
    return Arrays(rows[:, labels:].reshape(-1, 3, 32, 32), rows[:, labels - 1].astype(np.int64), classes)


def _cifar_pickles(paths: Sequence[Path], classes: int) -> Arrays:
    """The version for Python, read as data: nothing that a pickle names is called."""
    pixels: list[np.ndarray] = []
    labels: list[int] = []
    for path in paths:
        try:
            batch = pickles.loads(_bytes(path))
            _, (count, size), _, by_columns, raw = batch["data"].state
            found = batch["labels" if classes == 10 else "fine_labels"]
            raw = raw if isinstance(raw, bytes) else raw.encode("latin1")
            if (size, by_columns) != (3072, False) or not count == len(found) == len(raw) / 3072:
                raise ValueError(f"{len(found)} labels, {len(raw)} bytes of pixels")
            labels += [range(classes)[label] for label in found]
        except (pickles.NotPlain, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise TrainError(
                f"{path} is no file of CIFAR-{classes} for Python ({error}): fetch it anew, or take the binary version"
            ) from error
        pixels.append(np.frombuffer(raw, np.uint8).reshape(-1, 3, 32, 32))
    return Arrays(np.concatenate(pixels), np.array(labels, np.int64), classes)


def _numpy(root: Path) -> tuple[Images, Images]:
    """Pairs of files: bytes of shape (count, height, width), (count, channels, height, width) or with channels last."""

    def read(first: str) -> tuple[np.ndarray, np.ndarray]:
        found: list[np.ndarray] = []
        for path in (root / f"{first}images.npy", root / f"{first}labels.npy"):
            try:
                found.append(np.load(path, mmap_mode="r", allow_pickle=False))
            except (OSError, ValueError) as error:
                raise TrainError(f"cannot read {path}: {error}") from error
        images, labels = found
        images = images[:, None] if images.ndim == 3 else images
        fit = images.ndim == 4 and images.dtype == np.uint8 and labels.shape == images.shape[:1]
        if not fit or labels.dtype.kind not in "iu":
            raise TrainError(
                f"{root}/{first}images.npy has {images.dtype} of shape {images.shape}, and labels are {labels.dtype} "
                f"of shape {labels.shape}: bytes of so many images, and a whole number for each, are wanted"
            )
        last = images.shape[-1] in (1, 3, 4) and images.shape[1] not in (1, 3, 4)
        return (images.transpose(0, 3, 1, 2) if last else images), np.asarray(labels, np.int64)

    parted = (root / "train-images.npy").exists()
    pairs = [read("train-"), read("val-")] if parted else [read("")]
    if min(int(labels.min(initial=0)) for _, labels in pairs) < 0:
        raise TrainError(f"{root}: labels begin at 0, and some are below")
    classes = max(int(labels.max(initial=-1)) for _, labels in pairs) + 1
    made = [Arrays(images, labels, classes) for images, labels in pairs]
    return (made[0], made[1]) if parted else _parted(made[0], _HELD_OUT)


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

    pixels, numbers = read(images, 3)[:, None], read(labels, 1).astype(np.int64)
    if len(pixels) != len(numbers):
        raise TrainError(f"{images} has {len(pixels)} images, and {labels} has {len(numbers)} labels")
    return Arrays(pixels, numbers, int(numbers.max(initial=-1)) + 1)


def _folders(root: Path, size: int | None) -> tuple[Images, Images]:
    parted = (root / "train").is_dir() and (root / "val").is_dir()
    top = root / "train" if parted else root
    names = sorted(path.name for path in top.iterdir() if path.is_dir() and not path.name.startswith("."))
    found = _listed(top, names)
    if not found:
        raise TrainError(
            f"{root} holds no images that are known: class folders of {', '.join(sorted(_SUFFIXES))}, TFRecord files, "
            "the files of CIFAR, IDX files, or `images.npy` and `labels.npy`"
        )
    size = _needed(size, "class folders")

    def made(where: Path, some: list[tuple[str, int]]) -> Files:
        return Files(where, tuple(path for path, _ in some), tuple(label for _, label in some), len(names), size)

    if parted:
        return made(top, found), made(root / "val", _listed(root / "val", names))
    held_out = {path for path, _ in found if zlib.crc32(path.encode()) % _HELD_OUT == 0}
    training, validation = ([each for each in found if (each[0] in held_out) is out] for out in (False, True))
    return made(top, training), made(top, validation)


def _needed(size: int | None, kind: str) -> int:
    """What images are cut to, where they have to be decoded. Raises TrainError: it is not said, or they cannot be."""
    if size is None:
        raise TrainError(f"`train.options.size` is needed with {kind}: the pixels of a side that images are cut to")
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise TrainError(
            "image files are decoded by Pillow, which is not installed here: `pip install pillow`"
        ) from error
    return size


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
