"""The hint that names the extra of a package that is missing."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Import the packages of an extra, whose module has the same name."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"clipjax.{name} needs {error.name}, which is not installed: "
            f'pip install "clipjax[{name}]"',
            name=error.name,
        ) from error
