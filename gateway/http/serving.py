"""What is served at the moment, for a request that names a model."""

from __future__ import annotations

from flashduet.errors import Unavailable, UnknownModel
from gateway.gateway import Gateway
from gateway.router import ServedModel
from gateway.tokenization import Tokenizer


def serving(gateway: Gateway, model: str | None) -> tuple[ServedModel, Tokenizer]:
    """The served model, which must be the one asked for (None: any), and its tokenizer.

    Raises:
        Unavailable: nothing is served.
        UnknownModel: something else is.
    """
    served = gateway.served()
    if served is None or gateway.tokenizer is None:
        raise Unavailable("no target serves at the moment")
    if model is not None and model != served.name:
        raise UnknownModel(model, served.name)
    return served, gateway.tokenizer
