"""How tokens are chosen: one rule for target and drafter, with noise that a position owns.

What is re-exported here needs no torch; `flashduet.sampling.choose` and `.logprobs` do and are
imported explicitly by the two services that run models. docs/sampling.md states the rule.
"""

from flashduet.sampling.logit_bias import LogitBias
from flashduet.sampling.params import Sampling
from flashduet.sampling.position_logprobs import (
    MAX_TOP_LOGPROBS,
    PositionLogprobs,
    TokenLogprob,
)

__all__ = ["MAX_TOP_LOGPROBS", "LogitBias", "PositionLogprobs", "Sampling", "TokenLogprob"]
