"""How tokens are chosen: one rule for target and drafter, with noise that a position owns.

`flashduet.sampling.params` (re-exported here) needs no torch; `flashduet.sampling.choose` does and
is imported explicitly by the two services that run models. docs/sampling.md states the rule.
"""

from flashduet.sampling.params import Sampling

__all__ = ["Sampling"]
