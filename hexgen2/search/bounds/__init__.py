"""Upper bounds on the throughput of any placement, to judge by how far a search may be from the optimum."""
