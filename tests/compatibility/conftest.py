from __future__ import annotations

import pytest
from compatibility import RECORDED, WITH_RECORDED, Case


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Case:
    kind = request.param.removesuffix(WITH_RECORDED)
    return Case(kind, **(RECORDED if kind != request.param else {}))
