"""How good are my gradients? Looking at the error of the adjoint method, and bounding it.

tuning.py      diagnose and tune
monitoring.py  monitor: the same in training
report.py      what was found; drawing.py draws it
probe.py       runs a stage without a trace; input_of: what it is called with in a model
trajectory.py  states and their reconstructions
gradients.py   errors of gradients
constants.py   the paper's constants and bounds
settings.py    the settings that are compared: errors, memory, time; and the choice
"""

from .monitoring import GradientErrorWarning, Monitor, Observation, monitor
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
