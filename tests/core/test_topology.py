from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from refusals import refusal

from gemini_hpc.core.domains import MAX_PATH
from gemini_hpc.core.topology import TopologyError, parse


def test_a_list_of_the_sites() -> None:
    assert parse("# racks\nn[1-2]  rack1\nn3 hall-b.rack2  # new\n\nn[1,4] rack9\n") == {
        "n1": "rack1",
        "n2": "rack1",
        "n3": "hall-b.rack2",
        "n4": "rack9",
    }


def test_switches() -> None:
    text = "SwitchName=leaf1 Nodes=n[1-2] LinkSpeed=1\nswitchname=leaf2 \\\n nodes=n3\n"
    text += "SwitchName=spine Switches=leaf[1-2]\n"
    assert parse(text) == {"n1": "spine.leaf1", "n2": "spine.leaf1", "n3": "spine.leaf2"}


def test_what_scontrol_shows_of_switches() -> None:
    text = (
        "SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[1-2]\n"
        "SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=n[3-4]\n"
        "SwitchName=spine Level=1 LinkSpeed=1 Nodes=n[1-4] Switches=leaf[1-2]\n"
    )
    assert parse(text) == {f"n{k}": f"spine.leaf{(k + 1) // 2}" for k in (1, 2, 3, 4)}


def test_blocks() -> None:
    text = "BlockName=b1 Nodes=n[1-2]\nBlockName=b2 BlockIndex=1 Nodes=n3 BlockSize=2\nBlockSizes=2,4\n"
    assert parse(text) == {"n1": "b1", "n2": "b1", "n3": "b2"}


def test_switches_in_a_circle() -> None:
    found = parse(
        "SwitchName=a Switches=b\nSwitchName=b Switches=a\nSwitchName=c Switches=a\nSwitchName=b Nodes=n1\n"
    )
    assert found == {"n1": "a.b"}
    assert parse("SwitchName=a Switches=a\nSwitchName=a Nodes=n1") == {"n1": "a"}


def test_many_levels_end_somewhere() -> None:
    text = "".join(f"SwitchName={'s' * 200}{k} Switches={'s' * 200}{k - 1}\n" for k in range(1, 50))
    (path,) = parse(f"{text}SwitchName={'s' * 200}0 Nodes=n1\n").values()
    assert len(path) <= MAX_PATH and path.endswith("s0")


def test_what_cannot_be_used_is_told() -> None:
    for text, sentence in (
        ("n1", "line 1: wanted NODES DOMAIN"),
        ("n1 a\nn[2-1 b", "line 2: "),
        ("n1 a b", "line 1: wanted NODES DOMAIN"),
        ("n1 rack\x1b[2J", "line 1: wanted a name of letters"),
        ("n[1-2] ../../etc", "line 1: wanted a name of letters"),
        ("n[1-999999999] a", "names more than"),
        ("SwitchName= Nodes=n1", "line 1: wanted a name of letters"),
        ("- name: a", "line 1: wanted NODES DOMAIN"),
    ):
        assert sentence in refusal(TopologyError, parse, text), text


@given(st.text(alphabet="SwitchName=Nodes n[1-3],ab\\#\n.{}:", max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        found = parse(text)
    except TopologyError as error:
        assert "\n" not in str(error)
    else:
        assert all(0 < len(name) <= MAX_PATH for name in found.values())
