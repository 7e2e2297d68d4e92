"""How good are my gradients? Measures the error of the adjoint method and keeps it below a bound.

tuning.py        diagnose and tune
examination.py   the diagnosis of a stage, part by part; budget.py keeps it within its seconds
model.py         the diagnosis of all stages of a model under one bound
monitoring.py    monitor: measures the error during training
report.py        Report of a stage, model_report.py ModelReport: the results as text and numbers
drawing.py       the results as pictures
probe.py         runs a stage without changing it
calls.py         the stages of a model and their calls; input_of records a stage's input
trajectory.py    states and their reconstructions
gradients.py     errors of gradients
constants.py     the paper's constants and bounds
settings.py      the settings that are compared
measuring.py     their errors, times and memory (memory.py)
choice.py        the choice of one
"""

from ..defaults import GradientErrorWarning
from .calls import StageInput, input_of
from .model_report import ModelReport
from .monitoring import Monitor, Observation, monitor
from .report import Report
from .settings import Setting
from .tuning import diagnose, tune

__all__ = [
    "GradientErrorWarning",
    "ModelReport",
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
