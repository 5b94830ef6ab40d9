"""Tokenizers and chat templates: from texts to tokens and back, without torch.

Gateways use them. They decide nothing about models: a tokenizer is named in a service's job file, or lies
beside the weights.
"""
