"""Kept states of hybrids, and the pages that sequences share with them."""

from tests.paged_session import request
from trtllm_dflash.engine.paging import Paging
from trtllm_dflash.runtime.checkpoints import Checkpoints
from trtllm_dflash.runtime.slots import Slots

MARGIN = 8


def admit(slots, prompt):
    return slots.admit(request(prompt, draft=False), drafts=False)


def read_prompt(slots, stay, count=None):
    """What the scheduler does once a step that reads so many or all tokens is launched, and once it is read."""
    slots.begin_changes()
    slots.pages.copied(stay.lease)
    first, stay.launched = stay.launched, stay.prompt if count is None else stay.launched + count
    slots.keep_state(stay, first)
    stay.rows = stay.launched
    slots.record(stay)


def test_whole_pages_are_not_shared_where_the_copy_that_reaches_a_state_has_no_page():
    slots = Slots(2, Paging(pages=3, rows=64, width=3), MARGIN, Checkpoints(2, 4, 4))
    first = admit(slots, range(1000, 1100))
    read_prompt(slots, first)  # its state goes on behind 96 to 100 tokens, and not behind a page of 64
    slots.leave(first)
    slots.begin_changes()
    second = admit(slots, [*range(1000, 1098), *range(2000, 2060)])  # needs all pages, the copy's source too
    assert (second.rows, second.lease.rows, slots.state_copies) == (0, 0, [])
    slots.leave(second)
    assert slots.pages.used == 0


def test_it_waits_where_what_it_would_share_is_another_s_and_no_other_page_is_left():
    slots = Slots(3, Paging(pages=5, rows=64, width=3), MARGIN, Checkpoints(3, 4, 4))
    first = admit(slots, range(1000, 1100))
    read_prompt(slots, first)
    slots.begin_changes()
    running = admit(slots, [*range(1000, 1098), *range(3000, 3030)])  # shares the first page
    assert running.rows == 98
    slots.pages.copied(running.lease)
    slots.leave(first)
    slots.begin_changes()
    used = slots.pages.used
    assert slots.pages.available == 2
    assert admit(slots, [*range(1000, 1098), *range(2000, 2060)]) is None
    assert slots.pages.used == used
    slots.leave(running)
    assert admit(slots, [*range(1000, 1098), *range(2000, 2060)]).rows == 98


def test_no_state_is_gone_on_from_before_a_step_has_copied_it():
    slots = Slots(3, Paging(pages=9, rows=64, width=3), MARGIN, Checkpoints(3, 4, 4))
    first = admit(slots, range(1000, 1100))
    read_prompt(slots, first)
    ((_, place),) = slots.state_copies
    later = admit(slots, range(1000, 1150))
    slots.leave(first, forget=True)  # the step that would have copied its state has failed
    assert place not in [source for source, _ in slots.state_copies], "nothing was ever written there"
    assert later.rows == 0
    read_prompt(slots, later)
    slots.begin_changes()
    assert admit(slots, range(1000, 1160)).rows == 150


def test_a_state_that_a_later_sequence_s_failure_keeps_from_being_copied_is_forgotten():
    slots = Slots(3, Paging(pages=9, rows=64, width=3), MARGIN, Checkpoints(3, 4, 4))
    first = admit(slots, range(1000, 1100))
    read_prompt(slots, first)
    slots.leave(first)  # ended by the token that its prompt gave: the next step would copy its state
    later = admit(slots, range(2000, 2100))
    assert later.slot == first.slot
    slots.leave(later, forget=True)  # that step has failed, and may have begun on the slot
    assert slots.state_copies == []
    assert admit(slots, range(1000, 1150)).rows == 0


def test_states_of_a_failed_step_are_forgotten_though_their_sequence_has_left_its_slot():
    slots = Slots(3, Paging(pages=9, rows=64, width=3), MARGIN, Checkpoints(3, 4, 4))
    first = admit(slots, range(1000, 1100))
    read_prompt(slots, first)
    slots.leave(first)  # cancelled while the step is under way
    slots.begin_changes()  # the next step has copied the state
    slots.forget_states(first)
    assert admit(slots, range(1000, 1150)).rows == 0
    slots.forget_states(first)  # once more changes nothing


def test_a_state_whose_place_another_has_now_is_not_forgotten_for_it():
    checkpoints = Checkpoints(3, 1, 4)
    slots = Slots(3, Paging(pages=9, rows=64, width=3), MARGIN, checkpoints)
    first = admit(slots, range(1000, 1100))
    read_prompt(slots, first)
    slots.begin_changes()
    second = admit(slots, range(2000, 2100))
    read_prompt(slots, second)  # its state takes the only place
    slots.leave(first, forget=True)
    slots.begin_changes()
    slots.leave(second)
    assert admit(slots, range(2000, 2150)).rows == 100


def test_copies_that_a_failed_step_may_have_made_are_not_made_again():
    """The second of two copies has written over what the first one copies."""
    slots = Slots(2, Paging(pages=9, rows=64, width=3), MARGIN, Checkpoints(2, 4, 4))
    kept = admit(slots, range(1000, 1100))
    read_prompt(slots, kept)
    slots.begin_changes()
    slots.leave(kept)
    ended = admit(slots, range(2000, 2100))
    read_prompt(slots, ended)
    slots.leave(ended)  # the next step would copy its state
    waiting = admit(slots, range(1000, 1150))  # and then another one to the same slot
    assert waiting.slot == ended.slot
    (copied, _), (_, overwritten) = slots.state_copies
    assert copied == overwritten == ended.slot
    assert slots.drop_copies() == [waiting]
    assert slots.state_copies == []
    slots.leave(waiting)
    assert admit(slots, range(2000, 2150)).rows == 0, "its state may be another's"
    assert admit(slots, range(1000, 1150)).rows == 100


#: What prompts have in common, and what each goes on with.
COMMON, OWN = range(1000, 1400), [range(start, start + 40) for start in (2000, 3000, 4000)]


def test_a_state_is_kept_where_two_prompts_part_for_those_that_begin_so():
    slots = Slots(3, Paging(pages=40, rows=64, width=10), MARGIN, Checkpoints(3, 4, 4))
    first = admit(slots, [*COMMON, *OWN[0]])
    assert first.readable == 440
    read_prompt(slots, first)
    slots.begin_changes()
    second = admit(slots, [*COMMON, *OWN[1]])
    assert (second.rows, second.readable) == (0, 400)
    read_prompt(slots, second, 150)
    assert second.readable == 250 and not slots.state_copies
    read_prompt(slots, second, 250)
    assert second.readable == 40
    read_prompt(slots, second)
    slots.begin_changes()
    third = admit(slots, [*COMMON, *OWN[2]])
    assert (third.rows, third.readable) == (400, 40)


def test_a_conversation_s_next_turn_keeps_no_state_behind_the_reply():
    slots = Slots(3, Paging(pages=40, rows=64, width=15), MARGIN, Checkpoints(3, 4, 4))
    first = admit(slots, COMMON)
    read_prompt(slots, first)
    first.sequence.token_ids = [*range(5000, 5301)]  # a reply, the last token of which has no row yet
    assert slots.grow(first)
    first.rows = 700
    slots.leave(first)
    slots.begin_changes()
    turn = admit(slots, [*COMMON, *range(5000, 5301), *OWN[0]])
    assert (turn.rows, turn.readable) == (400, 341)


def test_a_state_near_a_prompt_s_end_is_that_of_its_end():
    slots = Slots(3, Paging(pages=40, rows=64, width=10), MARGIN, Checkpoints(3, 4, 4))
    read_prompt(slots, admit(slots, [*COMMON, *OWN[0]]))
    slots.begin_changes()
    second = admit(slots, [*COMMON, 7, 8, 9, 10])
    assert (second.rows, second.readable) == (0, 404)
    third = admit(slots, [*COMMON, 7, 8, 9, 10, 11])
    assert (third.rows, third.readable) == (0, 400)
