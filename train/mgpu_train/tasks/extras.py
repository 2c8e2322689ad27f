"""Which of mgpu-train's extras a training needs, as far as its run file says: known before anything is rented."""

from __future__ import annotations

from mgpu_train.config import TrainConfig
from mgpu_train.tasks import entry
from mgpu_train.tasks.diffusion_config import DiffusionOptions
from mgpu_train.tasks.hf_config import HfOptions
from mgpu_train.tasks.recommender_config import RecommenderOptions
from mgpu_train.tasks.vision_config import VisionOptions

_HAS_TOO = {"timm": ("vision",)}  # as pyproject.toml says


def lacking(train: TrainConfig, there: tuple[str, ...]) -> dict[str, str]:
    """The extras that this training needs and that are not among those which are there, each with the key for which.
    What files on the node need is not known here, nor what somebody else's task or strategy does."""
    needed = _needed(train, there)
    brought = (more for each in (*there, *needed.values()) for more in _HAS_TOO.get(each, ()))
    have = {*there, *brought}
    return {extra: key for key, extra in needed.items() if extra not in have}


def _needed(train: TrainConfig, there: tuple[str, ...]) -> dict[str, str]:
    """By key."""
    needed = {
        "`train.strategy: deepspeed`": ("deepspeed", train.strategy == "deepspeed"),
        "`train.precision: fp8`": ("torchao", train.precision == "fp8"),
        "`train.optimizer: adamw8bit`": ("torchao", train.optimizer == "adamw8bit"),
    }
    task = entry.OURS.get(train.task)
    options = task and task.options.model_validate(train.task_options)
    match options:
        case HfOptions():
            quantized = bool(options.lora and options.lora.quantize_base)
            needed |= {
                "`train.task: hf`": ("hf", True),
                "`train.options.lora.quantize_base`": ("torchao", quantized),
            }
        case VisionOptions() | DiffusionOptions():
            timm, weights = (options.timm, options.weights) if isinstance(options, VisionOptions) else (None, None)
            lacks = weights is not None and weights.endswith(".safetensors") and "hf" not in there  # has it, too
            needed |= {
                "`train.options.model`": ("timm", bool(timm)),
                "the safetensors of `train.options.weights`": ("timm", lacks),
                "the digits that are the default of `train.options.data`": ("vision", options.data is None),
            }
        case RecommenderOptions():
            needed["`train.options.data`"] = ("recommender", options.data.lower().endswith(".parquet"))
        case _:
            pass
    return {key: extra for key, (extra, wanted) in needed.items() if wanted}
