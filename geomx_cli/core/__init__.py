"""Foundations used by every other package: errors, options, events, units."""
