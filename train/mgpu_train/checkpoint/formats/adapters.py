"""Low-rank adapters that task `hf` has learned, as `peft` has them: its names, and its configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from mgpu_train.checkpoint.formats.archives import Unsupported
from mgpu_train.models.adapters import is_lora
from mgpu_train.tasks.hf_config import HfOptions, Lora

FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_TASKS = {"causal": "CAUSAL_LM", "classifier": "SEQ_CLS"}
_PREFIX = "base_model.model."


def name(name: str) -> str:
    """By which peft stores it."""
    return _PREFIX + (name.replace(".default.", ".") if is_lora(name) else name)


def config(origin: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Of adapters that are stored by these names, in a checkpoint that says this of itself.

    Raises Unsupported: it does not say how they were learned.
    """
    try:
        options = HfOptions.model_validate(origin["config"]["options"])
        lora = Lora.model_validate(options.lora)
    except (LookupError, TypeError, ValidationError) as error:
        raise Unsupported("the checkpoint's meta.json does not say how its adapters were learned") from error
    bare = [each.removeprefix(_PREFIX) for each in names]
    heads = sorted({each.partition(".")[0] for each in bare if not is_lora(each)})
    return {
        "peft_type": "LORA",
        "task_type": _TASKS.get(options.kind),
        "base_model_name_or_path": options.model,
        "revision": options.revision,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted({each.partition(".lora_")[0] for each in bare if is_lora(each)}),
        "modules_to_save": heads or None,
        "bias": "none",
        "inference_mode": True,
    }
