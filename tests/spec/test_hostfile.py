from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtrain.errors import ExitCode, InputFileError, UsageError
from llmtrain.spec.hostfile import (
    Cluster,
    Host,
    parse_hostfile,
    read_hostfile,
    render_hostfile,
    render_include,
    select,
)

CASES = Path(__file__).parent / "cases"


def _load(name: str) -> list[dict]:
    return [json.loads(line) for line in (CASES / name).read_text().splitlines()]


def _line_of(error: InputFileError) -> int | None:
    _, _, line = (error.where or "").rpartition(":")
    return int(line) if line.isdigit() else None


@pytest.mark.parametrize(
    "case", _load("hostfiles.jsonl"), ids=lambda case: case["text"][:30].encode("ascii", "replace")
)
def test_hostfile_cases(case):
    """Every hostfile of the case table is read as stated or refused with the stated words and line."""
    if "hosts" in case:
        cluster = parse_hostfile(case["text"], name="hostfile")
        assert [[host.name, len(host.slots)] for host in cluster.hosts] == case["hosts"]
        return
    with pytest.raises(InputFileError) as caught:
        parse_hostfile(case["text"], name="hostfile")
    assert case["error"] in caught.value.error.lower()
    assert _line_of(caught.value) == case["line"]
    assert caught.value.exit_code == ExitCode.INPUT
    assert caught.value.fix


@pytest.mark.parametrize(
    "case", _load("selections.jsonl"), ids=lambda case: f"{case.get('include')}|{case.get('exclude')}"
)
def test_selection_cases(case):
    """Every selection of the case table gives the stated ranks or is refused with the stated words."""
    cluster = parse_hostfile(case["text"], name="hostfile")
    if "ranks" in case:
        chosen = select(cluster, include=case.get("include"), exclude=case.get("exclude"))
        assert [[host.name, list(host.slots)] for host in chosen.hosts] == case["ranks"]
        return
    with pytest.raises(UsageError) as caught:
        select(cluster, include=case.get("include"), exclude=case.get("exclude"))
    assert case["error"] in caught.value.error
    assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fe80::1 slots=2\n", "ipv6"),
        ("[2001:db8::7] slots=2\n", "ipv6"),
        ("root@gpu004 slots=2\n", "user"),
        ("gpu004 slots=4 fast\n", "unknown text"),
        ("gpu004 max_slots=8 slots=4\n", "slots"),
        ("10.0.0.256 slots=2\n", "host name"),
        ("gpu004 slots=１\n", "character"),  # noqa: RUF001  a full-width digit is the point
        ("-gpu slots=1\n", "host name"),
        ("gpu..x slots=1\n", "host name"),
        ("gpu004 slots=\n", "slots"),
        ("gpu004\x00 slots=1\n", "character"),
        ("gpu004.\ngpu004 slots=1\n", "slots"),
        ("gpu004. slots=1\ngpu004 slots=1\n", "duplicate"),
        ("a slots=1\n127.0.1.1 slots=1\n", "loopback"),
    ],
)
def test_what_launchers_misread_is_refused(text, words):
    """Hostfile lines beyond the case table that DeepSpeed or pdsh would misread are refused too."""
    with pytest.raises(InputFileError) as caught:
        parse_hostfile(text, name="hostfile")
    assert words in caught.value.error.lower()


def test_missing_hostfile_is_an_error(tmp_path):
    """A hostfile that does not exist is an error, where DeepSpeed trains on the head alone."""
    with pytest.raises(InputFileError, match="no such hostfile"):
        read_hostfile(tmp_path / "absent")


def test_num_hosts_takes_the_first():
    """num_hosts keeps the first hosts in file order and refuses more than there are."""
    cluster = parse_hostfile("a slots=1\nb slots=2\nc slots=3\n", name="hostfile")
    assert select(cluster, num_hosts=2).names == ("a", "b")
    with pytest.raises(UsageError):
        select(cluster, num_hosts=4)
    with pytest.raises(UsageError):
        select(cluster, num_hosts=0)


def test_ranks_follow_file_order():
    """Ranks are numbered host by host in file order, over the slots in use."""
    cluster = select(parse_hostfile("z slots=2\na slots=3\n", name="hostfile"), include="a:1,2@z:1")
    assert cluster.ranks_of("z") == (0,)
    assert cluster.ranks_of("a") == (1, 2)
    assert cluster.world_size == 3


names = st.from_regex(r"[a-z][a-z0-9]{0,8}(-[a-z0-9]{1,4})?(\.[a-z]{2,5})?", fullmatch=True)
clusters = st.lists(
    st.tuples(names, st.sets(st.integers(0, 15), min_size=1)), min_size=1, max_size=12, unique_by=lambda t: t[0]
)


@given(clusters)
def test_deepspeed_reads_what_we_render(tmp_path_factory, drawn):
    """The real DeepSpeed parser reads a rendered hostfile and --include as the same hosts, slots and order."""
    from deepspeed.launcher import runner

    hosts = tuple(Host(name=name, slots=tuple(sorted(slots))) for name, slots in drawn if name != "localhost")
    if not hosts:
        return
    cluster = Cluster(hosts=hosts, origin="hostfile")
    path = tmp_path_factory.mktemp("hostfile") / "hostfile"
    path.write_text(render_hostfile(cluster))
    pool = runner.fetch_hostfile(str(path))
    active = runner.parse_inclusion_exclusion(pool, render_include(cluster), "")
    assert [(name, tuple(slots)) for name, slots in active.items()] == [(host.name, host.slots) for host in hosts]


lines = st.lists(
    st.one_of(
        st.builds("{} slots={}".format, names, st.integers(0, 20)),
        st.builds(
            "{} slots={} # {}".format,
            names,
            st.integers(1, 20),
            st.text(st.characters(codec="ascii", exclude_categories=["C"])),
        ),
        st.text(max_size=30).filter(lambda text: "\n" not in text and "\r" not in text),
        st.sampled_from(["", "#", "  ", "a,b slots=1", "-oProxyCommand=x slots=1"]),
    ),
    max_size=6,
)


@given(lines)
def test_what_we_accept_deepspeed_reads_the_same(tmp_path_factory, drawn):
    """Any text we accept is read by the real DeepSpeed parser as the same hosts and slot counts."""
    from deepspeed.launcher import runner

    text = "\n".join(drawn) + "\n"
    try:
        cluster = parse_hostfile(text, name="hostfile")
    except InputFileError:
        return
    path = tmp_path_factory.mktemp("hostfile") / "hostfile"
    path.write_text(text)
    assert list(runner.fetch_hostfile(str(path)).items()) == [(host.name, len(host.slots)) for host in cluster.hosts]
