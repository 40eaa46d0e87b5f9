"""Words the corpus is made of. All of it is our own; nothing here is downloaded."""

# ruff: noqa: SIM905 - words are easier to read than lists of strings
from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def wording(options: Sequence[T], *facts: object) -> T:
    """One of several wordings, settled by facts that were just written.

    Greedy decoding would always take the likeliest of several random wordings. Settled by content, the variety stays:
    the target can learn which one follows, while a drafter that looks 15 tokens ahead must first foresee the facts.
    """
    return options[zlib.crc32("/".join(map(str, facts)).encode()) % len(options)]


WOMEN = (
    "Mara Anna Lena Priya Sofia Nina Clara Yuki Amina Greta Ines Rosa Tessa Vera Zoe Hana Leila Olga Petra Ruth "
    "Mei Carla Dina Eva Fiona Gwen Helen Irene Julia Karin"
).split()
MEN = (
    "Tom Omar Ravi Jonas Luis Peter Felix Kenji Marco Ahmed Paul Hugo Ivan Liam Noah Oscar Samir Theo Victor "
    "Walter Adam Boris Carlos David Emil Frank Georg Henry Isaac Jakob"
).split()
PEOPLE = [(name, "she") for name in WOMEN] + [(name, "he") for name in MEN]
SURNAMES = (
    "Weber Okafor Tanaka Lindqvist Moreau Silva Novak Haddad Kowalski Jensen Rossi Petrov Nguyen Fischer Murphy "
    "Castro Bauer Ito Larsen Dubois Mendes Keller Sharma Olsen Costa Varga Brandt Leroy Santos Meyer Ferrari "
    "Hoffman Park Yilmaz Horvat Eriksen Romero Schmidt Adeyemi Walsh"
).split()
CITIES = (
    "Lisbon Oslo Vienna Kyoto Geneva Porto Dublin Lima Nairobi Quito Helsinki Prague Turin Bergen Lyon Krakow "
    "Osaka Hamburg Seville Toronto Denver Boston Chicago Cairo Athens Zagreb Riga Antwerp Malmo Basel"
).split()
COUNTRIES = (
    "Portugal Norway Austria Japan Ireland Peru Kenya Finland Italy France Poland Canada Egypt Greece Latvia"
).split()
STREETS = "Oak Maple Cedar River Station Mill Church Garden Harbor Park Hill Lake Market Bridge Forest North".split()
COLORS = "red blue green black white silver yellow orange purple brown gray pink".split()
ADJECTIVES = (
    "Silent Golden Broken Hidden Distant Crimson Frozen Gentle Hollow Burning Quiet Wandering Lost Ancient Bright "
    "Secret Rising Falling Endless Northern"
).split()
NOUNS = (
    "River Garden Winter Harbor Mountain Letter Island Forest Mirror Bridge Lantern Orchard Shadow Voyage Tower "
    "Valley Season Clock Desert Ocean"
).split()
ITEMS = (
    "apples oranges marbles stickers stamps coins pencils books cookies shells cards beads buttons balloons eggs "
    "candles bottles flowers bricks tiles tickets photos muffins peaches lemons postcards badges ribbons crayons "
    "magnets walnuts cherries pears seeds notebooks erasers bulbs screws nails cups plates spoons toys puzzles "
    "pears acorns pebbles feathers"
).split()
CONTAINERS = "boxes bags packs trays crates baskets jars bundles cartons tins".split()
SHOPS = "bakery library farm museum school hotel factory cinema garage pharmacy".split()
TAGS = (
    "travel history music science cooking nature art sports design health finance fiction poetry garden family "
    "work urgent fragile new sale outdoor kitchen office classic vegan spicy quick winter summer beginner "
    "advanced remote"
).split()
GENRES = "mystery fantasy biography romance thriller history poetry adventure".split()
JOBS = (
    "nurse engineer teacher baker designer pilot chemist plumber librarian farmer analyst editor carpenter "
    "manager tailor dentist"
).split()
HOBBIES = "chess hiking painting cycling swimming reading sailing pottery dancing skiing running fishing".split()
FOODS = "rice beans tomato onion garlic cheese basil flour butter sugar milk pepper carrot lemon potato spinach".split()
DISHES = "soup stew salad curry pie risotto omelette casserole".split()
LANGUAGES = "English French German Spanish Japanese Portuguese Arabic Italian Polish Dutch".split()
MONTHS = "January February March April May June July August September October November December".split()
SMALL_NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve".split()
