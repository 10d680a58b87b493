"""README and docs against the program: commands, flags, links, versions, and figures that are quoted."""

import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import click
import pytest
from click.core import ParameterSource
from cluster import ROOT

from geomx_cli import __version__
from geomx_cli.cli import geomx
from geomx_cli.commands._job import ParentCommand
from geomx_cli.core.errors import GeomxError
from geomx_cli.core.options import USUAL, defaults
from geomx_cli.core.plugins import algorithms, table
from geomx_cli.plan import JobSpec, plan
from geomx_cli.plan.this_machine import this_machine

README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES.remove(ROOT / "docs" / "reference" / "commands.md")
PLACES = re.compile(r"\b(JOB[12]?|PROCESS|DIR|FILE|NAME|NUMBER|PROJECT|EXPERIMENT|SPEC|MODE|DURATION)\b")
OTHERS = {
    "--help", "--version", "--name", "--no-name", "--heterogeneous", "--straggling-party", "--sweep", "--bounds",
    "--codecs", "--server-hosts", "--global-servers", "--local-servers", "--warm-up", "--signal",
    "--ntasks", "--ntasks-per-node", "--cpus-per-task", "--exclusive",
}  # fmt: skip
"""Flags of every program, of Slurm, and those that benchmarks make of names."""
EXAMPLES = (ROOT / "CONTRIBUTING.md",)
"""Pages with plug-ins that are not installed."""


def blocks(text: str) -> Iterator[str]:
    """The lines of indented or fenced code, without their comments, and the code spans of the prose."""
    fenced = re.compile(r"^ *```[a-z]*\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
    for found in fenced.finditer(text):
        yield from re.sub(r"\\\n", " ", found[1]).splitlines()
    for span in re.finditer(r"`([^`|]+)`", fenced.sub("", text)):
        yield " ".join(span[1].split())


def commands(path: Path) -> Iterator[list[str]]:
    """The words of each command of geomx in a page, without the program's name and variables before it."""
    for line in (line for line in blocks(path.read_text()) if "--help" not in line):
        beside = re.split(r"\s{2,}(?!#)", line.strip())[0]  # in a diagram a command stands beside its file
        place = re.match(r"^(?:\$ )?(?:[A-Z_0-9]+=\S+ )*(?:\S*/)?geomx (?=[a-z-])(.*)$", beside)
        if place is None or re.search(r"[{([…]|\.\.\.", place[1].partition("#")[0]):
            continue
        try:
            words = shlex.split(place[1], comments=True)
        except ValueError:
            continue
        pipe = next((at for at, word in enumerate(words) if word in ("|", "||", "&&", ">", ";")), len(words))
        yield words[:pipe]


FOUND = ((path, words) for path in PAGES if path not in EXAMPLES for words in commands(path))
WRITTEN = list({tuple(words): (path, words) for path, words in FOUND}.values())


def parsed(words: list[str]) -> click.Context:
    """The context of a command whose words are parsed, not run. Raises click.ClickException, GeomxError."""
    context, command = click.Context(geomx, info_name="geomx"), geomx
    while isinstance(command, click.Group):
        name, found, words = command.resolve_command(context, words)
        assert found is not None
        if isinstance(found, click.Group):
            context, command = click.Context(found, info_name=name, parent=context), found
            continue
        return found.make_context(name, list(words), parent=context)
    raise AssertionError(words)


@pytest.mark.parametrize(("path", "words"), WRITTEN, ids=lambda value: value.name if isinstance(value, Path) else None)
def test_every_command_is_one(path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every name, flag and value is known; a job of `geomx launch` on this machine can be planned."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts.toml").write_text('[[host]]\nname = "a"\nparty = "A"\n')  # an argument that must exist
    if words[0] not in geomx.list_commands(click.Context(geomx)):
        assert words[0].startswith("-") or len(words) == 1, words
        return
    sizes = {"NUMBER": "1", "DURATION": "1s", "NAME": "mnist" if words[0] == "data" else "fsa"}
    words = [PLACES.sub(lambda place: sizes.get(place[0], place[0]), word) for word in words]
    try:
        context = parsed(words)
    except click.MissingParameter:
        return  # the prose names a command without its arguments
    except (click.ClickException, GeomxError) as error:
        raise AssertionError(f"{path.name}: geomx {' '.join(words)}: {error}") from None
    if words[0] == "launch":
        values = {name: context.params[name] for name in defaults(table())}
        script = tuple(context.params["script"])
        left = {name for name in values if context.get_parameter_source(name) is ParameterSource.DEFAULT}
        usual = USUAL.get(str(values["network"]), {})
        values |= {name: value for name, value in usual.items() if name in left}
        values |= algorithms()[str(values["algo"])].forced_options
        spec = JobSpec(job="j", job_dir="/j", socket_dir="/s", options=values, script=script)
        plan(this_machine(values, range(9000, 12_000)), spec)


def test_every_flag_in_the_prose_is_one() -> None:
    known = _known_flags() | OTHERS
    for path in PAGES:
        for line in blocks(path.read_text()):
            flags = re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", line) if line.startswith("--") else ()
            assert known.issuperset(flags), f"{path.name}: {line}"


def _known_flags() -> set[str]:
    """The flags of all commands, and of the benchmarks."""
    found: set[str] = set()
    waiting: list[click.Command] = [geomx]
    while waiting:
        command = waiting.pop()
        for option in (each for each in command.params if isinstance(each, click.Option)):
            found.update(option.opts, option.secondary_opts)
        if isinstance(command, ParentCommand):
            waiting += command.commands.values()
        elif isinstance(command, click.Group):
            context = click.Context(command)
            waiting += [each for name in command.list_commands(context) if (each := command.get_command(context, name))]
    for script in (ROOT / "benchmarks").glob("*.py"):
        found.update(re.findall(r"""add_argument\(\s*f?["'](--[a-z-]+)""", script.read_text()))
    return found


def test_no_page_offers_what_is_always_refused() -> None:
    shown = {option.name: option.offered for option in table() if option.choices}
    for path in (page for page in PAGES if page not in EXAMPLES):
        for flag, value in re.findall(r"`--([a-z-]+) ([a-z0-9-]+)`", path.read_text()):
            choices = shown.get(flag.replace("-", "_"), ())
            assert not choices or value in choices, f"{path.name}: --{flag} {value}"


def test_links_and_their_headings_are_there() -> None:
    for path in PAGES:
        for target in re.findall(r"\]\(([^)#: ]*(?:#[^)]*)?)\)", path.read_text()):
            name, _, heading = target.partition("#")
            file = (path.parent / name).resolve() if name else path
            assert file.exists(), f"{path.name}: {target}"
            assert not heading or heading in _headings(file), f"{path.name}: {target}"


def _headings(path: Path) -> set[str]:
    lines = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return set(map(_anchor, lines))


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def measured(page: Path, heading: str) -> str:
    """The tables that publish.py has written into the section of a heading, and into the sections below it."""
    _, *parts = re.split(r"^(#+) (.*)$", page.read_text(), flags=re.MULTILINE)
    sections = list(zip(parts[::3], parts[1::3], parts[2::3], strict=True))
    at = next(index for index, (_, title, _) in enumerate(sections) if _anchor(title) == heading)
    below = takewhile(lambda section: len(section[0]) > len(sections[at][0]), sections[at + 1 :])
    text = "".join(body for *_, body in (sections[at], *below))
    return "\n".join(re.findall(r"<!-- measured: [\w-]+ -->\n(.*?)<!-- /measured -->", text, re.DOTALL))


def test_figures_of_the_readme_are_those_of_their_source() -> None:
    """Numbers with a decimal point, of a table's row that links to the section of its measured table; conditions are
    left out.
    """
    rows = [line for line in README.read_text().splitlines() if line.startswith("|") and "([source](" in line]
    assert len(rows) >= 3
    for row in rows:
        figures, source = re.split(r"\(\[source\]\(", row, maxsplit=1)
        page, _, heading = source.partition(")")[0].partition("#")
        tables = measured(ROOT / page, heading)
        for number in re.findall(r"\d+\.\d+", figures.split("|", 2)[2]):
            assert re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", tables), f"{number} of: {row}"


def test_the_comparison_of_the_readme_is_that_of_its_table() -> None:
    tables = measured(ROOT / "docs" / "results" / "exchange.md", "against-other-systems")
    row = r"^\| (geomx|[a-zA-Z ]+?) \|.*?\| ([\d.]+ s, [\d.]+ \u00d7)"
    rows = dict(re.findall(row, README.read_text(), re.MULTILINE))
    assert len(rows) == 5
    for name, said in rows.items():
        seconds, ratio = re.findall(r"[\d.]+", said)
        assert re.search(rf"\| {seconds}(?: \[[\d., ]+\])?, {ratio} x \|", tables), name


@pytest.mark.processes
def test_the_curve_is_that_of_the_measured_runs(tmp_path: Path) -> None:
    drawn = tmp_path / "drawn.svg"
    subprocess.run([sys.executable, ROOT / "benchmarks" / "curve.py", "--to", drawn], check=True)
    assert drawn.read_text() == (ROOT / "docs" / "figures" / "time-to-accuracy.svg").read_text()


def test_every_table_is_written_as_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every place in a page has its table, and publish.py would write nothing else there."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    publish = importlib.import_module("publish")
    pages = {page.name: page.read_text() for page in (ROOT / "docs" / "results").glob("*.md")}
    places = [(name, page) for page, text in pages.items()
              for name in re.findall(r"^<!-- measured: ([\w-]+) -->$", text, re.MULTILINE)]  # fmt: skip
    assert sorted(places) == sorted((each.name, each.page) for each in publish.TABLES)
    for each in publish.TABLES:
        if (publish.MEASURED / f"{each.name}.json").exists():
            assert publish.written(each, pages[each.page]) == pages[each.page], each.name


def test_footnotes_come_in_order_within_a_section() -> None:
    marks = "¹²³⁴⁵⁶⁷⁸⁹"
    for path in PAGES:
        for section in re.split(r"^#+ ", path.read_text(), flags=re.MULTILINE):
            first = list(dict.fromkeys(re.findall(rf"(?<![a-z0-9])[{marks}]", section)))
            assert first == sorted(first, key=marks.index), f"{path.name}: {section.splitlines()[0]}: {first}"


def test_the_version_is_one() -> None:
    assert f"version: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"geomx {__version__}." in (ROOT / "docs" / "reference" / "options.md").read_text()


def test_the_readme_fits() -> None:
    assert len(README.read_text().splitlines()) <= 180
