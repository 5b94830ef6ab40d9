"""Figures of a job, pure: what is worth an alert, and what its speed is.

`alerts` decides when a loss, a gradient norm, a straggler or a temperature is reported, by
`outlier_detector`; `job_figures` are metrics; `hardware_risk` reads signs of a failing device. Training
calls it. It changes nothing.
"""
