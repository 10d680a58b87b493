"""Aggregation of contributions at a server: sums them, closes rounds, sends results."""
