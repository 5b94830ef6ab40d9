"""The models behind the built-in policies: statistics, forecasts, bandits, path splits. Pure numpy.

Each file holds one method with its papers, and decides nothing about a mesh. The policies of `built_in`, the
kit's views and the scores call it; the benchmarks of `make bench-policies` measure it. There is no clock, no
bus and no randomness without a seed.

- `features`: sliding windows, cleaning, normalisation (public, for users' policies too).
- `forecasting`, `conformal`, `serial_correlation`, `link_history`: forecasts of links.
- `drift`: whether errors still come from where they came from.
- `conservative_bandit`, `failure_rate`, `outages`: decisions and rates under uncertainty.
- `sequential/`: whether a new version does worse than the one beside it.
- `allocation/`: where work should go, among instances and over paths.
"""
