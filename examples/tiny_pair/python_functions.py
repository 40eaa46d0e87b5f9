"""Small Python functions asked for in words.

A function is a name, a signature, a docstring and a body; the request names the function and its constants, and says whether a
loop, an example or an explanation is wanted. The pipelines are compositional, so most functions are never repeated.
"""

# ruff: noqa: E501 - a template stays on one line, as it will be read
from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from lexicon import PEOPLE, wording


@dataclass(frozen=True)
class Function:
    name: str
    ask: str  # "takes ... and returns ..."
    code: str
    example: str  # a call and its result
    about: str  # one closing sentence


LISTS = [
    "numbers",
    "values",
    "scores",
    "prices",
    "ages",
    "points",
    "amounts",
    "weights",
    "lengths",
    "heights",
    "counts",
    "grades",
    "marks",
    "sizes",
    "totals",
    "levels",
]
SINGULAR = {"heights": "height", "prices": "price", "ages": "age", "grades": "grade", "sizes": "size"}


def one(plural: str) -> str:
    return SINGULAR.get(plural, plural[:-1])


def pipeline(rng: Random) -> Function:
    """Filter, transform and reduce a list: some ten of each, in a loop or as a comprehension."""
    xs = rng.choice(LISTS)
    x, n, m = one(xs), rng.randint(2, 60), rng.randint(2, 12)
    words, test, tag = rng.choice(
        [
            (f"greater than {n}", f"{x} > {n}", f"over_{n}"),
            (f"less than {n}", f"{x} < {n}", f"under_{n}"),
            (f"at least {n}", f"{x} >= {n}", f"from_{n}"),
            (f"between {m} and {m + n}", f"{m} <= {x} <= {m + n}", f"{m}_to_{m + n}"),
            ("even", f"{x} % 2 == 0", "even"),
            ("odd", f"{x} % 2 == 1", "odd"),
            (f"divisible by {m}", f"{x} % {m} == 0", f"by_{m}"),
            ("positive", f"{x} > 0", "positive"),
            ("negative", f"{x} < 0", "negative"),
            (f"not equal to {n}", f"{x} != {n}", f"not_{n}"),
        ]
    )
    k = rng.randint(2, 20)
    change, value, verb = rng.choice(
        [
            ("", x, ""),
            ("", x, ""),
            ("squares them", f"{x} ** 2", "square"),
            (f"multiplies each by {k}", f"{x} * {k}", "scale"),
            (f"adds {k} to each", f"{x} + {k}", "shift"),
            (f"subtracts {k} from each", f"{x} - {k}", "lower"),
            ("takes the absolute value of each", f"abs({x})", "absolute"),
            ("halves each", f"{x} / 2", "halve"),
        ]
    )
    what, reduce, kind, start, step = rng.choice(
        [
            ("the sum", "sum({})", "float", "total = 0", "total += {}"),
            ("how many there are", "len({})", "int", "count = 0", "count += 1"),
            ("the largest", "max({}, default=0)", "float", "best = 0", "best = max(best, {})"),
            ("the list", "{}", "list[float]", "result = []", "result.append({})"),
            ("a sorted list", "sorted({})", "list[float]", "", ""),
            ("the list in reverse order", "{}[::-1]", "list[float]", "", ""),
        ]
    )
    reducer = {"the sum": "sum", "how many there are": "count", "the largest": "largest", "the list": "list"}.get(
        what, "sorted" if "sorted" in what else "reversed"
    )
    name = "_".join(
        part
        for part in rng.choice([(reducer, verb, tag, xs), (verb or "pick", tag, xs, reducer), (reducer, tag, xs)])
        if part
    )
    loop = bool(start) and rng.random() < 0.5
    doc = f"Return {what} of the {xs} that are {words}{'' if not change else ', where it ' + change}."
    if what == "how many there are":
        doc = f"Count the {xs} that are {words}."
    if loop:
        variable = start.split()[0]
        body = f"    {start}\n    for {x} in {xs}:\n        if {test}:\n            {step.format(value)}\n    return {variable}"
    else:
        body = "    return " + reduce.format(f"[{value} for {x} in {xs} if {test}]")
    code = f'def {name}({xs}: list[float]) -> {kind}:\n    """{doc}"""\n{body}'
    ask = f"takes a list of {xs}, keeps those that are {words}{', ' + change if change else ''} and returns {what}. {'Use a loop' if loop else 'Use a comprehension'}"
    sample = sorted(rng.sample(range(1, 80), 4))
    return Function(
        name,
        ask,
        code,
        f"{name}({sample})",
        f"It {'walks over' if loop else 'filters'} the {xs} and keeps only those that are {words}.",
    )


UNITS = [
    ("kilometers", "miles", "0.6214"),
    ("miles", "kilometers", "1.6093"),
    ("pounds", "kilograms", "0.4536"),
    ("kilograms", "pounds", "2.2046"),
    ("inches", "centimeters", "2.54"),
    ("feet", "meters", "0.3048"),
    ("meters", "feet", "3.2808"),
    ("gallons", "liters", "3.7854"),
    ("liters", "gallons", "0.2642"),
    ("ounces", "grams", "28.35"),
    ("hours", "minutes", "60"),
    ("days", "hours", "24"),
    ("weeks", "days", "7"),
    ("minutes", "seconds", "60"),
    ("yards", "meters", "0.9144"),
    ("acres", "hectares", "0.4047"),
    ("knots", "kilometers_per_hour", "1.852"),
    ("euros", "cents", "100"),
    ("dozens", "pieces", "12"),
    ("kilobytes", "bytes", "1024"),
]


def converter(rng: Random) -> Function:
    a, b, factor = rng.choice(UNITS)
    digits = rng.randint(1, 4)
    name = rng.choice([f"{a}_to_{b}", f"convert_{a}_to_{b}", f"{b}_from_{a}"])
    constant = f"{b}_per_{one(a)}".upper()
    doc = f"Convert {a} to {b}, rounded to {digits} digits."
    code = f'{constant} = {factor}\n\n\ndef {name}({a}: float) -> float:\n    """{doc}"""\n    return round({a} * {constant}, {digits})'
    ask = f"converts {a} to {b} with the factor {factor} and rounds to {digits} digits"
    return Function(name, ask, code, f"{name}({rng.randint(2, 90)})", f"One of the {a} is {factor} {b}.")


def clamp(rng: Random) -> Function:
    x = one(rng.choice(LISTS))
    low = rng.randint(0, 20)
    high = low + rng.randint(5, 80)
    name = rng.choice(["clamp", "limit", "bound", "restrict"]) + f"_{x}"
    code = f'def {name}({x}: float, low: float = {low}, high: float = {high}) -> float:\n    """Limit the {x} to the range from low to high."""\n    return max(low, min({x}, high))'
    ask = f"limits a {x} to the range from {low} to {high}"
    return Function(
        name, ask, code, f"{name}({high + 7})", f"A {x} below {low} becomes {low}, and one above {high} becomes {high}."
    )


LABELS = [
    ("low", "medium", "high"),
    ("cold", "mild", "hot"),
    ("poor", "fair", "good"),
    ("small", "normal", "large"),
    ("slow", "steady", "fast"),
    ("young", "adult", "senior"),
    ("cheap", "fair", "expensive"),
    ("light", "average", "heavy"),
    ("fail", "pass", "excellent"),
]


def classify(rng: Random) -> Function:
    x, (a, b, c) = one(rng.choice(LISTS)), rng.choice(LABELS)
    first = rng.randint(5, 50)
    second = first + rng.randint(5, 50)
    name = rng.choice([f"classify_{x}", f"{x}_label", f"rate_{x}", f"{x}_category"])
    code = (
        f'def {name}({x}: float) -> str:\n    """Return "{a}", "{b}" or "{c}" for a {x}."""\n    if {x} < {first}:\n        return "{a}"\n'
        f'    if {x} < {second}:\n        return "{b}"\n    return "{c}"'
    )
    ask = f'returns "{a}" for a {x} under {first}, "{b}" for one under {second} and "{c}" otherwise'
    return Function(name, ask, code, f"{name}({rng.randint(1, 100)})", f"The limits are {first} and {second}.")


def validator(rng: Random) -> Function:
    x, low, high = one(rng.choice(LISTS)), rng.randint(0, 18), rng.randint(20, 200)
    error = rng.choice(["ValueError", "RuntimeError", "AssertionError"])
    name = rng.choice(["check", "validate", "ensure", "verify"]) + f"_{x}"
    code = (
        f'def {name}({x}: float) -> float:\n    """Return the {x} if it is valid, else raise {error}."""\n    if {x} < {low}:\n'
        f'        raise {error}(f"{x} must be at least {low}, got {{{x}}}")\n    if {x} > {high}:\n        raise {error}(f"{x} must be at most {high}, got {{{x}}}")\n    return {x}'
    )
    ask = f"raises a {error} if a {x} is below {low} or above {high}, and returns it otherwise"
    return Function(
        name,
        ask,
        code,
        f"{name}({rng.randint(low, high)})",
        f"Anything outside {low} to {high} is refused with a {error}.",
    )


STRINGS = ["text", "word", "line", "title", "sentence", "name", "label", "message", "phrase", "string"]


def string(rng: Random) -> Function:
    s, n = rng.choice(STRINGS), rng.randint(2, 9)
    letter, other = rng.sample("abcdefghiklmnoprstuw", 2)
    name, ask, kind, doc, body, about = rng.choice(
        [
            (
                f"count_{letter}",
                f'counts how often the letter "{letter}" occurs in a {s}',
                "int",
                f'Count the letter "{letter}" in the {s}.',
                f'return {s}.lower().count("{letter}")',
                "Upper and lower case are treated alike.",
            ),
            (
                "count_vowels",
                f"counts the vowels in a {s}",
                "int",
                f"Count the vowels in the {s}.",
                f'return sum(char in "aeiou" for char in {s}.lower())',
                "Upper and lower case are treated alike.",
            ),
            (
                f"reverse_{s}",
                f"reverses a {s}",
                "str",
                f"Return the {s} backwards.",
                f"return {s}[::-1]",
                "A slice with step -1 walks backwards.",
            ),
            (
                "is_palindrome",
                f"checks whether a {s} is a palindrome",
                "bool",
                f"Tell whether the {s} reads the same backwards.",
                f'cleaned = {s}.lower().replace(" ", "")\n    return cleaned == cleaned[::-1]',
                "Spaces and case are ignored.",
            ),
            (
                f"replace_{letter}",
                f'replaces every "{letter}" in a {s} by "{other}"',
                "str",
                f'Replace "{letter}" by "{other}" in the {s}.',
                f'return {s}.replace("{letter}", "{other}")',
                "The original is not changed.",
            ),
            (
                f"first_{n}",
                f"returns the first {n} characters of a {s} in upper case",
                "str",
                f"Return the first {n} characters in upper case.",
                f"return {s}[:{n}].upper()",
                f"A shorter {s} is returned whole.",
            ),
            (
                f"last_{n}",
                f"returns the last {n} characters of a {s}",
                "str",
                f"Return the last {n} characters of the {s}.",
                f"return {s}[-{n}:]",
                f"A shorter {s} is returned whole.",
            ),
            (
                "long_words",
                f"returns the words of a {s} that are longer than {n} letters",
                "list[str]",
                f"Return the words longer than {n} letters.",
                f"return [word for word in {s}.split() if len(word) > {n}]",
                "The order of the words is kept.",
            ),
            (
                "longest_word",
                f"returns the longest word of a {s}",
                "str",
                f"Return the longest word of the {s}.",
                f'return max({s}.split(), key=len, default="")',
                f"An empty {s} gives an empty word.",
            ),
            (
                "join_words",
                f'joins the words of a {s} with "{rng.choice(["-", "_", "+", "/"])}"',
                "str",
                "",
                "",
                "Runs of spaces count as one.",
            ),
            (
                f"starts_with_{letter}",
                f'returns the words of a {s} that start with "{letter}"',
                "list[str]",
                f'Return the words that start with "{letter}".',
                f'return [word for word in {s}.split() if word.lower().startswith("{letter}")]',
                "The order of the words is kept.",
            ),
            (
                "word_lengths",
                f"maps each word of a {s} to its length",
                "dict[str, int]",
                "Map each word to its length.",
                f"return {{word: len(word) for word in {s}.split()}}",
                "A repeated word appears once.",
            ),
            (
                f"repeat_{s}",
                f"repeats a {s} {n} times",
                "str",
                f"Return the {s} repeated {n} times.",
                f"return {s} * {n}",
                "Nothing is put between the copies.",
            ),
            (
                "initials",
                f"returns the initials of a {s}",
                "str",
                f"Return the initials of the {s}.",
                f'return "".join(word[0].upper() for word in {s}.split())',
                "Each initial is in upper case.",
            ),
            (
                f"remove_{letter}",
                f'removes the letter "{letter}" from a {s}',
                "str",
                f'Remove the letter "{letter}" from the {s}.',
                f'return "".join(char for char in {s} if char != "{letter}")',
                "All other characters stay.",
            ),
        ]
    )
    if name == "join_words":
        separator = ask.split('"')[1]
        doc, body = f'Join the words of the {s} with "{separator}".', f'return "{separator}".join({s}.split())'
    code = f'def {name}({s}: str) -> {kind}:\n    """{doc}"""\n    {body}'
    return Function(name, ask, code, f'{name}("{rng.choice(PEOPLE)[0]} and {rng.choice(PEOPLE)[0]}")', about)


def recursion(rng: Random) -> Function:
    n, k = rng.choice(["n", "number", "value", "count", "limit"]), rng.randint(2, 9)
    name, ask, doc, body, about = rng.choice(
        [
            (
                "factorial",
                f"computes the factorial of {n}",
                f"Return the factorial of {n}.",
                f"if {n} <= 1:\n        return 1\n    return {n} * factorial({n} - 1)",
                "The factorial of 0 and 1 is 1.",
            ),
            (
                "fibonacci",
                f"returns the Fibonacci number of {n}",
                f"Return the Fibonacci number of {n}.",
                f"if {n} < 2:\n        return {n}\n    return fibonacci({n} - 1) + fibonacci({n} - 2)",
                "The first two numbers are 0 and 1.",
            ),
            (
                "digit_sum",
                f"adds the digits of {n}",
                f"Return the sum of the digits of {n}.",
                f"if {n} < 10:\n        return {n}\n    return {n} % 10 + digit_sum({n} // 10)",
                "Each call takes off the last digit.",
            ),
            (
                f"power_of_{k}",
                f"raises {k} to the power of {n}",
                f"Return {k} to the power of {n}.",
                f"if {n} == 0:\n        return 1\n    return {k} * power_of_{k}({n} - 1)",
                "Anything to the power of 0 is 1.",
            ),
            (
                f"sum_by_{k}",
                f"adds {n}, {n} - {k}, {n} - {2 * k} and so on while they are positive",
                f"Add up {n} in steps of {k} down to zero.",
                f"if {n} <= 0:\n        return 0\n    return {n} + sum_by_{k}({n} - {k})",
                f"Each call goes {k} further down.",
            ),
            (
                f"count_steps_{k}",
                f"counts how often {n} can be divided by {k} before it is below {k}",
                f"Count the divisions of {n} by {k}.",
                f"if {n} < {k}:\n        return 0\n    return 1 + count_steps_{k}({n} // {k})",
                "Division drops the remainder.",
            ),
        ]
    )
    code = f'def {name}({n}: int) -> int:\n    """{doc}"""\n    {body}'
    return Function(name, ask + " by recursion", code, f"{name}({rng.randint(2, 20)})", about)


def records(rng: Random) -> Function:
    """Lists of dictionaries: select, sort and add up by key."""
    things = rng.choice(
        [
            "users",
            "orders",
            "books",
            "players",
            "cities",
            "products",
            "teams",
            "songs",
            "rooms",
            "tickets",
            "files",
            "tasks",
        ]
    )
    thing = "city" if things == "cities" else things[:-1]
    key, label = (
        rng.choice(["age", "price", "score", "size", "year", "rank", "weight", "length", "total", "count"]),
        rng.choice(["name", "title", "code", "id", "owner", "label"]),
    )
    n, k = rng.randint(2, 99), rng.randint(2, 9)
    name, ask, kind, doc, body = rng.choice(
        [
            (
                f"{label}s_over_{n}",
                f'returns the "{label}" of those whose "{key}" is over {n}',
                "list[str]",
                f"Return the {label} of each {thing} whose {key} is over {n}.",
                f'return [{thing}["{label}"] for {thing} in {things} if {thing}["{key}"] > {n}]',
            ),
            (
                f"total_{key}",
                f'adds up their "{key}"',
                "float",
                f"Add up the {key} of all {things}.",
                f'return sum({thing}["{key}"] for {thing} in {things})',
            ),
            (
                f"sort_by_{key}",
                f'sorts them by "{key}", largest first',
                "list[dict]",
                f"Sort the {things} by {key}, largest first.",
                f'return sorted({things}, key=lambda {thing}: {thing}["{key}"], reverse=True)',
            ),
            (
                f"top_{k}_{things}",
                f'returns the {k} with the largest "{key}"',
                "list[dict]",
                f"Return the {k} {things} with the largest {key}.",
                f'ranked = sorted({things}, key=lambda {thing}: {thing}["{key}"], reverse=True)\n    return ranked[:{k}]',
            ),
            (
                f"index_by_{label}",
                f'maps each "{label}" to its "{key}"',
                "dict[str, float]",
                f"Map the {label} of each {thing} to its {key}.",
                f'return {{{thing}["{label}"]: {thing}["{key}"] for {thing} in {things}}}',
            ),
            (
                f"group_by_{key}",
                f'groups their "{label}" by "{key}"',
                "dict[float, list[str]]",
                f"Group the {label} of the {things} by {key}.",
                f'groups = {{}}\n    for {thing} in {things}:\n        groups.setdefault({thing}["{key}"], []).append({thing}["{label}"])\n    return groups',
            ),
            (
                f"average_{key}",
                f'returns the average "{key}", or {k} if there are none',
                "float",
                f"Return the average {key} of the {things}.",
                f'if not {things}:\n        return {k}\n    return sum({thing}["{key}"] for {thing} in {things}) / len({things})',
            ),
        ]
    )
    code = f'def {name}({things}: list[dict]) -> {kind}:\n    """{doc}"""\n    {body}'
    sample = f'{name}([{{"{label}": "{rng.choice(PEOPLE)[0]}", "{key}": {rng.randint(1, 99)}}}])'
    return Function(
        name,
        f"takes a list of dicts called {things} and {ask}",
        code,
        sample,
        f'Every {thing} needs the keys "{label}" and "{key}".',
    )


def table(rng: Random) -> Function:
    """Loops that print."""
    a, b = rng.sample(range(2, 12), 2)
    top = rng.randint(10, 100)
    first, second = rng.sample(
        ["Fizz", "Buzz", "Ping", "Pong", "Tick", "Tock", "Red", "Blue", "Left", "Right", "Hip", "Hop"], 2
    )
    if rng.random() < 0.5:
        name = f"{first}_{second}".lower()
        code = (
            f'def {name}(limit: int = {top}) -> None:\n    """Print 1 to limit with {first} for {a} and {second} for {b}."""\n    for i in range(1, limit + 1):\n'
            f'        if i % {a * b} == 0:\n            print("{first}{second}")\n        elif i % {a} == 0:\n            print("{first}")\n'
            f'        elif i % {b} == 0:\n            print("{second}")\n        else:\n            print(i)'
        )
        ask = f'prints the numbers from 1 to {top}, but "{first}" for multiples of {a}, "{second}" for multiples of {b} and both for multiples of {a * b}'
        return Function(name, ask, code, f"{name}({rng.randint(5, 30)})", f"The number {a * b} prints both words.")
    name = f"table_of_{a}"
    code = f'def {name}(limit: int = {top}) -> None:\n    """Print the multiplication table of {a} up to limit."""\n    for i in range(1, limit + 1):\n        print(f"{{i}} * {a} = {{i * {a}}}")'
    return Function(
        name,
        f"prints the multiplication table of {a} up to {top}",
        code,
        f"{name}({b})",
        f"It prints {top} lines unless told otherwise.",
    )


TYPES = [("str", None), ("int", (0, 99)), ("float", (1, 50)), ("bool", None)]
FIELDS = {
    "str": ["name", "title", "color", "city", "owner", "code", "label", "language"],
    "int": ["age", "pages", "year", "count", "seats", "rooms", "rank", "level"],
    "float": ["price", "weight", "height", "width", "score", "length"],
    "bool": ["active", "paid", "public", "ready", "hidden", "fragile"],
}


def dataclass_(rng: Random) -> Function:
    name = rng.choice(
        [
            "Book",
            "User",
            "Order",
            "Player",
            "Product",
            "Vehicle",
            "House",
            "Ticket",
            "Recipe",
            "Sensor",
            "Animal",
            "Course",
            "Song",
            "Planet",
            "Robot",
            "Garden",
        ]
    )
    kinds = rng.sample(list(FIELDS), rng.randint(2, 4))
    fields = [(rng.choice(FIELDS[kind]), kind) for kind in kinds]
    lines = [f"    {field}: {kind}" for field, kind in fields]
    asked = [f"{field} ({kind})" for field, kind in fields]
    default = {
        "str": '""',
        "int": str(rng.randint(1, 20)),
        "float": f"{rng.randint(1, 20)}.0",
        "bool": rng.choice(["True", "False"]),
    }[fields[-1][1]]
    lines[-1] += f" = {default}"
    asked[-1] += f" with the default {default}"
    shown = fields[0][0]
    code = (
        f'from dataclasses import dataclass\n\n\n@dataclass\nclass {name}:\n    """A {name.lower()} with {", ".join(f for f, _ in fields[:-1])} and {fields[-1][0]}."""\n\n'
        + "\n".join(lines)
        + f'\n\n    def describe(self) -> str:\n        return f"{name} with {shown} {{self.{shown}}}"'
    )
    values = {
        "str": f'"{rng.choice(PEOPLE)[0]}"',
        "int": str(rng.randint(1, 99)),
        "float": f"{rng.randint(1, 99)}.5",
        "bool": "True",
    }
    call = f"{name}({', '.join(f'{f}={values[k]}' for f, k in fields[:-1])})"
    return Function(
        name,
        f"has the fields {', '.join(asked[:-1])} and {asked[-1]}, and a method describe that shows the {shown}",
        code,
        call,
        f"The {fields[-1][0]} may be left out.",
    )


FAMILIES: list[Callable[[Random], Function]] = [
    *[pipeline] * 6,
    converter,
    clamp,
    classify,
    validator,
    string,
    string,
    recursion,
    records,
    records,
    records,
    table,
    dataclass_,
    dataclass_,
]

ASKS = [
    ("Write a Python {kind} `{name}` that {ask}.", "Here is `{name}`:"),
    ("Please write a Python {kind} called `{name}` that {ask}.", "Sure, this is `{name}`:"),
    ("I need a {kind} `{name}` in Python. It {ask}.", "This {kind} does it:"),
    ("Can you write a {kind} named `{name}` that {ask}? Use Python.", "Of course. Here is the {kind}:"),
    ("Python {kind} `{name}`: {ask}.", ""),
]


RESULTS = ["result", "answer", "output", "found", "outcome", "final", "reply", "current"]
VERBS = ["Return", "Compute", "Give", "Find", "Get", "Provide"]
COMMENTS = [
    "",
    "",
    "# compute the result",
    "# one expression is enough",
    "# a single pass over the input",
    "# no side effects",
    "# short and readable",
    "# as the docstring says",
    "# nothing is stored between calls",
]


def reworded(code: str) -> str:
    """The same function in one of many wordings, settled by its parameter and the digits of its name and constants."""
    parameter = re.findall(r"\((\w+)", code)[0]
    digits = "".join(re.findall(r"\d", code))
    first, last = (digits[:1] or "-"), (digits[-1:] or "-")
    code = code.replace('"""Return ', f'"""{wording(VERBS, "verb", parameter, first)} ', 1)
    lines = code.split("\n")
    head, _, value = lines[-1].partition("return ")
    comment = wording(COMMENTS, "comment", parameter, last)
    if value and not value.isidentifier() and head == "    ":
        name = wording(RESULTS, "name", parameter, last)
        if name != parameter and wording([True, True, False], "assign", parameter, first):
            lines[-1:] = [f"    {name} = {value}", f"    return {name}"]
            lines[-2:-2] = [f"    {comment}"] if comment else []
        elif comment:
            lines[-1:-1] = [f"    {comment}"]
    return "\n".join(lines)


def document(code: str) -> str:
    """The same function with Args and Returns in its docstring."""
    head, doc, body = re.split(r'    """(.*)"""\n', code, maxsplit=1)
    arguments, result = re.findall(r"\((.*)\) -> (.*):", head)[0]
    described = [f"        {name}: The {name}, {kind}." for name, kind in re.findall(r"(\w+): ([\w\[\]]+)", arguments)]
    lines = [
        f'    """{doc}',
        "",
        "    Args:",
        *described,
        "",
        "    Returns:",
        f"        {returned(doc, result)}",
        '    """',
    ]
    return head + "\n".join(lines) + "\n" + body


def returned(doc: str, result: str) -> str:
    if result == "None":
        return "Nothing."
    thing = (
        doc.partition(" ")[2].split(" of ")[0].split(",")[0].rstrip(".") if doc.split()[1] == "the" else "the result"
    )
    return f"{thing[0].upper()}{thing[1:]} as {result}."


def python_function(rng: Random) -> tuple[str, str]:
    f = rng.choice(FAMILIES)(rng)
    kind = "dataclass" if f.name[0].isupper() else "function"
    ask, intro = rng.choice(ASKS)
    prompt = ask.format(kind=kind, name=f.name, ask=f.ask)
    intro = intro.format(kind=kind, name=f.name)
    reply = f"{intro}\n\n" if intro else ""
    code = f.code if kind == "dataclass" else reworded(f.code)
    if kind == "function" and rng.random() < 0.35:
        prompt += rng.choice([" Document the arguments.", " Describe arguments and result in the docstring."])
        code = document(code)
    if rng.random() < 0.3:
        prompt += " Add an example call."
        code += f"\n\n\n{f.example}" if kind == "dataclass" else f"\n\n\nprint({f.example})"
    reply += f"```python\n{code}\n```"
    if rng.random() < 0.4:
        prompt += rng.choice([" Explain it.", " Add a short explanation."])
        opening = wording(["", "Note: ", "How it works: ", "In words: ", "A remark: "], "about", f.about.split()[-1])
        reply += f"\n\n{opening}{f.about}"
    return prompt, reply
