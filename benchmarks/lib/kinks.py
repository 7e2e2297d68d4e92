"""Whether stages can remember on which side of a kink the arguments of relu were."""

from __future__ import annotations

import resode_kernels as rk

KINKS: dict[str, bool] = {"kinks": True} if "kinks" in rk.StageOptions.__annotations__ else {}
"""The option, where there is one."""
