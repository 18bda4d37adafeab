"""Published results about clipping and projecting, measured again with clipjax.

    python -m examples.published --fast
    python -m examples.published --markdown docs/published-results.md

One module for each result; `measure()` returns the rows of the table. `__main__` runs them.
"""
