from math import cos, pi

from model import GPT, GPTConfig


def gpt(**args):
    return GPT(GPTConfig(**args))


def rate(step, total):
    return (step + 1) / 11 if step < 10 else 0.1 + 0.45 * (1 + cos(pi * (step - 10) / 40))
