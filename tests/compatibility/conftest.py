from __future__ import annotations

import pytest
from compatibility import Case


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)
