"""Pages of the K/V caches: counted, shared by reference through a tree of prefixes, and kept until others need them.

A node of the tree is a page, and its path from the root is the text before it. A prompt takes the full pages that it
shares with any earlier one by reference, and copies the rows after them that another's page shares in part. Only the
sequence that a page was given to writes to it, behind the rows that the tree knows: what is shared never changes.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from trtllm_dflash.engine.paging import Paging
from trtllm_dflash.runtime.windows import Windows

#: How many of so many rows that others left a sequence can go on from.
Reach: TypeAlias = Callable[[int], int]

#: Shorter shared prefixes are not worth a copy: a prompt has a template's first words in common with any other.
MIN_COPIED_ROWS = 16


class Node:
    """A page, and the tokens whose K/V rows are known to be in it.

    Attributes:
        tokens: of its first rows.
        drafter_rows: how many of them the drafter's caches hold too; they then hold all rows before the page.
        refs: leases that have the page, and copies that are yet to be made of it.
        parent: the page before it, or the root; None while it is not in the tree.
        children: pages after it.
        released: the time of its last release, in changes of all pages.
        key: its first tokens, by which its parent finds it; None while it has fewer.
        full: full pages after it, by their tokens, and whether the drafter's caches have them all.
        begun: pages after it by their keys, the newest last.
    """

    __slots__ = ("begun", "children", "drafter_rows", "full", "key", "page", "parent", "refs", "released", "tokens")

    def __init__(self, page: int) -> None:
        self.page = page
        self.tokens: list[int] = []
        self.drafter_rows = 0
        self.refs = 0
        self.parent: Node | None = None
        self.children = 0
        self.released = 0
        self.key: tuple[int, ...] | None = None
        self.full: dict[tuple[tuple[int, ...], bool], Node] = {}
        self.begun: dict[tuple[int, ...], dict[Node, None]] = {}


@dataclass(eq=False, slots=True)
class Lease:
    """Pages of one sequence, in the order of its positions.

    Attributes:
        rows: of the sequence that the tree knows.
        drafter_rows: how many of them the drafter's caches hold too.
        copy: page from, page to and rows, of a copy that must be made before the sequence's first step.
        source: the page that it comes from, which stays as it is until `Pages.copied`.
        window_copy: the same copy in layers with a window, where they have pages of their own.
        seen: places whose pages those layers have: from the first that the next row sees, to where steps may write.
    """

    nodes: list[Node]
    rows: int
    drafter_rows: int
    copy: tuple[int, int, int] | None = None
    source: Node | None = None
    window_copy: tuple[int, int, int] | None = None
    seen: range = range(0)


class Pages:
    """All pages of an engine.

    Args:
        paging: how many there are, and of how many rows.

    Attributes:
        used: pages that have leases.
        shared: those that have several.
        changes: a number that changes whenever an admission that was refused may succeed.
    """

    def __init__(self, paging: Paging) -> None:
        self._paging = paging
        self.total = paging.pages
        self.rows = paging.rows
        self.used = 0
        self.shared = 0
        self._free = [Node(page) for page in range(paging.pages - 1, -1, -1)]  # without tokens
        self._root = Node(-1)
        self._leaves: list[tuple[int, int, Node]] = []  # a heap of pages without leases: the first goes first
        self.changes = 0
        self.windows = Windows(paging) if paging.window else None

    @property
    def available(self) -> int:
        """Pages without a lease, free or kept: a page after a kept one is kept too, so that all can be taken."""
        return self.total - self.used

    @property
    def kept(self) -> int:
        """Pages without a lease whose rows are kept for prompts that begin so."""
        return self.total - self.used - len(self._free)

    # -- leases ------------------------------------------------------------------------------------------------------

    def admit(self, ids: list[int], drafts: bool, rows: int, reach: Reach | None = None) -> Lease | None:
        """Gives a sequence pages for so many rows; None where there are not enough.

        Args:
            ids: the tokens that it begins with. The last one's row is never shared: a step has to run on it.
            drafts: whether the rows must be in the drafter's caches too.
            reach: says of a number of rows that others left how many it can go on from; None: all.
        """
        nodes, source, copied = self._longest_prefix(ids, drafts)
        if reach is not None:
            nodes, source, copied = self._shortened(nodes, source, copied, reach)
        needed, whole = -(-rows // self.rows), len(nodes) * self.rows
        left = self.available - (needed - len(nodes)) - sum(node.refs == 0 for node in nodes)
        if source is not None and left == 0 and source.refs == 0:
            source = None  # it is needed itself
            if reach is not None and reach(whole) != whole:  # nothing goes on from the whole pages alone
                nodes, left = [], self.available - needed
        if left < 0:
            return None
        new = needed - len(nodes)
        for node in nodes:
            self._refer(node)
        lease = Lease(nodes, len(nodes) * self.rows, sum(node.drafter_rows for node in nodes))
        if source is not None:
            self._refer(source)
        for _ in range(new):
            nodes.append(self._take())
        if self.windows is not None:
            shared = lease.rows // self.rows
            self._see(lease, range(self.windows.first_seen(shared), shared))
            if source is not None:  # first, or its window page might be taken for the other
                window = self.windows.hold(source.page)
                self._see(lease, range(lease.seen.start, shared + 1))
                lease.window_copy = window, self.windows.of(nodes[shared].page), copied
        if source is not None:
            self._copy(lease, source, nodes[lease.rows // self.rows], copied)
        return lease

    def grow(self, lease: Lease) -> int:
        """Gives a sequence one more page, which must be available, behind those that it has; returns it."""
        node = self._take()
        lease.nodes.append(node)
        return node.page

    def look(self, lease: Lease, rows: int, end: int) -> range:
        """Gives a sequence pages of layers with a window, and takes back those that it sees no more.

        There always are enough.

        Args:
            rows: the position of the first row that is yet to be computed.
            end: rows that its steps may write.

        Returns:
            Places of new ones.
        """
        before = lease.seen
        last = max(before.stop, min(-(-end // self.rows), len(lease.nodes)))
        first = max(before.start, min(self._paging.first_seen(rows), before.stop))
        self._see(lease, range(first, last))
        return range(before.stop, last)

    def copied(self, lease: Lease) -> None:
        """Lets go of the page that a lease's first rows were copied from."""
        if lease.source is not None:
            if lease.window_copy is not None and self.windows is not None:
                self.windows.let_go(lease.source.page)
            self._release(lease.source)
        lease.copy = lease.source = lease.window_copy = None

    def record(self, lease: Lease, tokens: list[int], drafter_rows: int) -> list[tuple[int, int]]:
        """Notes the tokens of the sequence's next rows, which its steps have written.

        A page that becomes full and is there already is given back for the other one.

        Args:
            drafter_rows: of all its rows, those that are in the drafter's caches too.

        Returns:
            Such pages: the place in the sequence, and the page that it has there from now on.
        """
        exchanged = []
        lease.drafter_rows = drafter_rows
        at = 0
        while at < len(tokens):
            place, row = divmod(lease.rows, self.rows)
            node = lease.nodes[place]
            new = tokens[at : at + self.rows - row]
            at += len(new)
            lease.rows += len(new)
            node.tokens += new
            node.drafter_rows = max(0, min(drafter_rows - place * self.rows, len(node.tokens)))
            self._link(node, lease.nodes[place - 1] if place else self._root)
            if len(node.tokens) == self.rows:
                lease.nodes[place] = self._find_or_add(node, place in lease.seen)
                if lease.nodes[place] is not node:
                    exchanged.append((place, lease.nodes[place].page))
        return exchanged

    def release(self, lease: Lease) -> None:
        """Takes a sequence's pages back, and keeps their rows for prompts that begin so."""
        self.copied(lease)
        self._see(lease, range(0))
        for node in reversed(lease.nodes):
            self._release(node)
        lease.nodes = []

    def forget(self, lease: Lease) -> None:
        """Takes a sequence's pages back, and keeps of their rows none that no other sequence has."""
        nodes = lease.nodes
        self.release(lease)
        for node in reversed(nodes):
            if node.parent is not None and node.refs == 0 and node.children == 0:
                self._empty(node)

    # -- finding -----------------------------------------------------------------------------------------------------

    def _longest_prefix(self, ids: list[int], drafts: bool) -> tuple[list[Node], Node | None, int]:
        """Finds full pages that a prompt begins with, and the page that shares most rows after them: their number.

        Of pages that begin alike, as many are compared as a page has rows: the newest.
        """
        node, nodes, at = self._root, [], 0
        most = len(ids) - 1
        while at + self.rows <= most:
            tokens = tuple(ids[at : at + self.rows])
            child = node.full.get((tokens, True))
            if child is None and not drafts:
                child = node.full.get((tokens, False))
            if child is None:
                break
            nodes.append(child)
            node = child
            at += self.rows
        if self.windows is not None:
            del nodes[self.windows.seen_prefix([node.page for node in nodes]) :]
            node, at = nodes[-1] if nodes else self._root, len(nodes) * self.rows
        best, rows = None, MIN_COPIED_ROWS - 1
        begun = node.begun.get(tuple(ids[at : at + MIN_COPIED_ROWS]), {})
        # Thousands may begin with a template's words. An older one would save less than a page's rows more, so that the
        # larger a page is the more are compared: where a slot has one page, all of them.
        for child in islice(reversed(begun), self.rows):
            if self.windows is not None and not self.windows.has(child.page):
                continue
            # Not a whole page: it would be full before a step has written to it, and never come into the tree.
            limit = min(most - at, self.rows - 1, child.drafter_rows if drafts else len(child.tokens))
            if limit > rows and child.tokens[: rows + 1] == ids[at : at + rows + 1]:
                best, rows = child, _shared_rows(child.tokens, ids, at, rows + 1, limit)
        return nodes, best, rows if best is not None else 0

    def _shortened(
        self, nodes: list[Node], source: Node | None, copied: int, reach: Reach
    ) -> tuple[list[Node], Node | None, int]:
        """Shortens what `_longest_prefix` found to what can be gone on from."""
        found = len(nodes) * self.rows + copied
        kept = reach(found)
        if kept == found:
            return nodes, source, copied
        assert self.windows is None, "no target has both states and windows: what the row after it sees may be lost"
        whole, rest = divmod(kept, self.rows)
        source = nodes[whole] if whole < len(nodes) else source
        return nodes[:whole], source if rest else None, rest

    def _copy(self, lease: Lease, source: Node, target: Node, rows: int) -> None:
        """Notes that a page begins with rows of another, which has a reference to keep it until they are copied."""
        target.tokens = source.tokens[:rows]
        target.drafter_rows = min(source.drafter_rows, rows)
        lease.rows += rows
        if lease.drafter_rows == lease.rows - rows:
            lease.drafter_rows += target.drafter_rows
        lease.copy = source.page, target.page, rows
        lease.source = source

    # -- the tree ----------------------------------------------------------------------------------------------------

    def _link(self, node: Node, parent: Node) -> None:
        """Adds a page with tokens to the tree, if it is not there; by its key once it has one."""
        if node.parent is None:
            node.parent = parent
            parent.children += 1
        if node.key is None and len(node.tokens) >= MIN_COPIED_ROWS:
            node.key = tuple(node.tokens[:MIN_COPIED_ROWS])
            parent.begun.setdefault(node.key, {})[node] = None

    def _find_or_add(self, node: Node, seen: bool) -> Node:
        """Adds a page to the full ones; where there is such a page, gives it back and refers to that one instead.

        Not to one whose rows the drafter's caches have fewer of.

        Args:
            seen: whether the sequence sees it in layers with a window, which have pages of their own.
        """
        self.changes += 1
        parent = node.parent
        assert parent is not None
        known = parent.full.setdefault((tuple(node.tokens), node.drafter_rows == self.rows), node)
        if known is node or node.refs > 1 or known.drafter_rows < node.drafter_rows:
            return node
        self._refer(known)
        if self.windows is not None:
            self.windows.exchange(node.page, known.page, seen)
        self.used -= 1
        node.refs = 0
        self._empty(node)
        return known

    def _unlink(self, node: Node) -> None:
        """Takes a page without children out of the tree."""
        parent = node.parent
        assert parent is not None
        assert not node.children
        parent.children -= 1
        node.parent = None
        if node.key is not None:
            begun = parent.begun[node.key]
            del begun[node]
            if not begun:
                del parent.begun[node.key]
            node.key = None
        if len(node.tokens) == self.rows:
            tokens = tuple(node.tokens), node.drafter_rows == self.rows
            if parent.full.get(tokens) is node:
                del parent.full[tokens]
        if parent.refs == 0 and parent.children == 0 and parent.parent is not None:
            self._offer(parent)

    def _empty(self, node: Node) -> None:
        """Frees a page that nobody has and none comes after."""
        if node.parent is not None:
            self._unlink(node)
        node.tokens, node.drafter_rows = [], 0
        self._free.append(node)

    # -- counting ----------------------------------------------------------------------------------------------------

    def _refer(self, node: Node) -> None:
        node.refs += 1
        self.used += node.refs == 1
        self.shared += node.refs == 2

    def _release(self, node: Node) -> None:
        node.refs -= 1
        self.shared -= node.refs == 1
        if node.refs:
            return
        self.used -= 1
        self.changes += 1
        node.released = self.changes
        if node.children:
            return
        if node.key is not None or len(node.tokens) == self.rows:
            self._offer(node)
            return
        self._empty(node)  # nothing finds it

    def _offer(self, node: Node) -> None:
        """Notes a page that has neither leases nor children."""
        if len(self._leaves) > 2 * self.total:  # most of them have been taken since
            self._leaves = [leaf for leaf in self._leaves if _is_leaf(leaf[2], leaf[0])]
            heapq.heapify(self._leaves)
        heapq.heappush(self._leaves, (node.released, node.page, node))

    def _take(self) -> Node:
        """Takes a free page, or the one that was released first of those without children."""
        if not self._free:
            released, _, node = heapq.heappop(self._leaves)
            while not _is_leaf(node, released):
                released, _, node = heapq.heappop(self._leaves)
            self._empty(node)
        node = self._free.pop()
        node.refs = 1
        self.used += 1
        if self.windows is not None:
            self.windows.forget(node.page)
        return node

    def _see(self, lease: Lease, seen: range) -> None:
        """Gives a sequence the pages of layers with a window at these places, and takes back those at others."""
        if self.windows is None:
            return
        for place in lease.seen:
            if place not in seen:
                self.windows.let_go(lease.nodes[place].page)
        for place in seen:
            if place not in lease.seen:
                self.windows.hold(lease.nodes[place].page)
        lease.seen = seen


class LinearPages(Pages):
    """One page for each slot, of its number: nothing is given by reference, and own rows are used where they are."""

    def __init__(self, paging: Paging) -> None:
        super().__init__(paging)
        self._slots = [Node(page) for page in range(paging.pages)]
        self._free = []

    def is_free(self, slot: int) -> bool:
        """Whether a slot's page has no lease, and no copy is yet to be made of it."""
        return self._slots[slot].refs == 0

    def admit_to(self, slot: int, ids: list[int], drafts: bool, reach: Reach | None = None) -> Lease:
        """Gives a sequence the page of a free slot. Arguments as in `admit`."""
        node = self._slots[slot]
        _, source, copied = self._longest_prefix(ids, drafts)
        most = min(len(ids) - 1, node.drafter_rows if drafts else len(node.tokens))
        own = _shared_rows(node.tokens, ids, 0, 0, most)
        if reach is not None:
            copied, own = reach(copied), reach(own)
        in_place = source is None or copied <= own
        self._cut(node, own if in_place else 0)
        self._refer(node)
        lease = Lease([node], len(node.tokens), node.drafter_rows)
        if source is not None and not in_place:
            self._refer(source)
            self._copy(lease, source, node, copied)
        return lease

    def release(self, lease: Lease) -> None:
        node, is_empty = lease.nodes[0], lease.copy is not None
        super().release(lease)
        if is_empty:  # the copy that its first rows come from was never made
            self._cut(node, 0)

    def forget(self, lease: Lease) -> None:
        node = lease.nodes[0]
        self.release(lease)
        self._cut(node, 0)

    @property
    def kept(self) -> int:
        return sum(node.refs == 0 and bool(node.tokens) for node in self._slots)

    def _cut(self, node: Node, rows: int) -> None:
        """Forgets all rows of a page but the first ones."""
        if node.parent is not None:
            self._unlink(node)
        del node.tokens[rows:]
        node.drafter_rows = min(node.drafter_rows, rows)
        if rows:
            self._link(node, self._root)

    def _release(self, node: Node) -> None:
        node.refs -= 1
        self.shared -= node.refs == 1
        self.used -= node.refs == 0
        self.changes += node.refs == 0


def _is_leaf(node: Node, released: int) -> bool:
    """Whether a page that was without leases and children, since a release, still is."""
    return node.parent is not None and node.refs == 0 and node.children == 0 and node.released == released


def _shared_rows(tokens: list[int], ids: list[int], first: int, known: int, most: int) -> int:
    """Counts a page's first tokens that are a prompt's from `first` on: `known` at least, and `most` at most."""
    while known < most:
        middle = (known + most + 1) // 2
        if tokens[known:middle] == ids[first + known : first + middle]:
            known = middle
        else:
            most = middle - 1
    return known
