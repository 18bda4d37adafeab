"""Every public member compiles for the platforms that are promised, on a machine that has none of them.

    pip install -e '.[test,platforms-tpu]'
    python -m pytest -m tpu_compile -n 2 --dist=worksteal tests/platforms
    pip install -e '.[test,platforms]'
    python -m pytest -m gpu_compile -n 2 --dist=worksteal tests/platforms

The extras bring XLA's compilers, which need no device; where they are missing, the tests are skipped.
"""
