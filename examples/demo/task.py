"""The task of the demo: office notes in free text become JSON.

A row is a conversation: a system message that names the wanted keys, a note, and the JSON. Notes are templates filled
with names, companies and cities from `faker`; dates and amounts come in the spellings people use and have to be
normalised. What a template does not mention is null. Rows for evaluation come from templates and asides that no
training row uses.
"""

import json
import random
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

from faker import Faker

SYSTEM = (
    "Turn the note into JSON with the keys kind (order, booking or contact), name, company, city, date (YYYY-MM-DD) "
    "and amount (a number). Use null for what the note does not say."
)
KEYS = ("kind", "name", "company", "city", "date", "amount")
FIRST_DAY, DAYS = date(2024, 1, 1), 3 * 365


@dataclass(frozen=True)
class Phrasing:
    """The wording of one split: templates of each kind, and asides that say nothing of interest."""

    templates: dict[str, list[str]]
    asides: list[str]


def read_phrasing(path: Path) -> Phrasing:
    """Read a file of templates: a heading `[kind]` or `[aside]`, then one template a line."""
    sections: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            sections[line.strip("[]")] = lines = []
        elif line:
            lines.append(line)
    asides = sections.pop("aside")
    return Phrasing(templates=sections, asides=asides)


def make_rows(phrasing: Phrasing, count: int, seed: int) -> list[dict]:
    """Draw `count` different conversations; the same ones for the same seed and version of faker."""
    rng, faker = random.Random(seed), Faker("en_US")
    faker.seed_instance(seed)
    notes: dict[str, dict] = {}
    while len(notes) < count:
        note, record = draw_note(phrasing, rng, faker)
        notes[note] = record
    return [conversation(note, record) for note, record in notes.items()]


def draw_note(phrasing: Phrasing, rng: random.Random, faker: Faker) -> tuple[str, dict]:
    """One note and the record it says."""
    kind = rng.choice(sorted(phrasing.templates))
    template = rng.choice(phrasing.templates[kind])
    day = FIRST_DAY + timedelta(days=rng.randrange(DAYS))
    amount = draw_amount(rng)
    record = {
        "name": f"{faker.first_name()} {faker.last_name()}",
        "company": faker.company(),
        "city": faker.city(),
        "date": day.isoformat(),
        "amount": amount,
    }
    spelled = {**record, "date": spell_date(day, rng), "amount": spell_amount(amount, rng)}
    parts = [template.format(**spelled)]
    if rng.random() < 0.4:
        aside = rng.choice(phrasing.asides).format(number=rng.randrange(100, 9999))
        parts.insert(rng.randrange(2), aside)
    said = {key: value if f"{{{key}}}" in template else None for key, value in record.items()}
    return " ".join(parts), {"kind": kind, **said}


def draw_amount(rng: random.Random) -> int | float:
    """Dollars from 20 to 20,000, small ones more often, half of them with cents."""
    dollars = round(20 * 1000 ** rng.random())
    cents = rng.choice([0, rng.randrange(1, 100)])
    return dollars if cents == 0 else round(dollars + cents / 100, 2)


def spell_date(day: date, rng: random.Random) -> str:
    """A date as people write it."""
    last = day.day % 10 if day.day // 10 != 1 else 0
    ordinal = f"{day.day}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(last, 'th') }"
    return rng.choice(
        [
            f"{day:%B} {day.day}, {day.year}",
            f"{day.day} {day:%B} {day.year}",
            f"{day:%b} {day.day}, {day.year}",
            f"{day:%B} {ordinal}, {day.year}",
            f"the {ordinal} of {day:%B} {day.year}",
            f"{day.month}/{day.day}/{day.year}",
            day.isoformat(),
        ]
    )


def spell_amount(amount: float, rng: random.Random) -> str:
    """An amount of dollars as people write it."""
    digits = f"{amount:,.2f}" if isinstance(amount, float) else f"{amount:,}"
    return rng.choice([f"${digits}", f"{digits} USD", f"{digits} dollars", f"USD {digits.replace(',', '')}"])


def conversation(note: str, record: dict) -> dict:
    """A row in the `messages` format."""
    return {
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": note},
            {"role": "assistant", "content": json.dumps(record, ensure_ascii=False)},
        ]
    }


def write_rows(path: Path, rows: list[dict]) -> None:
    """Write rows as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
