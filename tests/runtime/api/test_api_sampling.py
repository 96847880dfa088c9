"""OpenAI's own client with every sampling option, compared with transformers on the same model."""

import pytest
import torch
from served import MODEL

PROMPT = "what a token depends on: the prompt, the answer of a request, and one seed 0123"
COUNT = 40
END, START = 0, 1


def complete(client, **options):
    openai_options = {
        "temperature",
        "logit_bias",
        "presence_penalty",
        "frequency_penalty",
        "n",
        "echo",
        "stop",
    }
    known = {key: options.pop(key) for key in list(options) if key in openai_options}
    extra = {"ignore_eos": True} | options
    request = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": COUNT, **known}
    return client.completions.create(**request, extra_body=extra)


def text_of(answer):
    return answer.choices[0].text


@pytest.fixture(scope="module")
def ids(reference):
    return reference.tokenizer(PROMPT).input_ids


@pytest.fixture(scope="module")
def decode(reference):
    return lambda tokens: reference.tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.fixture(scope="module")
def plain(reference, ids):
    return reference.greedy(ids, COUNT)


def test_the_repetition_penalty_is_that_of_transformers(client, reference, ids, decode, plain):
    expected = reference.greedy(ids, COUNT, repetition_penalty=1.1)
    assert expected != plain
    assert text_of(complete(client, repetition_penalty=1.1)) == decode(expected)


@pytest.mark.parametrize(
    "options",
    [
        {"presence_penalty": 2},
        {"presence_penalty": -2},
        {"frequency_penalty": 0.5},
        {"frequency_penalty": -0.5},
    ],
    ids=str,
)
def test_presence_and_frequency_penalties_follow_openais_formula(
    client, reference, ids, decode, plain, options
):
    presence, frequency = options.get("presence_penalty", 0), options.get("frequency_penalty", 0)

    def penalised(logits, output):
        counts = torch.bincount(torch.tensor(output, dtype=torch.long), minlength=len(logits))
        return logits - frequency * counts - presence * (counts > 0)

    expected = reference.changed(ids, penalised, COUNT)
    assert expected != plain
    assert text_of(complete(client, **options)) == decode(expected)


def test_a_bias_adds_to_the_logit(client, reference, ids, decode, plain):
    banned, favoured = plain[0], plain[3]
    bias = {str(banned): -100, str(favoured): 1.5}

    def biased(logits, output):
        logits[banned] -= 100
        logits[favoured] += 1.5
        return logits

    expected = reference.changed(ids, biased, COUNT)
    assert expected != plain and banned not in expected
    assert text_of(complete(client, logit_bias=bias)) == decode(expected)


def test_min_p_of_one_leaves_the_likeliest(client, decode, plain):
    assert text_of(complete(client, temperature=2, min_p=1)) == decode(plain)
    assert text_of(complete(client, temperature=2, seed=1)) != decode(plain)


def test_min_tokens_hold_the_end_back(client):
    options = {"logit_bias": {str(END): 100}, "ignore_eos": False}
    at_once = complete(client, **options)
    later = complete(client, min_tokens=5, **options)
    assert (at_once.usage.completion_tokens, later.usage.completion_tokens) == (1, 6)
    assert text_of(at_once) == "" and later.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("show", [False, True])
def test_stop_tokens_end_the_answer(client, decode, plain, show):
    stop = plain[7]
    before = plain[: plain.index(stop)]
    answer = complete(client, stop_token_ids=[stop], include_stop_str_in_output=show)
    assert answer.choices[0].finish_reason == "stop"
    assert text_of(answer) == decode([*before, stop] if show else before)
    assert answer.usage.completion_tokens == len(before) + 1


def test_a_stop_string_is_shown_if_asked_for_and_not_before_min_tokens(client, decode, plain):
    text = decode(plain)
    stop = text[8:11]
    end = text.index(stop) + len(stop)
    assert text_of(complete(client, stop=stop, include_stop_str_in_output=True)) == text[:end]
    common = max(set(text), key=text.count)
    least = 10
    earliest = len(decode(plain[:least]))
    at = text.index(common, earliest)
    assert text_of(complete(client, stop=common)) == text[: text.index(common)]
    assert text_of(complete(client, stop=common, min_tokens=least)) == text[:at]


def test_special_tokens_are_shown_if_asked_for(client):
    always = {"logit_bias": {str(START): 100}}
    assert text_of(complete(client, **always)) == ""
    assert text_of(complete(client, skip_special_tokens=False, **always)) == "<|im_start|>" * COUNT


def test_echo_puts_each_choices_prompt_first(client, ids, decode, plain):
    both, doubled = [PROMPT, "the"], [PROMPT, PROMPT, "the", "the"]
    request = {"model": MODEL, "temperature": 0, "max_tokens": 6, "n": 2, "extra_body": {"ignore_eos": True}}
    alone = client.completions.create(prompt=both, **request)
    echoed = client.completions.create(prompt=both, echo=True, **request)
    expected = [prompt + choice.text for prompt, choice in zip(doubled, alone.choices, strict=True)]
    assert [choice.text for choice in echoed.choices] == expected
    streamed = [""] * 4
    for chunk in client.completions.create(prompt=both, echo=True, stream=True, **request):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == expected
    as_ids = client.completions.create(prompt=ids, echo=True, **request)
    assert as_ids.choices[0].text == PROMPT + decode(plain[:6])


def test_penalties_and_the_seed_repeat_themselves_in_chat(client):
    request = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "which route?"}],
        "temperature": 0.9,
        "seed": 5,
        "max_tokens": 20,
        "presence_penalty": 0.5,
        "extra_body": {"min_p": 0.01, "ignore_eos": True},
    }
    texts = {client.chat.completions.create(**request).choices[0].message.content for _ in range(8)}
    assert len(texts) == 1
