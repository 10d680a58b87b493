"""The name suggested for an unknown one."""

from geomx_cli.core.option import did_you_mean


def test_equally_near_names_give_the_first() -> None:
    known = [f"resnet{layers}-v{version}" for version in (2, 1) for layers in (50, 34, 18)]
    assert did_you_mean("resnet", known) == "did you mean resnet18-v1?"
