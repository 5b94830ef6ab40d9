"""What a running job's figures say: alerts, speed, and signs of failing hardware.

`job.training` feeds `Alerts` and `JobFigures` with every decided step; `checkpointing` asks `hardware_risk`.
Nothing here acts: an alert changes neither routes nor members.

alerts.py            `Alerts`: loss spikes, gradient norms, stragglers, heat; raised once, cleared once
outlier_detector.py  `OutlierDetector`: the test behind them, a modified z-score with hysteresis; pure
job_figures.py       `JobFigures`: tokens per second, convergence, FLOPs, for metrics; pure
hardware_risk.py     how likely a device is about to fail; pure
"""
