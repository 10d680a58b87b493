"""Describes the links between parties that a job on one machine emulates."""

from collections.abc import Iterable

from geomx_cli.core.units import format_duration, parse_wan

__all__ = ["emulated_network"]


def emulated_network(wan: str, links: Iterable[str]) -> str:
    """Return a line about --wan and the `links` of the inventory, each as WanLink.text; "" if nothing is emulated."""
    shapes = [f"each party {_shape(wan, 'round trip')}"] if wan else []
    for link in links:
        pair, _, shape = link.partition("=")
        shapes.append(f"{pair.replace('>', ' to ')} {_shape(shape, 'delay')}")
    return f"emulated network: {'; '.join(shapes)}" if shapes else ""


def _shape(text: str, time: str) -> str:
    rate, seconds = parse_wan(text)
    parts = [f"{rate / 1e6:g} Mbit/s"] * bool(rate) + [f"{time} {format_duration(seconds)}"] * bool(seconds)
    return ", ".join(parts) or "unlimited"
