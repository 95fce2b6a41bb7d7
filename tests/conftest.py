"""What all tests share: quick compilation.

Tests compile far more than they compute, so code generation runs without LLVM's optimisations;
XLA's own passes, which decide the arithmetic, stay on. `make test-full` keeps everything on. Set
before jax is imported, and inherited by the programs that tests start.
"""

import os

import pytest

QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def pytest_configure(config):
    if config.getoption("markexpr") != "full":
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK}"


@pytest.fixture
def quick():
    """Quick compilation in `make test-full` too, of what is large and need not be fast."""
    import jax  # not before the flags above are set

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
