"""What task `hf` may be told."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, model_validator

from mgpu_train.config import Model, Text

Kind = Literal["causal", "masked", "classifier"]
# of a model on the hub: `gpt2`, `meta-llama/Llama-3.2-1B`; a folder is told by a slash more, or by a dot before it
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


class Lora(Model):
    """Low-rank adapters (Hu et al. 2021): the model's own weights stay as they are, and are in no checkpoint."""

    rank: int = Field(8, ge=1, le=4096, description="of each adapter")
    alpha: int = Field(16, ge=1, description="what an adapter gives is scaled by alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="of what adapters are given")
    targets: tuple[Text, ...] | None = Field(
        None, description="layers that have one, by the ends of their names: q_proj, v_proj (default: all but the head)"
    )
    quantize_base: Literal["nf4"] | None = Field(
        None,
        description="nf4: the model's linear layers between embedding and head keep 4 bits a number (QLoRA; torchao) "
        "(default: float32)",
    )


class HfOptions(Model):
    """Task hf: language models and classifiers of Hugging Face's libraries."""

    model: Text = Field(description="folder on the node with config.json and *.safetensors, or a name on the hub")
    revision: Text | None = Field(None, description="branch, tag or commit on the hub (default: main)")
    from_scratch: bool = Field(False, description="begins with random weights of this configuration")
    tokenizer: Text | None = Field(None, description="folder or name on the hub (default: the model's)")
    kind: Kind = Field(
        "causal",
        description="causal: predicts the next token; masked: predicts tokens that are hidden, as BERT; classifier: "
        "predicts the label of a text",
    )
    data: Text = Field(description="folder or file on the node: text files, or JSON lines (*.jsonl)")
    validation: Text | None = Field(
        None, description="the same for validation (default: one document of ten, by its file and number)"
    )
    text_key: Text = Field("text", description="key of the text in JSON lines")
    prompt_key: Text | None = Field(None, description="key of what stands before the text, and is not learned")
    label_key: Text = Field("label", description="kind classifier: key of the label, a word or a number")
    seq_len: int = Field(512, ge=8, le=1 << 20, description="tokens per sample at most")
    pack: bool | None = Field(
        None,
        description="samples are cut out of all documents, end to end; else each is the beginning of a document "
        "(default: true without labels and prompts)",
    )
    mask_share: float = Field(0.15, gt=0, lt=1, description="kind masked: share of tokens that are predicted")
    lora: Lora | None = Field(None, description="adapters are learned in place of the model (default: all of it is)")

    @property
    def packed(self) -> bool:
        """Whether samples are cut out of documents that lie end to end."""
        return self.pack if self.pack is not None else self.kind != "classifier" and self.prompt_key is None

    @model_validator(mode="after")
    def _together(self) -> HfOptions:
        told = self.model_fields_set
        wrong = {
            "prompt_key is for kind causal": self.prompt_key is not None and self.kind != "causal",
            "label_key is for kind classifier": "label_key" in told and self.kind != "classifier",
            "mask_share is for kind masked": "mask_share" in told and self.kind != "masked",
            "pack goes with no label and no prompt": bool(self.pack)
            and (self.kind == "classifier" or self.prompt_key is not None),
            "lora adapts weights, and with from_scratch there are none": self.lora is not None and self.from_scratch,
            f"revision is of a model on the hub, and {self.model} is a folder": self.revision is not None
            and not on_hub(self.model),
        }
        if found := [words for words, is_wrong in wrong.items() if is_wrong]:
            raise ValueError("; ".join(found))
        return self


def on_hub(model: str) -> bool:
    """Whether it may be a name on the hub."""
    return _HUB.fullmatch(model) is not None
