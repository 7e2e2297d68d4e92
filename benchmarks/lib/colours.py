"""One colour for each way to train, in all pictures."""

from __future__ import annotations

from networks import (
    BFLOAT16_STATES,
    CHANNELS_LAST,
    CHECKPOINT,
    COMPILED,
    PER_BLOCK,
    PLAIN,
    STANDARD,
)

COLOURS = {
    STANDARD: "#4d4d4d",
    CHANNELS_LAST: "#8c8c8c",
    COMPILED: "#56b4e9",
    PER_BLOCK: "#d37295",
    CHECKPOINT: "#b07aa1",
    BFLOAT16_STATES: "#e15759",
    PLAIN: "#9c755f",
    "paper": "#e69f00",
    "refined": "#0072b2",
    "predicted": "#009e73",
    "recorded": "#cc3399",
}
