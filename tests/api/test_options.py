"""The options of stages are written down once, and editors, mypy and ``help`` know them."""

from __future__ import annotations

import inspect
import re
from typing import get_args, get_origin, get_type_hints

import pytest
from typing_extensions import Unpack

import resode_kernels as rk
from resode_kernels import backends, functional, reference
from resode_kernels.options import ORDERS, BackendName, Options, ReverseRule

STAGES = [rk.MLPStage, rk.LinearStage, rk.ConvStage, rk.ResidualStage]
SCREEN = 50  # lines


def test_the_checked_options_are_the_ones_that_users_write() -> None:
    assert get_type_hints(Options) == get_type_hints(rk.StageOptions)
    assert Options.names() == tuple(get_type_hints(rk.StageOptions))


def test_every_list_of_names_is_complete() -> None:
    assert ("auto", *backends.REGISTRY) == get_args(BackendName)
    assert tuple(ORDERS) == get_args(ReverseRule)
    assert tuple(reference.ACTIVATIONS) == functional.ACTIVATIONS


@pytest.mark.parametrize("stage", STAGES)
def test_help_shows_signature_and_options_on_one_screen(stage: type[rk.Stage]) -> None:
    text = inspect.getdoc(stage)
    assert text is not None
    assert len(text.splitlines()) < SCREEN
    for name in Options.names():
        assert re.search(rf"^ *{name}  +\S", text, re.MULTILINE), name


@pytest.mark.parametrize(
    "function",
    [
        *(stage.__init__ for stage in STAGES),
        rk.Stage.configure,
        functional.mlp_stage,
        functional.linear_stage,
        functional.conv_stage,
    ],
)
def test_keywords_are_typed(function: object) -> None:
    hint = get_type_hints(function, include_extras=True)["options"]
    assert get_origin(hint) is Unpack
    assert get_args(hint) == (rk.StageOptions,)
