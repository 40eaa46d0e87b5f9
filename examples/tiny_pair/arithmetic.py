"""Word problems worked step by step.

A problem is a prompt and a list of steps (clause, left-hand side, result, unit). The way the prompt asks decides the
layout of the reply; how each step is told follows from the numbers written before it (see `lexicon.wording`).
"""

# ruff: noqa: E501 - a template stays on one line, as it will be read
from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

from lexicon import CITIES, CONTAINERS, ITEMS, PEOPLE, SHOPS, wording


@dataclass(frozen=True)
class Step:
    clause: str
    equation: str
    result: int
    unit: str = ""

    def told(self, fact: int) -> str:
        """The step as a sentence, without its full stop."""
        equation, result = f"{self.equation} = {self.result}", f"{self.result} {self.unit}".strip()
        forms = [
            f"{self.clause} {equation} {self.unit}".strip(),
            f"{equation}, so {self.clause} {result}",
            f"{self.clause} {self.equation}, and that is {result}",
            f"we calculate {equation}, which means {self.clause} {result}",
        ]
        return wording(forms, "form", fact % 10)

    @property
    def short(self) -> str:
        return f"{self.clause} {self.equation} = {self.result} {self.unit}".strip()


@dataclass(frozen=True)
class Problem:
    story: str
    question: str
    opening: str
    steps: list[Step]
    conclusion: str

    @property
    def answer(self) -> int:
        return self.steps[-1].result


def upper_first(text: str) -> str:
    return text[0].upper() + text[1:]


def stock(rng: Random) -> Problem:
    """A count that grows and shrinks over two to five events; each event has its own words."""
    (name, he), (friend, _) = rng.sample(PEOPLE, 2)
    him, his = ("her", "her") if he == "she" else ("him", "his")
    items, box = rng.choice(ITEMS), rng.choice(CONTAINERS)
    total = rng.randint(30, 600)
    start = rng.choice(
        [
            f"{name} has {total} {items}.",
            f"{name} collects {items} and owns {total} of them.",
            f"There are {total} {items} on {name}'s table.",
        ]
    )
    sentences, steps = [start], []
    count = rng.choice([2, 3, 3, 4, 4, 5])
    for number in range(count):
        events = ["gain", "packs"] if total < 1500 else ["lose"]
        if total >= 20:
            events += ["lose", "lose"]
        if total >= 60:
            events.append("lose packs")
        if total % 2 == 0 and total >= 10:
            events.append("half")
        if total <= 400:
            events.append("double")
        divisors = [d for d in range(2, 10) if total % d == 0 and total // d > 1]
        if number == count - 1 and divisors:
            events += ["share", "share"]
        event = rng.choice(events)
        n, k, m = rng.randint(15, 400), rng.randint(2, 9), rng.randint(6, 60)
        if event == "gain":
            said, clause = rng.choice(
                [
                    (f"{friend} gives {him} {n} more.", f"with the {n} from {friend}, {he} has"),
                    (f"{upper_first(he)} buys {n} more.", f"after buying {n} more, {he} has"),
                    (f"{upper_first(he)} finds another {n} in the attic.", f"with the {n} from the attic, {he} has"),
                    (f"For {his} birthday {he} gets {n} more.", f"after the birthday, {he} has"),
                ]
            )
            steps.append(Step(clause, f"{total} + {n}", total + n, items))
        elif event == "lose":
            n = rng.randint(3, total - 4)
            said, clause = rng.choice(
                [
                    (f"{upper_first(he)} gives {n} of them to {friend}.", f"after giving {n} to {friend}, {he} has"),
                    (f"{upper_first(he)} loses {n} on the way home.", f"after losing {n}, {he} has"),
                    (f"{upper_first(he)} sells {n} at the market.", f"after selling {n}, {he} has"),
                    (f"{upper_first(he)} uses {n} for a school project.", f"after using {n}, {he} has"),
                ]
            )
            steps.append(Step(clause, f"{total} - {n}", total - n, items))
        elif event == "packs":
            said = rng.choice(
                [
                    f"Then {he} buys {k} {box} with {m} {items} in each.",
                    f"{friend} brings {k} {box} of {m} {items}.",
                    f"{upper_first(he)} orders {k} {box}, each holding {m} {items}.",
                ]
            )
            steps.append(Step(f"the {k} {box} hold", f"{k} * {m}", k * m, items))
            steps.append(Step("adding them gives", f"{total} + {k * m}", total + k * m, items))
        elif event == "lose packs":
            k = rng.randint(2, 5)
            m = rng.randint(3, min(99, total // k - 1))
            said = rng.choice(
                [
                    f"{upper_first(he)} fills {k} {box} with {m} each and sells them.",
                    f"{upper_first(he)} gives away {k} {box} of {m}.",
                ]
            )
            steps.append(Step(f"the {k} {box} take away", f"{k} * {m}", k * m, items))
            steps.append(Step("removing them leaves", f"{total} - {k * m}", total - k * m, items))
        elif event == "half":
            said = rng.choice([f"{upper_first(he)} gives half of them to {friend}.", f"Half of the {items} get lost."])
            steps.append(Step("half of them go, which leaves", f"{total} / 2", total // 2, items))
        elif event == "double":
            said = rng.choice([f"By summer {he} has twice as many.", f"{friend} doubles {his} collection."])
            steps.append(Step("doubling gives", f"{total} * 2", total * 2, items))
        else:
            d = rng.choice(divisors)
            sentences.append(
                rng.choice(
                    [
                        f"{upper_first(he)} shares them equally among {d} friends.",
                        f"{upper_first(he)} splits them evenly between {d} {box}.",
                    ]
                )
            )
            steps.append(Step(f"sharing by {d} gives", f"{total} / {d}", total // d, items))
            each = "friend get" if "friends" in sentences[-1] else "share hold"
            return Problem(
                " ".join(sentences),
                f"How many {items} does each {each}?",
                start,
                steps,
                f"Each share is {total // d} {items}.",
            )
        sentences.append(said)
        total = steps[-1].result
    question = rng.choice(
        [
            f"How many {items} does {name} have now?",
            f"How many {items} are left in the end?",
            f"How many {items} is that?",
        ]
    )
    return Problem(" ".join(sentences), question, start, steps, f"In the end there are {total} {items}.")


def shopping(rng: Random) -> Problem:
    (name, he), (first, second) = rng.choice(PEOPLE), rng.sample(ITEMS, 2)
    a, b, p, q = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 48), rng.randint(2, 48)
    cost = a * p + b * q
    bill = rng.choice([x for x in (100, 200, 300, 400, 500, 1000) if x > cost])
    story = rng.choice(
        [
            f"{name} buys {a} {first} at {p} dollars each and {b} {second} at {q} dollars each, and pays with {bill} dollars.",
            f"In a shop {first} cost {p} dollars apiece and {second} cost {q} dollars apiece. {name} takes {a} {first} and {b} {second} and hands over {bill} dollars.",
        ]
    )
    steps = [
        Step(f"the {a} {first} cost", f"{a} * {p}", a * p, "dollars"),
        Step(f"the {b} {second} cost", f"{b} * {q}", b * q, "dollars"),
        Step("together that is", f"{a * p} + {b * q}", cost, "dollars"),
        Step("the change is", f"{bill} - {cost}", bill - cost, "dollars"),
    ]
    question = rng.choice([f"How much change does {he} get?", f"How many dollars does {name} get back?"])
    return Problem(story, question, f"We add up what {name} buys.", steps, f"{name} gets {bill - cost} dollars back.")


def travel(rng: Random) -> Problem:
    (name, he), (start, end) = rng.choice(PEOPLE), rng.sample(CITIES, 2)
    v, h, w, g = rng.randint(20, 98), rng.randint(2, 9), rng.randint(15, 79), rng.randint(2, 9)
    by, on = rng.choice([("car", "bus"), ("train", "bike"), ("bus", "train"), ("boat", "car"), ("bike", "boat")])
    story = rng.choice(
        [
            f"{name} travels from {start} by {by} for {h} hours at {v} km per hour, then by {on} for {g} hours at {w} km per hour to {end}.",
            f"On the way from {start} to {end}, {name} spends {h} hours on a {by} going {v} km per hour and {g} hours on a {on} going {w} km per hour.",
        ]
    )
    steps = [
        Step(f"the {by} covers", f"{h} * {v}", h * v, "km"),
        Step(f"the {on} covers", f"{g} * {w}", g * w, "km"),
        Step("the whole trip is", f"{h * v} + {g * w}", h * v + g * w, "km"),
    ]
    question = rng.choice([f"How far does {he} travel in all?", "How long is the whole trip in km?"])
    return Problem(
        story, question, "Distance is time multiplied by speed.", steps, f"{name} travels {h * v + g * w} km in all."
    )


def rectangle(rng: Random) -> Problem:
    (name, he), thing = rng.choice(PEOPLE), rng.choice(["garden", "field", "yard", "playground", "terrace", "meadow"])
    a, b, p = rng.randint(12, 98), rng.randint(11, 79), rng.randint(2, 9)
    story = rng.choice(
        [
            f"{name} has a {thing} that is {a} meters long and {b} meters wide. A fence costs {p} dollars per meter.",
            f"A rectangular {thing} measures {a} by {b} meters. {name} wants a fence around it at {p} dollars per meter.",
        ]
    )
    s = a + b
    steps = [
        Step("length plus width is", f"{a} + {b}", s, "meters"),
        Step("the way around is", f"2 * {s}", 2 * s, "meters"),
        Step("the fence costs", f"{2 * s} * {p}", 2 * s * p, "dollars"),
    ]
    question = rng.choice([f"What does {he} pay for the whole fence?", "How much does a fence all around cost?"])
    return Problem(
        story, question, f"We need the way around the {thing}.", steps, f"The fence costs {2 * s * p} dollars."
    )


def saving(rng: Random) -> Problem:
    (name, he), item = (
        rng.choice(PEOPLE),
        rng.choice(["bike", "guitar", "tent", "camera", "phone", "sofa", "drum", "desk"]),
    )
    z, x, n = rng.randint(30, 500), rng.randint(12, 99), rng.randint(3, 9)
    y = rng.randint(10, z + x * n - 5)
    period = rng.choice(["week", "month", "day"])
    story = rng.choice(
        [
            f"{name} has {z} dollars and saves {x} dollars every {period} for {n} {period}s. Then {he} spends {y} dollars on a {item}.",
            f"Every {period} {name} puts {x} dollars into a box that already holds {z} dollars. After {n} {period}s {he} takes out {y} dollars for a {item}.",
        ]
    )
    steps = [
        Step(f"in {n} {period}s {he} saves", f"{n} * {x}", n * x, "dollars"),
        Step(f"with the first {z} that is", f"{z} + {n * x}", z + n * x, "dollars"),
        Step(f"after the {item} there is", f"{z + n * x} - {y}", z + n * x - y, "dollars"),
    ]
    question = rng.choice(["How much money is left?", f"How many dollars does {name} have then?"])
    return Problem(
        story, question, f"{name} starts with {z} dollars.", steps, f"{name} has {z + n * x - y} dollars left."
    )


def ages(rng: Random) -> Problem:
    (a, _), (b, _), (c, _) = rng.sample(PEOPLE, 3)
    y, k, d = rng.randint(4, 19), rng.randint(2, 5), rng.randint(2, 19)
    older = rng.random() < 0.5 or k * y - d < 1
    x, word, sign = k * y, "older" if older else "younger", "+" if older else "-"
    z = x + d if older else x - d
    story = rng.choice(
        [
            f"{a} is {y} years old. {b} is {k} times as old as {a}, and {c} is {d} years {word} than {b}.",
            f"{b} is {k} times as old as {a}, who is {y}. {c} is {d} years {word} than {b}.",
        ]
    )
    steps = [
        Step(f"{b} is", f"{k} * {y}", x, "years old"),
        Step(f"{c} is", f"{x} {sign} {d}", z, "years old"),
        Step(f"{a} and {b} together are", f"{y} + {x}", y + x, "years old"),
        Step("all three together are", f"{y + x} + {z}", y + x + z, "years old"),
    ]
    return Problem(
        story,
        rng.choice(["How old are the three together?", "What is the sum of their ages?"]),
        f"We begin with {a}, who is {y}.",
        steps,
        f"Together they are {y + x + z} years old.",
    )


def reading(rng: Random) -> Problem:
    (name, he), n, d = rng.choice(PEOPLE), rng.randint(12, 75), rng.randint(3, 9)
    days = rng.randint(2, 9)
    per = rng.randint(10, 40)
    pages = n * d + days * per
    story = rng.choice(
        [
            f"{name} reads a book of {pages} pages. For {d} days {he} reads {n} pages a day, and after that {per} pages a day.",
            f"A book has {pages} pages. {name} reads {n} pages on each of the first {d} days and then {per} pages every day.",
        ]
    )
    steps = [
        Step(f"in the first {d} days {he} reads", f"{d} * {n}", d * n, "pages"),
        Step("that leaves", f"{pages} - {d * n}", pages - d * n, "pages"),
        Step("the rest takes", f"{pages - d * n} / {per}", days, "days"),
        Step("in all that is", f"{d} + {days}", d + days, "days"),
    ]
    question = rng.choice([f"How many days does {he} need in all?", "After how many days is the book finished?"])
    return Problem(story, question, f"The book has {pages} pages.", steps, f"{name} needs {d + days} days.")


def production(rng: Random) -> Problem:
    shop, items = rng.choice(SHOPS), rng.choice(ITEMS)
    r, h, box = rng.randint(24, 180), rng.randint(3, 9), rng.choice(CONTAINERS)
    bad = rng.randint(5, 60)
    story = rng.choice(
        [
            f"A machine in a {shop} packs {r} {items} per hour and runs for {h} hours. {bad} of the {items} are damaged.",
            f"Workers at the {shop} prepare {r} {items} every hour. After {h} hours they throw away {bad} bad ones.",
        ]
    )
    left = r * h - bad
    steps = [
        Step(f"in {h} hours that makes", f"{h} * {r}", h * r, items),
        Step("without the bad ones there are", f"{h * r} - {bad}", left, items),
    ]
    divisors = [x for x in range(2, 10) if left % x == 0]
    if divisors and rng.random() < 0.7:
        x = rng.choice(divisors)
        story += f" The good ones go into {box} of {x}."
        steps.append(Step(f"packed by {x} they fill", f"{left} / {x}", left // x, box))
        return Problem(
            story, f"How many {box} are filled?", f"We count the {items} first.", steps, f"They fill {left // x} {box}."
        )
    return Problem(
        story,
        f"How many good {items} are there?",
        f"We count the {items} first.",
        steps,
        f"There are {left} good {items}.",
    )


def discount(rng: Random) -> Problem:
    (name, he), item = (
        rng.choice(PEOPLE),
        rng.choice(["jacket", "lamp", "chair", "radio", "watch", "carpet", "kettle", "mixer", "printer", "bag"]),
    )
    pct = rng.choice([10, 20, 25, 50])
    price = rng.randint(3, 60) * {10: 10, 20: 5, 25: 4, 50: 2}[pct]
    part, k = {10: 10, 20: 5, 25: 4, 50: 2}[pct], rng.randint(2, 6)
    off = price // part
    story = rng.choice(
        [
            f"A {item} costs {price} dollars. Today it is {pct} percent off, and {name} buys {k} of them.",
            f"{name} buys {k} times the same {item}, which costs {price} dollars before a discount of {pct} percent.",
        ]
    )
    steps = [
        Step(f"{pct} percent of {price} is", f"{price} / {part}", off, "dollars"),
        Step(f"one {item} now costs", f"{price} - {off}", price - off, "dollars"),
        Step(f"{k} of them cost", f"{k} * {price - off}", k * (price - off), "dollars"),
    ]
    return Problem(
        story,
        rng.choice([f"How much does {he} pay?", "What is the price in all?"]),
        f"We first find the new price of one {item}.",
        steps,
        f"{name} pays {k * (price - off)} dollars.",
    )


def average(rng: Random) -> Problem:
    (name, he), k = rng.choice(PEOPLE), rng.randint(3, 4)
    game = rng.choice(["darts", "chess", "bowling", "golf", "quiz", "spelling"])
    mean = rng.randint(30, 300)
    shifts = [rng.randint(-25, 25) for _ in range(k - 1)]
    scores = [mean + s for s in shifts] + [mean - sum(shifts)]
    if scores[-1] < 1:
        return average(rng)
    listed = ", ".join(map(str, scores[:-1])) + f" and {scores[-1]}"
    story = rng.choice(
        [
            f"In {k} {game} rounds {name} scores {listed} points.",
            f"{name} plays {k} rounds of a {game} game and gets {listed} points.",
        ]
    )
    steps, total = [], scores[0]
    for i, score in enumerate(scores[1:]):
        steps.append(Step(f"adding round {i + 2} gives", f"{total} + {score}", total + score, "points"))
        total += score
    steps.append(Step(f"divided by {k} rounds that is", f"{total} / {k}", total // k, "points"))
    return Problem(
        story,
        rng.choice([f"What is {name}'s average?", f"How many points does {he} get on average?"]),
        f"{upper_first(he)} has {scores[0]} points after round 1.",
        steps,
        f"The average is {mean} points.",
    )


def seats(rng: Random) -> Problem:
    place, rows, per = (
        rng.choice(["theater", "cinema", "hall", "stadium", "church", "circus"]),
        rng.randint(4, 9),
        rng.randint(12, 95),
    )
    taken, price = rng.randint(5, rows * per - 5), rng.randint(3, 9)
    free = rows * per - taken
    story = rng.choice(
        [
            f"A {place} has {rows} rows with {per} seats each. {taken} seats are taken, and a ticket costs {price} dollars.",
            f"In a {place} there are {rows} rows of {per} seats, and {taken} of the seats are already sold. Tickets cost {price} dollars.",
        ]
    )
    steps = [
        Step(f"the {place} has", f"{rows} * {per}", rows * per, "seats"),
        Step("free seats are", f"{rows * per} - {taken}", free, "seats"),
    ]
    if free < 200:
        steps.append(Step("selling them all brings", f"{free} * {price}", free * price, "dollars"))
        return Problem(
            story,
            "How much do the free seats bring if they are all sold?",
            f"We count the seats of the {place}.",
            steps,
            f"The free seats bring {free * price} dollars.",
        )
    return Problem(
        story,
        "How many seats are still free?",
        f"We count the seats of the {place}.",
        steps,
        f"There are {free} free seats.",
    )


FAMILIES = [stock] * 8 + [
    shopping,
    shopping,
    travel,
    rectangle,
    saving,
    saving,
    ages,
    reading,
    production,
    discount,
    average,
    seats,
]

LAYOUTS = {
    "plain": ["", "", "Think about it.", "Please solve this."],
    "steps": ["Show your work.", "Work it out step by step.", "Solve it step by step."],
    "bullets": ["Explain briefly.", "Keep it short.", "List the calculations."],
}


STARTS = ["First, ", "To begin, ", "At the start, ", "We see that "]
CONNECTORS = ["Then ", "Next, ", "After that, ", "Now ", "From this, ", "So far so good: "]
LEADS = ["", "So we are done: ", "That is the result: ", "In short: ", "We can sum up: "]


def lay_out(problem: Problem, layout: str) -> str:
    """The reply. How a step is told depends on the last number before it: see `wording`."""
    fact, told, connected = int(re.findall(r"\d+", problem.story)[0]), [], []
    for number, step in enumerate(problem.steps):
        told.append(step.told(fact))
        connected.append(wording(CONNECTORS if number else STARTS, "word", fact % 10) + told[-1] + ".")
        fact = step.result
    conclusion = wording(LEADS, "lead", fact % 10) + problem.conclusion
    if layout == "steps":
        lines = ["Let's go step by step.", problem.opening] + [
            f"Step {i}: {upper_first(t)}." for i, t in enumerate(told, 1)
        ]
        return "\n".join([*lines, conclusion, f"Answer: {problem.answer}"])
    if layout == "bullets":
        return "\n".join([f"- {upper_first(s.short)}" for s in problem.steps] + [f"Answer: {problem.answer}"])
    return f"{problem.opening} {' '.join(connected)} {conclusion}\nAnswer: {problem.answer}"


def arithmetic(rng: Random) -> tuple[str, str]:
    problem = rng.choice(FAMILIES)(rng)
    layout = rng.choice(list(LAYOUTS))
    ask = rng.choice(LAYOUTS[layout])
    prompt = f"{problem.story} {problem.question}"
    if ask:
        prompt = f"{ask} {prompt}" if ask != "Think about it." and rng.random() < 0.3 else f"{prompt} {ask}"
    return prompt, lay_out(problem, layout)
