"""A folder of torch.distributed.checkpoint read as data: nothing that its pickles name is called, but what DCP writes.

A checkpoint comes from a store, and whoever could write there must not be able to run code here. DCP itself unpickles
`.metadata`, and each object that is no tensor, with everything that a pickle can do.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from mgpu_train.errors import TrainError

_DCP = "torch.distributed.checkpoint"
# plain classes: to make one has no effect but itself
_PLAIN = frozenset({
    (f"{_DCP}.metadata", "BytesStorageMetadata"),
    (f"{_DCP}.metadata", "ChunkStorageMetadata"),
    (f"{_DCP}.metadata", "Metadata"),
    (f"{_DCP}.metadata", "MetadataIndex"),
    (f"{_DCP}.metadata", "StorageMeta"),
    (f"{_DCP}.metadata", "TensorProperties"),
    (f"{_DCP}.metadata", "TensorStorageMetadata"),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),  # "torch.strided" and the like, by a table
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),  # where it was saved
    ("pathlib._local", "PosixPath"),  # its name in Python 3.13
})  # fmt: skip


class PlainReader(FileSystemReader):
    """DCP's reader of a local folder, for what may be somebody else's."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """`.metadata`, where it is no more than that. Raises TrainError, OSError."""
        path = self._get_metadata_path(kwargs.get("rank"))
        with self.fs.create_stream(path, "rb") as file:
            data = file.read()
        try:
            found = _Unpickler(io.BytesIO(data)).load()
            files = {each.relative_path for each in found.storage_data.values()}
            outside = [name for name in files if Path(name).parts != (name,) or name == ".."]
        except Exception as error:  # a damaged pickle raises whatever it happens to touch
            raise TrainError(f"{path} is no metadata of a checkpoint: {error}") from error
        if outside:
            raise TrainError(f"{path} names files outside of the checkpoint: {', '.join(sorted(outside))}")
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """DCP's own contract. Raises TrainError: a file is not there."""
        folder = Path(self.path)
        for item in plan.items:
            file = self.storage_data[item.storage_index].relative_path
            if not (folder / file).exists():
                raise TrainError(
                    f"`{item.storage_index.fqn}` is in {file}, which is not there. A node is given what its ranks read "
                    "by its job.json: keep to its strategy and processes, or `mgpu checkpoints pull` all files."
                )
        return super().read_data(plan, planner)


class PlainLoadPlanner(DefaultLoadPlanner):
    """DCP's load planner: what is no tensor is a plain value, or it is refused."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Raises TrainError: it is no plain value."""
        again = io.BytesIO()
        try:
            torch.save(torch.load(value, weights_only=True), again)
        except Exception as error:  # torch's own words advise to trust it
            raise TrainError(f"{read_item.dest_index.fqn} is damaged, or no plain value") from error
        again.seek(0)
        super().load_bytes(read_item, again)  # DCP unpickles what was made here


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) in _PLAIN:
            return super().find_class(module_name, global_name)
        if module_name == "torch" and isinstance(found := getattr(torch, global_name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, which no checkpoint has")
