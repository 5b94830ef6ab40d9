"""Microservice instances (MI): they hold stages of the model and stream tensors. Home of torch and pynvml."""

from schemas.former_names import keep_former_names

keep_former_names()
