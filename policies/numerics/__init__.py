"""Statistics for policies, pure and vectorised (numpy): features, forecasts, tests, bandits, scores of
paths.

Each file is one method with its source. Built-in policies and users' own call them. Nothing here knows the
bus, a job or a clock.
"""
