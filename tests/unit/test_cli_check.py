"""The check over services that answer from a script: what it concludes from what they say."""

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

from flashduet.errors import ConfigurationError, FlashduetError
from flashduet.sampling.params import Sampling
from flashduet.v1 import gateway_pb2 as pb
from flashduet_cli.lossless import run as lossless_run
from flashduet_cli.lossless.official import OfficialDFlash
from flashduet_cli.lossless.reference import Reference
from flashduet_cli.lossless.run import Check, CheckSettings
from flashduet_cli.prompt_file import read_prompts
from flashduet_cli.stack_config import StackConfig
from tests.support.scripted_gateway import ScriptedGateway, scripted_gateway
from tests.support.tiny import tiny_drafter, tiny_target

TOKENS = 6


class Services(ScriptedGateway):
    """A gateway that gives Transformers' own answer, and in drafted modes spoils it."""

    def __init__(self, target) -> None:
        super().__init__()
        self._reference = Reference(target, "float32")
        self.prompt_ids: list[int] = []
        # In drafted modes: the answer's token at this index becomes this one.
        self.spoil: tuple[int, int] | None = None
        self.prompt_tokens = 0
        self.drafted_tokens = 5

    async def Generate(self, request, context):
        tokens = self._reference.greedy(self.prompt_ids, TOKENS)
        drafted = request.speculation.mode != pb.SPECULATION_MODE_OFF
        if drafted and self.spoil is not None:
            tokens[self.spoil[0]] = self.spoil[1]
        yield pb.GenerateResponse(started=pb.GenerateStarted(model="tiny"))
        yield pb.GenerateResponse(chunk=pb.GenerateChunk(token_ids=tokens))
        yield pb.GenerateResponse(
            finished=pb.GenerateFinished(finish_reason=pb.FINISH_REASON_LENGTH)
        )
        yield pb.GenerateResponse(
            complete=pb.GenerateComplete(
                finish_reason=pb.FINISH_REASON_LENGTH,
                usage=pb.Usage(prompt_tokens=self.prompt_tokens, completion_tokens=len(tokens)),
                speculation=pb.SpeculationStats(
                    rounds=3, drafted_tokens=self.drafted_tokens if drafted else 0
                ),
            )
        )


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def checked(target, tmp_path, monkeypatch):
    """`checked(spoil=...)` runs a check of one prompt and returns its report; `official` is the
    drafter for that."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"id": "p", "turns": ["hello there"]}))
    prompts = read_prompts(file, target)
    ids = list(prompts[0].token_ids)
    services = Services(target)
    services.prompt_ids, services.prompt_tokens = ids, len(ids)
    settings = CheckSettings(
        config=StackConfig(),
        prompts_file=file,
        limit=None,
        dtype="float32",
        max_tokens=TOKENS,
        sampling=Sampling(),
        block_lengths=[4],
        official=False,
        random_drafter=False,
        partial=tmp_path / "partial.jsonl",
        verbose=False,
    )

    def run(official=None, **script):
        for name, value in script.items():
            setattr(services, name, value)
        with scripted_gateway(services) as (endpoint, _):

            @asynccontextmanager
            async def started(config, **_):
                yield SimpleNamespace(endpoint=endpoint)

            monkeypatch.setattr(lossless_run, "started", started)
            given = replace(
                settings,
                config=StackConfig(drafter=official and str(official)),
                official=official is not None,
            )
            check = Check(given, target, prompts, lambda mode, done: None)
            return asyncio.run(check.run())

    run.partial = settings.partial
    run.answer = services._reference.greedy(ids, TOKENS)
    return run


def test_equal_answers_pass(checked):
    report = checked()
    assert report.passed
    assert report.identical == report.prompts == 1
    lines = [json.loads(line) for line in checked.partial.read_text().splitlines()]
    assert [line["mode"] for line in lines] == ["off", "draft", "block-4", "transformers"]
    assert lines[0]["token_ids"] == checked.answer


def test_a_wrong_token_fails_with_its_place_and_both_tokens(checked):
    wrong = (checked.answer[3] + 1) % 256
    report = checked(spoil=(3, wrong))
    assert not report.passed
    assert report.identical == 0
    assert not report.near_ties
    assert [item.mode for item in report.differences] == ["draft", "block-4"]
    first = report.differences[0]
    assert (first.prompt_id, first.position) == ("p", 3)
    assert (first.base_token, first.mode_token) == (checked.answer[3], wrong)
    assert first.judgement.gap > first.judgement.bound > 0


def test_a_token_that_rounding_cannot_tell_apart_is_listed_and_passes(checked, monkeypatch):
    """In all passes of the reference the two logits are made equal; its own error is the bound."""
    ours, other = checked.answer[2], (checked.answer[2] + 1) % 256

    def tied(true):
        def logits(self, *arguments):
            row = true(self, *arguments).copy()
            row[other] = row[ours] - 1e-9
            return row

        return logits

    for name in ("exact_logits", "logits"):
        monkeypatch.setattr(Reference, name, tied(getattr(Reference, name)))
    report = checked(spoil=(2, other))
    assert report.passed
    assert report.identical == 0
    assert {item.mode for item in report.near_ties} == {"draft", "block-4"}
    assert report.near_ties[0].judgement.bound < 1e-3


def test_nothing_drafted_shows_nothing(checked):
    report = checked(drafted_tokens=0)
    assert report.identical == 1
    assert report.undrafted_modes() == ["draft", "block-4"]
    assert not report.passed


def test_a_prompt_that_the_gateway_reads_otherwise_is_an_error(checked):
    with pytest.raises(FlashduetError, match="tokens of the prompt"):
        checked(prompt_tokens=3)


@pytest.fixture
def drafter(target, tmp_path):
    return tiny_drafter(tmp_path / "drafter", target)


def test_the_official_package_answers_too(checked, drafter):
    report = checked(official=drafter)
    assert report.passed
    assert report.answers["dflash"]["p"].token_ids == tuple(checked.answer)
    assert report.answers["dflash"]["p"].drafted_tokens


def test_a_drafter_that_the_official_package_cannot_read_is_told_at_once(checked, drafter):
    config = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps(config | {"architectures": ["Eagle"]}))
    with pytest.raises(ConfigurationError, match="Eagle"):
        checked(official=drafter)
    assert not checked.partial.exists(), "nothing was answered before"


@pytest.mark.filterwarnings("error")
def test_drafts_of_the_official_package_are_counted_as_they_were_made(target, drafter):
    official = OfficialDFlash(target, drafter, "float32")
    answer = official.greedy([1, 2, 3], 2)
    assert (answer.rounds, answer.drafted_tokens) == (1, 1), "one more token was wanted"
    assert official.greedy([1, 2, 3], 1).drafted_tokens == 0
