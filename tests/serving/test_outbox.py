"""A model's thread beside `execute`: it looks around often while somebody waits, and rests otherwise."""

import itertools
import queue
import threading

import pytest

from tests.waiting import PATIENCE
from trtllm_dflash.serving import outbox
from trtllm_dflash.serving.outbox import Outbox

OFTEN, SELDOM, NEVER = 0.01, 0.1, None


class Sender:
    def __init__(self):
        self.asked = threading.Event()

    def is_cancelled(self):
        self.asked.set()
        return False


@pytest.fixture
def pauses(monkeypatch):
    """For how long the thread waits for work each time, as it begins to."""
    seen: queue.SimpleQueue[float | None] = queue.SimpleQueue()

    class Work(queue.SimpleQueue):
        def get(self, timeout):
            seen.put(timeout)
            return super().get(timeout=timeout)

    monkeypatch.setattr(outbox, "SimpleQueue", Work)
    return iter(lambda: seen.get(timeout=PATIENCE), object())


def until(pauses, wanted):
    """The pauses before the first one of so long."""
    return set(itertools.takewhile(lambda pause: pause != wanted, pauses))


def test_a_client_is_watched_until_it_has_its_answer_and_then_the_thread_sleeps(pauses):
    box, sender = Outbox(), Sender()
    assert next(pauses) is NEVER
    box.put(lambda: box.watch(sender, lambda: None))
    assert next(pauses) == OFTEN
    assert sender.asked.wait(PATIENCE)
    box.put(lambda: box.unwatch(sender))
    assert until(pauses, NEVER) <= {OFTEN}
    box.close()


def test_who_has_more_to_do_is_called_often_and_else_seldom(pauses):
    busy = threading.Event()
    box = Outbox(busy.is_set)
    assert next(pauses) == SELDOM
    busy.set()
    assert until(pauses, OFTEN) <= {SELDOM}
    busy.clear()
    assert until(pauses, SELDOM) <= {OFTEN}
    box.put(lambda: None)  # there may be more to do after it
    assert until(pauses, OFTEN) <= {SELDOM}
    assert until(pauses, SELDOM) <= {OFTEN}
    box.close()
