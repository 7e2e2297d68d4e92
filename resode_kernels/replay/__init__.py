"""The path of modules: blocks run in PyTorch, and the backward pass runs them again.

function.py      the autograd.Function of a stage of modules
blocks.py        modules as blocks whose evaluations can be repeated exactly
calls.py         calls of modules, with the arguments that a stage passes on
verification.py  whether a replay computes what the forward pass did
turns.py         threads take turns at running modules
parameters.py    the places of parameters in modules, and stand-ins to put there
surroundings.py  random number generators and autocast
kinks.py         on which sides of their kinks the arguments of functions lie

The forward and the reverse pass are in ``reference.py``. Stages with fused kernels take the other
path, ``resode_kernels.fused``.
"""
