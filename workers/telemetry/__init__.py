"""Telemetry (draft §5.2): what a device and a process report of themselves.

`device_telemetry` chooses NVML or psutil, `cuda_probe` reads a CUDA device field by field, `load` keeps
moving figures of an instance's own speed. The instance publishes what comes of it. It measures, and decides
nothing.
"""
