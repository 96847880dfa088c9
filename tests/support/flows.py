"""Random flow networks, networkx's solution of them, and invariants of every flow."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
from hypothesis import strategies as st

from hexgen2.search.flow.max_flow import FlowNetwork

rates = st.floats(0.001, 100)


@st.composite
def networks(draw):
    p, d = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    return FlowNetwork(
        np.array(draw(st.lists(rates, min_size=p, max_size=p))),
        np.array(draw(st.lists(rates, min_size=d, max_size=d))),
        np.array(draw(st.lists(rates, min_size=p * d, max_size=p * d))).reshape(p, d),
    )


def with_networkx(network: FlowNetwork) -> float:
    """Solve the paper's network, with its in and out nodes, by preflow-push."""
    graph = nx.DiGraph()
    for i, capacity in enumerate(network.prefill):
        graph.add_edge("h", f"p{i}in")
        graph.add_edge(f"p{i}in", f"p{i}out", capacity=capacity)
    for j, capacity in enumerate(network.decode):
        graph.add_edge(f"d{j}in", f"d{j}out", capacity=capacity)
        graph.add_edge(f"d{j}out", "t")
    for (i, j), capacity in np.ndenumerate(network.routes):
        graph.add_edge(f"p{i}out", f"d{j}in", capacity=capacity)
    return nx.maximum_flow_value(graph, "h", "t", flow_func=nx.algorithms.flow.preflow_push)


def check_flow(network: FlowNetwork, flow) -> None:
    slack = 1e-6 * max(flow.value, 1e-9)
    assert (flow.routes >= 0).all() and (flow.routes <= network.routes + slack).all()
    assert (flow.routes.sum(axis=1) <= network.prefill + slack).all()
    assert (flow.routes.sum(axis=0) <= network.decode + slack).all()
    assert flow.routes.sum() == pytest.approx(flow.value, rel=1e-6)
