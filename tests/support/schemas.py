"""Bounded JSON schemas by chance: `python -m support.schemas --seed 20 --count 1000` prints one a line, the seed first.

So bounded that what is written under them ends: few properties and items, short texts, numbers in a range, no
recursion."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Schema = dict[str, Any]

SEED = 20
NAMES = ("id", "name", "size", "tags", "kind", "path", "line", "user", "items", "x y", "größe", "a.b", "$id", "0")
WORDS = ("red", "green", "blue", "yes", "no", "os.path", "ä", "two words", 'quo"te', "back\\slash", "", "tab\t")
PATTERNS = (
    "^[a-z]{2,6}$", "^[0-9]{3}-[0-9]{4}$", "^(red|green|blue)$", "^[A-Z][a-z]{1,5}$",
    "^v[0-9]{1,2}(\\.[0-9]{1,2}){0,2}$", "^#[0-9a-f]{6}$", "^[^a-z]{1,4}$",
)  # fmt: skip
FORMATS = ("ipv4", "uuid")
MAX_DEPTH = 3
MAX_DEFINITIONS = 2


@dataclass
class SchemaMaker:
    """Draws schemas; what `$ref` names gathers in `definitions`."""

    rng: random.Random
    definitions: dict[str, Schema] = field(default_factory=dict)

    def make(self) -> Schema:
        """A whole schema, most often of an object."""
        self.definitions = {}
        drawn = self.object(0) if self.rng.random() < 0.8 else self.any(0)
        return {**drawn, "$defs": dict(self.definitions)} if self.definitions else drawn

    def any(self, depth: int) -> Schema:
        """What may stand at this depth."""
        leaves: list[Callable[[], Schema]] = [
            self.integer, self.number, self.string, self.string, self.pattern, self.format, self.enum, self.constant,
            self.simple,
        ]  # fmt: skip
        nested: list[Callable[[int], Schema]] = [self.object, self.array, self.tuple, self.any_of, self.reference]
        if depth < MAX_DEPTH and self.rng.random() < 0.5:
            return self.rng.choice(nested)(depth)
        return self.rng.choice(leaves)()

    def object(self, depth: int) -> Schema:
        """Some properties, most of them required, and no others."""
        names = self.rng.sample(NAMES, self.rng.randint(1, 4 - depth // 2))
        properties = {name: self.any(depth + 1) for name in names}
        required = [name for name in names if self.rng.random() < 0.7]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    def array(self, depth: int) -> Schema:
        """Items of one kind."""
        least = self.rng.randint(0, 2)
        bounds = {"minItems": least, "maxItems": least + self.rng.randint(0, 2)}
        return {"type": "array", "items": self.any(depth + 1), **bounds}

    def tuple(self, depth: int) -> Schema:
        """Items each of its own kind."""
        items = [self.any(depth + 1) for _ in range(self.rng.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}

    def any_of(self, depth: int) -> Schema:
        """One of several."""
        return {"anyOf": [self.any(depth + 1) for _ in range(self.rng.randint(2, 3))]}

    def reference(self, depth: int) -> Schema:
        """A definition, an old one or a new one."""
        if len(self.definitions) < MAX_DEFINITIONS:
            name = f"d{len(self.definitions)}"
            self.definitions[name] = {}  # counted while its own is drawn
            self.definitions[name] = self.any(MAX_DEPTH)
        return {"$ref": f"#/$defs/{self.rng.choice([*self.definitions])}"}

    def integer(self) -> Schema:
        """In a range, whose ends may be out of it."""
        low = self.rng.randint(-1000, 1000)
        high = low + self.rng.choice((0, 1, 9, 100, 5000))
        if high - low > 1 and self.rng.random() < 0.3:
            return {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": high}
        return {"type": "integer", "minimum": low, "maximum": high}

    def number(self) -> Schema:
        """The same, with a fraction."""
        low = round(self.rng.uniform(-100, 100), self.rng.randint(0, 3))
        return {"type": "number", "minimum": low, "maximum": low + self.rng.choice((0.5, 10, 1000))}

    def string(self) -> Schema:
        """Of a length."""
        least = self.rng.randint(0, 4)
        return {"type": "string", "minLength": least, "maxLength": least + self.rng.randint(0, 8)}

    def pattern(self) -> Schema:
        """Of a pattern."""
        return {"type": "string", "pattern": self.rng.choice(PATTERNS)}

    def format(self) -> Schema:
        """Of a format."""
        return {"type": "string", "format": self.rng.choice(FORMATS)}

    def enum(self) -> Schema:
        """One of some values, of any type."""
        others = [None, True, False, 0, -7, 2.5, [1, "a"], {"a": None}]
        return {"enum": self.rng.sample([*WORDS, *others], self.rng.randint(1, 5))}

    def constant(self) -> Schema:
        """One value."""
        return {"const": self.rng.choice([*WORDS, 12, None, {"k": [1, 2]}])}

    def simple(self) -> Schema:
        """What needs no bounds, or may be null."""
        one = self.rng.choice(("integer", "string"))
        bounds = {"minimum": 0, "maximum": 99} if one == "integer" else {"maxLength": 5}
        return self.rng.choice([{"type": "boolean"}, {"type": "null"}, {"type": [one, "null"], **bounds}])


def make_schemas(count: int, seed: int = SEED) -> list[Schema]:
    """So many; a longer list begins like a shorter one."""
    return [SchemaMaker(random.Random(f"{seed}/{number}")).make() for number in range(count)]


def main() -> None:
    """Prints them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--count", type=int, default=1000)
    given = parser.parse_args()
    print(f"# seed {given.seed}")
    for schema in make_schemas(given.count, given.seed):
        print(json.dumps(schema))


if __name__ == "__main__":
    main()
