"""Short prose: little stories, diary entries and descriptions.

The prompt settles little: a hero, a place or a thing, a season. Everything else is drawn, and the reply has real entropy.
A draw is skewed towards a few options, and which ones depends on the words drawn just before (as in any language, "a
pale" is followed by other nouns than "a noisy"). So the likeliest text differs from prompt to prompt, and to foresee it
is to foresee every draw on the way.

In a template, [adj] is a draw from LEXICON, and <place> is a fact of the text, drawn where the prompt gives none.
"""

# ruff: noqa: E501, SIM905 - a template stays on one line, as it will be read; words are easier to read than lists
from __future__ import annotations

import re
import zlib
from random import Random

from lexicon import MEN, WOMEN

ODDS = (36, 22, 15, 11, 9, 7)  # of the first, second, ... option in the order that the last words settle

ANIMALS = (
    "fox owl hare badger hedgehog crow otter goat mouse donkey cat heron squirrel wolf bear sparrow beaver goose "
    "mole frog stork rabbit"
).split()
FOLK = (
    "baker sailor shepherd clockmaker miller gardener painter fisherman postman carpenter doctor teacher musician "
    "tailor ferryman farmer juggler widow soldier student potter beekeeper"
).split()
SEASONS = "spring summer autumn winter".split()
PLACES = (
    "bridge mill harbor orchard lighthouse well tower market garden river barn station chapel island cave meadow "
    "pond castle library quarry bakery inn vineyard stable attic cellar workshop crossroads ferry dam"
).split()
THINGS = (
    "lantern letter key map bell clock kite coat violin mirror boat suitcase coin compass feather book drum ring "
    "scarf kettle basket whistle candle hat locket painting"
).split()
MOODS = "cheerful sad strange quiet funny gentle mysterious hopeful".split()
DAYTIMES = "morning evening afternoon night day".split()
DETAILS = {
    "spring": "fresh grass|cherry blossom|melting snow|young leaves|soft rain|wild garlic|birdsong|wet earth".split(
        "|"
    ),
    "summer": "warm dust|dry hay|ripe berries|long shadows|buzzing bees|distant thunder|blue skies|sweet clover".split(
        "|"
    ),
    "autumn": "fallen leaves|ripe apples|thick mist|wood smoke|cold rain|migrating geese|mushrooms|golden light".split(
        "|"
    ),
    "winter": "deep snow|clear ice|cold wind|frozen twigs|white frost|early darkness|bright stars|chimney smoke".split(
        "|"
    ),
}
FACTS = {
    "animal": ANIMALS,
    "folk": FOLK,
    "place": PLACES,
    "thing": THINGS,
    "season": SEASONS,
    "daytime": DAYTIMES,
    "woman": WOMEN,
    "man": MEN,
}

LEXICON: dict[str, list[str]] = {
    key: words.split("|")
    for key, words in {
        "day": "bright|windy|foggy|silent|golden|grey|rainy|mild|misty|clear|gloomy|calm|pale|sleepy|busy|lonely",
        "old": "old|crooked|famous|empty|narrow|mossy|forgotten|noisy|broken|tiny|grand|dusty|hidden|crowded|painted|haunted|dark|lovely",
        "small": "small|heavy|silver|wooden|rusty|torn|shiny|strange|golden|green|red|blue|worn|broken|beautiful|dirty|precious|secret",
        "nature": "shy|brave|clever|lazy|proud|lonely|patient|curious|stubborn|friendly|hungry|careful|restless|kind|grumpy|dreamy|tired|merry",
        "went": "walked to|ran to|came to|wandered to|returned to|hurried to|went to|crept to|strolled to|rode to|found the way to|drove to",
        "found": "found|noticed|picked up|discovered|saw|dropped|spotted|stumbled over|dug up|hid|cleaned|remembered",
        "where": "under a [spot]|behind a [spot]|near a [spot]|beside a [spot]|in front of a [spot]|next to a [spot]|close to a [spot]|by a [spot]",
        "wanted": "to rest|to sing|to help|to find a friend|to go home|to hide|to trade|to learn the truth|to see the sea|to be alone|to buy bread|to forget the past|to win a bet|to hear music|to keep a promise|to sleep",
        "other": "stranger|child|merchant|neighbor|thief|cousin|beggar|captain|hunter|nun|grandmother|policeman|peddler|twin|king|dancer|cook|poet",
        "met": "arrived|appeared|laughed|knocked|shouted|whispered something|asked for help|wanted to talk|offered some soup|began to cry|waved|pointed at the sky|demanded money|told a joke|started to sing|fell asleep",
        "trouble": "a [beast] [cried]|a huge [beast] [cried]|the [prop] [broke]|the old [prop] [broke]|a storm broke out|the light went out|a black [beast] [cried]|thunder rolled",
        "felt": "afraid|angry|happy|ashamed|surprised|calm|jealous|proud|sleepy|hopeful|confused|brave|sorry|curious|relieved|worried",
        "how": "slowly|bravely|quietly|at once|with a sigh|without a word|carefully|with trembling hands|secretly|with a smile|gladly|calmly|in great haste|by chance|all alone|politely",
        "did": "opened the [door]|closed the [door]|locked the [door]|fixed the [door]|lit a fire|called for help|made a plan|tied a knot|counted to ten|followed the [other]|helped the [other]|hugged the [other]|shared the [food]|hid the [food]|pushed the [prop]|moved the [prop]|told the truth",
        "saved": "everyone cheered|the [danger] [stopped]|soon the [danger] [stopped]|a [other] came running|the trick worked|the moon rose|at last the [danger] [stopped]",
        "gift": "a [fine] [present]|a [fine] old [present]|one [fine] [present]|a truly [fine] [present]",
        "since": "nobody was lonely|the bells ring twice|people tell this tale|there is peace|the door stays open|they are best friends|nothing was ever lost|children play there|the place has a new name|they meet every week|no one locks a door|somebody always leaves a light on",
        "said": "nothing is lost forever|a friend is worth the trouble|patience pays|tomorrow is another day|courage begins with a step|small things matter|every road leads home|kindness comes back|the night is never long|listening is an art|luck loves the bold|one candle is enough",
        "sound": "[loud] [noise]|rather [loud] [noise]|very [loud] [noise]",
        "smell": "fresh bread|wet stone|tar|roses|coffee|old books|smoke|lavender|fish|cinnamon|soap|pine|leather|honey|rain|oranges",
        "people": "a young [other]|an old [other]|a [nature] [other]|my [kin]|the old [other]|a tall [other]",
        "doing": "sells [goods]|counts [goods]|feeds the [birds]|waits for a [other]|talks to a [other]|draws a [prop]|repairs a [prop]|sings softly|plays cards|drinks tea|watches the [birds]|carries [goods]|looks for a [thing]",
        "stands": "a [made] [statue]|one [made] [statue]|an old [made] [statue]|a huge [made] [statue]",
        "color": "red|blue|grey|green|golden|white|yellow|silver|purple|brown|pink|black",
        "part": "walls|windows|stones|doors|roof tiles|stairs|shutters|curtains|beams|railings|corners|flags",
        "look": "gleam|fade|crumble|shine|tremble|seem alive|look tired|catch the light|remember better days|turn dark|glow|rest in the shade",
        "act": "slept late|lost a [cup]|broke a [cup]|bought a [cup]|painted a [cup]|baked a cake|missed the train|met a [other]|wrote to my [kin]|visited my [kin]|burned the [food]|ate the [food]|got lost|won at chess|fed the [birds]",
        "kin": "sister|brother|uncle|aunt|neighbor|teacher|grandfather|mother|cousin|best friend|landlady|boss",
        "news": "is getting married|has sold the house|broke an arm|wants to move away|won a prize|found a job|bought a horse|has learned to swim|saw a ghost|is ill again|grew a beard|forgot my birthday|wrote a poem|adopted a cat",
        "think": "about the [idea]|about my [kin]|of the [idea]|of [goods]|of nothing|of my [kin]",
        "plan": "call my [kin]|write to my [kin]|visit my [kin]|buy a [cup]|paint a [cup]|fix the [door]|get up early|learn to dance|start again|feed the [birds]|sell [goods]|find a [cup]",
        "spot": "bench|wall|gate|barrel|fence|tree|stone|haystack|hedge|cart|door|bush|ditch|post|table|stove",
        "door": "gate|door|window|box|chest|shed|hatch|barrel|cage|drawer",
        "food": "bread|cake|soup|cheese|apples|honey|nuts|eggs|pie|beans",
        "fine": "warm|new|good|long|sweet|wise|simple|rare|secret|kind|sad|funny|strange|little",
        "present": "meal|friend|song|story|promise|word|book|coat|map|kiss|bell|dream|name|hat|cake|letter",
        "loud": "distant|soft|loud|faint|merry|strange|sudden|low|sad|wild|gentle|odd",
        "noise": "bells|laughter|footsteps|gulls|hammering|whispers|frogs|music|voices|drums|crickets|singing",
        "beast": "dog|wolf|raven|bull|goose|bear|ghost|giant|horse|cat|snake|rat",
        "cried": "howled|came closer|began to cry|ran past|woke up|jumped up|roared|fled|fell down|turned around",
        "prop": "rope|wheel|ladder|roof|window|boat|chain|lamp|chimney|cart|wall|bell|table|net",
        "broke": "snapped|broke|fell down|cracked|shook|caught fire|vanished|gave way|moved|turned red",
        "danger": "wind|rain|noise|danger|fire|trouble|fear|storm|crying|cold",
        "stopped": "stopped|ended|passed|faded|went away|was over|was forgotten|lost its power",
        "made": "broken|green|crooked|wooden|tall|rusty|mossy|empty|blue|small|white|dirty|heavy|golden",
        "statue": "cart|door|cross|fountain|chair|lamp|pine|tent|mailbox|bench|crate|bicycle|gate|pillar|wheel|lion",
        "goods": "flowers|coins|apples|nets|postcards|cherries|candles|hats|eggs|nuts|books|shoes|toys|pears",
        "birds": "birds|ducks|gulls|pigeons|geese|swans|cats|goats|hens|horses|sheep",
        "cup": "cup|glove|hat|plate|shoe|spoon|chair|vase|lamp|coat|ring|clock|book",
        "idea": "sea|past|future|weather|moon|money|music|rain|stars|road|war|price of bread",
    }.items()
}

STORY = [
    [
        "one [day] <daytime> in <season>, a [nature] <hero> [went] the [old] <place>.",
        "in <season>, with [detail] everywhere, a [nature] <hero> named <name> lived near the [old] <place>.",
        "<name> was a [nature] <hero> who [went] the [old] <place> every <daytime> in <season>.",
        "it was a [day] <daytime> in <season>, and the [nature] <hero> sat by the [old] <place>.",
        "long ago, in a <season> of [detail], the [nature] <hero> <name> [went] the <place>.",
        "nobody in the [old] village knew why <name> the <hero> [went] the <place> that <season>.",
        "on the first [day] <daytime> of <season>, <name> the <hero> woke up near the [old] <place>.",
        "there once was a [nature] <hero> who loved [detail] in <season> and a certain [old] <place>.",
    ],
    [
        "the <hero> wanted [wanted], but [how] [found] a [small] <thing> [where].",
        "[where], <subject> [found] a [small] <thing> that smelled of [smell].",
        "<subject> only wanted [wanted], and [found] a [small] <thing> instead.",
        "<subject> carried a [small] <thing> and hoped [wanted].",
        "among the sounds of [sound], <subject> [how] [found] a [small] <thing>.",
        "there was a [small] <thing> [where], and it belonged to a [nature] [other].",
        "a [nature] [other] had left a [small] <thing> [where].",
        "<subject> felt [felt], because a [small] <thing> lay [where].",
    ],
    [
        "suddenly [trouble], and <subject> felt [felt].",
        "then a [nature] [other] [met], and [trouble].",
        "before long [trouble], and a [nature] [other] [met].",
        "just then a [other] with a [color] hat [met].",
        "but [trouble], and the smell of [smell] grew strong.",
        "a [nature] [other] [met] and said that [said].",
        "after a while there was the sound of [sound], and [trouble].",
        "that night [trouble], and nobody felt [felt].",
    ],
    [
        "<subject> [did] [how], and [saved].",
        "a [other] [how] [did], while <subject> [did].",
        "feeling [felt], <subject> [did] and [did].",
        "together they [did], and [saved].",
        "[how], <subject> [did] until [saved].",
        "so <subject> [did], [did], and waited until [saved].",
        "nobody helped, so <subject> [how] [did].",
        "a [nature] [other] [did], and [saved].",
    ],
    [
        "for this there was [gift] and [gift], and ever since [since].",
        "at dawn <subject> got [gift] and felt [felt].",
        "since that <season> [since].",
        "in the end [saved], and <subject> learned that [said].",
        "<subject> kept the <thing>, and since then [since].",
        "the <hero> went home with [gift] and knew that [said].",
        "they parted as friends with [gift], and to this day [since].",
        "the <thing> is still there, [where], and [since].",
    ],
]

DIARY = [
    [
        "dear diary, it was a [day] <season> <daytime>, and I [act].",
        "this <season> I often do nothing, but today I [act] and [went] the [old] <place>.",
        "a [day] <daytime> in <season>: [detail], [sound], and the smell of [smell].",
        "this <season> <daytime> I woke up feeling [felt] and [act].",
        "what a [day] <season> <daytime>: I [act] and [act].",
        "<season> is here with [detail], and today I [act].",
    ],
    [
        "at the [old] <place> I met [people], and we talked about [smell] and [sound].",
        "my [kin] came to the <place> with a [small] <thing> and [met].",
        "at the <place> I [found] a [small] <thing> [where].",
        "near the [old] <place> [trouble], and I felt [felt].",
        "I sat by the <place> and thought [think] and [think].",
        "on the way to the [old] <place> I heard [sound] and [act].",
    ],
    [
        "my [kin] writes that my [kin] [news].",
        "a [other] told me that my [kin] [news].",
        "I [did] [how], and [saved].",
        "later [trouble], so I [did] and [act].",
        "my [nature] [kin] [met], which made me feel [felt].",
        "they say that the [other] [news], and I am [felt].",
    ],
    [
        "tomorrow I will [plan] and [plan].",
        "now I drink tea, think [think] and feel [felt].",
        "before I sleep, I want to [plan]; after all, [said].",
        "I am [felt] tonight, for I know that [said].",
        "perhaps I should [plan], or simply think [think].",
        "good night, and let me not forget to [plan].",
    ],
]

DESCRIPTION = [
    [
        "the <place> is [old] and [old] on a [day] <daytime> in <season>.",
        "on a <season> <daytime>, the [old] <place> smells of [smell] and [smell].",
        "in <season>, with [detail] around the <place>, the [color] [part] [look].",
        "every <season> <daytime>, [people] can be seen at the [old] <place>.",
        "behind [stands] lies the <place>, [day] and [old] in the <season> <daytime>.",
        "it is a [day] <daytime> in <season>, and [sound] can be heard from the [old] <place>.",
    ],
    [
        "next to [stands] and [stands], the [color] [part] [look].",
        "the [part] are [color], the [part] [color], and both [look].",
        "one can hear [sound], and far away [sound].",
        "the [old] [part] [look] behind [stands].",
        "there is [stands] [where], and a [small] <thing> [where].",
        "one hears [sound] and notices the smell of [smell].",
    ],
    [
        "near [stands], a [nature] [other] [doing] and [doing].",
        "a [nature] [other] [doing], and a [other] [doing].",
        "now and then a [other] with a [small] <thing> [doing].",
        "a [color] cat sleeps [where], while a [nature] [other] [doing].",
        "a [nature] [other] [doing] [how].",
        "sometimes a [other] [doing] and thinks [think].",
    ],
    [
        "whoever stays for a while feels [felt] and leaves with [gift].",
        "everything says that [said].",
        "it is a place to feel [felt] and to think [think].",
        "when the <daytime> ends, the [part] [look], and [since].",
        "people come here [wanted] and leave with [gift].",
        "they say that [since], and that [said].",
    ],
]

ASKS = {
    "story": [
        "Tell a short story about {a} and {b}.",
        "Write a little story with {a} and {b}.",
        "Tell me a tale of {a} and {b}.",
        "Can you tell a story about {a} and {b}?",
        "I would like a short story about {a} and {b}.",
        "Make up a {m} story about {a} and {b}.",
    ],
    "diary": [
        "Write a diary entry about a {d} at {b}.",
        "Write a short diary entry: a {m} {d} at {b}.",
        "Invent a diary page about {b} and a {m} {d}.",
        "How would someone write in a diary about a {d} at {b}?",
    ],
    "description": [
        "Describe {b} in a few sentences, in the {d}.",
        "Write a short description of {b} on a {m} {d}.",
        "Paint {b} in words, on a {d}.",
        "Describe {b} on a {m} {d}.",
    ],
}
SLOT = re.compile(r"\[(\w+)\]|<(\w+)>")


def with_articles(text: str) -> str:
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)


class Teller:
    def __init__(self, rng: Random, facts: dict[str, str]) -> None:
        self.rng, self.facts, self.said, self.used = rng, facts, list(facts.values()), set(facts.values())

    def draw(self, slot: str, options: list[str]) -> str:
        """A new word; the last two drawn settle which ones are likely."""
        n, facts = len(options), self.said[-2:]
        h = zlib.crc32("/".join([slot, *facts]).encode())
        start, stride = h % n, 1 + h // n % (n - 1)
        order = [w for k in range(n) if (w := options[(start + k * stride) % n]) not in self.used]
        order = list(dict.fromkeys(order)) or options
        word = self.rng.choices(order[: len(ODDS)], ODDS[: len(order)])[0]
        self.used.add(word)
        self.said.append(word)
        return word

    def fact(self, name: str) -> str:
        if name == "hero":
            return self.facts.get("animal") or self.facts["folk"]
        if name == "subject":
            return self.facts.get("name") or f"the {self.fact('hero')}"
        if name not in self.facts:
            options = FACTS[self.rng.choice(["woman", "man"])] if name == "name" else FACTS[name]
            self.facts[name] = self.draw(name, options)
        return self.facts[name]

    def fill(self, slot: re.Match[str]) -> str:
        drawn, fact = slot.groups()
        if fact:
            return self.fact(fact)
        if drawn == "thing":
            return self.draw(drawn, THINGS)
        said = self.draw(drawn, DETAILS[self.fact("season")] if drawn == "detail" else LEXICON[drawn])
        return SLOT.sub(self.fill, said)

    def tell(self, parts: list[list[str]]) -> str:
        sentences = []
        for number, part in enumerate(parts):
            sentence = with_articles(SLOT.sub(self.fill, self.draw(f"part {number}", part)))
            sentences.append(sentence[0].upper() + sentence[1:])
        return " ".join(sentences)


def story(rng: Random) -> tuple[str, str]:
    form = rng.choice(["story", "story", "story", "diary", "description"])
    ask = rng.choice(ASKS[form])
    facts = {"season": rng.choice(SEASONS)}
    if form == "story":
        kind = rng.choice(["animal", "folk"])
        facts[kind] = rng.choice(FACTS[kind])
        second = rng.choice(["place", "place", "thing"])
    else:
        second, facts["daytime"] = "place", rng.choice(DAYTIMES)
    facts[second] = rng.choice(FACTS[second])
    prompt = ask.format(
        a=f"a {facts.get('animal') or facts.get('folk')}",
        b=f"a {facts[second]}",
        d=facts.get("daytime"),
        m=rng.choice(MOODS),
    )
    prompt = f"{prompt[:-1]} in {facts['season']}{prompt[-1]}"
    if rng.random() < 0.3:
        prompt += rng.choice([" Keep it short.", " A few sentences are enough.", " Please.", " Surprise me."])
    parts = {"story": STORY, "diary": DIARY, "description": DESCRIPTION}[form]
    return with_articles(prompt), Teller(rng, facts).tell(parts)


WORDS = {
    **LEXICON,
    **FACTS,
    "detail": [w for some in DETAILS.values() for w in some],
    "hero": ANIMALS + FOLK,
    "name": WOMEN + MEN,
    "subject": ["<name>", "the <hero>"],
}


def pattern(template: str) -> str:
    """A regular expression for what a template can become."""
    text, at = "", 0
    for slot in SLOT.finditer(template):
        words = WORDS[slot[1] or slot[2]]
        text += re.escape(template[at : slot.start()]) + f"(?:{'|'.join(map(pattern, words))})"
        at = slot.end()
    text += re.escape(template[at:])
    return re.sub(r"\b(a)\\ ", r"\1n?\\ ", text)


def is_story(text: str) -> bool:
    """Whether each sentence is one that the grammar makes, in order, and none is missing."""
    return any(
        re.fullmatch("\\ ".join(f"(?:{'|'.join(map(pattern, part))})" for part in parts), text, re.IGNORECASE)
        for parts in (STORY, DIARY, DESCRIPTION)
    )


def asked_for(prompt: str, reply: str) -> bool:
    """Whether the hero, the place or thing, and the season of the prompt are in the reply."""
    words = {w for name in ("animal", "folk", "place", "thing", "season") for w in FACTS[name]}
    return words.intersection(re.findall(r"\w+", prompt)) <= set(re.findall(r"\w+", reply.lower()))
