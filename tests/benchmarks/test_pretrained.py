"""A real pretrained network as a stage: all-MiniLM-L6-v2, whose weights are in a package."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import unchanged
from networks import minilm
from torch import Tensor
from unchanged import AUTOCAST, SETTINGS, Case

pytestmark = pytest.mark.skipif(minilm.missing() is not None, reason=str(minilm.missing()))


PAIRS = 6


@pytest.fixture(scope="module")
def case() -> Case:
    return unchanged.pretrained(0, PAIRS)


def recorded(bits: int) -> unchanged.Setting:
    return next(s for s in SETTINGS if (s.name, s.bits) == ("recorded", bits))


def test_as_a_stage_it_computes_what_it_did(case: Case) -> None:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(minilm.folder(), attn_implementation="eager").eval()
    tokens = minilm.sentence_pairs(PAIRS, seed=0)
    assert tokens.shape == (2 * PAIRS, minilm.TOKENS)
    with torch.no_grad():
        theirs = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).last_hidden_state
        torch.testing.assert_close(case.stage(case.x), theirs, rtol=1e-4, atol=1e-4)


def test_the_pairs_belong_together(case: Case) -> None:
    """The pretrained network tells the sentences of a pair from the others."""
    with torch.no_grad():
        first, second = minilm.embeddings(case.stage(case.x)).chunk(2)
    nearest = (first @ second.T).argmax(1)
    assert (nearest == torch.arange(PAIRS)).float().mean() > 0.8


def test_recorded_increments_are_more_precise_than_autocast(case: Case) -> None:
    """The rules that keep nothing are of no use here."""
    paper = next(s for s in SETTINGS if s.name == "paper")
    chosen = [(setting, False) for setting in (recorded(8), recorded(4), paper, AUTOCAST)]
    eight, four, none, autocast = unchanged.errors(case, chosen).values()
    assert eight == pytest.approx(4e-3, rel=0.25)
    assert four == pytest.approx(7e-2, rel=0.25)
    assert 2 * eight < autocast < four
    assert none > 1


def test_it_learns_with_recorded_increments(case: Case) -> None:
    """As with exact gradients."""

    def loss_after(steps: int, configure: Callable[[unchanged.Case], None]) -> float:
        mine = case.to(torch.float32)
        configure(mine)
        optimizer = torch.optim.SGD(mine.stage.parameters(), 1e-2)
        for _ in range(steps):
            loss: Tensor = mine.loss(mine.stage(mine.x))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            return float(mine.loss(mine.stage(mine.x)))

    before = loss_after(0, lambda mine: None)
    exact = loss_after(3, lambda mine: mine.stage.configure(backward="stored"))
    ours = loss_after(3, lambda mine: mine.stage.configure(reverse="recorded"))
    assert exact < before
    assert ours == pytest.approx(exact, abs=0.02 * (before - exact))
