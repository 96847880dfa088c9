"""Answers of a served placement with real workers to OpenAI's own client."""

import asyncio

import openai
import pytest
from served import KEY, MODEL, SECONDS, until_idle
from tokenizer_files import CONTEXT, SENTENCES

KV_BYTES_PER_TOKEN = 4 * 2 * 4 * 8 * 4
PROMPTS = [*SENTENCES, "the", "KV cache of a request 🚀", "0123", "Ein schöner Tag"]
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "which route?"}]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_is_that_of_transformers(client, reference, prompt):
    answer = client.completions.create(prompt=prompt, **GREEDY)
    assert answer.choices[0].text == reference.text(prompt)
    assert answer.choices[0].finish_reason == "length"
    length = len(reference.tokenizer(prompt).input_ids)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (length, 24)
    assert answer.hexgen2["kv_bytes"] == length * KV_BYTES_PER_TOKEN


def test_prompts_as_ids_and_as_lists(client, reference):
    ids = [reference.tokenizer(prompt).input_ids for prompt in PROMPTS[:3]]
    expected = [reference.text(prompt) for prompt in PROMPTS[:3]]
    for prompt in (ids, PROMPTS[:3]):
        answer = client.completions.create(prompt=prompt, **GREEDY)
        assert [choice.text for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert answer.usage.prompt_tokens == sum(map(len, ids))
    assert client.completions.create(prompt=ids[0], **GREEDY).choices[0].text == expected[0]


def test_chat_is_the_template_and_the_same_engine(client, reference):
    ids = reference.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    answer = client.chat.completions.create(messages=MESSAGES, **GREEDY)
    expected = reference.tokenizer.decode(reference.greedy(ids), skip_special_tokens=True)
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.prompt_tokens == len(ids)
    parts = [{"role": "system", "content": [{"type": "text", "text": "be brief"}]}, MESSAGES[1]]
    assert client.chat.completions.create(messages=parts, **GREEDY).choices[0].message.content == expected


def test_chat_takes_what_the_context_leaves(client, reference):
    ids = reference.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage.completion_tokens == CONTEXT - len(ids)
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("options", [{}, {"temperature": 1.2, "seed": 3, "n": 2}])
def test_streams_carry_the_same_text(client, options):
    request = {**GREEDY, **options, "prompt": SENTENCES[2]}
    whole = client.completions.create(**request)
    texts, reasons, chunks = [""] * len(whole.choices), {}, []
    for chunk in client.completions.create(stream=True, stream_options={"include_usage": True}, **request):
        chunks.append(chunk)
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert len({chunk.id for chunk in chunks}) == 1 and len(chunks) > 4
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    most = len(texts) * whole.usage.prompt_tokens * KV_BYTES_PER_TOKEN
    assert 0 < chunks[-1].hexgen2["kv_bytes"] <= most


def test_chat_streams_carry_the_same_text(client):
    whole = client.chat.completions.create(messages=MESSAGES, **GREEDY)
    chunks = list(client.chat.completions.create(messages=MESSAGES, stream=True, **GREEDY))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length" and chunks[-1].usage is None


def test_a_seed_repeats_itself_and_choices_differ(client):
    request = {**GREEDY, "temperature": 1.0, "seed": 7, "prompt": "the", "n": 3}
    first, second = (client.completions.create(**request) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices] and len(set(texts)) == 3
    assert client.completions.create(**{**request, "n": 1}).choices[0].text == texts[0]
    assert client.completions.create(**{**request, "seed": 8}).choices[0].text != texts[0]
    narrow = {**request, "extra_body": {"ignore_eos": True, "top_k": 1}, "n": 1}
    assert client.completions.create(**narrow).choices[0].text == (
        client.completions.create(prompt="the", **GREEDY).choices[0].text
    )
    assert first.usage.completion_tokens == 72 and len(first.hexgen2["choices"]) == 3


def test_a_seed_gives_the_same_tokens_on_every_route(client, http):
    """The routes connect replicas of one GPU, of two stages and of two tensor-parallel GPUs."""
    until_idle(http)
    rules = [{"temperature": 1.0}, {"temperature": 1.4, "top_p": 0.9, "extra_body": {"top_k": 50}}]
    for rule in rules:
        extra = {"ignore_eos": True, **rule.get("extra_body", {})}
        request = {"max_tokens": 40, "seed": 21, "logprobs": 0, **rule, "extra_body": extra}
        drawn = {}
        for _ in range(8):
            answer = client.completions.create(model=MODEL, prompt=SENTENCES[1], **request)
            route = (answer.hexgen2["prefill_replica"], answer.hexgen2["decode_replica"])
            drawn.setdefault(route, []).append(answer.choices[0].logprobs.tokens)
        assert len(drawn) == 3, drawn.keys()
        first = drawn["prefill-0", "decode-0"][0]
        assert len(first) == 40
        assert all(tokens == first for all_drawn in drawn.values() for tokens in all_drawn)


def test_stop_strings_cut_the_text_and_are_never_shown(client, http, reference):
    text = reference.text(SENTENCES[0])
    stop = text[7:11]
    expected = text.partition(stop)[0]
    request = {**GREEDY, "prompt": SENTENCES[0], "stop": [stop, "never there"]}
    answer = client.completions.create(**request)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, "stop")
    shown = ""
    for chunk in client.completions.create(stream=True, **request):
        shown += chunk.choices[0].text
        assert expected.startswith(shown)
    assert shown == expected
    until_idle(http)


def test_the_end_token_ends_an_answer(client):
    for seed in range(12):
        answer = client.completions.create(
            model=MODEL, prompt="the", temperature=2, seed=seed, n=4, max_tokens=200
        )
        if ended := [choice for choice in answer.choices if choice.finish_reason == "stop"]:
            assert all("<|end|>" not in choice.text for choice in ended)
            assert answer.usage.completion_tokens < 800
            return
    pytest.fail("no answer of 48 ended")


def test_logprobs_are_those_of_transformers(client, reference):
    ids = reference.tokenizer(SENTENCES[3]).input_ids
    answer = reference.greedy(ids, 6)
    rows = reference.logprobs([*ids, *answer])[len(ids) - 1 :]
    best = [row.max().item() for row in rows[:6]]
    request = {**GREEDY, "max_tokens": 6}
    given = client.completions.create(prompt=SENTENCES[3], logprobs=3, **request).choices[0].logprobs
    assert given.token_logprobs == pytest.approx(best, abs=1e-3)
    assert [max(top.values()) for top in given.top_logprobs] == pytest.approx(best, abs=1e-3)
    assert given.text_offset[0] == 0 and len(given.text_offset) == len(given.tokens) == 6
    chat = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=4, **request)
    content = chat.choices[0].logprobs.content
    assert len(content) == 6 and all(len(entry.top_logprobs) == 4 for entry in content)
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in content)
    streamed = client.chat.completions.create(
        messages=MESSAGES, logprobs=True, top_logprobs=4, stream=True, **request
    )
    entries = [e for c in streamed if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert [entry.logprob for entry in entries] == pytest.approx(
        [entry.logprob for entry in content], abs=1e-5
    )


def test_one_token_is_answered_by_the_prefill_replica_alone(client, reference):
    raw = client.completions.with_raw_response.create(prompt="the", **{**GREEDY, "max_tokens": 1})
    answer = raw.parse()
    assert answer.choices[0].text == reference.text("the", 1) and answer.hexgen2["kv_bytes"] == 0
    assert raw.headers["x-hexgen2-prefill-replica"] == raw.headers["x-hexgen2-decode-replica"]


def test_sixteen_clients_at_once(server, reference, http):
    async def ask(client, number):
        prompt = PROMPTS[number % len(PROMPTS)]
        if number % 2:
            return (await client.completions.create(prompt=prompt, **GREEDY)).choices[0].text
        stream = await client.completions.create(prompt=prompt, stream=True, **GREEDY)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_at_once():
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=SECONDS
        ) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(16)))

    expected = [reference.text(PROMPTS[number % len(PROMPTS)]) for number in range(16)]
    assert asyncio.run(all_at_once()) == expected
    until_idle(http)
    records = http.get("/requests").json()["requests"]
    routes = {(record["prefill_replica"], record["decode_replica"]) for record in records}
    assert {("prefill-0", "decode-0"), ("prefill-1", "decode-0"), ("prefill-1", "decode-1")} <= routes
