"""A classifier of drawn digits, as anybody would write it."""

from torch import Tensor, nn


class Digits(nn.Module):
    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.look = nn.Conv2d(1, channels, 3, padding=1)
        self.norm = nn.GroupNorm(4, channels)
        self.hidden = nn.Linear(channels * 35, 64)
        self.classify = nn.Linear(64, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        """Pixels (samples, 35) float32 → logits (samples, 10)."""
        seen = self.norm(self.look(pixels.view(-1, 1, 7, 5))).relu()
        logits: Tensor = self.classify(self.hidden(seen.flatten(1)).relu())
        return logits
