"""Telemetry (draft §5.2): what a device and a process report of themselves.

`device_telemetry` chooses NVML or psutil, `cuda_probe` reads a CUDA device field by field, `load` keeps
moving figures of an instance's own speed, and `instance_telemetry` makes the samples that the instance
publishes. It measures, and decides nothing.
"""
