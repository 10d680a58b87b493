"""The table of options: text and values, the command line made from it, and the reference page."""

from collections.abc import Sequence

import click
import pytest
from click.testing import CliRunner
from cluster import ROOT
from hypothesis import given
from hypothesis import strategies as st

from geomx_cli.commands._options import GroupedCommand, add_options, values
from geomx_cli.commands.reference import page
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.option import nearest
from geomx_cli.core.options import OPTIONS, Option, Value, check, decode, encode
from geomx_cli.core.plugins import table
from geomx_cli.core.units import parse_wan

EXAMPLES = (
    Option("eager", "bool", False, "GEOMX_TEST_EAGER", "Be eager.", "synchronisation"),
    Option("calm", "bool", True, "GEOMX_TEST_CALM", "Be calm.", "synchronisation"),
    Option("depth", "int", 3, "GEOMX_TEST_DEPTH", "How deep.", "training", minimum=1, maximum=9),
    Option("rate", "float", 0.5, "GEOMX_TEST_RATE", "How fast.", "training"),
    Option("wait", "duration", 2.0, "GEOMX_TEST_WAIT", "How long.", "transport", maximum=100),
    Option("age", "duration", 0.0, "GEOMX_TEST_AGE", "How old.", "transport"),
    Option("room", "size", 4096, "GEOMX_TEST_ROOM", "How much.", "transport"),
    Option("shape", "wan", "", "GEOMX_TEST_SHAPE", "What link.", "transport"),
    Option("kind", "text", "a", "GEOMX_TEST_KIND", "Which.", "cluster", choices=("a", "b")),
)
BY_NAME = {option.name: option for option in EXAMPLES}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("eager", "1", True),
        ("eager", "off", False),
        ("depth", " 9 ", 9),
        ("rate", "1e-3", 0.001),
        ("wait", "300ms", 0.3),
        ("wait", "1.5m", 90.0),
        ("room", "1MiB", 2**20),
        ("shape", "100mbit,30ms", "100mbit,30ms"),
        ("kind", "b", "b"),
    ],
)
def test_decode(name: str, text: str, value: Value) -> None:
    found = decode(BY_NAME[name], text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("eager", "maybe"),
        ("depth", "3.5"),
        ("depth", "10"),
        ("rate", "nan%"),
        ("rate", "1_0"),
        ("depth", "٣"),
        ("wait", "5 parsecs"),
        ("wait", "101"),
        ("room", "-1"),
        ("shape", "fast"),
        ("kind", "c"),
    ],
)
def test_a_wrong_text_names_flag_and_variable(name: str, text: str) -> None:
    option = BY_NAME[name]
    with pytest.raises(InvalidSettings) as caught:
        decode(option, text)
    assert option.flag in caught.value.message
    assert option.env in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("option", (*OPTIONS, *EXAMPLES), ids=lambda option: option.name)
def test_a_default_is_allowed_and_survives_its_text(option: Option) -> None:
    assert check(option, option.default) == option.default
    assert decode(option, encode(option, option.default)) == option.default
    assert decode(option, option.default_text) == option.default, "as the help shows it"


@given(st.floats(0, 1e300), st.sampled_from(["rate", "wait", "age", "room", "depth"]))
def test_every_value_survives_its_text(number: float, name: str) -> None:
    """As processes get it in their environment."""
    option = BY_NAME[name]
    value = min(number, option.maximum)
    if option.kind in ("int", "size"):
        value = int(max(value, option.minimum))
    assert decode(option, encode(option, value)) == value


def test_parse_wan() -> None:
    assert parse_wan("100mbit, 30ms") == (1e8, 0.03)
    assert parse_wan("1gbit") == (1e9, 0.0)
    assert parse_wan("20ms") == (0.0, 0.02)
    assert parse_wan("") == (0.0, 0.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nonsense", "'nonsense' is neither a rate nor a round trip"),
        ("100Mbps,30ms", "'100Mbps' has the unit 'Mbps'"),
        ("100mbit 30ms", "'100mbit 30ms' has no comma"),
        ("100mbit,30", "'30' has no unit"),
        ("100mbit,1gbit", "'1gbit' is a second rate"),
        ("30ms,1s", "'1s' is a second round trip"),
        ("0mbit", "0 bit/s"),
        ("100m", "1 h 40 min"),
    ],
)
def test_a_wrong_part_of_a_link_is_named(text: str, said: str) -> None:
    with pytest.raises(InvalidSettings) as caught:
        decode(BY_NAME["shape"], text)
    assert said in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("lr", 2e6, "write auto, or a number from 0 to 1000000"),
        ("seed", -1, "write a number from 0"),
        ("momentum", 1.0, "write a number from 0 and below 1"),
        ("slice_elements", 16, "write auto, or a number from 1024 to 8388608"),
        ("patience", 0.5, "write a number from 1s to 604800s"),
    ],
)
def test_bounds_are_told_in_plain_numbers(name: str, value: float, hint: str) -> None:
    option = next(option for option in OPTIONS if option.name == name)
    with pytest.raises(InvalidSettings) as caught:
        check(option, value)
    assert caught.value.hint == hint


def run(arguments: Sequence[str], env: dict[str, str] | None = None) -> dict[str, Value]:
    """The options parsed by a command from the examples."""
    seen: dict[str, Value] = {}

    @add_options(EXAMPLES)
    @click.command(cls=GroupedCommand)
    def command(**parameters: Value) -> None:
        seen.update(values(EXAMPLES, parameters))

    result = CliRunner().invoke(command, arguments, env=env, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return seen


def test_flag_before_variable_before_default() -> None:
    assert run([]) == {option.name: option.default for option in EXAMPLES}
    env = {"DEPTH": "5", "WAIT": "50ms", "EAGER": "yes", "CALM": "0"}
    env = {f"GEOMX_TEST_{name}": text for name, text in env.items()}
    found = run(["--depth", "7"], env)
    assert (found["depth"], found["wait"], found["eager"], found["calm"]) == (7, 0.05, True, False)
    assert run(["--no-eager", "--calm"], env) == found | {"depth": 5, "eager": False, "calm": True}
    assert run(["--room", "64k"], {"GEOMX_TEST_ROOM": ""})["room"] == 64_000
    assert run([], {"GEOMX_TEST_ROOM": ""})["room"] == 4096


def test_a_wrong_variable_is_refused_like_a_flag() -> None:
    with pytest.raises(InvalidSettings, match="--depth"):
        run(["--depth", "12"])
    with pytest.raises(InvalidSettings, match="GEOMX_TEST_DEPTH"):
        run([], {"GEOMX_TEST_DEPTH": "deep"})
    with pytest.raises(InvalidSettings, match="GEOMX_TEST_EAGER"):
        run([], {"GEOMX_TEST_EAGER": "maybe"})


def test_the_reference_page_is_up_to_date() -> None:
    written = ROOT / "docs" / "reference" / "options.md"
    assert written.read_text() == page(table()), "python -m geomx_cli.commands.reference > docs/reference/options.md"


@pytest.mark.parametrize(
    ("word", "known", "hint"),
    [
        ("fas", ("esync", "fsa", "hfa"), "did you mean fsa?"),
        ("Top-k", ("fp16", "topk"), "did you mean topk?"),
        ("--flt", ("--lr", "--flat"), "did you mean --flat?"),
        ("x" * 10_000, ("fsa", "hfa"), "choose one of fsa, hfa"),
    ],
)
def test_the_nearest_word(word: str, known: tuple[str, ...], hint: str) -> None:
    assert nearest(word, known) == hint


def test_a_default_with_a_word_is_shown_by_it_and_may_be_written() -> None:
    option = Option("pause", "int", -1, "GEOMX_TEST_PAUSE", "How long.", "training", minimum=0, word="never")
    assert (decode(option, "never"), decode(option, "7")) == (-1, 7)
    assert encode(option, -1) == "-1"
    command = add_options([option])(click.Command("try", params=[]))
    shown = CliRunner().invoke(command, ["--help"]).output
    assert "default: never" in shown and "-1" not in shown
    assert "`never` | never, or whole number from 0" in page([option])


def test_users_are_not_offered_what_geomx_alone_writes() -> None:
    delivery = next(option for option in table() if option.name == "delivery")
    assert delivery.offered == ("direct",)
    assert {"dgt", "tsengine"} <= {*delivery.choices}
    assert decode(delivery, "dgt") == "dgt", "as a process's environment has it"
