"""What a pool with KV groups announces to the prefix index: blocks before usable boundaries."""

from __future__ import annotations

from engine.kv.groups.usable_prefixes import UsablePrefixes


def tree(parents: list[int], *tails: int) -> UsablePrefixes:
    """Returns the tree of these full pages, named by letters, without window pages."""
    made = UsablePrefixes([bytes([ord("a") + block]) for block in range(len(parents))], tails)
    for block, parent in enumerate(parents):
        made.add(block, parent)
    return made


def changes(made: UsablePrefixes) -> tuple[str, str]:
    gained, lost = made.take_changes()
    return b"".join(gained).decode(), b"".join(lost).decode()


def test_blocks_before_a_usable_boundary_are_announced_parents_first() -> None:
    made = tree([-1, 0, 1, 2, 3, 4, 5, 6, 7, 8], 2)
    assert changes(made) == ("", "")
    for block in (2, 3, 6, 7):  # the picture in the module
        made.set_page(block, 0, True)
    assert changes(made) == ("abcdefgh", "")
    assert [made.is_announced(block) for block in (7, 8)] == [True, False]
    made.set_page(7, 0, False)
    assert changes(made) == ("", "hgfe"), "the boundary after d is usable"
    made.set_page(2, 0, False)
    assert changes(made) == ("", "dcba")
    made.set_page(2, 0, True)
    made.set_page(4, 0, True)
    assert changes(made) == ("abcde", "")


def test_a_prompt_begins_like_a_whole_tail() -> None:
    made = tree([-1, 0, 1], 2)
    made.set_page(0, 0, True)
    assert changes(made) == ("a", "")
    made.set_page(2, 0, True)
    assert changes(made) == ("", "")
    made.set_page(1, 0, True)
    assert changes(made) == ("bc", "")


def test_every_window_group_needs_its_tail() -> None:
    made = tree([-1, 0, 1, 2], 1, 2)
    for block in range(4):
        made.set_page(block, 0, True)
    assert changes(made) == ("", "")
    made.set_page(2, 1, True)
    assert changes(made) == ("", "")
    made.set_page(3, 1, True)
    assert changes(made) == ("abcd", "")
    made.set_page(3, 0, False)
    assert changes(made) == ("", "dcba")


def test_branches_share_their_beginning() -> None:
    made = tree([-1, 0, 1, 1], 1)
    made.set_page(2, 0, True)
    made.set_page(3, 0, True)
    assert changes(made) == ("abcd", "")
    made.remove(3)
    assert changes(made) == ("", "d")
    made.remove(2)
    assert changes(made) == ("", "cba")
    made.add(2, 1)
    assert changes(made) == ("", "")
    made.set_page(2, 0, True)
    assert changes(made) == ("abc", "")
