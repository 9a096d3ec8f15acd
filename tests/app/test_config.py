"""The one reader: precedence, errors that name the mend, no setting read and dropped."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from app.config import (
    NOT_YET,
    ServerConfig,
    find_model,
    load_settings,
    plain_environment,
    read_api_keys,
    worker_environment,
)
from app.settings import FLAGS, SETTINGS, Setting
from engine.errors import ConfigError, ModelError

Texts = Mapping[str, str]


def read(
    model: str | None = None,
    *,
    flags: Texts | None = None,
    environ: Texts | None = None,
    file: Path | None = None,
) -> ServerConfig:
    config = {"config": str(file)} if file else {}
    return load_settings(model, {**(flags or {}), **config}, environ or {})


def refusal(
    model: str | None = None, *, flags: Texts | None = None, environ: Texts | None = None
) -> str:
    with pytest.raises(ConfigError) as caught:
        read(model, flags=flags, environ=environ)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "stagelight.toml"
    path.write_text("port = 9001\nmax_sequences = 9\n", encoding="utf-8")
    return path


# Precedence and sources


def test_a_flag_wins_over_the_environment_and_that_over_the_file_and_that_over_the_default(
    file: Path,
) -> None:
    environ = {"STAGELIGHT_PORT": "9002"}

    assert read().port == 8000
    assert read(file=file).port == 9001
    assert read(file=file, environ=environ).port == 9002
    assert read(file=file, environ=environ, flags={"port": "9003"}).port == 9003
    assert read(file=file, environ=environ, flags={"port": "9003"}).engine.max_sequences == 9


def test_the_file_may_be_named_in_the_environment(file: Path) -> None:
    assert read(environ={"STAGELIGHT_CONFIG": str(file)}).port == 9001


def test_the_model_comes_from_argument_environment_file_or_is_glimmer(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}", encoding="utf-8")
    file = tmp_path / "settings.toml"
    file.write_text(f'model = "{tmp_path}/one"\n', encoding="utf-8")
    environ = {"STAGELIGHT_MODEL": f"{tmp_path}/two"}

    assert read().model == "glimmer"
    assert read(file=file).served_model_name == "one"
    assert read(file=file, environ=environ).served_model_name == "two"
    assert read(f"{tmp_path}/three", file=file, environ=environ).served_model_name == "three"


def test_the_file_may_hold_lists_switches_and_names_with_dashes(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(
        "restart_delays_s = [0, 2.5]\nclamp = true\nsupervise = false\nmax-context = 640\n",
        encoding="utf-8",
    )

    config = read(file=file)

    assert config.restart_delays_s == (0.0, 2.5)
    assert (config.clamp, config.supervise) == (True, False)
    assert config.engine.max_context == 640


def test_an_empty_text_is_the_same_as_none() -> None:
    assert read(flags={"host": ""}, environ={"STAGELIGHT_PORT": ""}) == read()


def test_a_cluster_that_names_its_service_stagelight_changes_nothing() -> None:
    """Such a cluster sets STAGELIGHT_PORT=tcp://… and more for every pod."""
    environ = {
        "STAGELIGHT_PORT": "tcp://10.0.0.7:80",
        "STAGELIGHT_SERVICE_HOST": "10.0.0.7",
        "STAGELIGHT_SERVICE_PORT": "80",
        "STAGELIGHT_SERVICE_PORT_HTTP": "80",
        "STAGELIGHT_PORT_80_TCP": "tcp://10.0.0.7:80",
        "STAGELIGHT_PORT_80_TCP_ADDR": "10.0.0.7",
    }
    assert read(environ=environ) == read()


# Errors


def test_an_unknown_name_is_refused_with_the_nearest_one_whatever_its_source(
    tmp_path: Path,
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("max_contxt = 5\n", encoding="utf-8")

    assert "max-context" in refusal(flags={"config": str(file)})
    assert str(file) in refusal(flags={"config": str(file)})
    assert "max-context" in refusal(environ={"STAGELIGHT_MAXCONTEXT": "5"})
    assert "served-model-name" in refusal(flags={"served-model": "x"})
    assert "docs/settings.md" in refusal(environ={"STAGELIGHT_QQQQ": "5"})


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("port", "65536"),
        ("port", "-1"),
        ("port", "8000.0"),
        ("max-sequences", "0"),
        ("step-tokens", "many"),
        ("supervise", "yes"),
        ("drain-s", "nan"),
        ("drain-s", "-1"),
        ("drain-s", "inf"),
        ("devices", "gpu:0"),
        ("devices", "cpu:x"),
        ("devices", "cpu,"),
        ("dtype", "int8"),
        ("speculate", "0"),
        ("log-format", "xml"),
        ("served-model-name", " m"),
        ("max-context", "0"),
    ],
)
def test_an_illegal_value_is_refused_with_the_legal_ones(flag: str, text: str) -> None:
    legal = next(setting for setting in SETTINGS if setting.name == flag).kind.legal

    message = refusal(flags={flag: text})

    assert message == f"--{flag} is {text!r}; use {legal}."


@pytest.mark.parametrize("text", ["1", "0", "yes", "true", "on", "force!"])
def test_overlay_publish_knows_three_words_and_no_other(text: str) -> None:
    """Rule 12: an unknown mode stops the boot, also where no model sees pictures."""
    assert "auto, force or off" in refusal(flags={"overlay-publish": text})


@pytest.mark.parametrize(
    ("text", "mode"), [("auto", "auto"), (" Auto ", "auto"), ("OFF", "off"), ("Force", "force")]
)
def test_overlay_publish_is_trimmed_and_in_any_letter_case(text: str, mode: str) -> None:
    """Rule 12: passed on as a value."""
    assert read(flags={"overlay-publish": text}).engine.overlay_publish == mode
    assert read(flags={"overlay-publish": ""}) == read()


@pytest.mark.parametrize("text", ["nvlink", "off", "peers"])
def test_transport_knows_three_words_and_no_other(text: str) -> None:
    """Rule 19."""
    assert "auto, peer or host" in refusal(flags={"transport": text})


def test_the_stages_of_the_engine_are_those_of_the_devices() -> None:
    """Rules 48, 49."""
    engine = read(flags={"devices": "cpu,cpu:1,cpu:0", "stages": "3", "fence": "0,1,7,8"}).engine

    assert engine.devices == ("cpu:0", "cpu:1", "cpu:0")
    assert engine.fence == (0, 1, 7, 8)
    assert read(flags={"devices": "cpu:0,cpu:1"}).engine.fence is None
    assert read(flags={"devices": "cpu:0,cpu:1", "transport": "host"}).engine.transport == "host"


@pytest.mark.parametrize(
    ("stages", "devices"), [("2", "cpu"), ("1", "cpu:0,cpu:1"), ("3", "cpu:0,cpu:1")]
)
def test_stages_and_devices_that_disagree_are_refused(stages: str, devices: str) -> None:
    """Rule 49: no device is made up and none is left out."""
    message = refusal(flags={"stages": stages, "devices": devices})

    assert message.startswith(f"--stages is {stages} and --devices names ")
    assert "use --devices with one for each stage, e.g. cpu:0" in message


@pytest.mark.parametrize(
    ("flag", "text", "mend"),
    [
        ("devices", "cuda:0", "cpu"),
        ("speculate", "2", "off"),
        ("dtype", "bfloat16", "float32"),
        ("load-format", "dummy", "auto"),
        ("image-hosts", "example.org", "none"),
    ],
)
def test_a_value_whose_part_is_not_built_ends_the_boot_and_says_so(
    flag: str, text: str, mend: str
) -> None:
    message = refusal(flags={flag: text})

    assert message.startswith(f"--{flag} {text} asks for ")
    assert "this version does not have" in message
    assert f"use {mend}" in message


def test_a_hub_name_and_a_gguf_file_are_not_in_this_version() -> None:
    assert "name its folder" in refusal("org/name")
    assert "GGUF" in refusal("model.gguf")


def test_a_file_that_is_missing_broken_or_has_tables_is_refused_by_name(tmp_path: Path) -> None:
    broken, tables = tmp_path / "broken.toml", tmp_path / "tables.toml"
    broken.write_text("port = ", encoding="utf-8")
    tables.write_text("[server]\nport = 1\n", encoding="utf-8")

    assert "nowhere.toml" in refusal(flags={"config": "nowhere.toml"})
    assert str(broken) in refusal(flags={"config": str(broken)})
    assert "[server]" in refusal(flags={"config": str(tables)})


def test_limits_that_contradict_one_another_are_refused() -> None:
    assert "soft limit" in refusal(
        environ={"STAGELIGHT_STALL_SOFT_S": "5", "STAGELIGHT_STALL_HARD_S": "5"}
    )
    assert "page_tokens is 17" in refusal(environ={"STAGELIGHT_PAGE_TOKENS": "17"})


@pytest.mark.parametrize("cuts", ["0", "1,8", "0,8,8", "0,4,8"])
def test_a_fence_that_does_not_cut_the_stages_is_refused(cuts: str) -> None:
    assert "does not cut 1 stage" in refusal(flags={"fence": cuts})


def test_a_fence_of_one_stage_goes_to_the_engine() -> None:
    assert read(flags={"fence": "0,8"}).engine.fence == (0, 8)


# Models


def test_a_folder_without_a_config_and_a_name_of_nothing_are_bad_models(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=re.escape(f"{tmp_path} has no config.json")):
        find_model(str(tmp_path))
    with pytest.raises(ModelError, match="nothing-here is no folder"):
        find_model("nothing-here")


def test_the_default_model_ships_with_the_package() -> None:
    folder = read().model_folder

    assert (folder / "model.safetensors").is_file()
    assert read().engine.model == str(folder)
    assert read().served_model_name == "glimmer"


# Keys


def test_with_a_key_the_server_listens_everywhere_and_without_one_at_home(tmp_path: Path) -> None:
    """O15, D7: an explicit host wins; beyond loopback without a key there is one warning."""
    keys = tmp_path / "keys"
    keys.write_text("alice:secret\n", encoding="utf-8")
    keyed = {"api-key-file": str(keys)}

    assert read().host == "127.0.0.1"
    assert read(flags=keyed).host == "0.0.0.0"
    assert read(flags={**keyed, "host": "127.0.0.1"}).host == "127.0.0.1"
    assert read().warnings == ()
    assert read(flags=keyed).warnings == ()
    assert "without a key" in read(flags={"host": "0.0.0.0"}).warnings[0]


def test_fault_injection_is_announced() -> None:
    """Rule 120."""
    (line,) = read(flags={"fault-injection": "on"}).warnings
    assert "fault injection is on" in line


def test_keys_have_a_name_or_part_of_their_hash(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("alice:s3cret\n\nbare-key\n", encoding="utf-8")

    named, bare = read_api_keys(path)

    assert (named.name, named.value) == ("alice", "s3cret")
    assert re.fullmatch(r"[0-9a-f]{4}", bare.name)
    assert bare.value == "bare-key"
    assert "s3cret" not in repr(named)


@pytest.mark.parametrize("line", ["two words", "alice:", ":sesame", "schlüssel"])
def test_a_line_that_is_no_key_is_named_by_its_number_and_never_shown(
    tmp_path: Path, line: str
) -> None:
    path = tmp_path / "keys"
    path.write_text(f"good\n{line}\n", encoding="utf-8")

    message = refusal(flags={"api-key-file": str(path)})

    assert "line 2" in message
    assert line not in message


def test_a_key_file_that_is_missing_or_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n", encoding="utf-8")

    assert "cannot be read" in refusal(flags={"api-key-file": str(tmp_path / "none")})
    assert "holds no key" in refusal(flags={"api-key-file": str(tmp_path / "empty")})


# The table


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_a_default_is_a_legal_value_or_says_what_holds_without_one(setting: Setting) -> None:
    assert bool(setting.default) != bool(setting.otherwise)
    if setting.default:
        setting.kind.parse(setting.default)


OTHER_TEXTS = (
    *("off", "on", "host", "json", "16", "32", "0,8", "1,2", "x", "/x", "both", "openai"),
    "cpu:0,cpu:1",
)
# These change nothing by themselves: float32 weights come one way, and stages follow the devices.
ONE_WAY = {"dtype", "load-format", "stages"}


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_no_setting_is_read_and_dropped(setting: Setting, tmp_path: Path) -> None:
    """Another legal value gives another configuration, or is refused as not built."""
    key = tmp_path / "key"
    key.write_text("k\n", encoding="utf-8")
    for text in (str(key), *OTHER_TEXTS):
        try:
            setting.kind.parse(text)
        except (ValueError, KeyError):
            continue
        try:
            found = read(environ={setting.variable: text})
        except ConfigError:
            continue
        if found != read():
            return
    assert setting.name in ONE_WAY | {row.setting for row in NOT_YET}


def test_flags_are_those_of_the_public_interface() -> None:
    assert [setting.name for setting in FLAGS] == [
        "host",
        "port",
        "served-model-name",
        "devices",
        "stages",
        "fence",
        "max-context",
        "max-sequences",
        "step-tokens",
        "dtype",
        "load-format",
        "overlay-publish",
        "transport",
        "speculate",
        "prefix-cache",
        "supervise",
        "deterministic",
        "api-key-file",
        "image-hosts",
        "log-format",
        "drain-s",
        "fault-injection",
    ]


def test_names_are_unique_and_end_in_their_unit() -> None:
    names = [setting.name for setting in SETTINGS]
    assert len(set(names)) == len(names)
    timed = [s.name for s in SETTINGS if s.kind.metavar.startswith("SECONDS")]
    assert all(name.endswith("-s") for name in timed)
    assert list(itertools.filterfalse(re.compile(r"[a-z]+(-[a-z]+)*").fullmatch, names)) == []


# The environment of other processes


def test_a_worker_starts_with_its_blas_threads_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "7")
    monkeypatch.setenv("SOMETHING_ELSE", "kept")

    environment = worker_environment(2)

    assert environment["OPENBLAS_NUM_THREADS"] == environment["OMP_NUM_THREADS"] == "2"
    assert environment["SOMETHING_ELSE"] == "kept"
    assert (Path(environment["PYTHONPATH"].split(os.pathsep)[0]) / "app" / "worker.py").is_file()


def test_a_server_started_by_a_command_gets_none_of_our_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STAGELIGHT_API_KEY_FILE", "/keys")
    monkeypatch.setenv("SOMETHING_ELSE", "kept")

    environment = plain_environment()

    assert "STAGELIGHT_API_KEY_FILE" not in environment
    assert environment["SOMETHING_ELSE"] == "kept"
