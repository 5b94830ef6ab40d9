"""The doors of model services: OpenAI's models and completions, predictions, and going on with an answer.

On OpenAI's paths answers and errors have its shapes (docs/serving.md), and what is not supported is refused
by name. The routes keep no state; `entities.gateway.generation` answers.
"""
