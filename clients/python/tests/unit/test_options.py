"""Options: a value that no one has meant is refused, and never replaced by another one."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from kubefan import (
    BackoffOptions,
    Client,
    ClientOptions,
    Encoding,
    Fallback,
    OnExpired,
    OnLag,
    Projection,
    Target,
    WatchOptions,
)
from kubefan._in_cluster import ClientKeywords
from kubefan._informer_state import InformerState
from kubefan._keywords import get_request, list_request, watch_options
from kubefan._watch_state import WatchState
from kubefan.v1alpha1 import watch_pb2 as api

#: Each option with fixed values, and what a watch sends for each.
SENT: list[tuple[str, Any, dict[str, Any]]] = [
    ("on_lag", OnLag.EXPIRE, {"on_lag": api.ON_LAG_EXPIRE}),
    ("on_lag", OnLag.CONFLATE, {"on_lag": api.ON_LAG_CONFLATE}),
    ("on_expired", OnExpired.FAIL, {"on_expired": api.ON_EXPIRED_FAIL}),
    ("on_expired", OnExpired.RESTART, {"on_expired": api.ON_EXPIRED_RESTART}),
    ("encoding", Encoding.JSON, {"encoding": api.ENCODING_JSON}),
    ("encoding", Encoding.ZSTD, {"encoding": api.ENCODING_ZSTD}),
    ("encoding", Encoding.ZSTD_DELTA, {"encoding": api.ENCODING_ZSTD_DELTA}),
    ("fallback", Fallback.PACED, {}),
    ("fallback", Fallback.NEVER, {}),
]


def test_every_value_of_an_enum_is_in_the_table() -> None:
    assert {value for _, value, _ in SENT} == {*OnLag, *OnExpired, *Encoding, *Fallback}


@pytest.mark.parametrize(("option", "value", "sent"), SENT)
def test_a_value_and_its_string_send_the_same(
    option: str, value: Any, sent: dict[str, Any]
) -> None:
    for given in (value, value.value):
        target, options = watch_options("pods", {option: given})
        assert getattr(options, option) is value
        request = WatchState(target, options).request(0.0)
        assert request is not None
        assert {name: getattr(request, name) for name in sent} == sent
        informer = InformerState("pods", {option: given})
        assert getattr(informer.options(), option) is value


@pytest.mark.parametrize(
    ("option", "allowed"),
    [
        ("on_lag", "'expire' or 'conflate'"),
        ("on_expired", "'fail' or 'restart'"),
        ("encoding", "'json', 'zstd' or 'zstd-delta'"),
        ("fallback", "'paced' or 'never'"),
    ],
)
@pytest.mark.parametrize(
    "given", ["paces", "CONFLATE", "", None, 1, True, OnLag, DeprecationWarning]
)
def test_any_other_value_is_refused_with_the_allowed_ones(
    option: str, allowed: str, given: Any
) -> None:
    calls: list[Any] = [
        lambda: WatchOptions(**{option: given}),
        lambda: watch_options("pods", {option: given}),
        lambda: InformerState("pods", {option: given}),
    ]
    for call in calls:
        with pytest.raises(ValueError) as raised:
            call()
        text = str(raised.value)
        assert text.startswith(f"{option}={given!r}"), text
        assert allowed in text, text


def test_a_value_of_another_option_is_refused() -> None:
    with pytest.raises(ValueError, match="on_lag=<OnExpired"):
        watch_options("pods", {"on_lag": OnExpired.RESTART})


@pytest.mark.parametrize("call", [list_request, watch_options])
@pytest.mark.parametrize("given", [None, "metadata", ["spec.nodeName"], {"paths": ["a"]}])
def test_a_projection_is_made_with_its_class(call: Any, given: Any) -> None:
    with pytest.raises(ValueError, match=r"projection=.*Projection\.fields\("):
        call("pods", {"projection": given})
    with pytest.raises(ValueError, match=r"projection=.*Projection\.fields\("):
        get_request("pods", "a", "n", {"projection": given})
    with pytest.raises(ValueError, match=r"projection=.*Projection\.fields\("):
        InformerState("pods", {"projection": given})


def test_a_projection_without_paths_does_not_mean_everything() -> None:
    with pytest.raises(ValueError, match=r"at least one path.*Projection\(\)"):
        Projection.fields()
    with pytest.raises(ValueError, match="path is empty"):
        Projection.fields("spec", "")
    # A string is a sequence of letters, and no letter is a path that a caller could mean.
    paths: Any = "spec.nodeName"
    with pytest.raises(ValueError, match=r"paths='spec\.nodeName'"):
        Projection(paths=paths)
    listed: Any = ["spec.nodeName", "status"]
    with pytest.raises(ValueError, match=r"paths=\(\['spec\.nodeName', 'status'\],\)"):
        Projection.fields(listed)
    assert Projection(paths=listed) == Projection.fields("spec.nodeName", "status")
    assert hash(Projection(paths=listed)) == hash(Projection.fields(*listed))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"only_changes": True}, "only_changes needs a projection that leaves something out"),
        ({"only_changes": True, "encoding": "zstd"}, "only_changes needs a projection"),
        ({"timeout": 0}, "timeout=0 is not possible; give a number of seconds above 0"),
        ({"timeout": -1.0}, "timeout=-1.0"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"timeout": "5"}, "timeout='5'"),
        ({"bookmark_interval": 0.5}, "bookmark_interval=0.5 is not possible; give a number of at"),
        ({"bookmark_interval": float("inf")}, "bookmark_interval=inf"),
        ({"delta_base_bytes_max": -1}, "delta_base_bytes_max=-1"),
    ],
)
def test_options_that_contradict_each_other_or_mean_nothing_are_refused(
    options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError) as raised:
        watch_options("pods", options)
    assert problem in str(raised.value)


def test_only_changes_is_possible_with_what_has_the_canonical_form() -> None:
    for options in (
        {"projection": Projection.fields("spec")},
        {"projection": Projection.metadata()},
        {"projection": Projection(drop_managed_fields=True)},
        {"encoding": Encoding.ZSTD_DELTA},
    ):
        assert watch_options("pods", {"only_changes": True, **options})[1].only_changes


@pytest.mark.parametrize(
    "options",
    [
        {"initial": 0.0},
        {"initial": -1.0},
        {"initial": float("nan")},
        {"initial": 2.0, "max": 1.0},
        {"factor": 0.5},
        {"jitter": -0.1},
        {"reset_after": -1.0},
    ],
)
def test_delays_that_would_ask_in_a_tight_loop_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="|".join(f"{name}=" for name in options)):
        BackoffOptions(**options)


@pytest.mark.parametrize(
    "name", ["connect_timeout", "message_bytes_max", "keepalive_interval", "keepalive_timeout"]
)
def test_limits_of_a_connection_are_above_zero(name: str) -> None:
    for given in (0, -1):
        options: dict[str, Any] = {name: given}
        with pytest.raises(ValueError, match=f"{name}={given}"):
            ClientOptions(**options)


def test_a_stream_that_was_left_in_its_first_snapshot_may_be_continued() -> None:
    # It has a cluster, but no version yet.
    assert watch_options("pods", {"resource_version": "", "cluster": "c"})[1].cluster == "c"


def test_a_list_and_a_get_have_five_minutes_unless_the_caller_says_otherwise() -> None:
    assert [list_request("pods", {})[1], get_request("pods", "a", "n", {})[1]] == [300.0, 300.0]
    assert list_request("pods", {"timeout": 2})[1] == 2
    assert get_request("pods", "a", "n", {"timeout": 2})[1] == 2


def test_an_informer_starts_with_the_present_state() -> None:
    for name, value in (("resource_version", "5"), ("cluster", "c"), ("timeout", 1.0)):
        with pytest.raises(TypeError, match=f"an informer has no {name}"):
            InformerState("pods", {name: value})


def test_a_client_in_a_pod_takes_every_option_of_a_client() -> None:
    assert set(ClientKeywords.__annotations__) == {one.name for one in fields(ClientOptions)}
    wrong: Any = {"no_such_option": 1}
    with pytest.raises(TypeError, match="no_such_option"):
        Client.in_cluster("h:1", **wrong)


def test_the_target_and_the_options_are_those_of_the_keywords() -> None:
    target, options = watch_options("pods", {"namespace": "n", "on_lag": "expire"})
    assert (target, options) == (Target("pods", "n"), WatchOptions(on_lag=OnLag.EXPIRE))
