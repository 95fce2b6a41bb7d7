"""The fixture of the recipes of faults."""

import pytest

from tests.pallas_kernels.kda_recipes import WAYS


@pytest.fixture(params=WAYS, ids=lambda way: "-".join(way))
def way(request):
    return request.param
