"""What all tests share: quick compilation.

Tests compile far more than they compute, so code generation runs without LLVM's optimisations;
XLA's own passes, which decide the arithmetic, stay on. `make test-full` keeps everything on. Set
before jax is imported, and inherited by the programs that tests start.
"""

import os

QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def pytest_configure(config):
    if config.getoption("markexpr") != "full":
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK}"
