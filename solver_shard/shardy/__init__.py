"""Sharding propagation: the greedy passes of the reference implementation, on StableHLO modules and traced programs."""
