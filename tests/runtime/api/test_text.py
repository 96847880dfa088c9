"""Text during generation: nothing is lost or torn, and nothing follows a stop string."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_files import SENTENCES, VOCAB, write_tokenizer

from runtime.api.text import Detokenizer, StopStrings
from runtime.api.tokenizer import ModelTokenizer, NoChatTemplate

texts = st.text(alphabet=st.sampled_from("abcé你🙂 \n"), max_size=30)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return ModelTokenizer.load(folder)


def stream(tokenizer, prompt, ids):
    detokenizer = Detokenizer(tokenizer.decode, prompt)
    pieces = [detokenizer.push(token) for token in ids]
    return [*pieces, detokenizer.finish()]


@settings(deadline=None, max_examples=300)
@given(ids=st.lists(st.integers(0, VOCAB - 1), max_size=40))
def test_pieces_of_any_tokens_are_the_text_of_the_whole(tokenizer, ids):
    pieces = stream(tokenizer, [], ids)
    assert "".join(pieces) == tokenizer.decode(ids)


@settings(deadline=None)
@given(before=st.sampled_from(SENTENCES), text=texts)
def test_characters_are_never_torn(tokenizer, before, text):
    prompt, ids = (tokenizer._core.encode(part).ids for part in (before, text))
    pieces = stream(tokenizer, prompt, ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_an_unfinished_character_shows_at_the_end_only(tokenizer):
    rocket = tokenizer._core.encode("🚀").ids
    pieces = stream(tokenizer, [], [*tokenizer._core.encode("go ").ids, *rocket[:-1]])
    if len(rocket) > 1:
        assert "".join(pieces[:-1]) == "go " and pieces[-1].strip("\ufffd") == ""


def test_special_tokens_leave_no_text_and_no_growing_window(tokenizer):
    detokenizer = Detokenizer(tokenizer.decode, [])
    assert [detokenizer.push(0) for _ in range(50)] == [""] * 50
    assert len(detokenizer._window) < 10
    assert detokenizer.push(tokenizer._core.encode("a").ids[0]) == "a"


@given(st.text(alphabet="ab", max_size=40), st.text(alphabet="ab", min_size=1, max_size=4), st.data())
def test_a_stop_string_cuts_wherever_the_chunks_break(text, stop, data):
    checker, shown, rest = StopStrings([stop]), "", text
    while rest and not checker.met:
        size = data.draw(st.integers(1, len(rest)))
        shown += checker.push(rest[:size])
        rest = rest[size:]
        assert stop not in shown
        assert text.partition(stop)[0].startswith(shown)
    if not checker.met:
        shown += checker.finish()
    assert checker.met == (stop in text)
    assert shown == text.partition(stop)[0]


SEVERAL = ["ab", "abba", "bb", "baa"]


@given(text=st.text(alphabet="ab", max_size=30), show=st.booleans(), free=st.integers(0, 12), data=st.data())
def test_of_several_stop_strings_the_first_to_end_counts(text, show, free, data):
    """The result is the same as if the text came letter by letter; the first `free` characters may not end
    it."""
    ends = [
        (end, end - len(stop))
        for end in range(free + 1, len(text) + 1)
        for stop in SEVERAL
        if text[:end].endswith(stop)
    ]
    expected = text if not ends else text[: min(ends)[0] if show else min(ends)[1]]
    checker, shown, at = StopStrings(SEVERAL, show), "", 0
    while at < len(text) and not checker.met:
        most = (free if at < free else len(text)) - at
        size = data.draw(st.integers(1, max(1, min(most, len(text) - at))))
        shown += checker.push(text[at : at + size], may_end=at >= free)
        at += size
    assert checker.met == bool(ends)
    assert shown + checker.finish() == expected


def test_without_stop_strings_text_passes_at_once():
    checker = StopStrings([])
    assert checker.push("abc") == "abc" and checker.finish() == "" and not checker.met


def test_a_tokenizer_without_template_says_so(tmp_path):
    write_tokenizer(tmp_path, chat_template=None)
    with pytest.raises(NoChatTemplate):
        ModelTokenizer.load(tmp_path).encode_chat([{"role": "user", "content": "hi"}])
