"""Any bytes in a frame give a message or BadFrame, nothing else."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.frames import HEAD_BYTES, BadFrame, body_length
from runtime.protocol.codec import decode, encode
from runtime.protocol.from_workers import StepOutput, TokenOutput
from runtime.protocol.message import Message, Sampling
from runtime.protocol.to_workers import Decode, Prefill

KNOWN = [
    Prefill(request_id="r1", prompt=(1, 2), sampling=Sampling(), target="d"),
    Decode(request_id="r1", last_token=3, index=1, sampling=Sampling(logit_bias=((1, 2.0),))),
    StepOutput(replica="d", outputs=(TokenOutput(request_id="r1", index=0, token=4),)),
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


def decoded(body):
    try:
        message = decode(body)
    except BadFrame:
        return
    assert isinstance(message, Message)
    assert decode(encode(message)[HEAD_BYTES:]) == message or "nan" in repr(message)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes(body):
    decoded(body)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["Prefill", "Decode", "StepOutput", "Connect", "Configure", "Step", "KvSlice"]), VALUES
)
def test_a_tag_of_ours_with_any_fields(tag, value):
    decoded(msgspec.msgpack.encode([tag, value]))
    decoded(msgspec.msgpack.encode([tag, *(value if isinstance(value, list) else ())]))


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(KNOWN), st.data())
def test_a_message_with_some_bytes_changed(message, data):
    body = bytearray(encode(message)[HEAD_BYTES:])
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    decoded(bytes(body[: data.draw(st.integers(0, len(body)))]))


@pytest.mark.parametrize("depth", [10, 1000, 100_000])
def test_nesting_of_any_depth(depth):
    decoded(b"\x91" * depth)
    decoded(b"\x92\xa7Prefill" + b"\x91" * depth)
    decoded(b"\x81\xa1a" * depth)


@given(st.binary(min_size=HEAD_BYTES, max_size=HEAD_BYTES))
def test_any_length(head):
    try:
        assert 0 <= body_length(head) <= 64 * 2**20
    except BadFrame as refused:
        assert "over the limit" in str(refused)
