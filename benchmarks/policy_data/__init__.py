"""A loader per data set. Each takes a path and returns arrays or frozen records, or raises `WrongForm`.

Files of the same form from elsewhere serve as well: each loader's docstring says the form.
"""
