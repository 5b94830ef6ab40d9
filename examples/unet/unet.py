"""A small U-Net, and drawn discs under noise that it is to remove."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def block(taken: int, made: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(taken, made, 3, padding=1),
        nn.GroupNorm(4, made),
        nn.SiLU(),
        nn.Conv2d(made, made, 3, padding=1),
        nn.SiLU(),
    )


class UNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down1, self.down2 = block(1, width), block(width, 2 * width)
        self.middle = block(2 * width, 4 * width)
        self.rise2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.up2 = block(4 * width, 2 * width)
        self.rise1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.up1 = block(2 * width, width)
        self.last = nn.Conv2d(width, 1, 1)
        self.pool = nn.MaxPool2d(2)

    def forward(self, noisy: Tensor) -> Tensor:
        """Images (samples, 1, side, side) → the same without noise; the side is a multiple of 4."""
        fine = self.down1(noisy)
        coarse = self.down2(self.pool(fine))
        risen = self.rise2(self.middle(self.pool(coarse)))
        coarse = self.up2(torch.cat([coarse, risen], dim=1))
        fine = self.up1(torch.cat([fine, self.rise1(coarse)], dim=1))
        clean: Tensor = self.last(fine)
        return clean


class NoisyDiscs:
    """Two discs of different brightness each. What is drawn follows from the index, the noise from torch's
    generator, which is seeded anew for each sample of each epoch."""

    def __init__(self, count: int = 2000, side: int = 16) -> None:
        self.count, self.side = count, side

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        own = torch.Generator().manual_seed(index)
        y, x = torch.meshgrid(torch.arange(self.side), torch.arange(self.side), indexing="ij")
        clean = torch.zeros(1, self.side, self.side)
        for brightness in (0.5, 1.0):
            place = torch.rand(2, generator=own) * self.side
            radius = 2 + 3 * torch.rand(1, generator=own)
            clean[0, (x - place[0]) ** 2 + (y - place[1]) ** 2 < radius**2] = brightness
        return {"noisy": clean + 0.4 * torch.randn(clean.shape), "targets": clean}
