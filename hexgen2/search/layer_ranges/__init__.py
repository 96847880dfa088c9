"""Layer ranges on nodes (Helix, Mei et al., ASPLOS 2025): ranges may overlap, and each request takes a path
of its own through them. Planned by max flow, without a fixed set of pipelines."""
