"""Draws data/CLASS/NUMBER.png: 900 pictures of circles, squares and triangles, 36 × 36 pixels each."""

from __future__ import annotations

import random
from pathlib import Path

from PIL import Image, ImageDraw

SIDE = 36
PICTURES = 300


def picture(shape: str, draw: random.Random) -> Image.Image:
    image = Image.new("RGB", (SIDE, SIDE), tuple(draw.randrange(0, 100) for _ in range(3)))
    radius = draw.uniform(8, 14)
    x, y = (draw.uniform(radius, SIDE - radius) for _ in range(2))
    colour = tuple(draw.randrange(155, 256) for _ in range(3))
    pen = ImageDraw.Draw(image)
    if shape == "circle":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), colour)
    else:
        sides = 3 if shape == "triangle" else 4
        pen.regular_polygon((x, y, radius), sides, draw.uniform(0, 10), colour)
    return image


def main() -> None:
    draw = random.Random(0)
    for shape in ("circle", "square", "triangle"):
        folder = Path(__file__).with_name("data") / shape
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(PICTURES):
            picture(shape, draw).save(folder / f"{number}.png")


if __name__ == "__main__":
    main()
