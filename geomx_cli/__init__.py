"""Train one model over several data centres joined by slow, unreliable wide-area links."""

__version__ = "0.1.0"
