"""Cluster membership: members, their liveness, and the placement of slices."""
