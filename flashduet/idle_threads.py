"""How compute threads wait for their next piece of work. Import it before torch.

A service without work must not spin: the pair shares cores and takes turns. But between the
operations of one pass, some ten microseconds apart, sleeping and waking costs more than the work
(measured on two cores: 24 ms instead of 17 for a token, 40 instead of 23 for 16). So threads spin
for a fraction of a millisecond (GNU, in turns of a loop), or for one (Intel and LLVM).

Whatever is set already stays.
"""

from __future__ import annotations

import os

WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "20000", "KMP_BLOCKTIME": "1"}

for _name, _value in WAITING.items():
    os.environ.setdefault(_name, _value)
