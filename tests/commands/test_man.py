"""`geomx man`: pages in roff for all commands, with every option."""

from pathlib import Path

import click
import pytest
from cluster import ROOT

from geomx_cli import cli
from geomx_cli.commands._commands_reference import page
from geomx_cli.commands._manual import pages
from geomx_cli.core.plugins import table

MACROS = {".TH", ".SH", ".SS", ".PP", ".TP", ".B", ".BR", ".nf", ".fi", ".nh", ".ad"}


def context() -> click.Context:
    return click.Context(cli.geomx, info_name="geomx", help_option_names=["-h", "--help"])


@pytest.fixture(scope="module")
def written() -> dict[str, str]:
    return dict(pages(context()))


def test_every_command_has_a_page(written: dict[str, str]) -> None:
    assert set(written) >= {f"geomx-{name}.1" for name in cli.COMMANDS} | {"geomx.1", "geomx-logs-collect.1"}
    for text in written.values():
        assert {line.split()[0] for line in text.splitlines() if line[:1] in (".", "'")} <= MACROS
        assert "[JOB]-" not in text and "\b" not in text


def test_launch_has_every_option_of_the_table(written: dict[str, str]) -> None:
    flags = [option.flag.replace("-", "\\-") for option in table()]
    assert [flag for flag in flags if f"\\fB{flag}" not in written["geomx-launch.1"]] == []


def test_a_page_or_all_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["man", "logs", "collect"]) == 0
    assert capsys.readouterr().out.startswith('.TH "GEOMX\\-LOGS\\-COLLECT" 1 ')
    assert cli.main(["man", "--to", str(tmp_path / "man1")]) == 0
    assert (tmp_path / "man1" / "geomx-hosts-check.1").read_text().startswith('.TH "GEOMX\\-HOSTS\\-CHECK" 1 ')
    assert cli.main(["man", "fly"]) == 2


def test_the_reference_of_commands_is_up_to_date() -> None:
    written = ROOT / "docs" / "reference" / "commands.md"
    assert written.read_text() == page(context()), "geomx man --markdown > docs/reference/commands.md"
