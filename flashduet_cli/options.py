"""Command-line options that several commands share, worded once."""

from __future__ import annotations

from typing import Annotated

import typer

from flashduet.settings import DtypeChoice, TransportChoice

DEFAULT_ENDPOINT = "127.0.0.1:50050"

Endpoint = Annotated[
    str, typer.Option(help="The gateway's gRPC address.", envvar="FLASHDUET_ENDPOINT")
]
# Of commands that start a stack of their own where none is named.
OwnEndpoint = Annotated[
    str | None,
    typer.Option(
        help=f"The gateway's gRPC address. Default: {DEFAULT_ENDPOINT}, or a stack of the call's "
        "own where none serves there.",
        envvar="FLASHDUET_ENDPOINT",
        show_default=False,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(help="Target: default, a folder, a .gguf file, or a Hub id.", show_default=False),
]
Drafter = Annotated[
    str | None,
    typer.Option(
        help="Drafter: a folder or a Hub id. Default: the shipped one.", show_default=False
    ),
]
Dtype = Annotated[
    DtypeChoice | None,
    typer.Option(help="Data type of target and draft.", show_default=False),
]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.", show_default=False)]
Transport = Annotated[
    TransportChoice | None,
    typer.Option(help="How features get to the draft.", show_default=False),
]
Threads = Annotated[
    int | None,
    typer.Option(min=1, help="Compute threads of target and draft.", show_default=False),
]
Temperature = Annotated[
    float | None, typer.Option(help="0 is greedy (the default).", show_default=False)
]
TopP = Annotated[
    float | None, typer.Option(help="Nucleus mass kept, in (0, 1].", show_default=False)
]
TopK = Annotated[
    int | None,
    typer.Option(min=0, help="Most likely tokens kept; 0 keeps all.", show_default=False),
]
MinP = Annotated[
    float | None,
    typer.Option(help="Drop tokens under this times the likeliest one.", show_default=False),
]
PresencePenalty = Annotated[
    float | None,
    typer.Option(help="Off the logits of tokens in the answer, -2 to 2.", show_default=False),
]
FrequencyPenalty = Annotated[
    float | None,
    typer.Option(help="The same, times how often they are there.", show_default=False),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(help="Weakens tokens of prompt and answer; 1 does not.", show_default=False),
]
Seed = Annotated[
    int | None, typer.Option(min=0, help="Key of the sampling noise.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show the services' logs.")]
