"""Globally optimal sharding of PyTorch models, with a proof."""
