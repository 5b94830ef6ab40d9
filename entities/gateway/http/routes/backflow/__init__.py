"""Routes of what is kept of requests: what users say about it, and what services have of it.

consents.py  `/v1/consents`, `/v1/feedback`: for whoever asks services
kept.py      `/v1/services/{service}/kept`: for whoever runs one
"""
