"""Microservice instances (MI): they hold stages of the model and stream tensors. Home of torch and pynvml."""
