"""How good are my gradients? Measures the error of the adjoint method and keeps it below a bound.

tuning.py      diagnose and tune
monitoring.py  monitor: measures the error during training
report.py      Report: the results as text and numbers; drawing.py plots them
probe.py       runs a stage without changing it; input_of records a stage's input in a model
trajectory.py  states and their reconstructions
gradients.py   errors of gradients
constants.py   the paper's constants and bounds
settings.py    the settings that are compared: their errors, memory and times; the choice of one
"""

from ..defaults import GradientErrorWarning
from .monitoring import Monitor, Observation, monitor
from .probe import StageInput, input_of
from .report import Report
from .settings import Setting
from .tuning import diagnose, tune

__all__ = [
    "GradientErrorWarning",
    "Monitor",
    "Observation",
    "Report",
    "Setting",
    "StageInput",
    "diagnose",
    "input_of",
    "monitor",
    "tune",
]
