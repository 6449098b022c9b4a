"""Does a drafter belong to a target? Checked at load, and again with every target that attaches.

A wrong pair still gives right answers, only slowly: acceptance collapses in silence. So every
mismatch is refused, with words that say which it is and what to do.
"""

from __future__ import annotations

from draft_service.config import DrafterConfig
from draft_service.draft_vocabulary import DraftVocabulary
from flashduet.errors import Incompatible
from flashduet.v1.common_pb2 import ModelFacts

_SAME_TARGET = (
    "give FLASHDUET_DRAFT_TARGET_MODEL the same checkpoint as FLASHDUET_TARGET_MODEL, or attach "
    "this target to another draft service"
)
_OTHER_DRAFTER = "set FLASHDUET_DRAFT_MODEL to a drafter trained for this target"


def check_drafter(config: DrafterConfig, vocabulary: DraftVocabulary, facts: ModelFacts) -> None:
    """Does the drafter fit the target, and the embedding and head that it is to use?

    Raises:
        Incompatible: names the first property that differs.
    """
    _check_config(config, facts)
    for label, matrix in (("embedding", vocabulary.embedding), ("head", vocabulary.head)):
        if matrix.shape[1] != config.hidden_size:
            raise _differs(
                f"{label} width", config.hidden_size, matrix.shape[1], facts.name, _OTHER_DRAFTER
            )
    rows = vocabulary.vocab_size
    if vocabulary.mask_embedding is None and config.mask_token_id >= rows:
        raise _differs(
            "mask token id", f"less than {rows}", config.mask_token_id, facts.name, _OTHER_DRAFTER
        )


def check_target(config: DrafterConfig, own: ModelFacts, attached: ModelFacts) -> None:
    """Does a target that wants to attach fit the drafter, and the target read at start?

    Args:
        own: facts of the target whose embedding and head this service reads.
        attached: facts from the target's Hello.

    Raises:
        Incompatible: names the first property that differs.
    """
    _check_config(config, attached)
    for label, field in (
        ("hidden size", "hidden_size"),
        ("number of layers", "num_layers"),
        ("vocabulary size", "vocab_size"),
    ):
        expected, found = getattr(own, field), getattr(attached, field)
        if expected != found:
            raise _differs(label, expected, found, attached.name, _SAME_TARGET)
    hashes = own.tokenizer_hash, attached.tokenizer_hash
    # Without a tokenizer on one side there is nothing to compare.
    if all(hashes) and hashes[0] != hashes[1]:
        raise _differs("tokenizer hash", hashes[0], hashes[1], attached.name, _SAME_TARGET)


def _check_config(config: DrafterConfig, facts: ModelFacts) -> None:
    if config.feature_size != facts.hidden_size:
        raise _differs(
            "hidden size", config.feature_size, facts.hidden_size, facts.name, _OTHER_DRAFTER
        )
    trained_for = config.num_target_layers
    if trained_for is not None and trained_for != facts.num_layers:
        raise _differs(
            "number of layers", trained_for, facts.num_layers, facts.name, _OTHER_DRAFTER
        )
    if config.vocab_size != facts.vocab_size:
        raise _differs(
            "vocabulary size", config.vocab_size, facts.vocab_size, facts.name, _OTHER_DRAFTER
        )
    if (highest := max(config.target_layer_ids)) >= facts.num_layers:
        raise _differs(
            "target layer ids",
            f"{list(config.target_layer_ids)}, so more than {highest} layers",
            f"{facts.num_layers} layers",
            facts.name,
            _OTHER_DRAFTER,
        )


def _differs(what: str, expected: object, found: object, name: str, advice: str) -> Incompatible:
    return Incompatible(
        f"drafter and target {name!r} do not fit: {what}: the drafter expects {expected}, the "
        f"target has {found}; {advice}"
    )
