"""The official openai SDK talks to the gateway unmodified."""

import openai
import pytest

from tests.support.pair import Pair

MESSAGES = [{"role": "user", "content": "hello there"}]


@pytest.fixture
def client(pair: Pair):
    with openai.OpenAI(base_url=f"{pair.http}/v1", api_key="unused", timeout=240) as client:
        yield client


def test_chat_without_streaming(client):
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=12, temperature=0
    )
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_streaming_gives_the_same_text(client):
    model = client.models.list().data[0].id
    common = {"model": model, "messages": MESSAGES, "max_tokens": 24, "temperature": 2, "seed": 4}
    whole = client.chat.completions.create(**common)
    parts, finish, usage = [], None, None
    for event in client.chat.completions.create(
        **common, stream=True, stream_options={"include_usage": True}
    ):
        assert event.object == "chat.completion.chunk"
        if event.choices:
            parts.append(event.choices[0].delta.content or "")
            finish = event.choices[0].finish_reason or finish
        usage = event.usage or usage
    assert "".join(parts) == whole.choices[0].message.content
    assert finish == whole.choices[0].finish_reason
    assert usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": "x" * 20_000}]}, "messages"),
    ],
)
def test_bad_input_is_a_400_that_names_the_field(client, pair, change, field):
    model = client.models.list().data[0].id
    request = {"model": model, "messages": MESSAGES, "max_tokens": 4} | change
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**request)
    assert field in str(caught.value.body)
    assert caught.value.status_code == 400


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="nobody", messages=MESSAGES, max_tokens=4)
    assert caught.value.code == "model_not_found"
