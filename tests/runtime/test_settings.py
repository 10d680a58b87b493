"""A process's settings from its environment; errors name the variable. Durations, sizes and rates as text."""

import pytest

from geomx_cli.contract.settings import PlaneSettings, Settings
from geomx_cli.core import plugins, units
from geomx_cli.core.errors import InvalidSettings

PLANE = {
    "DMLC_PS_ROOT_URI": "127.0.0.1",
    "DMLC_PS_ROOT_PORT": "9000",
    "DMLC_NUM_SERVER": "1",
    "DMLC_NUM_WORKER": "2",
}
UPPER = {name.replace("_ROOT", "_GLOBAL_ROOT").replace("NUM_", "NUM_GLOBAL_"): text for name, text in PLANE.items()}


def read(env: dict[str, str]) -> Settings:
    return Settings.from_environment(plugins.table(), env)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *((name, "") for name in PLANE),
        ("DMLC_PS_ROOT_PORT", "http"),
        ("DMLC_PS_ROOT_PORT", "65536"),
        ("DMLC_NUM_SERVER", "0"),
        ("DMLC_NUM_WORKER", "two"),
        ("DMLC_ROLE", "boss"),
        ("DMLC_ROLE_GLOBAL", "worker"),
        ("DMLC_ROLE_MASTER_WORKER", "yes"),
        ("DMLC_ENABLE_CENTRAL_WORKER", "yes"),
        ("DMLC_NUM_ALL_WORKER", "many"),
        ("GEOMX_RANK", "first"),
        ("GEOMX_GLOBAL_RANK", "1.5"),
        ("GEOMX_PARTY_INDEX", "A"),
        ("GEOMX_INSECURE", "very"),
        ("GEOMX_WAN_SHARE", "half"),
        ("GEOMX_WAN_SHARE", "0"),
        ("GEOMX_CLOCK_AHEAD", "nan"),
        ("GEOMX_CLOCK_AHEAD", "an hour"),
        ("GEOMX_WAN", "fast"),
        ("GEOMX_WINDOW", "1MiBit"),
        ("GEOMX_HEARTBEAT", "0"),
        ("MXNET_KVSTORE_BIGARRAY_BOUND", "1"),
    ],
)
def test_a_wrong_variable_is_named(name: str, text: str) -> None:
    with pytest.raises(InvalidSettings) as caught:
        read({**PLANE, name: text})
    assert name in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("name", UPPER)
def test_a_missing_variable_of_the_global_plane_is_named(name: str) -> None:
    env = {**UPPER, "DMLC_ROLE_GLOBAL": "global_scheduler", name: ""}
    with pytest.raises(InvalidSettings, match=name):
        read(env)


def test_roles_and_their_planes() -> None:
    plane, server = PlaneSettings("127.0.0.1", 9000, 1, 2), {"DMLC_ROLE": "server"}
    assert read(PLANE).role == "worker"
    root = read({**PLANE, **UPPER, **server, "DMLC_ROLE_GLOBAL": "global_server"})
    assert (root.role, root.local, root.upper) == ("global_server", plane, plane)
    assert read({**PLANE, **UPPER, **server}).upper == plane
    assert read({**PLANE, **server}).upper is None, "the root of a flat cluster"
    assert read({**PLANE, **UPPER}).upper is None, "a worker has one plane"
    assert read({**UPPER, "DMLC_ROLE_GLOBAL": "global_scheduler"}).local is None
    assert read({**PLANE, "PORT": "tcp://10.0.0.1:80"}).port == 0, "some clusters set PORT for purposes of their own"


def test_an_environment_reads_back() -> None:
    table = plugins.table()
    settings = Settings(
        role="global_server",
        local=PlaneSettings("::1", 9000, 1, 2, "ipc:///tmp/s.sock"),
        upper=PlaneSettings("10.0.0.1", 9001, 2, 4),
        job="j", job_dir="/tmp/j", process="A/global_server:0", party="A", party_index=0, host="A", rank=0,
        bind=("ipc:///tmp/a.sock", "tcp://0.0.0.0:1"), advertise=("ipc:///tmp/a.sock", "tcp://10.0.0.1:1"),
        key_file="/tmp/k", wan_share=0.25, clock_ahead=-3600.5,
        options={option.name: option.default for option in table} | {"window": 4096, "wan": "100mbit,30ms"},
    )  # fmt: skip
    assert read(settings.to_environment(table)) == settings
    assert settings.local is not None
    assert settings.local.endpoint == "ipc:///tmp/s.sock"
    assert PlaneSettings("::1", 9000, 1, 2).endpoint == "tcp://[::1]:9000"


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (units.parse_duration, "300us", 3e-4),
        (units.parse_duration, " 2 min ", 120),
        (units.parse_duration, "1.5h", 5400),
        (units.parse_duration, "0", 0),
        (units.parse_size, "1MiB", 2**20),
        (units.parse_size, "0.5k", 500),
        (units.parse_size, "2gb", 2 * 10**9),
        (units.parse_rate, "1.5mbit", 1.5e6),
        (units.parse_rate, "2Gbit", 2e9),
    ],
)
def test_units(parse: object, text: str, value: float) -> None:
    assert parse(text) == pytest.approx(value)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (units.parse_duration, "-1s"),
        (units.parse_duration, ""),
        (units.parse_duration, "1e3"),
        (units.parse_duration, "5 parsecs"),
        (units.parse_size, "1mbit"),
        (units.parse_size, "MiB"),
        (units.parse_rate, "100"),
        (units.parse_rate, "100mb"),
        (units.parse_rate, "1,5mbit"),
    ],
)
def test_no_units(parse: object, text: str) -> None:
    with pytest.raises(InvalidSettings) as caught:
        parse(text)  # type: ignore[operator]
    assert repr(text) in caught.value.message
    assert "as in" in caught.value.hint


def test_readable_units() -> None:
    assert [units.format_duration(x) for x in (0.85, 4.2, 185, 3720)] == ["850 ms", "4.2 s", "3 min 05 s", "1 h 02 min"]
    assert [units.format_duration(x) for x in (0.9996, 59.96, 179.6, 3599.7)] == [
        "1.0 s", "1 min 00 s", "3 min 00 s", "1 h 00 min"
    ]  # fmt: skip
    assert [units.format_bytes(x) for x in (12, 715_000, 46.8e6, 2e9)] == ["12 B", "715 kB", "46.8 MB", "2 GB"]
