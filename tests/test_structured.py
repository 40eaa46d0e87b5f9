"""Replies have the form that is asked for, and are what the target chooses within it, drafted or not."""

import json
import re
from dataclasses import replace
from typing import Literal, Optional

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from tokenizers import Tokenizer

from tests.conftest import TINY
from tests.family_checks import on_ranks
from trtllm_dflash import LLM, SamplingParams, Structured
from trtllm_dflash.errors import ReplyError, RequestError
from trtllm_dflash.pairs.prompts import read_prompts
from trtllm_dflash.runtime import guiding
from trtllm_dflash.runtime.intake import Intake
from trtllm_dflash.runtime.prefill_budget import FixedPrefillBudget
from trtllm_dflash.runtime.scheduler import Scheduler
from trtllm_dflash.text.grammar import _TERM, Grammar, Grammars, Plan
from trtllm_dflash.text.lookahead import Lookahead
from trtllm_dflash.text.reply.held_schema import FORMATS, held


class Exact(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Pet(Exact):
    name: str = Field(max_length=12)
    kind: Literal["dog", "cat", "newt"]


class Person(Exact):
    name: str = Field(max_length=16)
    age: int = Field(ge=0, le=120)
    pets: list[Pet] = Field(min_length=1, max_length=2)


class Chain(Exact):
    """A schema that refers to itself."""

    weight: int = Field(ge=1, le=9)
    next: Optional["Chain"]


MODELS = (Person, Chain)
FORMS = [
    Structured(kind="json_object"),
    *(Structured(kind="json_schema", value=model.model_json_schema()) for model in MODELS),
    Structured(kind="regex", value="[0-9]{3}-[a-f]{4}"),
    Structured(kind="choice", value=["yes, it is", 'no "never"', "peut-\u00eatre", "a\x7fb"]),
    Structured(kind="grammar", value='start: "(" start ")" | "x"'),
]
ASK = [{"role": "user", "content": "Give me a JSON object for a person."}]
STORY = [{"role": "user", "content": "Tell me a story about a sailor."}]
SAMPLED = {"temperature": 1.0, "seed": 8}


def asked(form, **more):
    return SamplingParams(**{"max_tokens": 120, "structured": form, **more})


def fits(form, text):
    if form.kind == "json_schema":
        model = MODELS[[m.model_json_schema() for m in MODELS].index(form.value)]
        try:
            model.model_validate_json(text)
        except ValidationError:
            return False
        return True
    if form.kind == "json_object":
        return isinstance(json.loads(text), dict)
    if form.kind == "regex":
        return re.fullmatch(form.value, text) is not None
    return text in form.value if form.kind == "choice" else re.fullmatch(r"\(*x\)*", text) is not None


@pytest.fixture(scope="module")
def loaded(tiny_at):
    return tiny_at(16)


@pytest.fixture(scope="module")
def requests():
    params = [asked(form, **more) for form in FORMS for more in ({}, SAMPLED)]
    free = [SamplingParams(max_tokens=20, ignore_eos=True, logprobs=1), SamplingParams(max_tokens=20, **SAMPLED)]
    return [ASK] * len(params) + [STORY] * 2, params + free


#: Of them, each form once, by turns greedy and sampled, and the free ones.
FEW = (0, 3, 4, 7, 8, 11, 12, 13)


@pytest.fixture(scope="module")
def replies(loaded, requests):
    return loaded.generate(*requests)


def test_every_reply_has_its_form(replies, requests):
    for params, reply in zip(requests[1], replies, strict=True):
        if params.structured is not None:
            assert reply.finish_reason == "stop"
            assert fits(params.structured, reply.text), reply.text


@pytest.mark.slow
def test_drafted_text_equals_plain_text_in_one_batch_with_free_replies(loaded, tiny_at, replies, requests):
    plain = loaded.generate(*requests, draft=False)
    assert [reply.token_ids for reply in plain] == [reply.token_ids for reply in replies]
    trees = tiny_at(16, draft_tree=15).generate(*requests)  # beside which replies with a form have chains
    assert [reply.token_ids for reply in trees] == [reply.token_ids for reply in replies]
    alone = [loaded.generate([STORY], params)[0].token_ids for params in requests[1][-2:]]
    assert alone == [reply.token_ids for reply in replies[-2:]]
    assert sum(reply.accepted_tokens for reply in replies[:-2]) > 40, "hardly a draft was accepted"


@pytest.mark.principal("True--1", "True-0.1", "False-2")
@pytest.mark.slow
@pytest.mark.parametrize(("draft", "strays"), [(True, -1), (True, 2), (True, 0.1), (False, 2)])
def test_a_step_ahead_of_the_host_chooses_the_same(loaded, replies, requests, monkeypatch, draft, strays):
    """As where the device computes by itself: steps wait for drafts always, never, or where it is worth it."""
    monkeypatch.setattr(guiding, "_STRAYS", strays)
    scheduler = Scheduler(loaded.session, draft=draft, ahead=1)
    sequences = [loaded.intake.sequence(requests[0][i], requests[1][i]) for i in FEW]
    for sequence in sequences:
        scheduler.submit(sequence)
    while scheduler.busy:
        scheduler.step()
    assert [sequence.completion().token_ids for sequence in sequences] == [replies[i].token_ids for i in FEW]
    if strays < 0:
        assert [sequence.accepted for sequence in sequences] == [replies[i].accepted_tokens for i in FEW]


def test_pieces_of_a_prompt_that_are_under_way_are_no_part_of_its_reply(loaded):
    """Two steps ahead: the first step that decodes follows two pieces, of which the last alone gives a token."""
    scheduler = Scheduler(loaded.session, draft=False, ahead=2, budget=FixedPrefillBudget(8))
    first = loaded.intake.sequence(STORY, SamplingParams(max_tokens=30, ignore_eos=True))
    scheduler.submit(first)
    while not first.token_ids:
        scheduler.step()
    prompt = [1000 + i for i in range(24)]
    held = loaded.intake.sequence(prompt, asked(FORMS[3]))
    scheduler.submit(held)
    while scheduler.busy:
        scheduler.step()
    (expected,) = loaded.generate([prompt], asked(FORMS[3]))
    assert held.completion().token_ids == expected.token_ids


def test_two_ranks_choose_as_one_does(loaded):
    """Forms, penalties, bans and log-probabilities, over a vocabulary of which each rank has a half."""
    asked = [
        SamplingParams(max_tokens=40, structured=FORMS[2], logprobs=2),
        SamplingParams(max_tokens=24, frequency_penalty=1.0, bad_words=("the",), prompt_logprobs=1, ignore_eos=True),
        SamplingParams(max_tokens=24, logit_bias={1500: 4.0, 300: -9.0}, min_p=0.1, **SAMPLED),
    ]
    prompts = [loaded.encode(ASK), [5, 6, 7], loaded.encode(STORY)]
    alone = loaded.generate(prompts, asked)
    together = on_ranks(
        TINY / "target", TINY / "drafter", 2, lambda llm: LLM(llm.session, loaded.codec).generate(prompts, asked)
    )
    assert [reply.token_ids for reply in together] == [reply.token_ids for reply in alone]
    for a, b in zip(together, alone, strict=True):
        for mine, other in ((a.logprobs, b.logprobs), (a.prompt_logprobs, b.prompt_logprobs)):
            numbers = [[its and its.logprob for its in each or ()] for each in (mine, other)]
            assert numbers[0] == pytest.approx(numbers[1], abs=1e-4)


def test_a_form_that_the_target_keeps_by_itself_changes_nothing_and_costs_no_draft(loaded):
    prompts = [[{"role": "user", "content": text}] for text in read_prompts(2)["json"]]
    free = loaded.generate(prompts, SamplingParams(max_tokens=120))
    held = loaded.generate(prompts, asked(Structured(kind="json_object")))
    assert [reply.text for reply in held] == [reply.text for reply in free]
    assert all(a.acceptance_length >= b.acceptance_length for a, b in zip(held, free, strict=True))


def test_penalties_and_bans_choose_among_what_the_grammar_allows(loaded):
    form = Structured(kind="choice", value=["no"])
    params = asked(form, bad_words=("no", "n"), min_tokens=100, presence_penalty=2.0, logprobs=0)
    for draft in (True, False):
        (reply,) = loaded.generate([ASK], params, draft=draft)
        assert reply.text == "no" and reply.finish_reason == "stop"
        assert len(reply.logprobs) == len(reply.token_ids)


LINK = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.principal("rule")
@pytest.mark.parametrize(
    "form",
    [
        Structured(kind="grammar", value='start: "x" start'),
        Structured(kind="json_schema", value=LINK),
        Structured(kind="json_schema", value={"type": "array", "items": {"const": 1}, "minItems": 1_000}),
    ],
    ids=["rule", "reference", "array"],
)
def test_a_form_that_forces_its_tokens_without_end_is_kept_drafted_or_not(loaded, form):
    (drafted,), (plain,) = (loaded.generate([ASK], asked(form, max_tokens=18), draft=draft) for draft in (True, False))
    assert drafted.token_ids == plain.token_ids
    assert drafted.accepted_tokens > 8


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_grammar_that_cannot_be_followed_ends_its_reply_alone(loaded, replies, requests, monkeypatch, ahead):
    """At its prompt's end, at a later step, where a mask is made and where its tokens are taken; every step is run to
    its end."""
    real_plan, real_write, real_accept, plans, bad = Grammar.plan, Plan.write, Grammar.accept, [], {}

    def fails(grammar, where):
        if bad.get(grammar) == where:
            raise RequestError("cannot be followed", "structured")

    def plan(self, drafts, *more):
        fails(self, "later" if self in plans else "at first")
        plans.append(self)
        return real_plan(self, drafts, *more)

    def write(self, *where):
        fails(self.left_open.__self__, "written")
        real_write(self, *where)

    def accept(self, token):
        fails(self, "taken")
        real_accept(self, token)

    monkeypatch.setattr(Grammar, "plan", plan)
    monkeypatch.setattr(Plan, "write", write)
    monkeypatch.setattr(Grammar, "accept", accept)
    scheduler, chosen = Scheduler(loaded.session, ahead=ahead), [10, -2, 0, 6, 4, 8]  # the last four are at fault
    sequences = [loaded.intake.sequence(requests[0][i], requests[1][i]) for i in chosen]
    places = "at first", "later", "written", "taken"
    bad.update(zip((sequence.grammar for sequence in sequences[2:]), places, strict=True))
    runs, run = [], loaded.session.run
    monkeypatch.setattr(loaded.session, "run", lambda step: runs.append(step) or run(step))
    for sequence in sequences:
        scheduler.submit(sequence)
    while scheduler.busy:
        scheduler.step()
    assert [s.error for s in sequences[:2]] == [None, None]
    assert [s.token_ids for s in sequences[:2]] == [replies[i].token_ids for i in chosen[:2]]
    assert [str(s.error) for s in sequences[2:]] == ["structured: cannot be followed"] * 4
    assert [len(s.token_ids) for s in sequences[2:]] == [0, 1, 0, 1]
    assert len(runs) == sum(scheduler.statistics.steps.values())
    assert scheduler.statistics.requests == {"completed": 2}  # what a client asked for is no failure of the server


def test_a_reply_that_has_ended_needs_no_grammar_that_can_be_followed(loaded, replies, monkeypatch):
    """As where a step is launched before that is known: what stands behind the end matters to nobody."""
    real_plan, sequences = Grammar.plan, []

    def plan(self, drafts, behind=(), complete=True):
        (sequence,) = (sequence for sequence in sequences if sequence.grammar is self)
        if len(sequence.token_ids) + len(behind) >= sequence.params.max_tokens:
            raise RequestError("cannot be followed", "structured")
        return real_plan(self, drafts, behind, complete)

    monkeypatch.setattr(Grammar, "plan", plan)
    scheduler = Scheduler(loaded.session, ahead=1)
    expected = [reply.token_ids for reply in replies[8:12:2]]
    for ids in expected:
        for most in range(2, len(ids)):
            sequences.append(loaded.intake.sequence(ASK, asked(FORMS[4 + expected.index(ids)], max_tokens=most)))
            scheduler.submit(sequences[-1])
    while scheduler.busy:
        scheduler.step()
    assert [sequence.error for sequence in sequences] == [None] * len(sequences)
    assert [sequence.token_ids for sequence in sequences] == [ids[:i] for ids in expected for i in range(2, len(ids))]


def test_a_tokenizer_s_end_token_ends_replies_where_the_engine_has_none(loaded):
    intake = Intake(loaded.config.model_copy(update={"stop_token_ids": ()}), loaded.codec)
    ends = intake.sequence([5], asked(FORMS[0])).end_token_ids
    assert ends == {loaded.codec.end_id}
    assert intake.sequence([5], SamplingParams()).end_token_ids == frozenset()


# -- grammars ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grammars(tiny):
    return Grammars(tiny.codec.backend, tiny.config.target.vocab_size, tiny.config.stop_token_ids)


def test_a_grammar_is_compiled_once_for_all_replies_that_it_holds(tiny, monkeypatch):
    grammars = Grammars(tiny.codec.backend, tiny.config.target.vocab_size, tiny.config.stop_token_ids)
    made = []
    own = grammars._matcher
    monkeypatch.setattr(grammars, "_matcher", lambda kind, value: made.append(value) or own(kind, value))
    first, second = (grammars.compile("choice", ["yes", "no"]) for _ in range(2))
    (token,) = tiny.codec.encode_words("yes")[:1]
    first.accept(token)
    assert first.plan([]).masks != second.plan([]).masks  # one moves, and not the other
    assert second.plan([]).masks == grammars.compile("choice", ["yes", "no"]).plan([]).masks
    assert made == [["yes", "no"]]
    for number in range(9):  # the oldest goes
        grammars.compile("choice", [str(number)])
    grammars.compile("choice", ["yes", "no"])
    assert made[-1] == ["yes", "no"] and len(made) == 11


def test_what_the_grammar_forces_stands_in_for_drafts(grammars, tiny):
    schema = {"type": "object", "properties": {"colour": {"const": "red"}}, "required": ["colour"]}
    grammar = grammars.compile("json_schema", {**schema, "additionalProperties": False})
    wrong = [7] * 30
    plan = grammar.plan(wrong)
    assert tiny.codec.decode(plan.drafts) == '{"colour": "red"}'
    assert plan.drafts[-1] in tiny.config.stop_token_ids
    assert len(plan.masks) == (1 + len(plan.drafts)) * tiny.config.target.vocab_size // 8
    assert grammar.plan(wrong) == plan  # looking ahead moves nothing
    assert grammar.plan([]).masks == plan.masks[: tiny.config.target.vocab_size // 8]


def test_a_draft_that_is_not_allowed_ends_the_block(grammars, tiny):
    grammar = grammars.compile("regex", "[a-m]+ [n-z]+")
    words = tiny.codec.encode_words("b c")
    assert grammar.plan([*words, *words]).drafts == words[:1] != words


def test_a_grammar_knows_how_often_a_reply_comes_to_a_forbidden_draft(grammars, tiny):
    grammar = grammars.compile("regex", "[ab]*")
    a, b, c = (tiny.codec.encode_words(word)[0] for word in "abc")
    strays = []
    for drafts, given in (([a, b], [a, b, a]), ([a, c, a], [a, b]), ([a, c], [b]), ([c], [a])):
        assert grammar.plan(drafts, complete=False).drafts == drafts[: drafts.index(c) if c in drafts else None]
        grammar.plan([], given)
        strays.append(grammar.strays)
    assert strays[0] < strays[2] < strays[1] < strays[3]
    end = tiny.config.stop_token_ids[0]
    assert grammar.plan([a], [b, end]) is None


@pytest.mark.slow
def test_what_is_too_complex_behind_a_draft_fails_only_replies_that_come_there(grammars, tiny):
    names = [f"x{i}" for i in range(251)]
    rules = [f'{name}: s s "b" | s s s | "a"' for name in names]
    grammar = grammars.compile("grammar", "\n".join(["start: s", "s: " + "|".join(names), *rules]))
    (token,) = tiny.codec.encode_words("a")
    masks = grammar.plan([token] * 2).masks
    size = tiny.config.target.vocab_size // 8
    first, *others = (masks[at : at + size] for at in range(0, len(masks), size))
    assert first == grammar.plan([]).masks
    assert others and all(not mask[end // 8] >> end % 8 & 1 for mask in others for end in tiny.config.stop_token_ids)
    with pytest.raises(RequestError, match=r"structured: cannot be followed: .* items; max is 2000; [^<]*$"):
        grammar.accept(token)
    with pytest.raises(RequestError, match="structured: cannot be followed"):
        grammar.plan([])


def test_a_token_that_is_not_allowed_is_a_fault_of_that_reply(grammars, tiny):
    with pytest.raises(ReplyError, match="left the reply's grammar"):
        grammars.compile("regex", "x+").accept(tiny.codec.encode_words("a")[0])


class Full:
    """A matcher that cannot go on behind any token."""

    _went_on = False

    def deep_copy(self):
        return Full()

    def consume_tokens(self, tokens):
        self._went_on = True

    def is_error(self):
        return self._went_on

    is_stopped = is_error

    def compute_ff_bytes(self):
        return b""

    def get_error(self):
        return "too many items<state>"

    def unsafe_compute_mask_ptr(self, address, size):
        pass


def test_a_token_of_a_row_that_was_left_open_is_a_fault_of_the_grammar(grammars, tiny):
    grammar = grammars.compile("regex", "x+")
    (right,), (wrong,) = tiny.codec.encode_words("x"), tiny.codec.encode_words("a")
    assert len(replace(grammar.plan([right]), ahead=Lookahead(Full())).masks) == 2 * tiny.config.target.vocab_size // 8
    with pytest.raises(RequestError, match=r"structured: cannot be followed: too many items$"):
        grammar.accept(wrong)


def nested(depth):
    """A schema of arrays in arrays."""
    schema = {"type": "strin"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def test_a_schema_that_is_true_allows_any_value_and_one_that_is_false_none(grammars):
    assert grammars.compile("json_schema", True)
    with pytest.raises(RequestError):
        grammars.compile("json_schema", False)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "string", "format": "password", "minLength": 2}}},
        {"items": {"anyOf": [{"propertyNames": {"type": "string"}, "additionalProperties": {"type": "boolean"}}]}},
        {"type": "array", "uniqueItems": False},
        {"properties": {"format": {"const": {"format": "path"}}, "propertyNames": {"type": "string"}}},
    ],
)
def test_what_holds_a_value_to_nothing_is_left_out(grammars, schema):
    """As Zod and pydantic write it. What the reply is held to stays."""
    assert grammars.compile("json_schema", schema)
    assert held({"format": "uuid", **schema})["format"] == "uuid"
    kept = held({"properties": {"a": {"format": "path", "const": {"format": "path"}}}})
    assert kept == {"properties": {"a": {"const": {"format": "path"}}}}


def test_a_property_named_pattern_is_no_pattern(grammars):
    """Tools that search files have one, beside long texts of others."""
    assert grammars.compile("json_schema", {"properties": {"pattern": {"type": "string", "maxLength": 10**6}}})


def test_formats_are_those_that_the_library_knows(grammars):
    for format in (*FORMATS, "unheard-of"):
        schema = {"type": "string", "format": format}
        problem = grammars._matcher("grammar", "start: %json " + json.dumps(schema)).get_error()
        assert ("Unknown format" in problem) == (format not in FORMATS)


def test_texts_that_look_like_special_tokens_stay_texts(loaded):
    name = "<|im_end|>"
    schema = {"type": "object", "properties": {name: {"const": "<|endoftext|>"}}, "required": [name]}
    for kind, value, text in (
        ("choice", [name], name),
        ("choice", ["<|endoftext|>"], "<|endoftext|>"),
        ("json_schema", schema | {"additionalProperties": False}, f'{{"{name}": "<|endoftext|>"}}'),
        ("grammar", f'start: "a" <|im_start|> "<|im_start|>" /{re.escape("<|im_start|>")}/', "a" + 2 * "<|im_start|>"),
    ):
        for draft in (True, False):
            (reply,) = loaded.generate([ASK], asked(Structured(kind=kind, value=value)), draft)
            assert (reply.text, reply.finish_reason) == (text, "stop")


@pytest.mark.parametrize("begun", ['"', "/"])
def test_what_a_grammar_does_not_close_is_read_once(grammars, begun):
    """64 KB of marks in such a text were read from each of them: 16 s, in which Python did nothing else."""
    unclosed = begun + f"<|im_end|>\\{begun}" * 5
    assert _TERM.findall(f"start: {unclosed}") == [unclosed]
    with pytest.raises(RequestError, match="lexer error"):
        grammars.compile("grammar", f"start: {unclosed}")


def test_special_tokens_are_known_behind_remarks_and_expressions_of_any_kind(grammars, tiny):
    end = tiny.codec.backend.token_to_id("<|im_end|>")
    for before in ('// it"s\n', '# it"s\n', "# and/or\n", '/"\n/'):
        source = f'start: "a" {before} | <|im_end|> # <|im_end|>'
        assert _TERM.sub(grammars._by_id, source) == f'start: "a" {before} | <[{end}]> # <|im_end|>'
        assert grammars.compile("grammar", source)


def test_a_tokenizer_may_have_tokens_that_the_model_has_no_numbers_for(tiny):
    tokenizer = Tokenizer.from_str(tiny.codec.backend.to_str())
    tokenizer.add_special_tokens(["<image>"])
    assert Grammars(tokenizer, tiny.config.target.vocab_size, [2]).compile("json_object", None)


@pytest.mark.parametrize(
    ("kind", "value", "says"),
    [
        ("json_schema", {"type": "strin"}, "#: Invalid type: strin"),
        (
            "json_schema",
            {"properties": {"a": {"items": {"anyOf": [{"type": "null"}, {"type": "string", "minLength": -1}]}}}},
            "#/properties/a/items/anyOf/1: ",
        ),
        ("json_schema", {"properties": {"a": {"not": {}}}}, '#/properties/a: Unimplemented keys: ["not"]'),
        ("json_schema", {"properties": {"a": {"$ref": "#/$defs/x"}}}, "#/properties/a: Pointer '/$defs/x' does not"),
        (
            "json_schema",
            {
                "$defs": {"n": {"properties": {"next": {"$ref": "#/$defs/n"}, "v": {"pattern": "["}}}},
                "$ref": "#/$defs/n",
            },
            "#/$defs/n/properties/v: error: unclosed character class",
        ),
        ("json_schema", {"properties": {"a": 3}}, "#/properties/a: a schema is an object, true or false"),
        ("json_schema", {"properties": {"a": True, "b": {"type": 3}}}, "#/properties/b: "),
        ("json_schema", nested(50), "#" + 50 * "/items" + ": Invalid type: strin"),
        ("json_schema", nested(300), "json_schema: recursion limit exceeded"),
        ("json_schema", nested(100_000), "json_schema: it is nested too deeply"),
        ("json_schema", {"enum": ["x" * 70_000]}, "characters; at most 65536 are taken"),
        (
            "json_schema",
            {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "\\n", "maxLength": 10**6}]},
            "a maxLength of 1000000 is too much beside patterns",
        ),
        ("grammar", r'start: %json {"type": ["string", "null"], "\u0070attern": "a", "maxLength": 1e7}', "too much"),
        ("json_schema", {"type": "array", "minItems": 1001}, "a minItems of 1001 is too much; at most 1,000 are taken"),
        ("json_schema", {"type": "integer", "multipleOf": 100_001}, "a multipleOf of 100001 together"),
        (
            "json_schema",
            {"properties": {f"p{i}": {"multipleOf": 9_999.5 + i} for i in range(2)}},
            "a multipleOf of 200000 together",
        ),
        ("regex", "a(?=b)", "regex: error: look-around"),
        ("grammar", "start: foo", 'grammar: at 1(8): unknown name: "foo"'),
    ],
)
def test_a_wrong_grammar_is_refused_with_its_place(grammars, kind, value, says):
    with pytest.raises(RequestError) as refused:
        grammars.compile(kind, value)
    assert says in refused.value.reason
    assert refused.value.field == "structured"
    assert "\n" not in str(refused.value)
