"""Hot links and forecasts of their load on GEANT's matrices; the test that declines Facebook's pods.

Loads are demands sent over each pair's first (shortest) tunnel, over capacity. A link is hot when it is above
the 90 % quantile of its own training part. The forecast is the mean of two (J. M. Bates, C. W. J. Granger:
The combination of forecasts, Oper. Res. Quarterly 20, 1969): of the links from their own past, and bottom-up,
where each demand is forecast and the sums over the links are taken (G. Athanasopoulos et al.: Hierarchical
forecasts, Int. J. Forecasting 25, 2009). As live, models are fitted again every six hours to all that came
before. MASE is the mean absolute error over that of the last value, both on the held-out part: of all links
together, and the mean of each link's own.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.emptiness import NothingMeasured, both_classes, some
from benchmarks.policy_data.te import Floats, Network, load_matrices, load_network
from benchmarks.policy_sections.scores import auroc, brier, calibration_error, error_ratio
from benchmarks.policy_sections.sheet import Bench
from policies.numerics.conformal import Conformal
from policies.numerics.forecasting import ForecastConfig, Trend, fit
from policies.numerics.serial_correlation import serial_correlation

Indices = NDArray[np.int64]

TRAINED = 0.7
DAY = 96
"""Matrices; one every 15 minutes."""
HOT = 0.9
REFIT = 24
LEARNT = 16
"""Matrices before the held-out part that the model in hindsight needs for its features."""
AR_LAGS, AR_RIDGE = 12, 10.0
BARS = {1: (0.955, 0.95), 5: (0.90, 0.93)}
"""Steps ahead → AUROC, MASE."""


def run(bench: Bench) -> None:
    folder = bench.data / "te" / "figret"
    network = load_network(folder / "GEANT")
    demands = load_matrices(folder / "GEANT" / "tms_0-399" / "7.hist", network.nodes)
    cut = round(TRAINED * len(demands))
    where = folder / "GEANT"
    some(demands[:cut], "matrices to train", where, "two days and more are needed", least=2 * DAY)
    some(demands[cut:], "held-out matrices", where, least=max(BARS) + 2)
    if not demands[:cut].std(axis=0).any() or not demands[cut:].std(axis=0).any():
        raise NothingMeasured("no demand that changes", where)
    loads = demands @ network.incidence().T / network.capacity
    bench.say(
        f"GEANT: {len(demands)} matrices, {len(network.links)} links; trained on the first {cut}, "
        f"scored on the rest, fitted again every {REFIT}"
    )
    for name in ("Facebook_pod_a", "Facebook_pod_b"):
        pod = load_network(folder / name)
        matrices = load_matrices(folder / name / "train" / "1.hist", pod.nodes)
        found = serial_correlation(matrices)
        bench.say(f"{name}: {len(matrices)} matrices, {found}")
        bench.at_most(f"{name} taken for forecastable", float(found.forecastable), 0)
    found = serial_correlation(loads[:cut])
    bench.say(f"GEANT: {found}")
    bench.at_least("GEANT taken for forecastable", float(found.forecastable), 1)
    for horizon in BARS:
        _horizon(bench, network, demands, loads, cut, horizon)


def _horizon(bench: Bench, network: Network, demands: Floats, loads: Floats, cut: int, horizon: int) -> None:
    config = ForecastConfig(horizon=horizon, season=DAY)
    rows = np.arange(cut, len(demands) - horizon)
    forecasts = _rolling(network, demands, loads, rows, config)
    forecast, truth, last = forecasts.mean(axis=0), loads[rows + horizon], loads[rows]
    seen = np.arange(round((1 - config.calibration) * cut), cut - horizon)
    calibration = _rolling(network, demands[:cut], loads[:cut], seen, config).mean(axis=0)
    conformal = Conformal.of(np.sqrt(loads[seen + horizon]) - np.sqrt(calibration))
    threshold = np.quantile(loads[:cut], HOT, axis=0)
    hot = truth > threshold
    both_classes(hot.ravel(), "held-out loads (of a hot link, or not)", bench.data / "te")
    chance = conformal.above(np.sqrt(forecast), np.sqrt(threshold))
    ratio = np.divide(last, threshold, out=np.zeros_like(last), where=threshold > 0)
    autoregressive = autoregression(loads, cut, horizon)[rows]
    least, most = BARS[horizon]
    label = f"{horizon} step{'s' if horizon > 1 else ''}"
    bench.at_least(f"{label}: AUROC of a hot link", auroc(chance, hot), least, last_value=auroc(ratio, hot))
    bench.at_most(
        f"{label}: MASE",
        error_ratio(forecast, last, truth),
        most,
        AR_12=error_ratio(autoregressive, last, truth),
        bottom_up=error_ratio(forecasts[0], last, truth),
        links=error_ratio(forecasts[1], last, truth),
    )
    bench.at_most(
        f"{label}: MASE, mean over links",
        _mean_ratio(forecast, last, truth),
        most,
        AR_12=_mean_ratio(autoregressive, last, truth),
    )
    hindsight = fit(loads[cut - DAY - LEARNT :], config)
    known = hindsight.levels(np.sqrt(loads) / hindsight.scale, rows)
    bench.told(
        f"{label}: MASE of links in hindsight",
        error_ratio(hindsight.value(known), last, truth),
        note="the same model fitted to the held-out part itself",
    )
    if bench.pictures is not None:
        _draw(bench.pictures, loads, rows, forecast, conformal, horizon)
    for coverage in (0.8, 0.95):
        low, high = conformal.interval(np.sqrt(forecast), coverage)
        inside = (truth >= np.maximum(low, 0) ** 2) & (truth <= high**2)
        bench.told(f"{label}: within the {coverage:.0%} interval", float(inside.mean()))
    often = np.full(hot.shape, (loads[:cut] > threshold).mean())
    bench.told(
        f"{label}: Brier score of a hot link",
        brier(chance, hot),
        always_the_same=brier(often, hot),
        last_value=brier((last > threshold).astype(float), hot),
    )
    bench.told(f"{label}: calibration error", calibration_error(chance, hot))
    live = demands[:cut].std(axis=0) > 0
    model, recent = fit(demands[:cut, live], config), demands[:cut, live]
    bench.latency(f"{label}: inference, {recent.shape[1]} series", lambda: model.predict(recent))


def _mean_ratio(forecast: Floats, naive: Floats, truth: Floats) -> float:
    """MASE of each link by itself, and their mean; links that did not change are left out."""
    error, scale = np.abs(forecast - truth).sum(axis=0), np.abs(naive - truth).sum(axis=0)
    return float(np.mean(error[scale > 0] / scale[scale > 0]))


def _draw(
    folder: Path, loads: Floats, rows: Indices, forecast: Floats, conformal: Conformal, horizon: int
) -> None:
    """The busiest links of the held-out part, with 80 % intervals, as `forecast-HORIZON.png`."""
    from dmsc.plots import save
    from dmsc.plots.forecast import PANELS, Course, draw_forecasts

    low, high = conformal.interval(np.sqrt(forecast), 0.8)
    courses = {}
    for link in np.argsort(-loads[rows].mean(axis=0))[:PANELS]:
        courses[f"link {link}"] = Course(
            at=(rows / 4).tolist(),
            value=loads[rows, link].tolist(),
            forecast_at=((rows + horizon) / 4).tolist(),
            expected=forecast[:, link].tolist(),
            low=(np.maximum(low[:, link], 0) ** 2).tolist(),
            high=(high[:, link] ** 2).tolist(),
        )
    folder.mkdir(parents=True, exist_ok=True)
    title = f"GEANT, held-out part, {horizon} step{'s' if horizon > 1 else ''} ahead"
    figure = draw_forecasts(title, courses, unit="utilisation", coverage="80 %", x_unit="hours")
    save(figure, folder / f"forecast-{horizon}.png")


def _rolling(
    network: Network, demands: Floats, loads: Floats, rows: Indices, config: ForecastConfig
) -> Floats:
    """Forecasts of the links from each of `rows`: bottom-up, and from the links' own past.

    Returns:
        `(2, rows, links)`. Models are fitted again every `REFIT` rows to all that came before.
    """
    blocks = []
    for at in range(0, len(rows), REFIT):
        now = rows[at : at + REFIT]
        known = now[0] + 1
        live = demands[:known].std(axis=0) > 0
        routed = network.incidence()[:, live] / network.capacity[:, None]
        parts = [
            _levels(fit(demands[:known, live], config), demands[:, live], now) @ routed.T,
            _levels(fit(loads[:known], config), loads, now),
        ]
        blocks.append(np.stack(parts))
    return np.concatenate(blocks, axis=1)


def _levels(model: Trend, series: Floats, rows: Indices) -> Floats:
    """Forecasts from several moments at once; each looks at what came before it only."""
    return model.value(model.levels(np.sqrt(series) / model.scale, rows))


def autoregression(loads: Floats, cut: int, horizon: int) -> Floats:
    """The baseline: AR(12) of each link's standardised changes, fitted to the training part, direct.

    Returns:
        `(times, links)`: at `t` the forecast for `t + horizon`; NaN where there is not enough past.
    """
    mean, deviation = loads[:cut].mean(axis=0), loads[:cut].std(axis=0)
    deviation = np.where(deviation > 0, deviation, 1.0)
    level = (loads - mean) / deviation
    change = np.diff(level, axis=0, prepend=level[:1])
    out = np.full_like(level, np.nan)
    penalty = AR_RIDGE * np.eye(AR_LAGS + 1)
    penalty[-1, -1] = 1e-9
    rows = np.arange(AR_LAGS - 1, len(loads) - horizon)
    trained = rows[rows < cut - horizon]
    for link in range(loads.shape[1]):
        past = np.stack([change[rows - lag, link] for lag in range(AR_LAGS)] + [np.ones(len(rows))], axis=1)
        seen = past[: len(trained)]
        wanted = level[trained + horizon, link] - level[trained, link]
        out[rows, link] = level[rows, link] + past @ np.linalg.solve(seen.T @ seen + penalty, seen.T @ wanted)
    forecast: Floats = out * deviation + mean
    return forecast
