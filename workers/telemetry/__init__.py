"""Measurements of a device, a process and its own speed (draft §5.2).

It decides how a figure is read and averaged, and never raises: an unknown figure is None. `instance`
publishes the samples, `links` uses the moving average. It publishes nothing itself and judges nothing.

- `device_telemetry`: one sample of a device; memory of this process.
- `cuda_probe`: CUDA devices through NVML.
- `load`: moving averages, and an instance's time per microbatch.
"""
