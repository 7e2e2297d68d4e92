"""The fused path: a whole stage is one kernel call in each direction.

autograd.py   the autograd.Function of a stage
ops.py        the forward and the reverse pass as torch.library ops
gate.py       which tensors the ops read, and which gradients they compute
batching.py   the two passes under torch.vmap

``resode_kernels.functional`` makes the ``Problem``, ``resode_kernels.backends`` run it. Stages
whose blocks are modules take the other path, ``resode_kernels.replay``.
"""
