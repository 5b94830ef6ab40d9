"""OpenVINO GenAI's continuous batching, in an interpreter of its own: its exporter takes other libraries.

side.py     here: the child that computes, asked by lines of JSON
child.py    there: exports the Llama, says how many of its tokens are transformers', and answers prompts
"""
