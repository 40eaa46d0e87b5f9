"""JSON records made from a description in words: every value of the reply is somewhere in the prompt."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from lexicon import (
    ADJECTIVES,
    CITIES,
    COLORS,
    COUNTRIES,
    DISHES,
    FOODS,
    GENRES,
    HOBBIES,
    ITEMS,
    JOBS,
    LANGUAGES,
    MONTHS,
    NOUNS,
    PEOPLE,
    SHOPS,
    SMALL_NUMBERS,
    STREETS,
    SURNAMES,
    TAGS,
)


def full_name(rng: Random) -> str:
    return f"{rng.choice(PEOPLE)[0]} {rng.choice(SURNAMES)}"


def title(rng: Random) -> str:
    return rng.choice(["The {a} {n}", "{a} {n}", "A {a} {n}", "The {n} of {c}"]).format(
        a=rng.choice(ADJECTIVES), n=rng.choice(NOUNS), c=rng.choice(CITIES)
    )


def number(low: int, high: int) -> Callable[[Random], int]:
    return lambda rng: rng.randint(low, high)


def price(rng: Random) -> float:
    return rng.randint(1, 299) + rng.choice([0.25, 0.5, 0.75, 0.99, 0.95])


def date(rng: Random) -> str:
    return f"{rng.randint(2015, 2031)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


def clock(rng: Random) -> str:
    return f"{rng.randint(6, 22):02d}:{rng.choice(['00', '15', '30', '45'])}"


def code(prefix: str) -> Callable[[Random], str]:
    return lambda rng: f"{prefix}-{rng.randint(100, 9999)}"


def one_of(words: list[str]) -> Callable[[Random], str]:
    return lambda rng: rng.choice(words)


def some_of(words: list[str]) -> Callable[[Random], list[str]]:
    return lambda rng: rng.sample(words, rng.randint(2, 4))


def email(rng: Random) -> str:
    return f"{rng.choice(PEOPLE)[0].lower()}.{rng.choice(SURNAMES).lower()}@example.{rng.choice(['com', 'org', 'net'])}"


def flag(rng: Random) -> bool:
    return rng.random() < 0.5


def address(rng: Random) -> dict[str, Any]:
    return {
        "street": f"{rng.randint(1, 199)} {rng.choice(STREETS)} Street",
        "city": rng.choice(CITIES),
        "zip": str(rng.randint(10000, 99999)),
    }


def size(rng: Random) -> dict[str, Any]:
    return {"width": rng.randint(5, 99), "height": rng.randint(5, 99), "unit": rng.choice(["cm", "mm", "inch"])}


def lines(rng: Random) -> list[dict[str, Any]]:
    return [{"item": item, "quantity": rng.randint(1, 20)} for item in rng.sample(ITEMS, rng.randint(2, 3))]


Field = tuple[str, Callable[[Random], Any], str]  # key, value, phrase with {v}; a flag's phrase is "yes|no"

RECORDS: dict[str, list[Field]] = {
    "book": [
        ("title", title, 'the title is "{v}"'),
        ("author", full_name, "the author is {v}"),
        ("year", number(1950, 2024), "it came out in {v}"),
        ("pages", number(80, 900), "it has {v} pages"),
        ("genre", one_of(GENRES), "the genre is {v}"),
        ("tags", some_of(TAGS), "its tags are {v}"),
        ("price", price, "it costs {v}"),
        ("available", flag, "it is available|it is not available"),
        ("language", one_of(LANGUAGES), "it is written in {v}"),
    ],
    "person": [
        ("name", full_name, "the name is {v}"),
        ("age", number(18, 90), "the age is {v}"),
        ("email", email, "the email is {v}"),
        ("job", one_of(JOBS), "works as a {v}"),
        ("hobbies", some_of(HOBBIES), "the hobbies are {v}"),
        ("address", address, "lives at {v}"),
        ("languages", some_of(LANGUAGES), "speaks {v}"),
        ("married", flag, "is married|is not married"),
    ],
    "order": [
        ("order_id", code("ORD"), "the order number is {v}"),
        ("customer", full_name, "the customer is {v}"),
        ("lines", lines, "it contains {v}"),
        ("date", date, "it was placed on {v}"),
        ("total", price, "the total is {v}"),
        ("paid", flag, "it is paid|it is not paid yet"),
        ("address", address, "it ships to {v}"),
        ("notes", some_of(TAGS), "the notes are {v}"),
    ],
    "product": [
        ("sku", code("SKU"), "the SKU is {v}"),
        ("name", title, 'it is called "{v}"'),
        ("color", one_of(COLORS), "the color is {v}"),
        ("price", price, "the price is {v}"),
        ("stock", number(0, 500), "there are {v} in stock"),
        ("size", size, "it measures {v}"),
        ("tags", some_of(TAGS), "the tags are {v}"),
        ("on_sale", flag, "it is on sale|it is not on sale"),
    ],
    "event": [
        ("title", title, 'it is titled "{v}"'),
        ("city", one_of(CITIES), "it takes place in {v}"),
        ("date", date, "the date is {v}"),
        ("start", clock, "it starts at {v}"),
        ("seats", number(20, 900), "there are {v} seats"),
        ("host", full_name, "the host is {v}"),
        ("topics", some_of(TAGS), "the topics are {v}"),
        ("free", flag, "entry is free|entry is not free"),
    ],
    "flight": [
        ("flight", code("FL"), "the flight number is {v}"),
        ("origin", one_of(CITIES), "it leaves from {v}"),
        ("destination", one_of(CITIES), "it goes to {v}"),
        ("departure", clock, "departure is at {v}"),
        ("date", date, "it flies on {v}"),
        ("gate", number(1, 60), "the gate is {v}"),
        ("passengers", number(40, 300), "it carries {v} passengers"),
        ("delayed", flag, "it is delayed|it is on time"),
        ("stops", some_of(CITIES), "the stops are {v}"),
    ],
    "server": [
        ("host", code("srv"), "the host is {v}"),
        ("port", number(1024, 9999), "the port is {v}"),
        ("memory_gb", number(4, 512), "it has {v} GB of memory"),
        ("region", one_of(CITIES), "the region is {v}"),
        ("owner", email, "the owner is {v}"),
        ("services", some_of(TAGS), "its services are {v}"),
        ("backup", flag, "backups are on|backups are off"),
        ("created", date, "it was created on {v}"),
    ],
    "recipe": [
        ("name", one_of([f"{f} {d}" for f in FOODS for d in DISHES]), "the dish is {v}"),
        ("servings", number(1, 12), "it serves {v}"),
        ("minutes", number(5, 180), "it takes {v} minutes"),
        ("ingredients", some_of(FOODS), "the ingredients are {v}"),
        ("author", full_name, "the cook is {v}"),
        ("tags", some_of(TAGS), "the tags are {v}"),
        ("vegetarian", flag, "it is vegetarian|it is not vegetarian"),
        ("rating", number(1, 5), "the rating is {v}"),
    ],
    "vehicle": [
        ("plate", code("KX"), "the plate is {v}"),
        ("color", one_of(COLORS), "the color is {v}"),
        ("year", number(1990, 2025), "it was built in {v}"),
        ("owner", full_name, "the owner is {v}"),
        ("mileage", number(1000, 250000), "the mileage is {v}"),
        ("electric", flag, "it is electric|it is not electric"),
        ("parked_at", address, "it is parked at {v}"),
        ("price", price, "the daily price is {v}"),
    ],
    "booking": [
        ("guest", full_name, "the guest is {v}"),
        ("hotel", title, 'the hotel is "{v}"'),
        ("check_in", date, "check-in is on {v}"),
        ("nights", number(1, 21), "the stay is {v} nights"),
        ("room", number(100, 999), "the room is {v}"),
        ("email", email, "the email is {v}"),
        ("breakfast", flag, "breakfast is included|breakfast is not included"),
        ("requests", some_of(TAGS), "the requests are {v}"),
    ],
    "course": [
        ("code", code("CRS"), "the code is {v}"),
        ("title", title, 'the title is "{v}"'),
        ("teacher", full_name, "the teacher is {v}"),
        ("credits", number(1, 12), "it gives {v} credits"),
        ("room", number(10, 499), "the room is {v}"),
        ("starts", date, "it starts on {v}"),
        ("topics", some_of(TAGS), "the topics are {v}"),
        ("online", flag, "it is held online|it is not held online"),
    ],
    "shipment": [
        ("tracking", code("TRK"), "the tracking code is {v}"),
        ("sender", full_name, "the sender is {v}"),
        ("weight_kg", number(1, 400), "the weight is {v} kg"),
        ("destination", address, "it goes to {v}"),
        ("contents", lines, "it contains {v}"),
        ("size", size, "it measures {v}"),
        ("express", flag, "it is sent express|it is not sent express"),
        ("sent", date, "it was sent on {v}"),
    ],
    "shop": [
        ("name", title, 'the name is "{v}"'),
        ("type", one_of(SHOPS), "it is a {v}"),
        ("country", one_of(COUNTRIES), "the country is {v}"),
        ("opens", clock, "it opens at {v}"),
        ("employees", number(1, 90), "it has {v} employees"),
        ("address", address, "the address is {v}"),
        ("manager", full_name, "the manager is {v}"),
        ("open_sunday", flag, "it is open on Sunday|it is closed on Sunday"),
        ("sells", some_of(ITEMS), "it sells {v}"),
    ],
}


def listed(words: list[str]) -> str:
    return ", ".join(words[:-1]) + f" and {words[-1]}"


def phrase(field: Field, value: Any) -> str:
    """The words for one field of the record."""
    _key, make, words = field
    if make is flag:
        return words.split("|")[0 if value else 1]
    if make is address:
        return words.format(v=f"{value['street']}, {value['city']} {value['zip']}")
    if make is size:
        return words.format(v=f"{value['width']} by {value['height']} {value['unit']}")
    if make is lines:
        return words.format(v=listed([f"{line['quantity']} {line['item']}" for line in value]))
    if make is date:
        year, month, day = value.split("-")
        return words.format(v=f"{int(day)} {MONTHS[int(month) - 1]} {year}")
    if make is price:
        return words.format(v=f"{value:.2f} dollars")
    if isinstance(value, int) and value < len(SMALL_NUMBERS):
        return words.format(v=SMALL_NUMBERS[value])
    if isinstance(value, list):
        return words.format(v=listed(value))
    return words.format(v=value)


def camel(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            "".join(w if i == 0 else w.title() for i, w in enumerate(k.split("_"))): camel(v) for k, v in value.items()
        }
    return [camel(v) for v in value] if isinstance(value, list) else value


ASKS = [
    "Make a JSON record for {a}: {d}.",
    "Write JSON for this {k}: {d}.",
    "Turn this {k} into JSON: {d}.",
    "I need a JSON object for {a}: {d}.",
    "Here is {a}: {d}. Give me the JSON.",
    "Describe this {k} as JSON: {d}.",
    "Convert to JSON. It is {a}: {d}.",
]


def json_record(rng: Random) -> tuple[str, str]:
    kind = rng.choice(list(RECORDS))
    chosen = rng.sample(RECORDS[kind], rng.randint(4, 8))
    record = {key: make(rng) for key, make, _ in chosen}
    described = rng.choice([", ", "; "]).join(phrase(field, record[field[0]]) for field in chosen)
    article = "an" if kind[0] in "aeiou" else "a"
    prompt = rng.choice(ASKS).format(k=kind, a=f"{article} {kind}", d=described)
    change = rng.random()
    if change < 0.3:
        prompt, record = (
            prompt + rng.choice([" Sort the keys.", " Keys in alphabetical order."]),
            dict(sorted(record.items())),
        )
    elif change < 0.5 and any(make is full_name for _, make, _ in chosen):
        prompt += " Split names into first and last."
        names = {key for key, make, _ in chosen if make is full_name}
        record = {
            k: dict(zip(["first", "last"], v.split(), strict=False)) if k in names else v for k, v in record.items()
        }
    layout = rng.choice(["plain", "plain", "plain", "camel", "line", "wrapped", "fenced"])
    indent: int | None = 2
    if layout == "camel":
        prompt, record = prompt + " Use camelCase keys.", camel(record)
    elif layout == "line":
        prompt, indent = prompt + rng.choice([" Put it on one line.", " One line, please."]), None
    elif layout == "wrapped":
        prompt, record = prompt + f' Wrap it in an object with the key "{kind}".', {kind: record}
    text = json.dumps(record, indent=indent)
    if layout == "fenced":
        prompt, text = prompt + " Use a code block.", f"Here is the {kind} as JSON:\n\n```json\n{text}\n```"
    return prompt, text
