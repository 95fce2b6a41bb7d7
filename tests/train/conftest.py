"""A tiny run shared by the tests of training."""

import pytest

from tests.train.stub import Run, make_run


@pytest.fixture(scope="session")
def run() -> Run:
    return make_run()
