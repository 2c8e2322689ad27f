"""Models of transformers whose sequences several ranks share (`mgpu_train.models.context`)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor

from mgpu_train.errors import TrainError
from mgpu_train.models.context import Context

# in these a token sees others by attention alone, whose function can be replaced, and they are told where it stands
# (`position_ids`). No model of transformers says so itself, so each of them is compared with the whole in our tests
SHARED = ("bert", "gpt2", "gpt_neox", "llama", "mistral", "mixtral", "qwen2", "qwen3")


def share(model: Any, context: Context, tokens: int) -> None:
    """From now on the model is given this rank's part of sequences of so many tokens, and their `position_ids`.

    Raises TrainError: it is not known to be right for this model.
    """
    config = model.config
    if config.model_type not in SHARED:
        raise TrainError(
            f"`train.context_parallel`: ranks share the sequences of models {', '.join(SHARED)}, and this is "
            f"{config.model_type}: take `strategy: fsdp` alone"
        )
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if window is not None and window < tokens:
        raise TrainError(
            f"`train.context_parallel`: the model's attention sees {window} tokens back (`sliding_window`), and shared "
            f"is what sees all {tokens}: lower `train.options.seq_len` to it, or take `strategy: fsdp` alone"
        )
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    kind, most = str(rope.get("rope_type")), rope.get("original_max_position_embeddings")
    most = most or getattr(config, "max_position_embeddings", tokens)
    if (kind == "longrope" or "dynamic" in kind) and tokens > most:
        raise TrainError(
            f"`train.context_parallel`: the model turns positions by how long a sequence of more than {most} tokens is "
            f"(`rope_type: {kind}`), and each rank would take its last token's place for that: lower "
            "`train.options.seq_len` to it, or take `strategy: fsdp` alone"
        )
    name = f"mgpu_context_{context.rank}"
    transformers.AttentionInterface.register(name, partial(_attention, context))
    model.set_attn_implementation(name)
    if config._attn_implementation != name:
        raise TrainError(
            f"`train.context_parallel`: {type(model).__name__} of transformers {transformers.__version__} does not let "
            "its attention be replaced: take `strategy: fsdp` alone"
        )


def _attention(
    context: Context,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **_others: Any,
) -> tuple[Tensor, None]:
    """As transformers' own of torch's `scaled_dot_product_attention`; it is given no mask: nothing is padding."""
    assert attention_mask is None  # noqa: S101 - transformers makes none for an attention that it does not know
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    shared = query.shape[1] != key.shape[1]
    named = {"is_causal": causal, "dropout_p": dropout, "scale": scaling, "enable_gqa": shared}
    found = context.attention(query, key, value, **named)
    return found.transpose(1, 2).contiguous(), None
