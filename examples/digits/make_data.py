"""Writes data/digits.csv: 4,000 noisy drawings of digits, 5 × 7 pixels each, and which digit each is."""

from __future__ import annotations

import csv
import random
from pathlib import Path

DIGITS = (
    "01110100011001110101110011000101110",
    "00100011000010000100001000010001110",
    "01110100010000100010001000100011111",
    "11111000100010000010000011000101110",
    "00010001100101010010111110001000010",
    "11111100001111000001000011000101110",
    "00110010001000011110100011000101110",
    "11111000010001000100010000100001000",
    "01110100011000101110100011000101110",
    "01110100011000101111000010001001100",
)
ROWS = 4000
PIXELS = len(DIGITS[0])


def main() -> None:
    draw = random.Random(0)
    folder = Path(__file__).with_name("data")
    folder.mkdir(exist_ok=True)
    with (folder / "digits.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow([*(f"p{pixel}" for pixel in range(PIXELS)), "digit"])
        for _ in range(ROWS):
            digit = draw.randrange(10)
            ink = [int(pixel) + draw.gauss(0, 0.4) for pixel in DIGITS[digit]]
            table.writerow([*(f"{value:.3f}" for value in ink), digit])


if __name__ == "__main__":
    main()
