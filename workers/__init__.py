"""Microservice instances (MI): they hold stages of the model and stream tensors. Here live torch and pynvml."""
