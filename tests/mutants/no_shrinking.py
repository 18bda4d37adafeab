"""A plugin of pytest: hypothesis stops at the first failure, which it need not make small."""

from hypothesis import Phase, settings


def pytest_configure() -> None:
    """After the root `conftest.py` has registered its profiles."""
    settings.register_profile(
        "no shrinking",
        parent=settings.get_profile("default"),
        phases=(Phase.explicit, Phase.generate),
        database=None,
    )
    settings.load_profile("no shrinking")
