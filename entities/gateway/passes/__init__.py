"""Single passes on their way to instances: which requests travel in one message (ADR-0187).

`generation/single_passes.py` calls it. It knows neither services nor versions, chooses no path, and looks
into no tensor.

gathered_passes.py   `GatheredPasses`: requests to the same instances, and what each of them is answered
"""
