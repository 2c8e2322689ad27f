"""`index.json`: what the token files of a folder are. `mgpu_train.data.tokenize` writes it last, so that a folder that
has it is whole."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from mgpu_train.config import Model
from mgpu_train.errors import TrainError

NAME = "index.json"


class Shard(Model):
    """One token file: tokens and nothing else, little-endian, documents end to end."""

    file: str = Field(description="its name in the folder", pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")
    split: Literal["train", "validation"]
    tokens: int = Field(ge=0)
    documents: int = Field(ge=0)
    text_bytes: int = Field(ge=0, description="of the documents in UTF-8, without what ends them")
    crc64nvme: str = Field(description="of the file, in hexadecimal: the checksum that S3 has, too")


class Index(Model):
    """The folder."""

    version: Literal[1] = 1
    token_bytes: Literal[2, 4] = Field(description="of one token: 2 where the vocabulary has at most 65,536")
    vocabulary: int = Field(
        ge=1, description="tokens that the tokenizer knows: what `train.model.vocabulary` has to be"
    )
    end: int | None = Field(description="the token that ends each document; null: none does")
    tokenizer: str = Field(description="CRC64NVME of tokenizer.json")
    settings: str = Field(description="CRC32 of all that the files follow from: inputs by name and size, and options")
    shards: tuple[Shard, ...]


def read(folder: Path) -> Index | None:
    """The index of a folder, or None where there is none. Raises TrainError: it cannot be read."""
    path = folder / NAME
    try:
        return Index.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TrainError(f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise TrainError(
            f"{path} is no index of token files ({where}: {first['msg']}): make the folder anew"
        ) from error
