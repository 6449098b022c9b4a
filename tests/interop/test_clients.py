"""Clients of others, unmodified: curl, the official DFlash command, LiteLLM."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from flashduet.client import Client, Message
from flashduet.client.results import Generation
from flashduet.sampling.params import Sampling
from tests.support.pair import Pair

MODEL = "target"
PROMPT = "hello there"
LENGTH = 12
TIMEOUT_S = 600


def truth(pair: Pair, sampling: Sampling, *messages: Message) -> Generation:
    """The same answer through our own client."""
    with Client(pair.gateway) as client:
        chat = messages or (Message("user", PROMPT),)
        return client.generate(
            list(chat), max_tokens=LENGTH, sampling=sampling, timeout=TIMEOUT_S
        ).result()


HOT = Sampling(temperature=3.0, seed=5)
HOT_JSON = {"temperature": 3.0, "seed": 5, "max_tokens": LENGTH}


def run(*command: str) -> str:
    finished = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.fixture
def curl() -> str:
    found = shutil.which("curl")
    if found is None:
        pytest.skip("curl is not installed")
    return found


def test_curl_gets_an_answer_whole_and_streamed(pair: Pair, curl: str):
    url = f"{pair.http}/v1/chat/completions"
    body = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], **HOT_JSON}
    whole = json.loads(run(curl, "-sS", "--fail-with-body", url, "-d", json.dumps(body)))
    assert whole["choices"][0]["message"]["content"] == truth(pair, HOT).text
    streamed = run(curl, "-sSN", "--fail-with-body", url, "-d", json.dumps(body | {"stream": True}))
    events = [line.removeprefix("data: ") for line in streamed.splitlines() if line]
    assert events[-1] == "[DONE]"
    texts = [
        choice["delta"].get("content", "")
        for event in events[:-1]
        for choice in json.loads(event)["choices"]
    ]
    assert "".join(texts) == truth(pair, HOT).text


def test_curl_is_told_what_is_wrong(pair: Pair, curl: str):
    answer = run(
        *(curl, "-sS", "-w", "\n%{http_code}", f"{pair.http}/v1/chat/completions"),
        *("-d", '{"model": "nobody", "messages": [{"role": "user", "content": "x"}]}'),
    )
    body, _, status = answer.rpartition("\n")
    assert status == "404"
    assert json.loads(body)["error"]["code"] == "model_not_found"


def test_the_official_dflash_command_prints_the_answer(pair: Pair):
    pytest.importorskip("dflash", reason="the official DFlash package is not installed")
    printed = run(
        *(sys.executable, "-m", "dflash.cli", "generate", "openai", "--model", MODEL),
        *("--base-url", pair.http, "--max-new-tokens", str(LENGTH), "--temperature", "0"),
        *("--reasoning", "off", "--system", "be kind", PROMPT),
    )
    expected = truth(pair, Sampling(), Message("system", "be kind"), Message("user", PROMPT))
    assert printed == expected.text + "\n"


def test_the_official_dflash_benchmark_reads_acceptance(pair: Pair, monkeypatch, capsys):
    """Its data set comes from a hub; all else is run as it is."""
    benchmark = pytest.importorskip("dflash.benchmark", reason="needs the official DFlash package")
    cli = pytest.importorskip("dflash.cli")
    prompts = [{"turns": [f"{PROMPT} {number}"]} for number in range(4)]
    monkeypatch.setattr(benchmark, "load_and_process_dataset", lambda name: prompts)
    cli.main(
        [
            *("benchmark", "openai", "--model", MODEL, "--base-url", pair.http),
            *("--dataset", "gsm8k", "--num-prompts", "4", "--concurrency", "2"),
            *("--max-new-tokens", str(LENGTH)),
        ]
    )
    printed = dict(
        line.split(":", 1) for line in capsys.readouterr().out.splitlines() if ":" in line
    )
    assert float(printed["Accept length"]) >= 1
    assert int(printed["Spec verify ct"]) > 0
    assert 0 < int(printed["Output tokens"]) <= 4 * LENGTH


@pytest.fixture(scope="module")
def litellm() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        # It fetches a price list otherwise.
        patch.setitem(os.environ, "LITELLM_LOCAL_MODEL_COST_MAP", "True")
        yield pytest.importorskip("litellm", reason="LiteLLM is not installed")


def litellm_options(pair: Pair) -> dict[str, Any]:
    return {
        "model": f"openai/{MODEL}",
        "api_base": f"{pair.http}/v1",
        "api_key": "unused",
        "messages": [{"role": "user", "content": PROMPT}],
        "timeout": TIMEOUT_S,
        **HOT_JSON,
    }


def test_litellm_gets_an_answer_whole_and_streamed(pair: Pair, litellm: ModuleType):
    options, expected = litellm_options(pair), truth(pair, HOT)
    whole = litellm.completion(**options, n=2, logprobs=True, top_logprobs=2)
    assert whole.choices[0].message.content == expected.text
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert len(whole.choices[0].logprobs.content) == len(expected.token_ids)
    assert whole.usage.prompt_tokens == expected.usage.prompt_tokens
    pieces = list(
        litellm.completion(**options, stream=True, stream_options={"include_usage": True})
    )
    texts = [piece.choices[0].delta.content or "" for piece in pieces if piece.choices]
    assert "".join(texts) == expected.text
    assert pieces[-1].usage.completion_tokens == len(expected.token_ids)


def test_litellm_goes_on_from_a_text(pair: Pair, litellm: ModuleType):
    options = litellm_options(pair) | {"model": f"text-completion-openai/{MODEL}"}
    del options["messages"]
    whole = litellm.text_completion(**options, prompt=PROMPT)
    with Client(pair.gateway) as client:
        expected = client.generate(PROMPT, raw=True, max_tokens=LENGTH, sampling=HOT).result()
    assert whole.choices[0].text == expected.text


def test_litellm_sees_a_refusal_as_one(pair: Pair, litellm: ModuleType):
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**litellm_options(pair) | {"temperature": -1})
