"""An instance that serves: sessions bound to it, waves computed and handed on, tokens published, predictions.

It decides what an instance of a version does with the requests of gateways: which sessions it works for
(`session_machine`), which of their rows are computed next (`wave_choice`), what goes to which neighbour
(`wave_hop`), and how single passes are put together (`prediction_batches`). `workers.instance` runs it
(`serving_runtime`) where the job file has `serve`.

It trains nothing, and has no part in the step transaction. It keeps nothing on disk (ADR-0144).
"""
