"""Microservice instances (MI): they hold stages of the model and stream tensors. torch and pynvml live here."""
