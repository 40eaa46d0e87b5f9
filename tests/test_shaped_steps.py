"""Captured steps with log-probabilities, penalties and masks, on the CPU: there graphs are functions."""

import pytest

from tests.conftest import HYBRID
from tests.test_penalties import LENGTH, ODD, PARAMETERS, SAMPLED, params
from trtllm_dflash import LLM, SamplingParams, Structured
from trtllm_dflash.errors import EngineError
from trtllm_dflash.ops.delta_states import Run
from trtllm_dflash.ops.torch_ops import TorchOps
from trtllm_dflash.runtime.scheduler import Scheduler
from trtllm_dflash.session.calls import Prepare, Step
from trtllm_dflash.session.cuda_session import CudaSession
from trtllm_dflash.session.graphs import StepGraphs
from trtllm_dflash.session.shaping import CapturedStep
from trtllm_dflash.session.torch_session import TorchSession
from trtllm_dflash.step import Drafting

MAX_TOKENS = LENGTH
FORM = Structured(kind="json_schema", value={"type": "object", "properties": {"name": {"type": "string"}}})
PROMPT = [{"role": "user", "content": "Give me a JSON object for a user."}]


class Replay:
    """Replays a function, as a graph does what it captured."""

    def __init__(self, function):
        self.replay = function


class Replayed(CudaSession):
    """The session of a GPU on [slots, rows], whose graphs are functions of the same tensors."""

    def __init__(self, config, weights, device):
        TorchSession.__init__(self, config, weights, device, flat=False)
        self.library, self._parts, self._why = None, None, "none on a CPU"
        self._shaping = self._hidden = self._left = None
        self._graphs = StepGraphs(config, self._capture)

    choice = TorchSession.choice
    _stream = TorchSession._stream  # type: ignore[assignment]

    def _free(self):
        pass

    def _slot_ops(self, inputs, first_slot):
        """As on a GPU, but for gated delta nets, whose states stand where the host knows."""
        if self.states is None:
            return super()._slot_ops(inputs, first_slot)
        slots = enumerate(zip(inputs.start.tolist(), inputs.row_count.tolist(), strict=True))
        runs = [Run(first_slot + i, start, count, entry=i, first=0) for i, (start, count) in slots if count]
        caches = self._caches_of(first_slot, len(inputs.token_ids))
        return TorchOps(self.weights, caches, self.communicator, self.states, runs)

    def _prepare(self, call, progress):
        if call.shaped and self._shaping is None:
            self._make_shaping()
        self._graphs.prepare(call, progress)

    def _capture(self, kind):
        words, begun = self._int32([0] * kind.slots), []
        decided, logprobs = self._end_slots(self._begin_slots(words, kind), kind)

        def begin():
            begun[:] = [self._begin_slots(words, kind)]
            if not kind.shaped:
                end()

        def end():
            outputs, chosen = self._end_slots(begun[0], kind)
            decided.copy_(outputs)
            if logprobs is not None:
                for kept, new in zip(vars(logprobs).values(), vars(chosen).values(), strict=True):
                    kept.copy_(new)

        return CapturedStep(Replay(begin), words, decided, Replay(end) if kind.shaped else None, logprobs)

    def _replay(self, captured, words):
        captured.words.copy_(self._int32(words))
        captured.graph.replay()


@pytest.fixture(scope="module")
def replayed(tiny_at):
    llm = tiny_at(16)
    config = llm.config.model_copy(update={"max_batch": 3})
    return LLM(Replayed(config, llm.session.weights, llm.session.device), llm.codec)


def requests(sampling):
    """One request of each kind, and such as ask for nothing beside them."""
    common = {"max_tokens": MAX_TOKENS, "seed": 3, **sampling}
    asked = [params(name, **common) for name in PARAMETERS]
    asked += [SamplingParams(**common, logprobs=3, prompt_logprobs=2), SamplingParams(**common)]
    asked += [SamplingParams(**common, structured=FORM), SamplingParams(**common, structured=FORM, logprobs=1)]
    prompts = [PROMPT if each.structured or i % 2 else ODD for i, each in enumerate(asked)]
    return prompts, asked


@pytest.fixture(scope="module")
def hybrid():
    """The shipped hybrid, and its session of captured steps."""
    settings = {"precision": "fp32", "device": "cpu", "max_batch": 3, "max_seq_len": 512}
    with LLM.from_pretrained(HYBRID / "target", HYBRID / "drafter", **settings) as llm:
        yield llm, LLM(Replayed(llm.config, llm.session.weights, llm.session.device), llm.codec)


@pytest.mark.slow
def test_they_have_the_text_and_log_probabilities_of_steps_that_are_not_captured(replayed, tiny):
    assert_replies_are_alike(replayed, tiny, *requests(SAMPLED))


@pytest.mark.exhaustive(beside="test_conversations_of_hybrids_go_on_from_states_that_such_steps_kept")
@pytest.mark.slow
def test_hybrids_have_them_too(hybrid):
    assert_replies_are_alike(hybrid[1], hybrid[0], *requests(SAMPLED))


def assert_replies_are_alike(llm, other, prompts, asked):
    """The tokens and log-probabilities of another engine, drafted and plain."""
    expected = other.generate(prompts, asked)
    for draft in (True, False):
        found = llm.generate(prompts, asked, draft=draft)
        assert [reply.token_ids for reply in found] == [reply.token_ids for reply in expected]
        for reply, other in zip(found, expected, strict=True):
            for kind in ("logprobs", "prompt_logprobs"):
                both = [getattr(each, kind) or [] for each in (reply, other)]
                values = [[its.logprob for its in each if its] for each in both]
                assert values[0] == pytest.approx(values[1], abs=1e-4)


def test_conversations_of_hybrids_go_on_from_states_that_such_steps_kept(hybrid):
    """With log-probabilities: what they copy of states is copied, each time."""
    whole, captured = hybrid
    scheduler = Scheduler(captured.session)
    talk = captured.encode(PROMPT)
    for turn in range(3):
        asked = SamplingParams(max_tokens=9, ignore_eos=True, logprobs=1)
        sequence = captured.intake.sequence(talk, asked)
        scheduler.submit(sequence)
        while scheduler.busy:
            scheduler.step()
        (alone,) = whole.generate([talk], asked)
        assert sequence.token_ids == alone.token_ids
        assert sequence.completion().logprobs[0].logprob == pytest.approx(alone.logprobs[0].logprob, abs=1e-4)
        talk = talk + sequence.token_ids + [40 + turn, 50, 60, 70]
    assert scheduler.statistics.reused_tokens > 0


def test_a_step_that_was_not_prepared_for_is_refused(tiny_at):
    llm = tiny_at(16)
    session = Replayed(llm.config, llm.session.weights, llm.session.device)
    session.prepare(Prepare((15,), sampled=False))
    with pytest.raises(EngineError, match="with log-probabilities, penalties or masks, drafting off, was not prepared"):
        session._graphs.find_slots(Step([(0, 1)], [], Drafting.OFF, 1, False, penalized=[0]))
