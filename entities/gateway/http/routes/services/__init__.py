"""Routes of model services.

records.py   what services there are, and orders about them: `/v1/services`
"""
