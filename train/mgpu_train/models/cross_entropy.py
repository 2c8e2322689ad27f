"""Cross-entropy of large vocabularies, which moves more memory than any block does where it is not compiled."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it


class CrossEntropy(nn.Module):
    """Summed, in nat, in float32. Compiled, neither the logits nor their logarithms are written out in float32: of a
    vocabulary of 50,000 that is 0.6 MB a token, forward and backward."""

    def __init__(self, left_out: int = -100) -> None:
        """`left_out`: the target that does not count."""
        super().__init__()
        self.left_out = left_out

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """(..., classes) and the class of each, int64, (...) -> a number."""
        guess, wanted = logits.flatten(0, -2).float(), targets.flatten()
        return F.cross_entropy(guess, wanted, reduction="sum", ignore_index=self.left_out)
