"""Any model config or trace is either loaded or refused with one line, never a traceback."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import mutated, mutated_bytes

from cost_model.config import architecture_from_config
from cost_model.errors import InputError
from cost_model.models import SHIPPED
from hexgen2.workload.traces import read_trace

BOUNDED = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


def check_one_line(error):
    assert len(str(error).splitlines()) == 1 and error.problem and error.remedy


@BOUNDED
@given(st.sampled_from(sorted(SHIPPED)).flatmap(lambda name: mutated(SHIPPED[name])))
def test_mutated_model_configs(config):
    try:
        architecture = architecture_from_config(config, "m", "m/config.json")
    except InputError as error:
        check_one_line(error)
        return
    assert architecture.total_params > 0


TRACES = [
    b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:50,396,109\n",
    b'{"timestamp": 1, "input_length": 10, "output_length": 5}\n'
    b'{"timestamp": 2, "input_length": 1, "output_length": 5}\n',
    b'[{"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]}]',
]


@pytest.mark.parametrize("original", TRACES, ids=["azure", "mooncake", "sharegpt"])
@BOUNDED
@given(data=st.data())
def test_mutated_traces(tmp_path, original, data):
    file = tmp_path / "trace"
    file.write_bytes(data.draw(mutated_bytes(original)))
    try:
        trace = read_trace(file)
    except InputError as error:
        check_one_line(error)
        return
    assert len(trace) and (trace.isl >= 1).all() and (trace.osl >= 1).all() and (trace.arrival_s >= 0).all()
