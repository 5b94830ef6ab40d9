"""The kinds of data that are read where they lie, one reader a file (`workers.data.opening.KINDS`).

Each gives `Samples`: a length and random access. Which samples a batch has is decided elsewhere, and so is
what becomes of one that can't be read.
"""
