"""Cluster files of any kind: a spec, or InputError in one line; never a traceback."""

import copy
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cluster_specs
from cluster_specs.loader import load_cluster
from cluster_specs.schema import ClusterSpec
from cost_model.errors import InputError

FOLDER = Path(cluster_specs.__file__).parent
SHIPPED = [path for path in sorted(FOLDER.glob("*.yaml")) if path.stem != "prices"]
TEXTS = [path.read_text() for path in SHIPPED]
DATA = [yaml.safe_load(text) for text in TEXTS]
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(["H100:0", "H100:-1", "H100:99999", ":", "nan", "1e400", "\x00", "../..", "\ud7ff\n\n"]),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
    st.just([]),
    st.just({}),
)
SETTINGS = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def loads_or_says_why(path, content):
    path.write_bytes(content)
    try:
        assert isinstance(load_cluster(str(path)), ClusterSpec)
    except InputError as refused:
        assert len(str(refused).splitlines()) == 1, str(refused)


def places(value, path=()):
    """The path to everything in plain data."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def changed(data, place, odd, how):
    *above, last = place
    holder = data
    for key in above:
        holder = holder[key]
    if how == "replace":
        holder[last] = odd
    elif how == "remove":
        del holder[last]
    elif how == "double" and isinstance(holder, list):
        holder.append(copy.deepcopy(holder[last]))
    elif isinstance(holder, dict):
        holder[str(odd)[:20]] = holder.pop(last)
    return data


@SETTINGS
@given(data=st.data(), which=st.sampled_from(range(len(DATA))))
def test_a_shipped_cluster_with_entries_changed(tmp_path, data, which):
    spec = copy.deepcopy(DATA[which])
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from([place for place in places(spec) if place] or [None]))
        if place:
            how = data.draw(st.sampled_from(["replace", "replace", "remove", "double", "rename"]))
            spec = changed(spec, place, data.draw(ODD), how)
    loads_or_says_why(tmp_path / "c.yaml", yaml.safe_dump(spec).encode())


@SETTINGS
@given(data=st.data(), which=st.sampled_from(range(len(TEXTS))))
def test_a_shipped_cluster_with_text_changed(tmp_path, data, which):
    text = TEXTS[which]
    start = data.draw(st.integers(0, len(text)))
    end = min(len(text), start + data.draw(st.integers(0, 30)))
    put = data.draw(
        st.text(max_size=10) | st.sampled_from(["&a ", "*a", "!!python/object:os.system", "\t", "{", "<<: "])
    )
    loads_or_says_why(tmp_path / "c.yaml", (text[:start] + put + text[end:]).encode("utf-8", "surrogatepass"))


@SETTINGS
@given(content=st.binary(max_size=200))
def test_any_bytes(tmp_path, content):
    loads_or_says_why(tmp_path / "c.yaml", content)


@pytest.mark.parametrize("name", [path.stem for path in SHIPPED])
def test_what_ships_loads(name):
    assert load_cluster(name).name
