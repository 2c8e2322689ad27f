"""What every block of a run file is, and the kinds of text in it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args, get_origin

from mgpu_train.config import Text
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from mgpu.errors import InputError
from mgpu.spec.values import form, no_name, refusal, shown


def as_list(value: Any) -> Any:
    """One text as a list of one."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


Market = Literal["spot", "on-demand", "spot-then-on-demand"]
LEAST_HOURS = 0.01  # of a hard cap: half a minute, below it machines end before anything has begun
MOST_HOURS = 24 * 60  # of a hard cap, and of all that is waited for
WORD = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
Word = Annotated[
    str,
    form(
        WORD,
        "letters, digits, `.`, `_` and `-`, at most 128, beginning with a letter or digit",
    ),
]
Words = Annotated[tuple[Word, ...], BeforeValidator(as_list, json_schema_input_type=Word | tuple[Word, ...])]
Names = Annotated[tuple[Text, ...], BeforeValidator(as_list, json_schema_input_type=Text | tuple[Text, ...])]


def _file(value: str) -> str:
    if wrong := no_name(value):
        raise ValueError(wrong)
    return value


File = Annotated[Text, AfterValidator(_file)]  # the name of a file or folder


class Block(BaseModel):
    """The base of every block: frozen, and an unknown key is a mistake."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid", allow_inf_nan=False)


class MachineKeys(Block):
    """The keys that say which machines are needed: run file, `Requirements` and the Fleet resource have them all.

    A key that stands here reaches the plan, the provider and the stack's state without another line.
    """

    regions: Words = Field(default=(), description="where machines may be (default: any)")
    nodes: int = Field(default=1, ge=1, le=1024, description="machines")
    gpus_per_node: int = Field(default=0, ge=0, le=16, description="GPUs of a machine; one process each (0: none)")
    gpu: Words = Field(
        default=(), description="GPU types, best first; one type is used for the whole fleet (default: any)"
    )
    disk_gib: int = Field(default=100, ge=1, description="disk of a machine, GiB")
    market: Market = Field(default="on-demand", description="how the machines are bought")
    max_price_usd_per_hour: float = Field(gt=0, description="dollars per hour, whole fleet, all nodes")
    max_hours: float = Field(gt=0, description="hard cap: hours after which the machines end, whatever happens")
    lease_minutes: float = Field(
        default=60,
        gt=0,
        json_schema_extra={"maximum": MOST_HOURS * 60},
        description="minutes that a fleet without a run lives",
    )


class ProviderOptions(Block):
    """The base of a provider's own block: every key has a default; a value is text, a number, yes or no, a list of
    texts, texts by names of the user's, or a block of such. An empty one is one that was not given.

    Stacks and records keep it flattened: texts by key, lists joined by commas, blocks as JSON, without what is not set.
    """

    block: ClassVar[str]  # its name in the run file, which is the provider's

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Raises TypeError: a key that could not be kept."""
        for name, field in cls.model_fields.items():
            if field.is_required() or field.alias is not None:
                raise TypeError(f"{cls.__name__}.{name}: an option has a default, and no alias")

    def contradicts(self, machines: MachineKeys) -> Iterator[tuple[str, str]]:
        """Keys about machines that cannot stand beside this block as it is, each with what is wrong."""
        yield from ()

    def in_folder(self, folder: Path) -> Self:
        """The same, with files that are named relative to a run file's folder named so that any process finds them."""
        return self

    def shares_files(self) -> bool:
        """Whether nodes and this machine see one file system, at the same paths."""
        return False

    def queue_s(self) -> float:
        """Seconds that a request may wait in a queue of the provider's before machines start."""
        return 0.0

    def flat(self) -> dict[str, str]:
        """The options as stacks and records keep them."""
        given = self.model_dump(exclude_none=True)
        texts = {key: _flattened(value) for key, value in given.items()}
        return {key: text for key, text in texts.items() if text}

    @classmethod
    def of(cls, flat: Mapping[str, str]) -> Self:
        """The options of a flattened block; an empty text counts as absent.

        Raises:
            InputError: keys or values that mean nothing here, all of them.
        """
        kinds = {key: field.annotation for key, field in cls.model_fields.items()}
        try:
            return cls.model_validate({key: _parted(value, kinds.get(key)) for key, value in flat.items() if value})
        except ValidationError as error:
            wrong = [_worded(cls, each) for each in error.errors(include_url=False)]
            raise InputError("\n".join(wrong), "", f"Mend `{cls.block}:` of the run file.") from None


def _is_list(annotation: Any) -> bool:
    return get_origin(annotation) in (list, tuple) or any(map(_is_list, get_args(annotation)))


def _is_block(annotation: Any) -> bool:
    model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return model or get_origin(annotation) is dict or any(map(_is_block, get_args(annotation)))


def _flattened(value: Any) -> str:
    """A value of a provider's block as stacks and records keep it."""
    if isinstance(value, dict):
        return json.dumps(value, sort_keys=True) if value else ""
    return _joined(value) if isinstance(value, list | tuple) else str(value)


def _joined(values: Sequence[str]) -> str:
    """Joined by commas; where a text has one itself, as JSON."""
    odd = any("," in value or value.startswith("[") or not value for value in values)
    return json.dumps(list(values)) if odd else ",".join(values)


def _parted(text: str, annotation: Any) -> Any:
    """A value as it was before `_flattened`; what cannot have come from there is left to the model to refuse."""
    if _is_list(annotation) and not text.startswith("["):
        return text.split(",")
    if not (_is_list(annotation) or _is_block(annotation)):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _worded(options: type[ProviderOptions], error: Any) -> str:
    at = ".".join(map(str, (options.block, *error["loc"][:1])))
    if error["type"] == "extra_forbidden":
        return f"{at}: there is no such setting; there are {', '.join(options.model_fields)}"
    return f"{at}: {refusal(error, shown(error['input']))}"
